"""SALM: loss and gradients against a row-by-row twin, its edge cases, and generation."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.speech.salm import SALM
from tests.tiny import HIDDEN, PLACEHOLDER, VOCAB, empty_micro_batch, ragged_micro_batches, tiny_salm

KINDS = ["whisper", "parakeet"]
SUMS = ("loss_sum", "num_tokens", "num_correct")


def one_row(batch: Mapping[str, Any], row: int) -> dict[str, Any]:
    """The row alone, without its padding; a row of these batches has one clip or none."""
    length = int(batch["text_lens"][row])
    one = slice(row, row + 1)
    clips = one if len(batch["audio_lens"]) else slice(0, 0)
    width = int(batch["audio_lens"][row]) if len(batch["audio_lens"]) else 0
    return {
        **batch,
        "audios": batch["audios"][clips, :width],
        "audio_lens": batch["audio_lens"][clips],
        "input_ids": batch["input_ids"][one, :length],
        "loss_mask": batch["loss_mask"][one, :length],
        "text_lens": batch["text_lens"][one],
        "sample_ids": batch["sample_ids"][one],
        "sample_seeds": batch["sample_seeds"][one],
    }


def row_embeddings(model: SALM, batch: Mapping[str, Any]) -> tuple[Tensor, list[int | None], list[bool]]:
    """Embeddings [1, L, H] of a batch of one row, its tokens (None for audio) and which are supervised."""
    clips = iter(())
    if len(batch["audio_lens"]):
        audio, lengths = model.perception(batch["audios"], batch["audio_lens"])
        clips = iter(audio[i, : int(n)] for i, n in enumerate(lengths))
    parts: list[Tensor] = []
    tokens: list[int | None] = []
    supervised: list[bool] = []
    for token, flag in zip(batch["input_ids"][0].tolist(), batch["loss_mask"][0].tolist(), strict=True):
        if token == PLACEHOLDER:
            parts.append(next(clips))
            tokens += [None] * len(parts[-1])
            supervised += [False] * len(parts[-1])
        else:
            parts.append(model.llm.get_input_embeddings().weight[token][None])
            tokens.append(token)
            supervised.append(flag)
    return torch.cat(parts)[None], tokens, supervised


def slow_sums(model: SALM, batch: Mapping[str, Any]) -> tuple[Tensor, int, int]:
    """Loss sum, supervised tokens and correct ones of a batch, token by token and row by row."""
    loss: Tensor = torch.zeros(())
    num = correct = 0
    for row in range(len(batch["input_ids"])):
        embeddings, tokens, supervised = row_embeddings(model, one_row(batch, row))
        logits = model.llm(inputs_embeds=embeddings).logits[0]
        for position in range(1, len(tokens)):
            if supervised[position]:
                target = torch.tensor(tokens[position])
                loss = loss + F.cross_entropy(logits[position - 1], target)
                num += 1
                correct += int(logits[position - 1].argmax() == target)
    return loss, num, correct


def gradients(model: SALM) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_unpadded_rows(kind: Any, attention: str) -> None:
    """Padding must not matter: with eager attention a fully masked query would make every gradient NaN.

    Parakeet's features are normalised in float32 over rows that are padded differently.
    """
    limit = {"whisper": 1e-10, "parakeet": 1e-6}[kind]
    model = tiny_salm(kind, torch.float64, attn_implementation=attention).eval()
    for batch in ragged_micro_batches(4, seed=5, without_audio=(2,)):
        out = model(batch)
        out["loss_sum"].backward()
        fast = gradients(model)
        loss, num, correct = slow_sums(model, batch)
        loss.backward()
        slow = gradients(model)
        assert float(out["num_tokens"]) == num == int(batch["loss_mask"][:, 1:].sum())
        assert float(out["num_correct"]) == correct
        torch.testing.assert_close(out["loss_sum"], loss, rtol=limit, atol=0)
        largest = max(float(g.abs().max()) for g in slow.values())
        for name, gradient in fast.items():
            expected = slow.get(name, torch.zeros_like(gradient))  # the twin skips perception without audio
            torch.testing.assert_close(gradient, expected, rtol=0, atol=limit * largest, msg=name)


def test_the_audio_carries_gradient_to_the_first_layer_of_the_encoder() -> None:
    model = tiny_salm("parakeet")
    model.llm.requires_grad_(False)
    (batch,) = ragged_micro_batches(1, seed=1)
    model(batch)["loss_sum"].backward()
    assert float(model.perception.encoder.subsampling.layers[0].weight.grad.abs().max()) > 0
    assert all(p.grad is None for p in model.llm.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_without_audio_perception_runs_with_weight_zero(kind: Any) -> None:
    model = tiny_salm(kind)
    (batch,) = ragged_micro_batches(1, seed=2, without_audio=(0,))
    ran: list[int] = []
    model.perception.encoder.register_forward_hook(lambda *_: ran.append(1))
    model(batch)["loss_sum"].backward()
    assert ran == [1]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert bool(parameter.grad.any()) == name.startswith("llm."), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["masked", "empty"])
def test_no_supervised_token_gives_zero_loss_and_zero_gradients(kind: Any, case: str) -> None:
    model = tiny_salm(kind)
    batch = empty_micro_batch() if case == "empty" else ragged_micro_batches(1, seed=2)[0]
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    out = model(batch)
    assert {name: out[name].item() for name in SUMS} == dict.fromkeys(SUMS, 0.0)
    out["loss_sum"].backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and torch.count_nonzero(parameter.grad) == 0, name


def test_sums_per_row_add_up_and_have_the_dtype_of_the_law() -> None:
    model = tiny_salm("whisper", torch.bfloat16).eval()
    batch = ragged_micro_batches(3, seed=4)[2]
    total, rows = model(batch), model(batch, mode="loss_per_row")
    for name in SUMS:
        assert total[name].dtype == torch.float32
        assert rows[name].shape == (3,)
        torch.testing.assert_close(rows[name].sum(), total[name])
    assert rows["num_tokens"].tolist() == batch["loss_mask"][:, 1:].sum(1).tolist()


def test_an_llm_with_a_head_of_its_own_gives_the_same() -> None:
    """Its own logits, of the labelled columns or of all, instead of the product with the head in chunks."""
    model = tiny_salm(dtype=torch.float64).eval()
    batch = ragged_micro_batches(3, seed=3)[2]
    widths: list[int] = []
    model.llm.lm_head.register_forward_hook(lambda _, args, out: widths.append(args[0].shape[1]))
    for mode in ("loss", "loss_per_row"):
        chunked = model(batch, mode=mode)
        transforms, model._transforms = model._transforms, None
        labelled = model(batch, mode=mode)
        arguments, model._llm_arguments = model._llm_arguments, model._llm_arguments - {"logits_to_keep"}
        whole = model(batch, mode=mode)
        model._transforms, model._llm_arguments = transforms, arguments
        for name in SUMS:
            torch.testing.assert_close(labelled[name], chunked[name], rtol=1e-12, atol=0)
            torch.testing.assert_close(whole[name], chunked[name], rtol=1e-12, atol=0)
    assert len(widths) == 4 and widths[0] < widths[1], "logits only where something is supervised"


def test_a_frozen_llm_stays_in_eval_mode() -> None:
    model = tiny_salm()
    model.llm.requires_grad_(False)
    model.train()
    assert not model.llm.training and model.perception.proj.training
    model.llm.lm_head.requires_grad_(True)
    assert model.train().llm.training


def test_placeholders_without_clips_are_refused_before_perception_runs() -> None:
    model = tiny_salm()
    (batch,) = ragged_micro_batches(1, seed=3)
    batch["audios"], batch["audio_lens"] = torch.zeros(0, 0), torch.zeros(0, dtype=torch.int64)
    ran: list[int] = []
    model.perception.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=r"1 audio placeholders \(clip-0-0: 1\) but 0 clips"):
        model(batch)
    assert ran == []


def greedy(model: SALM, batch: dict[str, Any], steps: int, eos: int) -> list[int]:
    """Decodes one row without cache and without padding."""
    embeddings, _, _ = row_embeddings(model, batch)
    table = model.llm.get_input_embeddings().weight
    tokens: list[int] = []
    while len(tokens) < steps and (not tokens or tokens[-1] != eos):
        logits = model.llm(inputs_embeds=embeddings, use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
        embeddings = torch.cat([embeddings, table[tokens[-1]][None, None]], 1)
    return tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_generation_equals_greedy_decoding_of_each_row(kind: Any, attention: str) -> None:
    model = tiny_salm(kind, attn_implementation=attention).eval()
    batch = ragged_micro_batches(3, seed=8)[2]
    with torch.no_grad():
        free = [greedy(model, one_row(batch, row), 8, eos=-1) for row in range(3)]
        eos = free[0][3]
        expected = [greedy(model, one_row(batch, row), 8, eos) for row in range(3)]
    assert len({len(row) for row in expected}) > 1, "rows must end at different steps"
    tokens = model.generate(batch, max_new_tokens=8, eos_token_id=eos, pad_token_id=VOCAB - 1)
    for row, wanted in zip(tokens.tolist(), expected, strict=True):
        assert row == wanted + [VOCAB - 1] * (tokens.shape[1] - len(wanted))


def test_generation_without_audio() -> None:
    model = tiny_salm().eval()
    (batch,) = ragged_micro_batches(1, seed=8, without_audio=(0,))
    with torch.no_grad():
        expected = greedy(model, one_row(batch, 0), 4, eos=-1)
    options: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": VOCAB, "pad_token_id": 3}
    assert model.generate(batch, **options).tolist() == [expected]


def test_generation_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="training mode: call model.eval"):
        tiny_salm().generate(empty_micro_batch(), max_new_tokens=1, eos_token_id=2, pad_token_id=3)


def test_each_clip_of_a_row_has_its_own_seed() -> None:
    model = tiny_salm("parakeet")
    seen: list[Tensor] = []
    model.perception.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    batch = ragged_micro_batches(2, seed=8)[1]
    batch["input_ids"][0, 3] = PLACEHOLDER
    batch["loss_mask"][0] = False
    batch["audios"] = torch.cat([batch["audios"], batch["audios"][:1]])
    batch["audio_lens"] = torch.cat([batch["audio_lens"], batch["audio_lens"][:1]])
    model(batch)
    alone = {
        key: value[1:] if len(value) == 2 else value[2:] for key, value in batch.items() if key != "is_empty"
    }
    model(alone)
    assert len(set(seen[0].tolist())) == 3
    assert seen[0][2] == seen[1][0], "the seed follows the sample, not its place in the batch"
    assert model.perception.proj.out_features == HIDDEN
