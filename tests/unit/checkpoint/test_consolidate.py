"""Checkpoints of any layout, in both formats, become Hugging Face folders without a process group."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.checkpoint.consolidate import SCRIPT_NAME, consolidate
from shoal.checkpoint.export import ExportOptions
from shoal.checkpoint.snapshot import SaveOptions
from shoal.checkpoint.state import load_state, save_state
from shoal.checkpoint.store import CheckpointError
from shoal.cli import main
from tests.families import tiny_lm
from tests.unit.checkpoint.models import LAYOUTS, build, parameters_of, read_folder, save_source, unequal
from tests.zygote import ROOT, RankRunner

SHARDED, TORCH = SaveOptions(model_format="safetensors"), SaveOptions(model_format="torch_save")


def save_on_rank(rank: int, world: int, layout: str, source: Path, path: Path, options: SaveOptions) -> Any:
    model = build(source, layout, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(4, 60, (2, 9), generator=torch.Generator().manual_seed(rank))
    model({"input_ids": ids})["loss_sum"].backward()
    for (
        parameter
    ) in model.parameters():  # ranks saw different data and plain copies do not talk to each other
        if layout in ("plain", "ddp") and parameter.grad is not None and world > 1:
            dist.all_reduce(parameter.grad)
    optimizer.step()
    save_state(path, model=model, optimizer=optimizer, step=1, options=options)
    return parameters_of(model)


def plain_names(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("llm."): tensor for name, tensor in parameters.items()}


@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
@pytest.mark.parametrize("options", [SHARDED, TORCH], ids=["safetensors", "torch_save"])
def test_a_checkpoint_of_every_layout_is_exported_offline(
    ranks: RankRunner, tmp_path: Path, layout: str, world: int, options: SaveOptions
) -> None:
    source, path = save_source(tmp_path / "source"), tmp_path / "run" / "step=1"
    trained = plain_names(ranks(save_on_rank, world, layout, source, path, options)[0])
    consolidate(path, tmp_path / "out", ExportOptions(max_shard_bytes=20_000))
    assert unequal(read_folder(tmp_path / "out"), trained) == []
    assert unequal(read_folder(tmp_path / "out"), read_folder(source)) != []
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert model.generation_config.max_new_tokens == 17
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-moe"])
def test_tied_and_stacked_tensors_are_exported_as_published(
    ranks: RankRunner, tmp_path: Path, family: str
) -> None:
    source, path = save_source(tmp_path / "source", family), tmp_path / "step=1"
    ranks(save_on_rank, 2, "fsdp2", source, path, SHARDED)
    consolidate(path, tmp_path / "out")
    assert read_folder(tmp_path / "out").keys() == read_folder(source).keys()


def load_on_rank(rank: int, world: int, layout: str, source: Path, path: Path) -> Any:
    model = build(source, layout, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    load_state(path, model=model, optimizer=optimizer)
    moments = {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    from tests.unit.checkpoint.models import full

    return parameters_of(model) | {name: full(value) for name, value in moments.items()}


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_safetensors_checkpoints_load_on_other_layouts(
    ranks: RankRunner, tmp_path: Path, family: str
) -> None:
    source, path = save_source(tmp_path / "source", family), tmp_path / "step=1"
    trained = ranks(save_on_rank, 3, "fsdp2", source, path, SHARDED)[0]
    assert list((path / "model").glob("*.safetensors")) and not list(path.glob("model.*"))
    loaded = [ranks(load_on_rank, world, layout, source, path)[0] for layout, world in LAYOUTS]
    for one in loaded:
        assert unequal({name: one[name] for name in trained}, trained) == []
        assert unequal(one, loaded[0]) == []
    assert "llm.model.norm.weight/exp_avg" in loaded[0]


def test_the_script_exports_wherever_the_checkpoint_lies(ranks: RankRunner, tmp_path: Path) -> None:
    source, path = save_source(tmp_path / "source"), tmp_path / "run" / "step=1"
    trained = plain_names(ranks(save_on_rank, 2, "fsdp2", source, path, SHARDED)[0])
    moved = tmp_path / "else where" / "copy"
    shutil.copytree(path, moved)
    shutil.rmtree(path)
    shutil.rmtree(source)
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", str(moved / SCRIPT_NAME)],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert unequal(read_folder(moved / "consolidated"), trained) == []
    done = subprocess.run(
        [str(moved / SCRIPT_NAME), str(tmp_path / "half"), "--dtype", "bfloat16"],
        cwd="/", env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {tensor.dtype for tensor in read_folder(tmp_path / "half").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_consolidated_checkpoint_holds_the_model_itself(ranks: RankRunner, tmp_path: Path) -> None:
    source, path = save_source(tmp_path / "source"), tmp_path / "step=1"
    options = SaveOptions(model_format="safetensors", consolidated=True)
    trained = plain_names(ranks(save_on_rank, 2, "fsdp2", source, path, options)[0])
    assert unequal(read_folder(path / "consolidated"), trained) == []
    assert not (path / SCRIPT_NAME).exists()
    AutoModelForCausalLM.from_pretrained(path / "consolidated")


def test_the_command_takes_a_run_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_lm("llama")
    for step in (1, 2):
        save_state(tmp_path / "checkpoints" / f"step={step}", model=model, step=step)
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 0
    assert "step=2" in capsys.readouterr().out
    assert unequal(read_folder(tmp_path / "out"), dict(model.state_dict())) == []
    for words, said in (
        ([str(tmp_path), str(tmp_path / "out")], "exists already"),
        ([str(tmp_path / "nowhere"), str(tmp_path / "new")], "is not a complete checkpoint"),
        ([str(tmp_path), str(tmp_path / "new"), "--max-shard-size", "many"], "is not a size"),
    ):
        assert main(["export", *words]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_ties_of_the_configuration_that_do_not_hold_are_refused(tmp_path: Path) -> None:
    model = tiny_lm("llama-tied")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    save_state(tmp_path / "step=1", model=model, step=1)
    with pytest.raises(CheckpointError, match=r"ties lm_head.weight to model.embed_tokens.weight"):
        consolidate(tmp_path / "step=1", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["step=1"]


# ------------------------------------------------------------------------------------------------------- memory

MEMORY = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
SHARD_BYTES = 32 * 2**20


class Peak(threading.Thread):
    """The largest anonymous resident memory of this process while it runs, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_value = self.value = anonymous_memory()
        self._go = True

    def run(self) -> None:
        while self._go:
            self.value = max(self.value, anonymous_memory())
            time.sleep(0.002)

    def stop(self) -> int:
        self._go = False
        self.join()
        return self.value - self.start_value


def anonymous_memory() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def save_large(rank: int, world: int, path: Path, model_format: str) -> int:
    model = tiny_lm("llama", **MEMORY)
    save_state(path, model=model, step=1, options=SaveOptions(model_format=model_format))  # type: ignore[arg-type]
    return sum(p.numel() * p.element_size() for p in model.parameters())


def export_measured(path: Path, output: Path) -> int:
    assert not dist.is_initialized()
    options = ExportOptions(max_shard_bytes=SHARD_BYTES)
    # Imports and thread stacks, on a model so small that it leaves no memory behind that could be used again.
    save_state(path.with_name("small"), model=tiny_lm("llama"), step=0)
    consolidate(path.with_name("small"), output.with_name("warm-up"), options)
    peak = Peak()
    peak.start()
    consolidate(path, output, options)
    return peak.stop()


@pytest.mark.parametrize("model_format", ["safetensors", "torch_save"])
def test_exporting_holds_one_file_and_a_tensor_in_memory(
    ranks: RankRunner, tmp_path: Path, model_format: str
) -> None:
    path = tmp_path / "step=1"
    size = ranks(save_large, 1, path, model_format, init=False)[0]
    code = (
        "import sys; from pathlib import Path; from tests.unit.checkpoint.test_consolidate import export_measured;"
        "print(export_measured(*map(Path, sys.argv[1:])))"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "out")]
    # Otherwise glibc keeps tens of MB of what was freed for later, more or less by chance.
    allocator = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    environment = {**os.environ, **allocator, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    peak = int(done.stdout.split()[-1])
    largest = 4 * MEMORY["hidden_size"] * MEMORY["intermediate_size"]
    assert size > 8 * SHARD_BYTES
    # A tensor is read in the pieces it was saved in, here one: the piece and the tensor exist at once.
    assert SHARD_BYTES / 2 < peak < SHARD_BYTES + 2.5 * largest, (peak / 2**20, size / 2**20)
