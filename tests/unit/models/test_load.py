"""Loading into any layout gives what transformers' own loader gives, parameters and buffers, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shoal.config.schema import DDPConfig, FSDP2Config, ParallelismSizes
from shoal.models.assemble import ModelPlan, Numerics, assemble
from shoal.models.auto import AutoModelForCausalLM as Ours
from shoal.models.files import open_tensors
from shoal.models.folder import hf_config, hf_generation_config, hf_tokenizer
from shoal.models.load import WeightSource
from shoal.parallel.setup import DistributedSetup
from tests.tiny import tiny_llama
from tests.zygote import RankRunner

CPU = torch.device("cpu")
LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"]}


def save(folder: Path, tied: bool = False) -> Path:
    tiny_llama(tie_word_embeddings=tied).save_pretrained(folder)
    return folder


def causal_lm_plan(folder: Path, **changes: Any) -> ModelPlan:
    def build() -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
        return model

    settings: dict[str, Any] = {"weights": (WeightSource("", folder),), "llm": "", "seed": 3, **changes}
    return ModelPlan(build, **settings)


def setup_of(strategy: str, world: int) -> DistributedSetup | None:
    if strategy == "plain":
        return None
    options = DDPConfig() if strategy == "ddp" else FSDP2Config()
    sizes = ParallelismSizes(dp_replicate_size=2 if strategy == "hsdp" else None)
    return DistributedSetup.build(strategy=options, parallelism_sizes=sizes, world_size=world)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in named}


def load_on_rank(
    rank: int, world: int, strategy: str, folder: str, changes: dict[str, Any]
) -> dict[str, Tensor]:
    torch.manual_seed(rank)  # what the ranks' generators hold must not matter
    plan = causal_lm_plan(Path(folder), **changes)
    return tensors_of(assemble(plan, setup_of(strategy, world), Numerics(), CPU).module)


@pytest.mark.parametrize(("strategy", "world"), [("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4), ("ddp", 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_every_layout_loads_what_transformers_loads(
    ranks: RankRunner, tmp_path: Path, strategy: str, world: int, tied: bool
) -> None:
    folder = save(tmp_path, tied)
    expected = tensors_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert any("inv_freq" in name for name in expected)
    for actual in ranks(load_on_rank, world, strategy, str(folder), {}):
        assert actual.keys() == expected.keys()
        differing = [name for name in expected if not torch.equal(actual[name], expected[name])]
        assert not differing


def test_adapters_start_alike_on_every_layout(ranks: RankRunner, tmp_path: Path) -> None:
    folder = save(tmp_path)
    plain = tensors_of(assemble(causal_lm_plan(folder, lora=LORA), None, Numerics(), CPU).module)
    sharded = ranks(load_on_rank, 2, "fsdp2", str(folder), {"lora": LORA})[1]
    assert plain.keys() == sharded.keys()
    assert all(torch.equal(plain[name], sharded[name]) for name in plain)
    base = load_file(folder / "model.safetensors")
    q_proj = "model.layers.0.self_attn.q_proj"
    assert torch.equal(plain[f"{q_proj}.base_layer.weight"], base[f"{q_proj}.weight"])
    assert plain[f"{q_proj}.lora_A.default.weight"].abs().sum() > 0
    assert plain[f"{q_proj}.lora_B.default.weight"].abs().sum() == 0


def test_initial_values_depend_on_seed_and_name_alone(ranks: RankRunner, tmp_path: Path) -> None:
    folder = save(tmp_path)
    plain = tensors_of(assemble(causal_lm_plan(folder, weights=()), None, Numerics(), CPU).module)
    for strategy, world in (("fsdp2", 2), ("hsdp", 4), ("ddp", 2)):
        actual = ranks(load_on_rank, world, strategy, str(folder), {"weights": ()})[-1]
        assert all(torch.equal(plain[name], actual[name]) for name in plain), strategy
    other = tensors_of(assemble(causal_lm_plan(folder, weights=(), seed=4), None, Numerics(), CPU).module)
    changed = {name for name in plain if not torch.equal(plain[name], other[name])}
    assert {n for n in plain if n.endswith("proj.weight")} <= changed
    layers = [plain[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2)]
    assert not torch.equal(*layers)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), "unexpected: extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), "of another shape:.*model.norm.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, damage: Any, said: str) -> None:
    folder = save(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=said):
        assemble(causal_lm_plan(folder), None, Numerics(), CPU)


def refuse_on_rank(rank: int, world: int, folder: str) -> str:
    with pytest.raises(ValueError, match="does not fit") as error:
        assemble(causal_lm_plan(Path(folder)), setup_of("fsdp2", world), Numerics(), CPU)
    return str(error.value)


def test_every_rank_refuses_with_the_same_message(ranks: RankRunner, tmp_path: Path) -> None:
    folder = save(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(31)  # one of two ranks could fill its half
    for index in range(14):
        tensors[f"surplus.{index}"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    first, second = ranks(refuse_on_rank, 2, str(folder))
    assert first == second
    assert "of another shape: model.norm.weight [31] instead of [32]" in first
    assert "surplus.0, " in first and " and 2 more" in first


@pytest.mark.parametrize("world", [2, 3])
def test_an_indexed_checkpoint_of_many_files(ranks: RankRunner, tmp_path: Path, world: int) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    # What no index names is not part of the model: here an unrelated file that some tools leave behind.
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "adapter.safetensors")
    expected = tensors_of(model)
    actual = ranks(load_on_rank, world, "fsdp2", str(tmp_path), {})[-1]
    assert not [name for name in expected if not torch.equal(actual[name], expected[name])]


def test_an_index_that_is_not_true_is_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], "gone": "nowhere.safetensors"}}))
    with pytest.raises(ValueError, match="names files that are absent: nowhere.safetensors"):
        open_tensors(tmp_path)
    some = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], "gone": some}}))
    with pytest.raises(ValueError, match="names tensors that no file holds: gone"):
        open_tensors(tmp_path)
    index.unlink()
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="another file holds too: model.norm.weight"):
        open_tensors(tmp_path)


def test_keys_that_an_architecture_declares_harmless_are_not_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # as old checkpoints have
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    module = assemble(causal_lm_plan(folder), None, Numerics(), CPU).module
    assert module.get_buffer("model.rotary_emb.inv_freq").abs().sum() > 0


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_must_agree_in_the_checkpoint(tmp_path: Path, equal: bool) -> None:
    folder = save(tmp_path, tied=True)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 0.0 if equal else 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if equal:
        module = assemble(causal_lm_plan(folder), None, Numerics(), CPU).module
        assert module.get_parameter("lm_head.weight") is module.get_parameter("model.embed_tokens.weight")
        return
    with pytest.raises(ValueError, match="are one tied parameter .* different values"):
        assemble(causal_lm_plan(folder), None, Numerics(), CPU)


def test_untied_model_needs_its_own_head(tmp_path: Path) -> None:
    save(tmp_path, tied=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ValueError, match="missing: lm_head.weight"):
        assemble(causal_lm_plan(tmp_path), None, Numerics(), CPU)


def test_parameters_do_not_alias_the_file(tmp_path: Path) -> None:
    folder = save(tmp_path)
    module = assemble(causal_lm_plan(folder), None, Numerics(), CPU).module
    before = tensors_of(module)
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        handle.write(bytes(file.stat().st_size // 2))
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors_of(module).items())


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no safetensors files"):
        assemble(causal_lm_plan(folder), None, Numerics(), CPU)


def test_stored_dtype_and_frozen_parameters_survive_loading(tmp_path: Path) -> None:
    folder = save(tmp_path)
    plan = causal_lm_plan(folder, freeze=(r"^model\.layers\.0\..+",), keep=(r".+\.up_proj\..+",))
    module = assemble(plan, None, Numerics(stored=torch.bfloat16), CPU).module
    assert isinstance(module, PreTrainedModel)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.requires_grad == (".layers.0." not in f".{name}" or ".up_proj." in name), name
    assert module.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32


@pytest.mark.parametrize("keys", [{"freeze": ("llm.(",)}, {"freeze": ("^x",), "keep": ("llm.(",)}])
def test_a_pattern_that_is_none_is_refused(tmp_path: Path, keys: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match=r"'llm\.\(' .*is no regular expression: .*; repair: escape"):
        assemble(causal_lm_plan(save(tmp_path), **keys), None, Numerics(), CPU)


def test_freezing_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\['\.\*'\] freezes every parameter.*freeze_params"):
        assemble(causal_lm_plan(save(tmp_path), freeze=(".*",)), None, Numerics(), CPU)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-500])


INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (SHARD, cut, "is no complete safetensors file: "),
        (SHARD, lambda file: file.write_bytes(b""), "is no complete safetensors file: "),
        (SHARD, Path.unlink, "names files that are absent: "),
        (INDEX, lambda file: file.write_text('{"weight_map": '), "cannot be read as JSON: "),
        (INDEX, lambda file: file.write_text("{}"), "has no table weight_map"),
        (INDEX, lambda file: file.write_text("[]"), "a JSON object with names is needed"),
    ],
)
def test_damaged_weights_are_refused_by_their_file_on_every_rank(
    ranks: RankRunner, tmp_path: Path, name: str, damage: Any, said: str
) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / name).is_file(), sorted(tmp_path.iterdir())
    damage(tmp_path / name)
    first, second = ranks(refused_weights, 2, str(tmp_path))
    assert first == second
    assert str(tmp_path) in first and name in first and said in first
    assert "; repair: fetch or copy " in first


def refused_weights(rank: int, world: int, folder: str) -> str:
    plan = ModelPlan(tiny_llama, weights=(WeightSource("", Path(folder)),), llm="", seed=3)
    with pytest.raises(ValueError) as error:
        assemble(plan, setup_of("fsdp2", world), Numerics(), CPU)
    return str(error.value)


@pytest.mark.parametrize("content", ['{"model_type": ', "[]", '{"model_type": "nothing"}', "{}"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_damaged_file_of_a_model_folder_is_named(tmp_path: Path, name: str, content: str) -> None:
    readers = {
        "config.json": hf_config,
        "generation_config.json": hf_generation_config,
        "tokenizer_config.json": hf_tokenizer,
    }
    save(tmp_path)
    (tmp_path / name).write_text(content)
    if name == "generation_config.json" and content.startswith("{") and content.endswith("}"):
        return  # any object is one
    with pytest.raises(ValueError, match=r"; repair: fetch or copy ") as error:
        readers[name](tmp_path)
    assert name in str(error.value) and str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_damaged_configuration_is_named_by_the_front_end(tmp_path: Path) -> None:
    (save(tmp_path) / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config.json: cannot be read as JSON: .*; repair: fetch or copy"):
        Ours.from_pretrained(tmp_path)
