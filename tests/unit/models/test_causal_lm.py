"""The trainable module: packed equals unpacked, chunked equals full, and both equal the model's own loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shoal.data.batch import empty_micro_batch
from shoal.data.text import Tokens
from shoal.data.text_batches import packed, padded
from shoal.kernels.attention import varlen_attention
from shoal.kernels.attention_hf import register_attention
from shoal.models.causal_lm import CausalLM, shifted_labels
from tests.tiny import tiny_llama

LENGTHS = (5, 1, 9, 4, 12)
PAD = 3


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tokens]:
    """Documents whose first part is not supervised; the fourth has no supervised token at all."""
    generator = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        mask = np.arange(length) >= int(generator.integers(0, max(1, length - 1)))
        rows.append(Tokens(generator.integers(4, 64, length), mask & (number != 3)))
    return rows


def model_of(family: str, attention: str, loss: str = "chunked", **terms: float) -> CausalLM:
    register_attention()
    if family == "llama":
        llm: PreTrainedModel = tiny_llama(torch.float64, attn_implementation=attention)
    else:
        sizes: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "initializer_range": 0.3,
            # Gemma 2 has no sdpa, and its eager attention rounds to float32.
            "attn_implementation": "shoal" if family == "gemma2" else attention,
            "pad_token_id": None,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            if family == "qwen3":
                llm = Qwen3ForCausalLM._from_config(Qwen3Config(**sizes), dtype=torch.float64)
            else:  # bounds its logits, and has sliding windows
                config = Gemma2Config(**sizes, sliding_window=4, final_logit_softcapping=5.0)
                llm = Gemma2ForCausalLM._from_config(config, dtype=torch.float64)
    return CausalLM(llm, loss=loss, **terms).train()  # type: ignore[arg-type]


# Gemma 2 computes norms and rotary angles in float32, whatever it is stored in.
TOLERANCE = {"gemma2": 1e-6}


def run(model: CausalLM, *micro_batches: dict[str, Any]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Sums over micro-batches, and every gradient by name."""
    model.zero_grad()
    sums: dict[str, float] = {"loss_sum": 0.0, "num_tokens": 0.0, "num_correct": 0.0}
    for micro_batch in micro_batches:
        out = model(micro_batch)
        out["loss_sum"].backward()
        sums = {name: value + float(out[name].detach()) for name, value in sums.items()}
    return sums, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual: tuple[Any, Any], expected: tuple[Any, Any], tolerance: float = 1e-10) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=tolerance)
    assert actual[1].keys() == expected[1].keys() and len(expected[1]) > 10
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    assert largest > 0
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            actual[1][name], gradient, rtol=tolerance, atol=tolerance * largest, msg=name
        )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_packed_rows_and_single_documents_give_the_same_loss_and_gradients(family: str) -> None:
    rows = documents()
    alone = run(model_of(family, "sdpa"), *(padded([row], PAD) for row in rows))
    together = run(model_of(family, "sdpa"), padded(rows, PAD))
    exact = run(model_of(family, "shoal"), packed(rows, sum(LENGTHS), PAD))
    with_rest = run(model_of(family, "shoal"), packed(rows, sum(LENGTHS) + 6, PAD))
    two_packs = run(model_of(family, "shoal"), packed(rows[:2], 16, PAD), packed(rows[2:], 26, PAD))
    expected_tokens = sum(int(row.loss_mask[1:].sum()) for row in rows)
    assert alone[0]["num_tokens"] == expected_tokens > 0
    for other in (together, exact, with_rest, two_packs):
        assert_same(other, alone, TOLERANCE.get(family, 1e-10))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}])
def test_chunked_and_full_losses_agree(family: str, terms: dict[str, float]) -> None:
    rows = documents()
    chunked = run(model_of(family, "sdpa", **terms), padded(rows, PAD))
    full = run(model_of(family, "sdpa", "full", **terms), padded(rows, PAD))
    tolerance = TOLERANCE.get(family, 1e-10)
    assert_same(chunked, full, tolerance)
    pack = packed(rows, 35, PAD)
    assert_same(run(model_of(family, "shoal", "full", **terms), pack), full, tolerance)


def test_loss_is_the_models_own() -> None:
    rows = documents()
    batch = padded(rows, PAD)
    model = model_of("llama", "sdpa")
    labels = batch["input_ids"].masked_fill(~batch["loss_mask"], -100)
    own = model.llm(input_ids=batch["input_ids"], labels=labels).loss.detach()
    out = model(batch)
    assert float(out["loss_sum"].detach() / out["num_tokens"]) == pytest.approx(
        float(own), rel=1e-6
    )  # computed in fp32


def test_padding_is_never_seen() -> None:
    rows = documents()
    model = model_of("llama", "shoal")
    once, other = packed(rows, 40, PAD), packed(rows, 40, 50)
    assert_same(run(model, once), run(model, other))


@pytest.mark.parametrize("loss", ["chunked", "full"])
@pytest.mark.parametrize("batch", ["rows", "pack", "empty"])
def test_without_a_supervised_token_all_is_zero_and_nothing_is_missing(loss: str, batch: str) -> None:
    rows = [Tokens(row.input_ids, np.zeros(len(row.input_ids), dtype=bool)) for row in documents()]
    micro_batch = {
        "rows": lambda: padded(rows, PAD),
        "pack": lambda: packed(rows, 35, PAD),
        "empty": lambda: empty_micro_batch(PAD),
    }[batch]()
    model = model_of("llama", "shoal" if batch == "pack" else "sdpa", loss)
    sums, gradients = run(model, micro_batch)
    assert sums == {"loss_sum": 0.0, "num_tokens": 0.0, "num_correct": 0.0}
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients.values())


def test_labels_are_the_next_supervised_tokens() -> None:
    ids = torch.tensor([[10, 11, 12, 13]])
    mask = torch.tensor([[True, False, True, True]])
    assert shifted_labels(ids, mask).tolist() == [[-100, 12, 13, -100]]


def test_an_adapted_head_needs_the_full_loss() -> None:
    llm = tiny_llama()
    llm.lm_head = torch.nn.Sequential(llm.lm_head)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="loss_fn.kind=full"):
        CausalLM(llm)


def leaves_padding_unset(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **named: Any
) -> tuple[Tensor, None]:
    """What transformers does for flash-attention: tokens outside of all documents keep what was in memory."""
    borders = named["cu_seq_lens_q"]
    assert named["max_length_q"] == int(borders.diff().max()) and torch.equal(borders, named["cu_seq_lens_k"])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out, _ = varlen_attention(q, k, v, borders, borders, causal=True, scale=scaling, backend="reference")
    outside = torch.arange(len(out)) >= int(borders[-1])
    return out.masked_fill(outside[:, None, None], torch.nan)[None], None


def test_padding_of_a_pack_is_a_document_for_attention_that_is_not_ours() -> None:
    AttentionInterface.register("unset", leaves_padding_unset)
    ours, theirs = model_of("llama", "shoal"), model_of("llama", "unset")
    for model in (ours, theirs):
        model(packed(documents(), sum(LENGTHS) + 20, PAD))["loss_sum"].backward()
    for (name, expected), (_, actual) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-10, atol=1e-10, msg=name)
