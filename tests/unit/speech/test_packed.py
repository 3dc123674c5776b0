"""Packed conversations give what padded ones give: sums, every gradient by name, and the same generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels.attention_hf import PACKED_ATTENTION, register_attention
from shoal.speech.salm import SALM
from shoal.speech.splice import IGNORE, plan
from tests.tiny import PLACEHOLDER, VOCAB, empty_micro_batch, ragged_micro_batches, tiny_llama, tiny_salm

SUMS = ("loss_sum", "num_tokens", "num_correct")


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register_attention()


def pair(encoder: Any = "whisper", **llama: Any) -> tuple[SALM, SALM]:
    """A padded and a packed model of the same weights, in float64."""
    padded = tiny_salm(encoder, torch.float64, **llama).eval()
    packed = tiny_salm(encoder, torch.float64, **{**llama, "attn_implementation": PACKED_ATTENTION}).eval()
    packed.load_state_dict(padded.state_dict())
    packed.packed = True
    return padded, packed


def text_batch(lens: list[int], width: int, supervised: list[int]) -> dict[str, Any]:
    """Conversations of text alone, the last `supervised` tokens of each to be predicted."""
    columns = torch.arange(width)
    text_lens, answers = torch.tensor(lens), torch.tensor(supervised)
    inside = columns < text_lens[:, None]
    ids = torch.randint(4, VOCAB, (len(lens), width), generator=torch.Generator().manual_seed(3))
    return {
        **empty_micro_batch(),
        "input_ids": ids.masked_fill(~inside, 3),
        "loss_mask": inside & (columns >= (text_lens - answers)[:, None]),
        "text_lens": text_lens,
        "sample_ids": [str(row) for row in range(len(lens))],
        "sample_seeds": torch.zeros(len(lens), dtype=torch.int64),
        "is_empty": False,
    }


def masked(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}


def two_clips_in_a_row() -> dict[str, Any]:
    batch = ragged_micro_batches(2, seed=8)[1]
    batch["input_ids"][0, 3] = PLACEHOLDER
    batch["loss_mask"][0, :4] = False
    clips = batch["audios"], batch["audio_lens"]
    batch["audios"], batch["audio_lens"] = (torch.cat([clip[:1], clip]) for clip in clips)
    return batch


BATCHES: dict[str, dict[str, Any]] = {
    "one conversation": ragged_micro_batches(1, seed=5)[0],
    "three conversations": ragged_micro_batches(3, seed=5)[2],
    "two clips in one conversation": two_clips_in_a_row(),
    "without audio": ragged_micro_batches(3, seed=6, without_audio=(2,))[2],
    "of no and of one token": text_batch([0, 7, 1, 0, 5, 1], 7, [0, 3, 1, 0, 5, 0]),
    "all of one token": text_batch([1, 1, 1], 2, [1, 0, 1]),
    "all of no token": text_batch([0, 0], 2, [0, 0]),
    "one fully masked": text_batch([6, 9], 9, [0, 4]),
    "all fully masked": masked(ragged_micro_batches(3, seed=7)[2]),
    "nothing at all": empty_micro_batch(),
}


def sums_and_gradients(model: SALM, batch: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(batch)
    out["loss_sum"].backward()
    trained = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == sum(p.requires_grad for p in model.parameters())
    return {**{name: out[name].detach() for name in SUMS}, **trained}


@pytest.mark.parametrize("encoder", ["whisper", "parakeet"])
@pytest.mark.parametrize("name", BATCHES)
def test_packed_equals_padded(name: str, encoder: Any) -> None:
    """Also for the degenerate: a conversation of no or one token, or without a supervised one, adds exactly 0."""
    padded, packed = pair(encoder)
    ours, expected = (sums_and_gradients(model, BATCHES[name]) for model in (packed, padded))
    assert ours.keys() == expected.keys()
    supervised = int(BATCHES[name]["loss_mask"][:, 1:].sum())
    assert float(ours["num_tokens"]) == supervised
    largest = max(float(value.abs().max()) for key, value in expected.items() if key not in SUMS)
    for key, value in expected.items():
        error = float((ours[key] - value).abs().max())
        assert error <= 1e-10 * max(float(value.abs().max()), 1e-3 * largest), key
    assert (largest == 0.0) == (supervised == 0)


@pytest.mark.parametrize("name", BATCHES)
def test_packed_equals_padded_for_each_conversation(name: str) -> None:
    padded, packed = pair()
    with torch.no_grad():
        ours, expected = (model(BATCHES[name], mode="loss_per_row") for model in (packed, padded))
    for key in SUMS:
        assert ours[key].shape == (len(BATCHES[name]["text_lens"]),)
        torch.testing.assert_close(ours[key], expected[key], rtol=1e-10, atol=1e-14)


def test_the_row_holds_no_padding_and_says_so() -> None:
    padded, packed = pair()
    batch = BATCHES["three conversations"]
    lens = packed.perception.output_lengths(batch["audio_lens"]) + batch["text_lens"] - 1
    widths: list[int] = []
    packed.llm.model.layers[0].register_forward_hook(lambda _, args, out: widths.append(args[0].shape[1]))
    out = packed(batch)
    assert widths == [int(lens.sum())] == [int(out["num_positions"])] == [int(out["num_real_positions"])]
    out = padded(batch)
    assert (
        int(out["num_positions"]) == 3 * int(lens.max()) > int(out["num_real_positions"]) == int(lens.sum())
    )


def test_a_conversation_does_not_change_with_its_neighbour() -> None:
    """Neither with its words nor with its audio; without borders it would."""
    _, packed = pair()
    batch = BATCHES["three conversations"]
    other = {**batch, "input_ids": batch["input_ids"].clone(), "audios": batch["audios"].clone()}
    other["input_ids"][0, 0] = (other["input_ids"][0, 0] + 5) % VOCAB
    other["audios"][0] *= 0.5
    with torch.no_grad():
        one, two = (packed(b, mode="loss_per_row")["loss_sum"] for b in (batch, other))
    assert torch.equal(one[1:], two[1:]) and one[0] != two[0]

    def without_borders(embeddings: Tensor, *others: Any) -> dict[str, Any]:
        whole = torch.tensor([0, embeddings.shape[1]], dtype=torch.int32)
        return {
            **SALM._llm_inputs(packed, embeddings, *others),
            "cu_seq_lens_q": whole,
            "cu_seq_lens_k": whole,
        }

    packed._llm_inputs = without_borders  # type: ignore[method-assign]
    with torch.no_grad():
        leaked = packed(other, mode="loss_per_row")["loss_sum"]
    assert float((leaked[1:] - two[1:]).abs().max()) > 1e-3


def test_generation_pads_and_training_goes_on_packed() -> None:
    padded, packed = pair()
    batch = BATCHES["three conversations"]
    options = {"max_new_tokens": 6, "eos_token_id": VOCAB, "pad_token_id": 3}
    before = packed(batch)["loss_sum"].item()
    assert packed.generate(batch, **options).tolist() == padded.generate(batch, **options).tolist()
    assert packed.llm.config._attn_implementation == PACKED_ATTENTION
    assert packed(batch)["loss_sum"].item() == before


def test_positions_restart_and_labels_stay_inside() -> None:
    ids = torch.tensor([[5, PLACEHOLDER, 7, 8], [9, 3, 3, 3], [10, 11, 12, 3]])
    mask = torch.tensor([[False, False, True, True], [True, False, False, False], [True, True, True, False]])
    layout = plan(
        ids,
        mask,
        torch.tensor([4, 1, 3]),
        torch.tensor([2]),
        placeholder_id=PLACEHOLDER,
        sample_ids=["a", "b", "c"],
        arrangement="packed",
    )
    assert layout.cu_seqlens is not None and layout.cu_seqlens.dtype == torch.int32
    assert layout.cu_seqlens.tolist() == [0, 5, 6, 9] and layout.max_seqlen == 5
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2]]
    assert layout.labels.tolist() == [[IGNORE, IGNORE, 7, 8, IGNORE, IGNORE, 11, 12, IGNORE]]
    assert layout.conversation.tolist() == [[0, 0, 0, 0, 0, 1, 2, 2, 2]]
    assert bool(layout.attention_mask.all())


def test_llms_that_cannot_be_packed_are_refused_by_name() -> None:
    perception = tiny_salm().perception
    with pytest.raises(ValueError, match=r"llama cannot be packed with attention_dropout=0\.1"):
        SALM(tiny_llama(attention_dropout=0.1), perception, placeholder_id=PLACEHOLDER, packed=True)
    other = tiny_llama()
    other.config.model_type = "minimax"
    with pytest.raises(ValueError, match="model type minimax cannot be packed: .*not been compared"):
        SALM(other, perception, placeholder_id=PLACEHOLDER, packed=True)
