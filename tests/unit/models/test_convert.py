"""Checkpoints whose tensors are stacked, split or joined load the same under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Concatenate, Transpose, WeightConverter

from shoal.models import convert
from shoal.models.assemble import Numerics, assemble
from shoal.models.convert import local_part, plan_conversions, read
from tests.families import tiny_lm
from tests.unit.models.test_load import CPU, causal_lm_plan, load_on_rank, setup_of, tensors_of
from tests.zygote import RankRunner

CONVERTED = ("qwen3-moe", "nemotron-h", "gpt-oss", "hrm-text", "olmo-hybrid")


def save(folder: Path, family: str) -> dict[str, Tensor]:
    """Writes a tiny model the way its checkpoints look; returns what transformers' own loader makes of it."""
    tiny_lm(family).save_pretrained(folder)
    return tensors_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def wrong(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(actual[name], expected[name])]


@pytest.mark.parametrize("family", CONVERTED)
def test_converted_weights_are_right_on_every_layout(ranks: RankRunner, tmp_path: Path, family: str) -> None:
    expected = save(tmp_path, family)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert bool(stored - expected.keys()) == (family != "gpt-oss")  # whose checkpoints look like the model
    for strategy, world in (("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4), ("ddp", 2)):
        for actual in ranks(load_on_rank, world, strategy, str(tmp_path), {}):
            assert not wrong(actual, expected), (strategy, world)


def load_slicing_first(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    convert._stacks_whole_slices = lambda converter, target: True  # this rank is a forked process
    return load_on_rank(rank, world, "fsdp2", folder, {})


@pytest.mark.parametrize("family", ["hrm-text", "olmo-hybrid"])
def test_slicing_before_converting_would_be_noticed(ranks: RankRunner, tmp_path: Path, family: str) -> None:
    expected = save(tmp_path, family)
    assert wrong(ranks(load_slicing_first, 2, str(tmp_path))[0], expected)


@pytest.mark.parametrize(("family", "layer"), [("hrm-text", "q_proj"), ("qwen3-moe", "q_proj")])
def test_adapted_layers_load_converted_weights(
    ranks: RankRunner, tmp_path: Path, family: str, layer: str
) -> None:
    expected = save(tmp_path, family)
    changes = {"lora": {"r": 2, "target_modules": [layer]}}
    actual = ranks(load_on_rank, 2, "fsdp2", str(tmp_path), changes)[0]
    base = {n.replace(".base_layer", ""): t for n, t in actual.items() if ".lora_" not in n}
    assert any(".base_layer" in name for name in actual)
    assert not wrong(base, expected)


def slices_read(rank: int, world: int, folder: str) -> list[str]:
    """Names of the checkpoint's experts that this rank reads."""
    names: list[str] = []
    honest = convert.own_slice

    def counted(source: Any, target: DTensor, index: int) -> Tensor | None:
        part = honest(source, target, index)
        if part is not None:
            names.append(str(index))
        return part

    convert.own_slice = counted
    assemble(causal_lm_plan(Path(folder)), setup_of("fsdp2", world), Numerics(), CPU)
    return names


def test_a_rank_reads_its_own_experts_only(ranks: RankRunner, tmp_path: Path) -> None:
    save(tmp_path, "qwen3-moe")
    first, second = ranks(slices_read, 2, str(tmp_path))
    assert (set(first), set(second)) == ({"0", "1", "2"}, {"3", "4"})
    assert len(first) + len(second) == 2 * 3 * 5  # layers, projections, experts


def test_a_missing_expert_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    save(tmp_path, "qwen3-moe")
    tensors = load_file(tmp_path / "model.safetensors")
    for projection in ("gate_proj", "up_proj"):
        del tensors[f"model.layers.1.mlp.experts.4.{projection}.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"of another shape: model.layers.1.mlp.experts.gate_up_proj \[4, 24, 32\]"
    ):
        assemble(causal_lm_plan(tmp_path), None, Numerics(), CPU)
    tensors["model.layers.0.mlp.experts.2.gate_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"layers.0.mlp.experts.gate_up_proj: MergeModulelist.* cannot convert"
    ):
        assemble(causal_lm_plan(tmp_path), None, Numerics(), CPU)


CONVERTERS = {
    "chunk": (
        WeightConverter("fused.weight", ["q.weight", "k.weight"], [Chunk(0)]),
        {"fused.weight": torch.arange(60.0).view(10, 6)},
    ),
    "concatenate": (
        WeightConverter(["q.weight", "k.weight"], "fused.weight", [Concatenate(0)]),
        {"q.weight": torch.arange(30.0).view(5, 6), "k.weight": -torch.arange(12.0).view(2, 6)},
    ),
    "transpose": (
        WeightConverter("fused.weight", "turned.weight", [Transpose(0, 1)]),
        {"fused.weight": torch.arange(35.0).view(5, 7)},
    ),
}


def convert_on_rank(rank: int, world: int, case: str) -> dict[str, Tensor]:
    transform, tensors = CONVERTERS[case]
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    model = tiny_lm("llama")  # only its settings are looked at
    expected = expected_of(case)
    targets = {
        name: distribute_tensor(torch.zeros_like(value), mesh, [Replicate(), Shard(0)])
        for name, value in expected.items()
    }
    plan, unexpected = plan_conversions(tensors, targets, [transform], model)
    assert not unexpected
    for conversion in plan:
        for name, part in read(conversion, tensors, targets, model):
            target = targets[name]
            target.to_local().copy_(part)
    return {name: target.full_tensor() for name, target in targets.items()}


def expected_of(case: str) -> dict[str, Tensor]:
    tensors = CONVERTERS[case][1]
    if case == "chunk":
        return dict(zip(("q.weight", "k.weight"), tensors["fused.weight"].chunk(2), strict=True))
    if case == "concatenate":
        return {"fused.weight": torch.cat([tensors["q.weight"], tensors["k.weight"]])}
    return {"turned.weight": tensors["fused.weight"].T}


@pytest.mark.parametrize("case", CONVERTERS)
@pytest.mark.parametrize("world", [2, 3])
def test_any_conversion_is_cut_after_it(ranks: RankRunner, case: str, world: int) -> None:
    for actual in ranks(convert_on_rank, world, case):
        assert not wrong(actual, expected_of(case))


def test_a_plain_target_takes_the_whole_tensor() -> None:
    whole = torch.arange(6.0)
    assert torch.equal(local_part(whole, torch.zeros(6)), whole)
