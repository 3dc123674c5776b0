"""Own audio against another clip's: pairing, bootstrap, and models that do and do not listen."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.evaluate.inputs import ConversationLoader, read_inputs
from shoal.evaluate.listening import ClipLosses, clip_losses, compare, exchange_audio, listens, partners
from shoal.speech.prompts import PromptFormatter
from shoal.speech.salm import SALM
from tests.tiny import tiny_salm, tiny_tokenizer
from tests.unit.evaluate import corpus

CPU = torch.device("cpu")


def speech_model() -> tuple[SALM, PromptFormatter]:
    prompts = PromptFormatter(tiny_tokenizer(), "plain", "<|audio|>")
    model = tiny_salm("parakeet")
    model.placeholder_id = prompts.placeholder_id
    return model.eval(), prompts


def test_means_and_ratio_are_weighted_by_tokens() -> None:
    result = compare(ClipLosses((2.0, 3.0), (1, 9)), ClipLosses((4.0, 6.0), (1, 9)))
    assert (result.own, result.exchanged, result.ratio) == (0.5, 1.0, 2.0)
    assert result.low <= 0.5 <= result.high


def test_a_constant_gain_per_token_leaves_no_doubt() -> None:
    tokens = (3, 5, 7, 11)
    own = ClipLosses((1.0, 2.0, 3.0, 4.0), tokens)
    other = ClipLosses(tuple(s + 0.25 * n for s, n in zip(own.loss_sums, tokens, strict=True)), tokens)
    result = compare(own, other)
    assert result.low == pytest.approx(0.25) and result.high == pytest.approx(0.25)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = []
    for trial in range(200):
        gains = rng.normal(0.3, 1.0, size=60)
        own = ClipLosses((0.0,) * 60, (1,) * 60)
        result = compare(own, ClipLosses(tuple(gains), (1,) * 60), num_resamples=400, seed=trial)
        covered.append(result.low <= 0.3 <= result.high)
    assert 0.88 <= np.mean(covered) <= 0.99


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="must count the same supervised tokens"):
        compare(ClipLosses((1.0, 1.0), (1, 2)), ClipLosses((1.0, 1.0), (2, 1)))
    with pytest.raises(ValueError, match="needs at least 2"):
        compare(ClipLosses((1.0,), (1,)), ClipLosses((1.0,), (1,)))
    with pytest.raises(ValueError, match="at least 2"):
        partners([1.0])


@pytest.mark.parametrize("count", range(2, 12))
def test_every_clip_gets_another_one_of_similar_length(count: int) -> None:
    durations = np.random.default_rng(count).exponential(5.0, count).tolist()
    partner = partners(durations)
    assert sorted(partner) == list(range(count))
    assert all(index != other for index, other in enumerate(partner))
    rank = np.argsort(np.argsort(durations))
    assert max(abs(int(rank[i]) - int(rank[p])) for i, p in enumerate(partner)) <= 2


def test_losses_per_clip_do_not_depend_on_the_batch_and_add_up(tmp_path: Path) -> None:
    model, prompts = speech_model()
    conversations = read_inputs(str(corpus.nemo_manifest(tmp_path)))
    batched = clip_losses(model, prompts, conversations, batch_size=3, device=CPU)
    alone = clip_losses(model, prompts, conversations, batch_size=1, device=CPU)
    assert batched.num_tokens == alone.num_tokens == tuple(len(t.split()) + 1 for t in corpus.TEXTS)
    assert batched.loss_sums == pytest.approx(alone.loss_sums, rel=1e-4)
    whole: dict[str, Any] = ConversationLoader(prompts, 16000, prompt_only=False).load(conversations)
    with torch.no_grad():
        total = model(whole)
    assert batched.mean == pytest.approx(float(total["loss_sum"] / total["num_tokens"]), rel=1e-4)


def test_exchanging_moves_the_audio_and_nothing_else(tmp_path: Path) -> None:
    conversations = read_inputs(str(corpus.nemo_manifest(tmp_path)))
    exchanged = exchange_audio(conversations)
    assert [c.id for c in exchanged] == corpus.clip_names()
    assert [c.turns[-1] for c in exchanged] == [c.turns[-1] for c in conversations]
    moved = [c.audio_turns[0].cut.id for c in exchanged]
    assert sorted(moved) == corpus.clip_names()
    assert all(cut != name for cut, name in zip(moved, corpus.clip_names(), strict=True))
    with pytest.raises(ValueError, match="one audio turn, not clip0"):
        exchange_audio([c.__class__(c.id, c.turns[-1:]) for c in conversations])


def test_a_deaf_model_has_ratio_one_and_a_hearing_one_has_not(tmp_path: Path) -> None:
    model, prompts = speech_model()
    conversations = read_inputs(str(corpus.nemo_manifest(tmp_path)))
    hearing = listens(model, prompts, conversations, batch_size=2, device=CPU)
    assert abs(hearing.ratio - 1.0) > 1e-3
    torch.nn.init.zeros_(model.perception.proj.weight)
    for layer in model.llm.model.layers:  # or the number of frames would be heard
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    deaf = listens(model, prompts, conversations, batch_size=2, device=CPU)
    assert deaf.ratio == pytest.approx(1.0, abs=1e-5)
    assert deaf.low == pytest.approx(0.0, abs=1e-5) and deaf.high == pytest.approx(0.0, abs=1e-5)


def test_training_mode_is_refused() -> None:
    model, prompts = speech_model()
    with pytest.raises(ValueError, match="training mode: call model.eval"):
        clip_losses(model.train(), prompts, [], batch_size=1, device=CPU)
