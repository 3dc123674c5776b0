"""Exporting from any layout gives a folder that plain transformers opens, every tensor equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.checkpoint.export import ExportOptions, export_model
from shoal.checkpoint.naming import HuggingFaceNames
from shoal.checkpoint.store import CheckpointError
from tests.families import FAMILIES, tiny_lm
from tests.tiny import tiny_salm
from tests.unit.checkpoint.models import LAYOUTS, build, read_folder, save_source, unequal
from tests.zygote import RankRunner

SMALL = ExportOptions(max_shard_bytes=20_000)


def export_on_rank(
    rank: int, world: int, layout: str, source: Path, output: Path, options: ExportOptions
) -> None:
    export_model(build(source, layout, world), output, options=options)


@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3-moe"])
def test_every_layout_writes_what_transformers_writes(
    ranks: RankRunner, tmp_path: Path, layout: str, world: int, family: str
) -> None:
    source, output = save_source(tmp_path / "source", family), tmp_path / "out"
    ranks(export_on_rank, world, layout, source, output, SMALL)
    assert unequal(read_folder(output), read_folder(source)) == []
    model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info
    assert model.generation_config.max_new_tokens == 17
    assert model.config.architectures == [type(model).__name__] and model.config.dtype == torch.float32
    ids = torch.arange(12).view(2, 6)
    original = AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(model(input_ids=ids).logits, original(input_ids=ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.chat_template and tokenizer("one two").input_ids
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def export_from_python(rank: int, world: int, layout: str, source: Path, output: Path) -> None:
    from shoal import AutoModelForCausalLM as Sharded
    from tests.unit.checkpoint.models import setup_of

    model = Sharded.from_pretrained(source, distributed_setup=setup_of(layout, world))
    export_model(model, output, options=SMALL)


@pytest.mark.parametrize(("layout", "world"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)])
def test_models_of_the_python_interface_are_exported_too(
    ranks: RankRunner, tmp_path: Path, layout: str, world: int
) -> None:
    source = save_source(tmp_path / "source")
    ranks(export_from_python, world, layout, source, tmp_path / "out")
    assert unequal(read_folder(tmp_path / "out"), read_folder(source)) == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.generation_config.max_new_tokens == 17


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_comes_out_as_transformers_saves_it(tmp_path: Path, family: str) -> None:
    model = tiny_lm(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "reference")
    export_model(model, tmp_path / "out")
    assert unequal(dict(model.state_dict()), before) == []
    assert unequal(read_folder(tmp_path / "out"), read_folder(tmp_path / "reference")) == []
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert unequal(dict(again.state_dict()), dict(model.state_dict())) == []


def test_the_index_names_every_tensor_and_its_file(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source")
    export_model(build(source, "plain", 1), tmp_path / "out", options=SMALL)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    tensors = read_folder(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for file in files:
        assert file.name in index["weight_map"].values() and f"-of-{len(files):05d}" in file.name
        # A file is as large as allowed, or holds one tensor that is larger than that.
        names = [name for name, owner in index["weight_map"].items() if owner == file.name]
        assert sum(tensors[n].nbytes for n in names) <= SMALL.max_shard_bytes or len(names) == 1
    export_model(build(source, "plain", 1), tmp_path / "one")
    assert [file.name for file in (tmp_path / "one").glob("model*")] == ["model.safetensors"]


def test_weights_are_cast_on_request(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source")
    options = ExportOptions(dtype=torch.bfloat16)
    export_model(build(source, "plain", 1), tmp_path / "out", options=options)
    expected = {name: tensor.bfloat16() for name, tensor in read_folder(source).items()}
    assert unequal(read_folder(tmp_path / "out"), expected) == []
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_weights_that_came_from_gguf_are_not_called_quantised(tmp_path: Path) -> None:
    model = tiny_lm("llama")
    model.config.quantization_config = {"quant_method": "gguf", "gguf_file": "model.Q4_1.gguf"}
    export_model(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert model.config.quantization_config["quant_method"] == "gguf"


def test_the_configuration_says_what_dtype_is_stored(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", dtype=torch.bfloat16)
    export_model(build(source, "plain", 1), tmp_path / "out")  # assembled in fp32
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32


def export_salm(rank: int, world: int, layout: str, output: Path) -> None:
    from shoal.models.assemble import ModelPlan, Numerics, assemble
    from tests.unit.checkpoint.models import CPU, setup_of

    plan = ModelPlan(tiny_salm, seed=3, perception="perception")
    export_model(assemble(plan, setup_of(layout, world), Numerics(), CPU).module, output)


def test_a_speech_model_becomes_one_folder_per_child(ranks: RankRunner, tmp_path: Path) -> None:
    for layout, world in (("plain", 1), ("fsdp2", 2), ("hsdp", 4)):
        ranks(export_salm, world, layout, tmp_path / layout)
    folders = {path.name for path in (tmp_path / "plain").iterdir()}
    assert folders == {"llm", "perception"}
    llm = AutoModelForCausalLM.from_pretrained(tmp_path / "plain" / "llm")
    assert sum(p.numel() for p in llm.parameters()) > 0
    perception = read_folder(tmp_path / "plain" / "perception")
    assert {name.split(".")[0] for name in perception} == {"encoder", "proj"}
    assert (tmp_path / "plain" / "perception" / "config.json").is_file()
    for layout in ("fsdp2", "hsdp"):
        for part in folders:
            assert (
                unequal(read_folder(tmp_path / layout / part), read_folder(tmp_path / "plain" / part)) == []
            )


def test_a_fused_tensor_is_written_once_from_all_its_pieces() -> None:
    """Reverting `Chunk` needs several tensors of the model at once: they are one group."""
    model = tiny_lm("hrm-text")
    with torch.device("meta"):
        naming = HuggingFaceNames(type(model)(model.config))
    groups = naming.groups(model.state_dict())
    joined = [group for group in groups if len(group) > 1]
    assert joined and all(len({name.rsplit(".", 2)[0] for name in group}) == 1 for group in joined)
    assert sorted(name for group in groups for name in group) == sorted(model.state_dict())


def stages_on_rank(rank: int, world: int, source: Path, output: Path) -> None:
    """Rank 0 holds the first layer, rank 1 the rest, as a pipeline would have it."""
    model = build(source, "plain", 1)
    own = model.llm.model
    for name, _ in list(own.layers.named_children()):
        if (name == "0") != (rank == 0):
            own.layers[int(name)] = nn.Identity()
    if rank == 0:
        model.llm.lm_head, own.norm = nn.Identity(), nn.Identity()
    else:
        own.embed_tokens = nn.Identity()
    export_model(model, output, options=SMALL)


def test_parts_that_only_other_ranks_hold_are_written_too(ranks: RankRunner, tmp_path: Path) -> None:
    source = save_source(tmp_path / "source")
    ranks(stages_on_rank, 2, source, tmp_path / "out")
    assert unequal(read_folder(tmp_path / "out"), read_folder(source)) == []


def test_an_existing_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        export_model(tiny_lm("llama"), tmp_path / "out")


def test_a_module_without_a_language_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no transformers model called llm"):
        export_model(nn.Linear(2, 2), tmp_path / "out")


def fail_on_rank(rank: int, world: int, source: Path, output: Path, failing: int, phase: str) -> str:
    import shoal.checkpoint.export as export
    from shoal.checkpoint.shards import ShardWriter

    model = build(source, "fsdp2", world)

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    if rank == failing:
        if phase == "write":
            ShardWriter._flush = refuse  # type: ignore[method-assign]
        else:
            setattr(export, phase, refuse)
    try:
        export_model(model, output, options=SMALL)
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("phase", "failing"),
    [("model_tensors", 1), ("naming_of", 1), ("write", 0), ("publish_output", 0), ("write_description", 0)],
)
def test_a_failure_on_one_rank_is_raised_on_all_with_its_origin(
    ranks: RankRunner, tmp_path: Path, phase: str, failing: int
) -> None:
    source = save_source(tmp_path / "source")
    messages = ranks(fail_on_rank, 2, source, tmp_path / "out", failing, phase, timeout=60)
    assert len(set(messages)) == 1, messages
    assert f"rank {failing}" in messages[0] and "No space left on device" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
