"""Dropout modules: which part of the whole mask they take, what they refuse, and that they are drop-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.kernels.dropout import keep_mask, token_keys
from shoal.models.dropout import (
    dropout_step,
    refuse_generator_dropout,
    replace_dropout,
    tokens_of,
)
from shoal.parallel.activation_checkpointing import checkpoint_module
from tests.families import tiny_lm
from tests.tiny import tiny_salm, tiny_whisper

SEEDS = torch.tensor([11, 12, 13])


class Layer(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)).tanh()


def model(p: float = 0.5, **options: Any) -> tuple[nn.Module, Any]:
    module = nn.ModuleDict({"a": Layer(p), "experts": nn.ModuleList([Layer(p)])})
    state = replace_dropout(module, **options)
    assert state is not None
    return module, state


def publish(state: Any, seeds: Tensor = SEEDS, length: int = 5) -> None:
    state.publish_text(seeds[:, None], torch.arange(length).expand(len(seeds), length))


def kept(module: nn.Module, x: Tensor) -> Tensor:
    """Which elements a dropout module keeps, of anything that has no zeros."""
    return module(torch.ones_like(x)) != 0


def test_class_and_behaviour_change_and_nothing_else() -> None:
    plain = nn.ModuleDict({"a": Layer(), "experts": nn.ModuleList([Layer()])})
    names, keys = [n for n, _ in plain.named_modules()], list(plain.state_dict())
    module, state = model()
    assert [n for n, _ in module.named_modules()] == names and list(module.state_dict()) == keys
    assert isinstance(module["a"].drop, nn.Dropout) and list(state.modules) == ["a.drop", "experts.0.drop"]
    assert replace_dropout(nn.Linear(2, 2)) is None

    x = torch.randn(3, 5, 8)
    assert module.eval()["a"].drop(x) is x  # without a step and without tokens
    module.train()
    module["a"].drop.p = 0.0
    assert module["a"].drop(x) is x
    module["a"].drop.p = 0.25
    publish(state)
    with dropout_step(module, 0, 0):
        wide = torch.ones(3, 5, 4000)
        assert abs(float(kept(module["a"].drop, wide).double().mean()) - 0.75) < 0.01


def test_masks_depend_on_module_step_and_seed() -> None:
    module, state = model()
    publish(state)
    x = torch.ones(3, 5, 64)
    masks = []
    for seed, step, drop in ((0, 0, "a"), (0, 1, "a"), (1, 0, "a"), (0, 0, "experts"), (0, 0, "a")):
        with dropout_step(module, seed, step):
            part = module["a"] if drop == "a" else module["experts"][0]
            masks.append(kept(part.drop, x))
    for other in masks[1:4]:
        assert 0.4 < float((other == masks[0]).double().mean()) < 0.6
    assert torch.equal(masks[4], masks[0])


def test_the_mask_is_that_of_the_kernel() -> None:
    module, state = model()
    publish(state)
    with dropout_step(module, 3, 4):
        drop = module["a"].drop
        tokens = token_keys(SEEDS[:, None], torch.arange(5))
        assert torch.equal(kept(drop, torch.ones(3, 5, 8)), keep_mask(tokens, 8, 0.5, drop.key))


def test_ranks_take_their_part_of_the_whole_mask() -> None:
    module, state = model()
    drop = module["a"].drop
    publish(state)
    with dropout_step(module, 0, 0):
        whole = kept(drop, torch.ones(3, 5, 8))
        for start, end in ((0, 3), (3, 8)):  # features
            drop.feature_start = start
            assert torch.equal(kept(drop, torch.ones(3, 5, end - start)), whole[..., start:end])
        drop.feature_start = 0
        parts = []
        for rank in range(2):  # tokens: three on each rank, the sixth is padding
            drop.token_part = (rank, 2)
            parts.append(kept(drop, torch.ones(3, 3, 8)))
        assert torch.equal(torch.cat(parts, 1)[:, :5], whole)
        drop.token_part = (0, 1)
        assert torch.equal(kept(drop, torch.ones(15, 8)), whole.flatten(0, 1))  # rows and tokens flattened
        publish(state, SEEDS[1:])  # another batch
        assert torch.equal(kept(drop, torch.ones(2, 5, 8)), whole[1:])
        publish(state, SEEDS, 4)  # another width
        assert torch.equal(kept(drop, torch.ones(3, 4, 8)), whole[:, :4])


def test_a_pack_has_the_masks_of_its_documents() -> None:
    module, state = model()
    drop = module["a"].drop
    lens = [5, 0, 1, 3]
    seeds = torch.tensor([11, 12, 13, 14])
    pack = {
        "sample_seeds": seeds,
        "input_ids": torch.zeros(1, 12, dtype=torch.int64),
        "position_ids": torch.cat([torch.arange(n) for n in (*lens, 3)])[None],
        "cu_seqlens": torch.tensor([0, 5, 5, 6, 9], dtype=torch.int32),
    }
    rows = {"sample_seeds": seeds, "input_ids": torch.zeros(4, 5, dtype=torch.int64)}
    with dropout_step(module, 0, 0):
        state.publish_text(*tokens_of(rows))
        padded = kept(drop, torch.ones(4, 5, 8))
        state.publish_text(*tokens_of(pack))
        packed = kept(drop, torch.ones(1, 12, 8))
    assert torch.equal(packed[0, :9], torch.cat([padded[row, :n] for row, n in enumerate(lens)]))


def test_frames_have_their_own_rows_and_any_width() -> None:
    module = nn.ModuleDict(
        {"perception": nn.ModuleDict({"encoder": Layer(), "proj": Layer()}), "llm": Layer()}
    )
    state = replace_dropout(module, perception="perception")
    assert state is not None
    assert [part.kind for part in state.modules.values()] == ["encoder", "adapter", "text"]
    encoder, adapter = (module["perception"][name].drop for name in ("encoder", "proj"))
    state.publish_frames("encoder", torch.tensor([5, 6]))
    state.publish_frames("adapter", torch.tensor([5, 6, 7]))
    with dropout_step(module, 0, 0):
        long = kept(encoder, torch.ones(2, 9, 8))
        assert torch.equal(kept(encoder, torch.ones(2, 4, 8)), long[:, :4])
        kept(adapter, torch.ones(3, 4, 8))
        with pytest.raises(
            ValueError, match=r"perception\.encoder\.drop: dropout p = 0\.5 of a tensor \[3, 4, 8\]"
        ):
            encoder(torch.ones(3, 4, 8))
        with pytest.raises(ValueError, match=r"perception\.encoder\.drop.*\[18, 8\]"):
            encoder(torch.ones(18, 8))  # how many frames a clip has is not known
        with pytest.raises(RuntimeError, match=r"llm\.drop: .*which tokens"):
            module["llm"].drop(torch.ones(2, 4, 8))


@pytest.mark.parametrize(
    ("shape", "where"),
    [
        ((3, 2, 8), "a"),  # columns picked before the head
        ((2, 5, 8), "a"),
        ((14, 8), "a"),
        ((8,), "a"),
        ((15, 8), "experts"),  # as many as there are tokens, but in an expert's own order
        ((3, 5, 2, 2, 2), "a"),
    ],
)
def test_other_shapes_are_refused_by_name(shape: tuple[int, ...], where: str) -> None:
    module, state = model()
    publish(state)
    name = "a.drop" if where == "a" else "experts.0.drop"
    with (
        dropout_step(module, 0, 0),
        pytest.raises(ValueError, match=f"{name}: .*repair: set this dropout to 0"),
    ):
        state.modules[name](torch.ones(shape))


def test_training_outside_of_a_step_is_refused() -> None:
    module, state = model()
    publish(state)
    with pytest.raises(RuntimeError, match=r"a\.drop: dropout p = 0\.5 in training needs to know the step"):
        module["a"].drop(torch.ones(3, 5, 8))
    with dropout_step(module, 0, 0):
        module["a"].drop(torch.ones(3, 5, 8))
    with pytest.raises(RuntimeError, match="needs to know the step"):
        module["a"].drop(torch.ones(3, 5, 8))


def test_attention_probabilities_are_drawn_per_micro_batch_or_refused() -> None:
    module, _ = model()
    probabilities = torch.ones(3, 2, 5, 5)
    with dropout_step(module, 0, 0):
        torch.manual_seed(1)
        first = module["a"].drop(probabilities)
        torch.manual_seed(1)
        assert torch.equal(first, nn.functional.dropout(probabilities, 0.5))
    module, _ = model(data_parallel_only=False)
    with (
        dropout_step(module, 0, 0),
        pytest.raises(ValueError, match=r"a\.drop: .*0 with tp_size, cp_size or pp_size"),
    ):
        module["a"].drop(probabilities)


@pytest.mark.parametrize("between", ["nothing", "another micro-batch"])
def test_recomputation_repeats_the_mask(between: str) -> None:
    """Also when, as in a pipeline, other micro-batches run between a forward and its backward."""
    torch.manual_seed(0)
    module, state = model()
    layer, x = module["a"], torch.randn(3, 5, 8, requires_grad=True)

    def gradients() -> tuple[Tensor, Tensor]:
        publish(state)
        with dropout_step(module, 0, 0):
            out = layer(x)
            if between != "nothing":
                publish(state, SEEDS + 50)
                layer(x)
            out.sum().backward()
        found = x.grad.clone(), layer.linear.weight.grad.clone()
        x.grad = layer.linear.weight.grad = None
        return found

    expected = gradients()
    checkpoint_module(layer, state.replaying)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


def test_without_replaying_the_recomputation_would_differ() -> None:
    torch.manual_seed(0)
    module, state = model()
    layer, x = module["a"], torch.randn(3, 5, 8)
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_module(layer)
        publish(state)
        with dropout_step(module, 0, 0):
            out = layer(x)
            publish(state, SEEDS + 50)
            out.sum().backward()
        found.append(layer.linear.weight.grad)
        layer.linear.weight.grad = None
    assert not torch.allclose(*found)


def test_a_compiled_layer_is_compiled_once_for_all_steps() -> None:
    module, state = model()
    layer, x = module["a"], torch.randn(3, 5, 8)
    expected = []
    for step in range(3):
        publish(state, SEEDS + step)
        with dropout_step(module, 0, step):
            expected.append(layer(x))
    graphs = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    for step in range(3):
        publish(state, SEEDS + step)
        with dropout_step(module, 0, step):
            assert torch.equal(layer(x), expected[step])
    assert len(graphs) == 1


# ------------------------------------------------------------------------------- what draws from the generator


def test_dropout_without_a_module_is_refused_by_name() -> None:
    llm = tiny_lm("llama", attention_dropout=0.1)
    with pytest.raises(ValueError) as error:
        refuse_generator_dropout(llm.eval(), "tp_size = 2")
    message = str(error.value)
    assert message.startswith("with tp_size = 2:\n")
    assert all(f"model.layers.{n}.self_attn.attention_dropout: dropout 0.1" in message for n in (0, 1))
    assert "repair: set it to 0" in message and not llm.training
    refuse_generator_dropout(tiny_lm("llama"), "tp_size = 2")


def test_modules_are_allowed_once_they_count() -> None:
    llm = tiny_lm("gpt2", attn_pdrop=0.0)
    with pytest.raises(ValueError, match=r"transformer\.drop\.p: dropout 0\.1"):
        refuse_generator_dropout(llm, "cp_size = 2")
    replace_dropout(llm)
    refuse_generator_dropout(llm, "cp_size = 2")
    llm = tiny_lm("gpt2")
    replace_dropout(llm)
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.attn_dropout\.p") as error:
        refuse_generator_dropout(llm, "cp_size = 2")  # fused attention reads the p of this one
    assert "resid_dropout" not in str(error.value)


def test_other_kinds_of_dropout_are_refused() -> None:
    module = nn.Sequential(nn.Dropout2d(0.1), nn.MultiheadAttention(4, 1, dropout=0.1), nn.AlphaDropout(0.0))
    with pytest.raises(ValueError) as error:
        refuse_generator_dropout(module, "tp_size = 2")
    assert "0.p: dropout 0.1" in str(error.value) and "1.dropout: dropout 0.1" in str(error.value)
    assert "2.p" not in str(error.value)


def test_a_frozen_encoder_does_not_drop_out() -> None:
    salm = tiny_salm()
    salm.perception.encoder = encoder = tiny_whisper(dropout=0.1)
    with pytest.raises(ValueError, match=r"perception\.encoder\.layers\.0\.dropout: dropout 0\.1"):
        refuse_generator_dropout(salm, "tp_size = 2")
    encoder.requires_grad_(False)
    refuse_generator_dropout(salm, "tp_size = 2")
