"""`shoal doctor --kernels`: every kernel in one table, and an exit status that a script can rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.cli import main
from shoal.kernels import attention_sdpa
from shoal.kernels.check import kernel_names
from shoal.kernels.survey import ATTENTION_CASES, survey, table


def test_every_kernel_and_every_case_is_in_the_survey() -> None:
    findings = list(survey(torch.device("cpu"), [torch.float32]))
    assert [f.kernel for f in findings if f.case in ("", "soft-cap")] == list(kernel_names())
    here = {f.kernel for f in findings if f.verdict == "ok"}
    assert here == {"loss", "attention.sdpa", "convolution.torch", "scan.torch"}
    assert [f.case for f in findings if f.kernel == "attention.sdpa"] == list(ATTENTION_CASES)
    for finding in findings:
        assert (finding.report is not None) == (finding.verdict == "ok") == (finding.reason == "")


def test_the_command_prints_errors_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--kernels", "--device", "cpu", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    (row,) = (line.split() for line in out.splitlines() if "latent" in line)
    assert row[0] == "attention.sdpa" and "bfloat16" in row and "ok" in row and 0 < float(row[-2]) < 4e-2
    (row,) = (line for line in out.splitlines() if line.startswith("attention.flash "))
    assert f"{len(ATTENTION_CASES)} of them" in row and "not here" in row
    assert "attention.flash: attention backend flash: it needs a CUDA device" in out
    assert f"torch               {torch.__version__}" in out


@pytest.mark.parametrize("factor", [8.0, 960.0])
def test_a_backward_that_amplifies_fails_the_command(
    factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = attention_sdpa._fused_backward

    def faulty(*arguments: Any, **keywords: Any) -> Any:
        return tuple(factor * grad for grad in sound(*arguments, **keywords))

    monkeypatch.setattr(attention_sdpa, "_fused_backward", faulty)
    assert main(["doctor", "--kernels", "--device", "cpu", "--dtype", "float32"]) == 1
    captured = capsys.readouterr()
    rows = [line for line in captured.out.splitlines() if line.startswith("attention.sdpa ")]
    assert sum("WRONG" in row for row in rows) == len(ATTENTION_CASES) - 1  # soft-caps take another way
    assert f"{factor:g} times as large as it has to be" in captured.out
    assert "attention.sdpa must not be trained with on this device" in captured.err


def test_a_kernel_that_fails_on_the_device_is_wrong_and_not_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(attention_sdpa, "_fused", failing)
    findings = list(survey(torch.device("cpu"), [torch.float32]))
    wrong = [f for f in findings if f.verdict == "WRONG"]
    assert {f.kernel for f in wrong} == {"attention.sdpa"}
    assert "attention.sdpa: RuntimeError: no kernel image is available" in table(findings)


def test_a_device_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--kernels", "--device", "gpu"]) == 1
    assert "repair: --device cpu" in capsys.readouterr().err
