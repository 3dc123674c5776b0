"""The splice against a slow twin, and its refusals."""

import pytest
import torch

from shoal.speech.splice import IGNORE, check_placeholders, plan, splice

AUDIO = 99
NAMES = ["a", "b", "c"]


def slow_splice(ids, mask, lens, text, clips, clip_lens, padding):
    """Builds every row token by token; returns embeddings, labels and attention as nested lists."""
    rows, clip = [], 0
    for row in range(len(ids)):
        slots = []  # (embedding, token or None, supervised)
        for column in range(int(lens[row])):
            token = int(ids[row, column])
            if token == AUDIO:
                slots += [(clips[clip, frame], None, False) for frame in range(int(clip_lens[clip]))]
                clip += 1
            else:
                slots.append((text[row, column], token, bool(mask[row, column])))
        rows.append(slots)
    width = max(len(slots) for slots in rows)
    embeddings = torch.zeros(len(rows), width, text.shape[-1])
    labels = torch.full((len(rows), width), IGNORE)
    attention = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, slots in enumerate(rows):
        offset = width - len(slots) if padding == "left" else 0
        for position, (embedding, _, _) in enumerate(slots):
            embeddings[row, offset + position] = embedding
            attention[row, offset + position] = True
            if position + 1 < len(slots) and slots[position + 1][2]:
                labels[row, offset + position] = slots[position + 1][1]
    return embeddings, labels, attention


def random_case(seed: int):
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 9, (3,), generator=generator)
    ids = torch.randint(0, 50, (3, 9), generator=generator)
    is_audio = torch.rand(3, 9, generator=generator) < 0.3
    ids[is_audio] = AUDIO
    inside = torch.arange(9) < lens[:, None]
    mask = (torch.rand(3, 9, generator=generator) < 0.5) & inside & ~is_audio
    clips = int((is_audio & inside).sum())
    clip_lens = torch.randint(1, 6, (clips,), generator=generator)
    text = torch.randn(3, 9, 4, generator=generator)
    audio = torch.randn(clips, 6, 4, generator=generator)
    return ids, mask, lens, text, audio, clip_lens


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("seed", range(12))
def test_splice_equals_the_slow_twin(seed: int, padding) -> None:
    ids, mask, lens, text, audio, clip_lens = random_case(seed)
    layout = plan(ids, mask, lens, clip_lens, placeholder_id=AUDIO, sample_ids=NAMES, arrangement=padding)
    embeddings, labels, attention = slow_splice(ids, mask, lens, text, audio, clip_lens, padding)
    torch.testing.assert_close(splice(text, audio, layout), embeddings, rtol=0, atol=0)
    assert torch.equal(layout.labels, labels)
    assert torch.equal(layout.attention_mask, attention)
    assert int((layout.labels != IGNORE).sum()) == int(mask[:, 1:].sum())
    counted = (attention.cumsum(1) - 1).clamp(min=0)
    assert torch.equal(layout.position_ids[attention], counted[attention])


def test_gradients_reach_exactly_what_was_used() -> None:
    ids, mask, lens, text, audio, clip_lens = random_case(3)
    text, audio = text.requires_grad_(), audio.requires_grad_()
    layout = plan(ids, mask, lens, clip_lens, placeholder_id=AUDIO, sample_ids=NAMES)
    out = splice(text, audio, layout)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    used_text = (torch.arange(9) < lens[:, None]) & (ids != AUDIO)
    used_audio = torch.arange(6) < clip_lens[:, None]
    assert torch.equal(text.grad.abs().sum(-1) > 0, used_text)
    assert torch.equal(audio.grad.abs().sum(-1) > 0, used_audio)
    torch.testing.assert_close(
        text.grad.sum() + audio.grad.sum(), weights[layout.attention_mask].sum(), rtol=1e-5, atol=1e-5
    )


def test_the_last_audio_frame_predicts_the_first_answer_token() -> None:
    ids = torch.tensor([[5, AUDIO, 7, 8]])
    mask = torch.tensor([[False, False, True, True]])
    layout = plan(ids, mask, torch.tensor([4]), torch.tensor([3]), placeholder_id=AUDIO, sample_ids=["a"])
    assert layout.labels.tolist() == [[IGNORE, IGNORE, IGNORE, 7, 8, IGNORE]]


def test_a_supervised_first_token_is_not_a_label() -> None:
    mask = torch.tensor([[True, True]])
    layout = plan(
        torch.tensor([[5, 6]]),
        mask,
        torch.tensor([2]),
        torch.zeros(0, dtype=torch.int64),
        placeholder_id=AUDIO,
        sample_ids=["a"],
    )
    assert layout.labels.tolist() == [[6, IGNORE]]


def test_a_clip_without_frames_vanishes() -> None:
    ids = torch.tensor([[5, AUDIO, 7]])
    mask = torch.tensor([[False, False, True]])
    layout = plan(ids, mask, torch.tensor([3]), torch.tensor([0]), placeholder_id=AUDIO, sample_ids=["a"])
    assert layout.labels.tolist() == [[7, IGNORE]]


@pytest.mark.parametrize("num_clips", [0, 1, 3])
def test_counts_that_differ_are_refused_with_names_and_both_numbers(num_clips: int) -> None:
    ids = torch.tensor([[5, AUDIO, AUDIO], [6, 7, AUDIO]])
    lens = torch.tensor([3, 2])
    with pytest.raises(ValueError, match=rf"2 audio placeholders \(x: 2, y: 0\) but {num_clips} clips"):
        check_placeholders(ids, lens, AUDIO, num_clips, ["x", "y"])


def test_supervision_that_cannot_become_a_label_is_refused() -> None:
    ids, lens = torch.tensor([[AUDIO, 7, 3]]), torch.tensor([2])
    one = torch.tensor([1])
    for mask in ([[True, False, False]], [[False, False, True]]):
        with pytest.raises(ValueError, match="padding or an audio placeholder is supervised: a"):
            plan(ids, torch.tensor(mask), lens, one, placeholder_id=AUDIO, sample_ids=["a"])
    with pytest.raises(ValueError, match="without a single frame at the start of the row: a"):
        plan(
            ids,
            torch.tensor([[False, True, False]]),
            lens,
            torch.tensor([0]),
            placeholder_id=AUDIO,
            sample_ids=["a"],
        )
