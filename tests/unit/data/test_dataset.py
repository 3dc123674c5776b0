"""Loading a step: shapes, what is left out, errors with their origin, seeds of samples."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from shoal.config.seeds import derive_seed
from shoal.config.speech import DatasetConfig, InputConfig
from shoal.data.audio import AudioOptions
from shoal.data.batch import empty_micro_batch
from shoal.data.conversation import EncodedPrompt
from shoal.data.dataset import StepDataset
from shoal.data.position import StepPlan, StreamPosition
from shoal.data.sources import open_sources
from shoal.data.stream import build_train_loader
from tests.unit.data import corpus
from tests.unit.data.corpus import CharPrompts, Clip

CLIPS = [Clip(0, 0.1), Clip(1, 0.3), Clip(2, 0.2)]
AFTER = StreamPosition(0, 2)


def conversations(config: DatasetConfig):
    return tuple(c for source in open_sources(config) for shard in source.shards for c in shard.read())


def load(items, prompts=None, **keys):
    data = StepDataset(prompts or CharPrompts(), AudioOptions(), seed=keys.pop("seed", 0), **keys)
    return data[StepPlan(tuple(items), 0, AFTER)]


def test_a_micro_batch(tmp_path):
    items = conversations(corpus.dataset(corpus.write_nemo(tmp_path, CLIPS)))
    long = replace(items[1], turns=(*items[1].turns[:1], replace(items[1].turns[1], text="a longer text")))
    batch = load([(items[0], long), ()], seed=3)
    assert batch.position == AFTER
    assert batch.error is None
    one, empty = batch.micro_batches
    assert one["audios"].shape == (2, 4800)
    assert one["audios"].dtype == torch.float32
    assert one["audio_lens"].tolist() == [1600, 4800]
    assert one["input_ids"].shape == (2, 14)
    assert one["text_lens"].tolist() == [7, 14]
    assert one["input_ids"][0].tolist() == [1, *map(ord, "text 0"), *[0] * 7]
    assert one["loss_mask"][0].tolist() == [False] + [True] * 6 + [False] * 7
    assert one["loss_mask"][1].tolist() == [False] + [True] * 13
    assert one["sample_ids"] == ["clip0.wav", "clip1.wav"]
    assert one["sample_seeds"].tolist() == [derive_seed("sample", 3, 0, name) for name in one["sample_ids"]]
    assert one["is_empty"] is False
    assert {key: type(value) for key, value in one.items()} == {key: type(v) for key, v in empty.items()}
    assert {k: v.dtype for k, v in one.items() if isinstance(v, torch.Tensor)} == {
        k: v.dtype for k, v in empty.items() if isinstance(v, torch.Tensor)
    }


def test_the_empty_micro_batch_supervises_nothing():
    one = empty_micro_batch(9)
    assert one["is_empty"] is True
    assert one["audios"].shape == (0, 0)
    assert one["audio_lens"].shape == (0,)
    assert one["input_ids"].tolist() == [[9, 9]]
    assert not one["loss_mask"].any()


def test_text_only_and_several_audio_turns(tmp_path):
    corpus.write_nemo(tmp_path, CLIPS)

    def audio(n):
        return {"from": "user", "value": f"clip{n}.wav", "type": "audio", "duration": CLIPS[n].seconds}

    lines = [
        {
            "id": "words",
            "conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "ho"}],
        },
        {"id": "two", "conversations": [audio(1), audio(0), {"from": "assistant", "value": "both"}]},
        {"id": "one", "conversations": [audio(2), {"from": "assistant", "value": "single"}]},
    ]
    path = str(corpus.write_lines(tmp_path / "talk.jsonl", lines))
    entry = InputConfig(type="multimodal_conversation", manifest_filepath=path)
    words, two, one = conversations(DatasetConfig(input_cfg=(entry,)))
    mixed, text = load([(two, words, one), (words,)]).micro_batches
    assert mixed["audio_lens"].tolist() == [4800, 1600, 3200]
    assert (mixed["input_ids"] == CharPrompts.placeholder_id).sum(1).tolist() == [2, 0, 1]
    assert text["audios"].shape == (0, 0)
    assert text["is_empty"] is False


def broken(tmp_path):
    manifest = corpus.write_nemo(tmp_path, CLIPS)
    (tmp_path / "clip1.wav").write_bytes(b"")
    return conversations(corpus.dataset(manifest))


def test_bad_audio_is_left_out_with_its_text_counted_and_named(tmp_path, caplog):
    first, bad, last = broken(tmp_path)
    batch = load([(first, bad, last), (bad,)])
    assert batch.error is None
    assert batch.skipped == {"empty": 2}
    kept, empty = batch.micro_batches
    assert kept["sample_ids"] == ["clip0.wav", "clip2.wav"]
    assert kept["audio_lens"].tolist() == [1600, 3200]
    assert "".join(map(chr, kept["input_ids"][1, 1:])) == "text 2"
    assert empty["is_empty"]
    assert "'clip1.wav'" in caplog.text


def test_one_bad_turn_takes_its_whole_conversation(tmp_path):
    first, bad, last = broken(tmp_path)
    both = replace(first, turns=(*first.turns[:1], *bad.turns[:1], *first.turns[1:]))
    (one,) = load([(both, last)]).micro_batches
    assert one["sample_ids"] == ["clip2.wav"]
    assert one["audios"].shape == (1, 3200)


def test_bad_audio_can_be_an_error_which_is_reported_and_not_raised(tmp_path):
    first, bad, _ = broken(tmp_path)
    batch = load([(first,), (bad,)], on_bad_audio="error")
    assert batch.error is not None
    assert "'clip1.wav'" in batch.error
    assert [one["is_empty"] for one in batch.micro_batches] == [True, True]


class RaisingPrompts(CharPrompts):
    def encode(self, conversation):
        raise RuntimeError("no such token")


class GreedyPrompts(CharPrompts):
    def encode(self, conversation):
        return EncodedPrompt((1, 1, 5), (False, False, True))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [(RaisingPrompts(), "no such token"), (GreedyPrompts(), "2 audio placeholders for 1 audio turns")],
)
def test_any_other_failure_is_the_error_of_the_step(tmp_path, prompts, message):
    items = conversations(corpus.dataset(corpus.write_nemo(tmp_path, CLIPS)))
    batch = load([items[:1]], prompts)
    assert message in batch.error
    assert "sample 'clip0.wav'" in batch.error


def test_an_error_in_a_worker_reaches_the_step(tmp_path):
    manifest = corpus.write_nemo(tmp_path, CLIPS)
    (tmp_path / "clip1.wav").unlink()
    config = corpus.dataset(manifest, num_workers=1, batch_size=1, on_bad_audio="error")
    loader = build_train_loader(config, CharPrompts(), dp_rank=0, dp_size=1, global_micro_batches=1)
    errors = [batch.error for batch in loader]
    assert [error is None for error in errors] == [True, False, True]
    assert "missing" in errors[1]


def test_prompts_only_for_generation(tmp_path):
    items = conversations(corpus.dataset(corpus.write_nemo(tmp_path, CLIPS)))
    (one,) = load([items[:1]], prompt_only=True).micro_batches
    assert one["input_ids"].tolist() == [[1]]
    assert one["audio_lens"].tolist() == [1600]


def test_sample_seeds_have_31_bits_and_depend_on_seed_epoch_and_name(tmp_path):
    items = conversations(corpus.dataset(corpus.write_nemo(tmp_path, CLIPS)))
    seeds = set()
    for seed in (0, 1):
        data = StepDataset(CharPrompts(), AudioOptions(), seed=seed)
        for epoch in (0, 1):
            seeds |= set(data[StepPlan((items,), epoch, AFTER)].micro_batches[0]["sample_seeds"].tolist())
    assert len(seeds) == 12
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_derived_seeds_are_stable():
    # Fixed values: a change would reorder the data of every checkpoint that exists.
    parts = [("shuffle", 1, 2), ("a", 1), ("a1",), ("sample", 0, 0, "clip")]
    assert [derive_seed(*some) for some in parts] == [89811859, 1296014391, 1191429784, 272126534]


def test_plans_and_batches_pickle(tmp_path):
    items = conversations(corpus.dataset(corpus.write_nemo(tmp_path, CLIPS)))
    plan = StepPlan((items,), 0, AFTER, {"x": 1})
    assert [c.id for c in pickle.loads(pickle.dumps(plan)).micro_batches[0]] == [c.id for c in items]
    batch = pickle.loads(pickle.dumps(load([items])))
    assert batch.position == AFTER
