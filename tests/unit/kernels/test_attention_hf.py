"""A model of transformers gives packed documents what it gives each alone: logits and every gradient by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.kernels.attention_hf import register_attention
from shoal.kernels.packable import PACKABLE, packable
from tests.unit.kernels.families import VOCAB, InDouble, tiny_model
from tests.unit.kernels.packs import running_sum

LENS = (5, 9, 1, 3, 11)  # with a window and a chunk of 4 in the families that have them
PADDING = 3
MAIN = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "smollm3",
    "gpt_oss",
    "deepseek_v3",
]
HYBRIDS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "nemotron_h": {},
    "jamba": {},
    "mamba": {},
}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register_attention("shoal", "sdpa")


def tokens(total: int) -> Tensor:
    return torch.randint(4, VOCAB, (1, total), generator=torch.Generator().manual_seed(1))


def packed_inputs(*, padding: int = 0) -> dict[str, Any]:
    """Documents in one row; padding continues the positions of the last one."""
    cu_seqlens = running_sum(LENS)
    positions = [torch.arange(length) for length in LENS]
    positions[-1] = torch.arange(LENS[-1] + padding)
    return {
        "input_ids": torch.cat([tokens(sum(LENS)), tokens(padding)], 1),
        "position_ids": torch.cat(positions)[None],
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(LENS),
        "max_length_k": max(LENS),
        "use_cache": False,
    }


def weighted(logits: Tensor) -> Tensor:
    """A loss that weighs every logit of the real tokens differently."""
    real = logits[0, : sum(LENS)]
    return (real * torch.randn(real.shape, generator=torch.Generator().manual_seed(2)).to(real.dtype)).sum()


def backward(model: PreTrainedModel, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weighted(logits).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) > 3
    return {"logits": logits.detach()[:, : sum(LENS)], **gradients}


def one_by_one(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model as it is, one document at a time, with transformers' own attention."""
    ids, ends = tokens(sum(LENS)), running_sum(LENS).tolist()
    pieces = [
        model(input_ids=ids[:, a:b], use_cache=False).logits for a, b in zip(ends, ends[1:], strict=False)
    ]
    return backward(model, torch.cat(pieces, 1))


def packed(model: PreTrainedModel, **changes: Any) -> dict[str, Tensor]:
    model.set_attn_implementation("shoal")
    inputs = {**packed_inputs(), **changes}
    return backward(
        model, model(**{name: value for name, value in inputs.items() if value is not None}).logits
    )


def worst(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest error of any tensor, relative to its largest entry and at least 1e-3 of the largest of all."""
    assert ours.keys() == reference.keys()
    largest = max(float(value.abs().max()) for name, value in reference.items() if name != "logits")
    errors = []
    for name, expected in reference.items():
        scale = max(float(expected.abs().max()), 1e-3 * largest)
        errors.append(float((ours[name] - expected).abs().max()) / scale)
    return max(errors)


@pytest.mark.parametrize("family", sorted(PACKABLE))
def test_packed_equals_one_by_one_in_fp64(family: str) -> None:
    with InDouble():
        model = tiny_model(family)
        packable(model)
        expected = one_by_one(model)
        assert worst(packed(model), expected) <= 1e-10


@pytest.mark.parametrize("family", MAIN)
def test_packed_equals_one_by_one_in_fp32_and_padding_changes_nothing(family: str) -> None:
    model = tiny_model(family, torch.float32)
    expected = one_by_one(model)
    assert worst(packed(model), expected) <= 1e-5
    assert worst(packed(model, **packed_inputs(padding=PADDING)), expected) <= 1e-5


@pytest.mark.parametrize("family", MAIN)
def test_without_borders_documents_are_told_apart_by_their_positions(family: str) -> None:
    with InDouble():
        model = tiny_model(family)
        expected = one_by_one(model)
        given = packed(model, cu_seq_lens_q=None, cu_seq_lens_k=None)
        assert worst(given, expected) <= 1e-10


@pytest.mark.parametrize("family", MAIN)
def test_the_comparison_sees_documents_that_run_into_each_other(family: str) -> None:
    with InDouble():
        model = tiny_model(family)
        expected = one_by_one(model)
        cu_seqlens = torch.tensor([0, sum(LENS)], dtype=torch.int32)
        assert worst(packed(model, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens), expected) > 1e-3


def test_right_padded_rows_are_documents() -> None:
    """Unpacked and causal: every row is one document, and its padding is seen by nobody."""
    with InDouble():
        model = tiny_model("mistral")
        ids = tokens(18).view(2, 9)
        reference = model(input_ids=ids[:1, :6], use_cache=False).logits
        model.set_attn_implementation("shoal")
        logits = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits[:1, :6], reference, rtol=1e-12, atol=1e-12)


def test_rows_stay_apart_whatever_their_first_position_is() -> None:
    """A row of a document's later part begins in the middle of the positions."""
    with InDouble():
        model = tiny_model("mistral")
        ids, positions = tokens(18).view(2, 9), torch.stack([torch.arange(9), torch.arange(5, 14)])
        alone = model(input_ids=ids[1:], position_ids=positions[1:], use_cache=False).logits
        model.set_attn_implementation("shoal")
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(logits[1:], alone, rtol=1e-12, atol=1e-12)


def test_gradient_checkpointing() -> None:
    model = tiny_model("gemma2", torch.float32)
    expected = one_by_one(model)
    model.activation_checkpointing_enable()
    assert worst(packed(model), expected) <= 1e-5


def test_autocast() -> None:
    model = tiny_model("qwen3", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = one_by_one(model)
        assert worst(packed(model), expected) <= 5e-2


def test_compiled_layers() -> None:
    model = tiny_model("llama", torch.float32)
    expected = one_by_one(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    assert worst(packed(model), expected) <= 1e-5


def test_bidirectional_windows_are_those_of_transformers() -> None:
    with InDouble():
        model = tiny_model("gemma3_text", use_bidirectional_attention=True, attention="sdpa").eval()
        ids = tokens(12)
        expected = model(input_ids=ids, use_cache=False).logits
        model.set_attn_implementation("shoal")
        borders = torch.tensor([0, 12], dtype=torch.int32)
        ours = model(input_ids=ids, cu_seq_lens_q=borders, use_cache=False).logits
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        with pytest.raises(ValueError, match="without a causal mask padding would be seen"):
            model(input_ids=ids, use_cache=False)


def test_generation_is_refused() -> None:
    model = tiny_model("llama", torch.float32, attention="shoal").eval()
    with pytest.raises(
        ValueError, match=r"1 queries over 4 cached keys; .*set_attn_implementation\('sdpa'\)"
    ):
        model.generate(input_ids=tokens(3), max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 29, 29, dtype=torch.bool)}, "got a mask"),
        ({"output_attentions": True}, "output_attentions is not supported"),
        ({"input_ids": tokens(58).view(2, 29), "position_ids": None}, "cu_seq_lens_q with 2 rows"),
    ],
)
def test_what_it_does_not_compute_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"attention 'shoal' in LlamaAttention: .*{message}"):
        packed(tiny_model("llama", torch.float32), **change)


def test_dropout_is_refused_when_it_would_be_applied() -> None:
    model = tiny_model("llama", torch.float32, attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"llama cannot be packed with attention_dropout=0\.1.* set .* to 0"):
        packable(model)
    with pytest.raises(ValueError, match=r"attention dropout 0\.1 is not supported"):
        packed(model)


def test_a_layer_that_receives_neither_borders_nor_positions_is_refused() -> None:
    with (
        InDouble(),
        pytest.raises(ValueError, match="Llama4.*received neither cu_seq_lens_q nor position_ids"),
    ):
        packed(tiny_model("llama4_text"), cu_seq_lens_q=None, cu_seq_lens_k=None)


@pytest.mark.parametrize("family", ["falcon", "bloom", "mpt"])
def test_models_outside_the_attention_interface_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match=f"model type {family} cannot be packed: .*attention interface"):
        packable(tiny_model(family, torch.float32, num_key_value_heads=4))


@pytest.mark.parametrize("family", HYBRIDS)
def test_models_that_mix_tokens_otherwise_are_refused(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(family, torch.float32, **HYBRIDS[family])
    with pytest.raises(
        ValueError, match=rf"model type {family} cannot be packed: .*conv1d.* is a convolution"
    ):
        packable(model)


def test_a_family_that_was_not_compared_may_be_wrong_without_an_error() -> None:
    """Why only compared families pass: linear attention takes no borders and mixes the documents."""
    model = tiny_model("minimax", torch.float32)
    expected = one_by_one(model)
    assert worst(packed(model), expected) > 1e-3


@pytest.mark.parametrize("family", ["minimax", "opt"])
def test_families_that_were_not_compared_are_refused(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(family, torch.float32)
    with pytest.raises(ValueError, match=f"model type {family} cannot be packed: .*not been compared"):
        packable(model)
