"""scripts/open_in_vllm.py: exports open in vLLM, where there is one; what its comparisons find, anywhere.

vLLM's environment may be another one: SHOAL_VLLM_PYTHON names its interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts import open_in_vllm
from shoal.checkpoint.export import ExportOptions, export_model
from tests.tiny import tiny_llama

PYTHON = os.environ.get("SHOAL_VLLM_PYTHON", sys.executable)
FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
HEADS = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # of 32, the least that vLLM takes
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


@pytest.fixture(scope="session")
def vllm_python() -> str:
    if subprocess.run([PYTHON, "-c", FIND], check=False).returncode:
        pytest.skip(
            "vLLM is not installed here; SHOAL_VLLM_PYTHON names the interpreter of an environment with it"
        )
    return PYTHON


@pytest.mark.slow
def test_exports_open_in_vllm(vllm_python: str, tmp_path: Path) -> None:
    models = {
        "tied": tiny_llama(tie_word_embeddings=True, **HEADS),
        "untied": tiny_llama(**HEADS),
    }
    for name, model in models.items():
        export_model(model, tmp_path / name, options=ExportOptions(max_shard_bytes=50_000))
    words = [vllm_python, open_in_vllm.__file__, *(str(tmp_path / name) for name in models)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" parameters\n") == len(models) and done.stdout.endswith("no difference\n")


def loading() -> tuple[dict[str, Tensor], dict[str, open_in_vllm.Parameter]]:
    """Exported tensors, and what a right vLLM makes of them."""
    attention = [f"a.{part}.weight" for part in FUSED["qkv_proj"]]
    gated = [f"m.experts.{expert}.{part}.weight" for expert in (0, 1) for part in ("gate_proj", "up_proj")]
    down = [f"m.experts.{expert}.down_proj.weight" for expert in (0, 1)]
    names = [*attention, *gated, *down]
    exported = {name: torch.full((2, 3), float(number)) for number, name in enumerate(names)}
    exported |= {"embed_tokens.weight": torch.ones(5, 3), "norm.weight": torch.ones(3)}
    parameters = {
        "a.qkv_proj.weight": torch.cat([exported[name] for name in attention]),
        "m.experts.routed_experts.w13_weight": torch.cat([exported[name] for name in gated]).view(2, 4, 3),
        "m.experts.routed_experts.w2_weight": torch.stack([exported[name] for name in down]),
        "embed_tokens.weight": torch.cat([torch.ones(5, 3), torch.zeros(3, 3)]),
        "norm.weight": torch.ones(3),
    }
    parts = {name: open_in_vllm.parts_of(name, len(tensor), FUSED) for name, tensor in parameters.items()}
    return exported, {name: (tensor, parts[name]) for name, tensor in parameters.items()}


def test_fused_and_padded_parameters_are_their_exported_tensors() -> None:
    exported, recorded = loading()
    assert open_in_vllm.tensor_differences(recorded, exported) == []


WRONG: dict[str, Any] = {
    "a-value": ("a.qkv_proj.weight", lambda t: t + torch.eye(6, 3) * 1e-6),
    "the-order-of-the-parts": ("a.qkv_proj.weight", lambda t: t.flip(0)),
    "the-order-of-the-experts": ("m.experts.routed_experts.w2_weight", lambda t: t.flip(0)),
    "the-padding": ("embed_tokens.weight", torch.ones_like),
    "rows-too-many": ("norm.weight", lambda t: torch.cat([t, torch.zeros(1)])),
    "the-dtype": ("norm.weight", lambda t: t.double()),
    "not-a-number": ("norm.weight", lambda t: t * torch.nan),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_a_parameter_that_is_something_else_is_named(case: str) -> None:
    exported, recorded = loading()
    name, change = WRONG[case]
    tensor, parts = recorded[name]
    recorded[name] = change(tensor), parts
    (line,) = open_in_vllm.tensor_differences(recorded, exported)
    assert line.startswith(f"{name}, ")


def test_tensors_without_a_counterpart_are_named() -> None:
    exported, recorded = loading()
    del recorded["norm.weight"], exported["a.k_proj.weight"]
    lines = open_in_vllm.tensor_differences(recorded, exported)
    assert [line.split()[0] for line in lines] == ["a.qkv_proj.weight,", "norm.weight"]


def continued(model: torch.nn.Module, choose: Callable[[Tensor], Tensor]) -> Any:
    """What vLLM gives for a prompt, made with `model`: four new tokens, and the log probability of every token."""
    tokens = [5, 9, 3]
    for _ in range(4):
        tokens.append(int(choose(model(torch.tensor([tokens])).logits[0, -1])))
    scores = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1).tolist()
    steps = [{t: SimpleNamespace(logprob=row[t])} for row, t in zip(scores, tokens[1:], strict=True)]
    output = SimpleNamespace(token_ids=tokens[3:], logprobs=steps[2:])
    return SimpleNamespace(prompt_token_ids=tokens[:3], prompt_logprobs=[None, *steps[:2]], outputs=[output])


@torch.no_grad()
def test_another_models_tokens_are_told_apart() -> None:
    model = tiny_llama(**HEADS)
    greedy, timid = continued(model, torch.argmax), continued(model, torch.argmin)
    assert open_in_vllm.token_differences(model, [greedy], 1e-5) == []
    (line,) = open_in_vllm.token_differences(model, [greedy, timid], 1e-5)
    assert line.startswith("prompt 1: ") and float(line.rpartition(" ")[2]) > 0.1
    greedy.prompt_logprobs[2][3].logprob += 0.01
    (line,) = open_in_vllm.token_differences(model, [greedy], 1e-5)
    assert line == "prompt 0: log probabilities differ by 1.0e-02, choices by 0.0e+00"
