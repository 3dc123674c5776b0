"""Case 16: tied input and output embeddings stay one tensor through sharding, training, saving, exporting, loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from shoal.checkpoint.consolidate import consolidate
from shoal.checkpoint.snapshot import SaveOptions
from shoal.checkpoint.state import load_state, save_state
from tests.unit.checkpoint.models import build, full, parameters_of, read_folder, save_source, unequal
from tests.zygote import RankRunner

LAYOUTS = (("plain", 1), ("ddp", 2), ("fsdp2", 2), ("hsdp", 4))
EMBEDDING, HEAD = "llm.model.embed_tokens.weight", "llm.lm_head.weight"
IDS = torch.arange(4, 34).view(3, 10)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("model") / "source", "llama-tied")


def logits_of(model: Any) -> Tensor:
    """A forward of the trainable module, whose logits are caught on the way: nothing sharded is touched outside."""
    caught: list[Tensor] = []
    handle = model.llm.register_forward_hook(lambda *parts: caught.append(parts[2].logits.detach().clone()))
    with torch.no_grad():
        model({"input_ids": IDS})
    handle.remove()
    return caught[0]


def train_and_save(rank: int, world: int, layout: str, source: Path, path: Path, model_format: str) -> Any:
    model = build(source, layout, world)
    names = dict(model.named_parameters(remove_duplicate=False))
    assert names[EMBEDDING] is names[HEAD]
    model({"input_ids": IDS})["loss_sum"].backward()
    gradient = full(names[EMBEDDING].grad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model({"input_ids": IDS})["loss_sum"].backward()
        optimizer.step()
    options = SaveOptions(model_format=model_format)  # type: ignore[arg-type]
    save_state(path, model=model, optimizer=optimizer, step=2, options=options)
    return gradient, logits_of(model), parameters_of(model)


def load(rank: int, world: int, layout: str, source: Path, path: Path) -> Any:
    model = build(source, layout, world)
    load_state(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    names = dict(model.named_parameters(remove_duplicate=False))
    return names[EMBEDDING] is names[HEAD], logits_of(model)


@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
@pytest.mark.parametrize("model_format", ["safetensors", "torch_save"])
def test_the_gradient_has_both_parts_and_resumed_logits_are_the_same(
    ranks: RankRunner, tmp_path: Path, source: Path, layout: str, world: int, model_format: str
) -> None:
    path = tmp_path / "step=2"
    gradient, logits, trained = ranks(train_and_save, world, layout, source, path, model_format)[0]
    # The same rows on every rank: summed over the shards' ranks; the module inside DDP's wrapper sums nothing.
    scale = 1.0 if layout in ("plain", "ddp") else float(world)
    input_part, output_part = _parts_of_the_gradient(source)
    torch.testing.assert_close(gradient, scale * (input_part + output_part), rtol=1e-5, atol=1e-5)
    assert input_part.abs().max() > 0.01 and output_part.abs().max() > 0.01
    for tied, again in ranks(load, world, layout, source, path):
        assert tied and torch.equal(again, logits)
    consolidate(path, tmp_path / "out")
    exported = read_folder(tmp_path / "out")
    assert "lm_head.weight" not in exported
    assert unequal(exported, {name.removeprefix("llm."): tensor for name, tensor in trained.items()}) == []
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    torch.testing.assert_close(plain(input_ids=IDS).logits, logits, rtol=1e-5, atol=1e-5)


def _parts_of_the_gradient(source: Path) -> tuple[Tensor, Tensor]:
    """Gradients of input and output embedding, from a model in which they are two parameters of one value."""
    tied = AutoModelForCausalLM.from_pretrained(source)
    config = tied.config
    config.tie_word_embeddings = False
    model = type(tied)(config)
    model.load_state_dict(tied.state_dict())
    logits = model(input_ids=IDS, use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum").backward()
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    return model.model.embed_tokens.weight.grad, model.lm_head.weight.grad


def test_a_separate_head_under_a_tying_configuration_is_a_clear_error(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "llama-tied")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="different values.*tie_word_embeddings=false"):
        build(source, "plain", 1)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    model = build(source, "plain", 1)
    assert torch.equal(model.llm.lm_head.weight, tensors["lm_head.weight"])


def test_an_equal_copy_of_the_head_is_accepted(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "llama-tied")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    model = build(source, "plain", 1)
    assert model.llm.lm_head.weight is model.llm.model.embed_tokens.weight
