"""Case 34: a consolidated export has Hugging Face's keys, readable files, equal tensors; errors name their origin.

Each rank of a pipeline holds other layers, and the models are built from a configuration: there is no source index to
copy keys from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from shoal.checkpoint.consolidate import consolidate
from shoal.checkpoint.export import ExportOptions, export_model
from shoal.checkpoint.snapshot import SaveOptions
from shoal.checkpoint.state import save_state
from shoal.checkpoint.store import CheckpointError
from tests.families import tiny_config, tiny_lm
from tests.unit.checkpoint.models import CPU, LanguageModel, read_folder, setup_of, unequal
from tests.zygote import RankRunner

SMALL = ExportOptions(max_shard_bytes=8_000)
FAMILIES = ("qwen3-moe", "nemotron-h", "gpt-oss", "llama-tied")


def built_from_configuration(family: str, layout: str, world: int) -> LanguageModel:
    from shoal.models.assemble import ModelPlan, Numerics, assemble

    def build() -> nn.Module:
        config = tiny_config(family)
        return LanguageModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))

    module = assemble(ModelPlan(build, seed=3), setup_of(layout, world), Numerics(), CPU).module
    assert isinstance(module, LanguageModel)
    return module


def keep_own_stage(model: LanguageModel, rank: int) -> None:
    """Leave this rank the layers of its stage: even layers and the embedding, or odd layers, norm and head."""
    inner: Any = model.llm.model
    for index in range(len(inner.layers)):
        if index % 2 != rank:
            inner.layers[index] = nn.Identity()
    if rank == 0:
        model.llm.lm_head, inner.norm = nn.Identity(), nn.Identity()
    else:
        inner.embed_tokens = nn.Identity()


def export_and_save(rank: int, world: int, layout: str, family: str, root: Path) -> None:
    model = built_from_configuration(family, "plain" if layout == "stages" else layout, world)
    if layout == "stages":
        keep_own_stage(model, rank)
    export_model(model, root / "live", options=SMALL)
    for model_format in ("safetensors", "torch_save"):
        options = SaveOptions(model_format=model_format)  # type: ignore[arg-type]
        save_state(root / model_format, model=model, step=1, options=options)


def reference(family: str, folder: Path) -> dict[str, Tensor]:
    """What transformers saves of the same model on a single process."""
    built_from_configuration(family, "plain", 1).llm.save_pretrained(folder)
    return read_folder(folder)


def check(folder: Path, expected: dict[str, Tensor]) -> None:
    assert unequal(read_folder(folder), expected) == []
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert {file.name for file in folder.glob("*.safetensors")} == set(index["weight_map"].values())
    for name, file in index["weight_map"].items():
        assert name in read_folder(folder, file.removesuffix(".safetensors"))
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layout", "world"), [("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4), ("stages", 2)])
def test_keys_and_tensors_are_those_of_a_single_process(
    ranks: RankRunner, tmp_path: Path, family: str, layout: str, world: int
) -> None:
    if layout == "stages" and family != "qwen3-moe":
        pytest.skip("stages are cut by hand for one family")
    expected = reference(family, tmp_path / "reference")
    if family == "qwen3-moe":
        experts = [name for name in expected if ".experts." in name]
        assert len(experts) == 2 * 5 * 3 and "model.layers.1.mlp.experts.4.up_proj.weight" in experts
    ranks(export_and_save, world, layout, family, tmp_path)
    check(tmp_path / "live", expected)
    for model_format in ("safetensors", "torch_save"):
        consolidate(tmp_path / model_format, tmp_path / f"{model_format}-out", SMALL)
        check(tmp_path / f"{model_format}-out", expected)


def fail_on_rank_1(rank: int, world: int, root: Path, phase: str) -> str:
    import shoal.checkpoint.export as export
    import shoal.checkpoint.writing as writing

    model = built_from_configuration("qwen3-moe", "fsdp2", world)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("the gate of layer 1 is missing")

    if rank == 1:
        holder, name = {
            "collecting to export": (export, "model_tensors"),
            "writing shards": (writing.HuggingFaceStorageWriter, "write_data"),
        }[phase]
        setattr(holder, name, refuse)
    try:
        if phase == "writing shards":
            options = SaveOptions(model_format="safetensors", consolidated=True)
            save_state(root / "step=1", model=model, step=1, options=options)
        else:
            export_model(model, root / "out", options=SMALL)
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("phase", ["collecting to export", "writing shards"])
def test_a_failure_on_rank_1_is_raised_on_every_rank_with_its_origin(
    ranks: RankRunner, tmp_path: Path, phase: str
) -> None:
    messages = ranks(fail_on_rank_1, 3, tmp_path, phase, timeout=60)
    assert len(set(messages)) == 1
    assert "rank 1" in messages[0] and "RuntimeError: the gate of layer 1 is missing" in messages[0]
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_in_the_reference_would_be_seen(tmp_path: Path) -> None:
    """The comparison above fails for stacked experts, as a save without conversions would write them."""
    model = tiny_lm("qwen3-moe")
    expected = {name: tensor for name, tensor in model.state_dict().items()}
    export_model(model, tmp_path / "out")
    assert "model.layers.0.mlp.experts.gate_up_proj" in unequal(read_folder(tmp_path / "out"), expected)
