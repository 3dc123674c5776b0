"""Case 28: an adapter that is saved from shards holds every rank's slice, in peft's own format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from shoal.checkpoint.adapters import load_adapter
from shoal.checkpoint.consolidate import consolidate
from shoal.checkpoint.export import ExportOptions, export_model
from shoal.checkpoint.parts import parts_of
from shoal.checkpoint.reader import SavedModel, TensorReader
from shoal.checkpoint.snapshot import SaveOptions
from shoal.checkpoint.state import load_state, save_state
from shoal.checkpoint.store import CheckpointError
from tests.unit.checkpoint.models import LORA, build, full, parameters_of, read_folder, save_source, unequal
from tests.zygote import RankRunner

LAYOUTS = (("plain", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4))
ADAPTERS_ONLY = SaveOptions(model_part="trainable")


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole adapter tensors by name; collective when they are sharded."""
    return {name: full(p) for name, p in model.named_parameters() if ".lora_" in name}


def fill_by_rank(model: nn.Module, rank: int, step: float = 1.0) -> None:
    """Give each rank's slices values that no other rank has; replicas of a slice agree."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if ".lora_" in name:
                shard = parameter.device_mesh.get_local_rank(-1) if isinstance(parameter, DTensor) else 0
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                values = torch.arange(local.numel(), dtype=local.dtype).view_as(local)
                local.copy_(step * (1000 * (shard + 1) + 10 * number + values / 1000) / 5000)


def save_all(rank: int, world: int, layout: str, source: Path, root: Path) -> Any:
    model = build(source, layout, world, lora=LORA)
    fill_by_rank(model, rank)
    before = parameters_of(model)
    export_model(model, root / "adapter")
    export_model(model, root / "merged", options=ExportOptions(merge_lora=True))
    assert unequal(parameters_of(model), before) == []
    save_state(root / "step=1", model=model, step=1, options=ADAPTERS_ONLY)
    save_state(root / "step=2", model=model, step=2, options=SaveOptions(model_format="safetensors"))
    return adapters_of(model)


def load_all(rank: int, world: int, layout: str, source: Path, root: Path) -> Any:
    """What comes back from the adapter folder, and from the checkpoint of adapters alone."""
    found = []
    for kind in ("adapter", "checkpoint"):
        model = build(source, layout, world, lora=LORA)
        fill_by_rank(model, rank, step=0.0)
        assert all(not tensor.any() for tensor in adapters_of(model).values())
        if kind == "adapter":
            load_adapter(model, parts_of(model)[0], root / "adapter")
        else:
            load_state(root / "step=1", model=model)
        found.append(adapters_of(model))
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("model") / "source")


@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
def test_every_slice_is_in_the_file_and_peft_loads_it(
    ranks: RankRunner, tmp_path: Path, source: Path, layout: str, world: int
) -> None:
    expected = ranks(save_all, world, layout, source, tmp_path)[0]
    assert all(tensor.abs().min() > 0 for tensor in expected.values())  # no slice was left as it was created
    names = {n: n.replace("llm.", "base_model.model.", 1).replace(".default", "") for n in expected}
    assert (
        unequal(
            read_folder(tmp_path / "adapter", "adapter_model"), {names[n]: t for n, t in expected.items()}
        )
        == []
    )

    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), tmp_path / "adapter")
    loaded = {
        n.replace("base_model.model.", "llm.", 1): p for n, p in opened.named_parameters() if ".lora_" in n
    }
    assert unequal(loaded, expected) == []

    merged = dict(opened.merge_and_unload().state_dict())
    consolidate(tmp_path / "step=2", tmp_path / "offline", ExportOptions(merge_lora=True))
    for folder in ("merged", "offline"):
        found = read_folder(tmp_path / folder)
        assert found.keys() == merged.keys()
        for name, tensor in merged.items():  # the last bit of B @ A depends on how memory is aligned
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=f"{folder}: {name}")


@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
def test_adapters_come_back_on_every_layout(
    ranks: RankRunner, tmp_path: Path, source: Path, layout: str, world: int
) -> None:
    expected = ranks(save_all, 2, "fsdp2", source, tmp_path)[0]
    for report in ranks(load_all, world, layout, source, tmp_path):
        for found in report:
            assert unequal(found, expected) == []


def test_a_checkpoint_of_adapters_alone_holds_nothing_else_and_exports_as_them(
    ranks: RankRunner, tmp_path: Path, source: Path
) -> None:
    ranks(save_all, 2, "fsdp2", source, tmp_path)
    assert {".lora_" in name for name in TensorReader(tmp_path / "step=1").tensors()} == {True}
    whole = SavedModel(tmp_path / "step=2", "safetensors").tensors
    assert "llm.model.embed_tokens.weight" in whole and len(whole) > len(read_folder(source))
    consolidate(tmp_path / "step=1", tmp_path / "out")
    found = read_folder(tmp_path / "out", "adapter_model")
    assert unequal(found, read_folder(tmp_path / "adapter", "adapter_model")) == []
    assert not (tmp_path / "out" / "config.json").exists()
    with pytest.raises(
        CheckpointError, match="is not in the checkpoint, which holds trained parameters only"
    ):
        consolidate(tmp_path / "step=1", tmp_path / "full", ExportOptions(merge_lora=True))


def local_slices_only(rank: int, world: int, source: Path) -> list[bool]:
    model = build(source, "fsdp2", world, lora=LORA)
    fill_by_rank(model, rank)
    named = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    whole = {name: full(p) for name, p in named.items()}
    return [named[name].to_local().shape == whole[name].shape for name in named]


def test_the_fault_would_be_seen(ranks: RankRunner, source: Path) -> None:
    """On two ranks no rank's slice is the whole tensor, so that a file of rank 0's slices could not pass above."""
    assert not any(ranks(local_slices_only, 2, source)[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_alpha": 24}, "was trained with lora_alpha = 12, this run's 24"),
        ({"target_modules": ["q_proj"]}, r"does not fit \(4 tensors\)"),
        ({"r": 2}, "was trained with r = 3, this run's 2"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(
    tmp_path: Path, source: Path, changes: dict[str, Any], said: str
) -> None:
    export_model(build(source, "plain", 1, lora=LORA), tmp_path / "adapter")
    model = build(source, "plain", 1, lora={**LORA, **changes})
    with pytest.raises(ValueError, match=said):
        load_adapter(model, parts_of(model)[0], tmp_path / "adapter")


def test_weights_trained_besides_the_adapters_are_not_lost_silently(tmp_path: Path, source: Path) -> None:
    model = build(source, "plain", 1, lora=LORA, keep=(r"^llm\.model\.norm\..+",))
    with pytest.raises(
        CheckpointError, match="model.norm.weight and 0 others were trained besides the adapters"
    ):
        export_model(model, tmp_path / "adapter")
    export_model(model, tmp_path / "merged", options=ExportOptions(merge_lora=True))
