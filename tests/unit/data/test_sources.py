"""Every source type: what is read, with which text and which audio; shares; what is refused."""

from __future__ import annotations

import gzip
import json
import shutil

import numpy as np
import pytest
from lhotse import CutSet, Recording
from lhotse.audio import AudioSource
from lhotse.cut import MonoCut
from lhotse.shar import SharWriter

from shoal.config.speech import DatasetConfig, InputConfig
from shoal.data.audio import AudioOptions, load_audio
from shoal.data.conversation import TextTurn
from shoal.data.sources import open_sources
from tests.unit.data import corpus
from tests.unit.data.corpus import Clip

CLIPS = [Clip(number, 0.1 + 0.05 * number) for number in range(5)]


def read(config: DatasetConfig):
    return [c for source in open_sources(config) for shard in source.shards for c in shard.read()]


def entry(**keys):
    return DatasetConfig(input_cfg=(InputConfig(**keys),))


def assert_pairs(conversations, some=CLIPS):
    """Every conversation has its clip's text, and audio whose every sample is its clip's number."""
    assert len(conversations) == len(some)
    for conversation, clip in zip(conversations, some, strict=True):
        audio, answer = conversation.turns[-2:]
        assert answer == TextTurn("assistant", clip.text)
        samples = load_audio(audio, AudioOptions())
        np.testing.assert_array_equal(samples, clip.samples())
        assert conversation.duration == pytest.approx(clip.seconds)


# ------------------------------------------------------------------------------------------------ lhotse


@pytest.mark.parametrize("kind", ["lhotse", "lhotse_as_conversation"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json"])
def test_lhotse_cuts(tmp_path, kind, suffix):
    path = tmp_path / f"cuts{suffix}"
    CutSet.from_cuts(corpus.make_cut(tmp_path, clip) for clip in CLIPS).to_file(path)
    assert_pairs(read(entry(type=kind, cuts_path=str(path))))
    assert_pairs(read(DatasetConfig(cuts_path=str(path))))


def test_relative_recordings_lie_beside_the_manifest(tmp_path):
    cuts = [corpus.make_cut(tmp_path / "wav", clip) for clip in CLIPS]
    for cut in cuts:
        cut.recording.sources[0].source = cut.recording.sources[0].source.removeprefix(f"{tmp_path}/")
    joined = cuts[3].append(cuts[4])
    CutSet.from_cuts([*cuts[:3], joined]).to_file(tmp_path / "cuts.jsonl")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.move(tmp_path / "cuts.jsonl", moved)
    shutil.move(tmp_path / "wav", moved)
    conversations = read(DatasetConfig(cuts_path=str(moved / "cuts.jsonl")))
    assert_pairs(conversations[:3], CLIPS[:3])
    mixed = load_audio(conversations[3].audio_turns[0], AudioOptions())
    np.testing.assert_allclose(mixed, np.concatenate([CLIPS[3].samples(), CLIPS[4].samples()]), atol=1e-6)
    assert conversations[3].turns[-1] == TextTurn("assistant", "text 3 text 4")


def test_context_and_system_prompt_come_from_tags_and_cuts(tmp_path):
    path = corpus.write_cuts(tmp_path, CLIPS[:1], context="from the cut", system_prompt="cut's system")
    plain = read(DatasetConfig(cuts_path=str(path)))[0]
    assert plain.turns[:2] == (TextTurn("system", "cut's system"), TextTurn("user", "from the cut"))
    tagged = read(entry(type="lhotse", cuts_path=str(path), tags={"context": "from the tag"}))[0]
    assert tagged.turns[:2] == (TextTurn("system", "cut's system"), TextTurn("user", "from the tag"))
    assert tagged.tags == {"context": "from the tag"}


def test_a_slice_of_a_recording_is_read_at_its_start(tmp_path):
    ramp = np.arange(16000, dtype=np.float32) / 16000
    recording = Recording.from_file(corpus.write_wav(tmp_path / "ramp.wav", ramp))
    cut = recording.to_cut().truncate(offset=0.25, duration=0.5)
    CutSet.from_cuts([cut]).to_file(tmp_path / "cuts.jsonl")
    (conversation,) = read(DatasetConfig(cuts_path=str(tmp_path / "cuts.jsonl")))
    np.testing.assert_array_equal(load_audio(conversation.audio_turns[0], AudioOptions()), ramp[4000:12000])


# -------------------------------------------------------------------------------------------------- shar


def write_shar(tmp_path, some=CLIPS):
    folder = tmp_path / "shar"
    folder.mkdir(exist_ok=True)
    with SharWriter(str(folder), fields={"recording": "flac"}, shard_size=2) as writer:
        for clip in some:
            cut = corpus.make_cut(tmp_path / "wav", clip)
            cut.custom = {"language": "en"}
            writer.write(cut)
    shutil.rmtree(tmp_path / "wav")
    return folder


def test_lhotse_shar(tmp_path):
    folder = write_shar(tmp_path)
    config = entry(type="lhotse_shar", shar_path=str(folder))
    assert [len(source.shards) for source in open_sources(config)] == [3]
    assert_pairs(read(config))
    assert_pairs(read(DatasetConfig(shar_path=(str(folder),))))
    assert_pairs(read(entry(type="lhotse_as_conversation", shar_path=str(folder))))


def test_shar_audio_is_paired_by_name_not_by_place(tmp_path):
    folder = write_shar(tmp_path)
    path = folder / "cuts.000000.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join(reversed(lines))))
    assert_pairs(read(DatasetConfig(shar_path=(str(folder),))), [CLIPS[i] for i in (1, 0, 2, 3, 4)])


def test_shar_without_its_archive_is_refused(tmp_path):
    folder = write_shar(tmp_path)
    (folder / "recording.000001.tar").unlink()
    with pytest.raises(ValueError, match=r"clip2.*recording\.\*\.tar"):
        read(DatasetConfig(shar_path=(str(folder),)))
    with pytest.raises(ValueError, match="shar_path"):
        read(DatasetConfig(cuts_path=str(folder / "cuts.000000.jsonl.gz")))


# -------------------------------------------------------------------------------------------------- nemo


def test_nemo(tmp_path):
    path = corpus.write_nemo(tmp_path, CLIPS)
    assert_pairs(read(DatasetConfig(manifest_filepath=str(path))))
    assert_pairs(read(entry(type="nemo", manifest_filepath=(str(path),))))
    assert_pairs(read(entry(type="lhotse_as_conversation", manifest_filepath=str(path))))


def test_nemo_offset_skipme_and_fields(tmp_path):
    ramp = np.arange(16000, dtype=np.float32) / 16000
    corpus.write_wav(tmp_path / "ramp.wav", ramp)
    lines = [
        {"audio_filepath": "ramp.wav", "offset": 0.5, "duration": 0.25, "text": "a", "context": "say"},
        {"audio_filepath": "ramp.wav", "offset": 0.25, "duration": 0.25, "text": "b"},
        {"audio_filepath": "gone.wav", "duration": 1.0, "text": "c", "_skipme": True},
    ]
    path = corpus.write_lines(tmp_path / "m.json", lines)
    first, second = read(DatasetConfig(manifest_filepath=str(path)))
    assert first.turns[0] == TextTurn("user", "say")
    assert first.id != second.id
    np.testing.assert_array_equal(load_audio(first.audio_turns[0], AudioOptions()), ramp[8000:12000])
    np.testing.assert_array_equal(load_audio(second.audio_turns[0], AudioOptions()), ramp[4000:8000])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"audio_filepath": "a.wav", "text": "x"}', r"m\.json:1: 'duration' is missing"),
        ('{"duration": 1.0}', r"m\.json:1: 'audio_filepath' is missing"),
        ("{broken", r"m\.json:1: not JSON"),
        ("[1]", r"m\.json:1: a line must be a JSON object"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    (tmp_path / "m.json").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read(DatasetConfig(manifest_filepath=str(tmp_path / "m.json")))


def write_tarred(tmp_path, *, one_manifest: bool):
    shards = [CLIPS[:2], CLIPS[2:4], CLIPS[4:]]
    for index, some in enumerate(shards):
        members = {f"{clip.name}.wav": corpus.wav_bytes(clip.samples()) for clip in reversed(some)}
        corpus.write_tar(tmp_path / f"audio_{index}.tar", members)
        lines = [corpus.nemo_line(clip, shard_id=index) for clip in some]
        corpus.write_lines(tmp_path / f"manifest_{index}.json", lines)
    lines = [corpus.nemo_line(clip, shard_id=index) for index, some in enumerate(shards) for clip in some]
    corpus.write_lines(tmp_path / "all.json", lines)
    return "all.json" if one_manifest else "manifest__OP_0..2_CL_.json"


@pytest.mark.parametrize("one_manifest", [False, True])
def test_nemo_tarred(tmp_path, one_manifest):
    manifest = str(tmp_path / write_tarred(tmp_path, one_manifest=one_manifest))
    archives = str(tmp_path / "audio_{0..2}.tar")
    assert_pairs(read(DatasetConfig(manifest_filepath=manifest, tarred_audio_filepaths=archives)))
    tarred = {"manifest_filepath": manifest, "tarred_audio_filepaths": archives}
    assert_pairs(read(entry(type="nemo_tarred", **tarred)))
    assert_pairs(read(entry(type="lhotse_as_conversation", **tarred)))


def test_tarred_entries_that_share_one_member(tmp_path):
    ramp = np.arange(16000, dtype=np.float32) / 16000
    corpus.write_tar(tmp_path / "audio_0.tar", {"ramp.wav": corpus.wav_bytes(ramp)})
    lines = [
        {"audio_filepath": f"ramp-sub{part}.wav", "offset": 0.25 * part, "duration": 0.25, "text": "x"}
        for part in (1, 2)
    ]
    path = corpus.write_lines(tmp_path / "m.json", lines)
    archive = str(tmp_path / "audio_0.tar")
    both = read(DatasetConfig(manifest_filepath=str(path), tarred_audio_filepaths=archive))
    for part, conversation in enumerate(both, start=1):
        samples = load_audio(conversation.audio_turns[0], AudioOptions())
        np.testing.assert_array_equal(samples, ramp[4000 * part : 4000 * (part + 1)])


def test_tarred_mistakes_are_refused(tmp_path):
    manifest = str(tmp_path / write_tarred(tmp_path, one_manifest=True))
    with pytest.raises(ValueError, match="tarred_audio_filepaths: missing"):
        open_sources(entry(type="nemo_tarred", manifest_filepath=manifest))
    with pytest.raises(ValueError, match=r"no such file.*audio_3\.tar"):
        open_sources(
            entry(
                type="nemo_tarred",
                manifest_filepath=manifest,
                tarred_audio_filepaths=str(tmp_path / "audio_{0..3}.tar"),
            )
        )
    some = (str(tmp_path / "audio_0.tar"), str(tmp_path / "audio_1.tar"))
    config = entry(type="nemo_tarred", manifest_filepath=manifest, tarred_audio_filepaths=some)
    with pytest.raises(ValueError, match=r"all\.json:5: shard_id is 2, and the archives have \[0, 1\]"):
        read(config)
    (tmp_path / "audio.tar.gz").write_bytes(gzip.compress((tmp_path / "audio_0.tar").read_bytes()))
    packed = str(tmp_path / "audio.tar.gz")
    with pytest.raises(ValueError, match="must be an uncompressed"):
        open_sources(entry(type="nemo_tarred", manifest_filepath=manifest, tarred_audio_filepaths=packed))


# -------------------------------------------------------------------------------- conversations and text


def test_multimodal_conversation(tmp_path):
    for clip in CLIPS[:2]:
        corpus.write_wav(tmp_path / f"{clip.name}.wav", clip.samples())
    line = {
        "id": "talk",
        "conversations": [
            {"from": "User", "value": "Listen:", "type": "text"},
            {"from": "User", "value": "clip0.wav", "type": "audio", "duration": CLIPS[0].seconds},
            {"role": "assistant", "value": "I hear one.", "type": "text"},
            {"from": "human", "value": "clip1.wav", "type": "audio", "duration": CLIPS[1].seconds},
            {"from": "gpt", "value": "And two."},
        ],
    }
    path = corpus.write_lines(tmp_path / "talk.jsonl", [line])
    keys = {"type": "multimodal_conversation", "manifest_filepath": str(path)}
    (talk,) = read(entry(**keys, tags={"system_prompt": "Be brief."}))
    assert [turn.role for turn in talk.turns] == ["system", "user", "user", "assistant", "user", "assistant"]
    assert talk.duration == pytest.approx(CLIPS[0].seconds + CLIPS[1].seconds)
    assert talk.longest_audio == pytest.approx(CLIPS[1].seconds)
    for turn, clip in zip(talk.audio_turns, CLIPS, strict=False):
        np.testing.assert_array_equal(load_audio(turn, AudioOptions()), clip.samples())


def test_multimodal_conversation_in_an_archive(tmp_path):
    data = corpus.wav_bytes(CLIPS[0].samples())
    corpus.write_tar(tmp_path / "audio_0.tar", {"deep/clip0.wav": data})
    line = {
        "id": "talk",
        "conversations": [
            {"from": "user", "value": "deep/clip0.wav", "type": "audio", "duration": CLIPS[0].seconds},
            {"from": "assistant", "value": CLIPS[0].text, "type": "text"},
        ],
    }
    path = corpus.write_lines(tmp_path / "talk.jsonl", [line])
    config = entry(
        type="multimodal_conversation",
        manifest_filepath=str(path),
        tarred_audio_filepaths=str(tmp_path / "audio_0.tar"),
    )
    assert_pairs(read(config), CLIPS[:1])


def test_text(tmp_path):
    (tmp_path / "a.txt").write_text("first line\n\nsecond line\n")
    first, second = read(entry(type="txt", paths=str(tmp_path / "a.txt"), tags={"context": "Go on:"}))
    assert first.turns == (TextTurn("user", "Go on:"), TextTurn("assistant", "first line"))
    assert second.turns[-1].text == "second line"
    assert first.id != second.id
    assert first.duration == 0


# -------------------------------------------------------------------------------------- groups and shares


def three_manifests(tmp_path, counts=(6, 3, 1)):
    paths = []
    for index, count in enumerate(counts):
        some = [Clip(100 * index + number, 0.1) for number in range(count)]
        paths.append(str(corpus.write_nemo(tmp_path / str(index), some, audio=False)))
    return paths


def nemo(path, **keys):
    return InputConfig(type="nemo", manifest_filepath=path, **keys)


def test_nested_groups_multiply_weights_and_inherit_tags(tmp_path):
    a, b, c = three_manifests(tmp_path)
    inner = (nemo(b, weight=1.0, tags={"x": "inner"}), nemo(c, weight=3.0))
    group = InputConfig(type="group", weight=2.0, tags={"x": "outer", "context": "hi"}, input_cfg=inner)
    sources = open_sources(DatasetConfig(input_cfg=(nemo(a, weight=2.0), group)))
    assert [source.share for source in sources] == pytest.approx([0.5, 0.125, 0.375])
    tags = [next(source.shards[0].read()).tags for source in sources]
    assert tags == [{}, {"x": "inner", "context": "hi"}, {"x": "outer", "context": "hi"}]


def test_without_weights_shares_are_the_number_of_examples(tmp_path):
    a, b, c = three_manifests(tmp_path)
    group = InputConfig(type="group", input_cfg=(nemo(b), nemo(c)))
    sources = open_sources(DatasetConfig(input_cfg=(nemo(a), group)))
    assert [source.share for source in sources] == pytest.approx([0.6, 0.3, 0.1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lambda a, b: {"input_cfg": (nemo(a, weight=1.0), nemo(b))},
            r"input_cfg: entries \[1\] have no weight",
        ),
        (lambda a, b: {"input_cfg": ()}, r"data\.input_cfg: is empty"),
        (
            lambda a, b: {"input_cfg": (InputConfig(type="group"),)},
            r"input_cfg\[0\]\.input_cfg: a group needs",
        ),
        (lambda a, b: {"input_cfg": (nemo(a),), "manifest_filepath": b}, "move the latter"),
        (lambda a, b: {}, "exactly one of"),
        (lambda a, b: {"manifest_filepath": a, "cuts_path": b}, "exactly one of"),
        (lambda a, b: {"manifest_filepath": "/nowhere/m.json"}, "no such file: /nowhere/m.json"),
        (
            lambda a, b: {"input_cfg": (InputConfig(type="lhotse", manifest_filepath=a),)},
            "takes exactly one of",
        ),
        (lambda a, b: {"manifest_filepath": "pipe:echo"}, "--allow-commands"),
        (lambda a, b: {"cuts_path": "https://host/cuts.jsonl.gz"}, "--allow-commands"),
    ],
)
def test_impossible_sources_are_refused_before_anything_is_read(tmp_path, config, message):
    a, b, _ = three_manifests(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_sources(DatasetConfig(**config(a, b)))


# --------------------------------------------------------------------------------- commands in manifests


@pytest.mark.parametrize("kind", ["command", "url"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_cut_that_runs_a_command_is_refused_by_name_before_it_is_decoded(tmp_path, kind, mixed):
    source = AudioSource(kind, [0], f"touch {tmp_path}/ran" if kind == "command" else "https://host/a.wav")
    recording = Recording("evil", [source], 16000, 16000, 1.0)
    cut = MonoCut("evil", 0.0, 1.0, 0, recording=recording)
    if mixed:
        cut = corpus.make_cut(tmp_path, CLIPS[0]).append(cut).with_id("evil")
    CutSet.from_cuts([corpus.make_cut(tmp_path, CLIPS[1]), cut]).to_file(tmp_path / "cuts.jsonl")
    config = DatasetConfig(cuts_path=str(tmp_path / "cuts.jsonl"))
    with pytest.raises(ValueError, match=f"'evil'.*{kind}.*--allow-commands"):
        read(config)
    assert not (tmp_path / "ran").exists()


def test_an_allowed_command_is_read(tmp_path):
    wav = corpus.write_wav(tmp_path / "a.wav", CLIPS[0].samples())
    seconds = CLIPS[0].seconds
    recording = Recording(
        "piped", [AudioSource("command", [0], f"cat {wav}")], 16000, round(seconds * 16000), seconds
    )
    CutSet.from_cuts([recording.to_cut()]).to_file(tmp_path / "cuts.jsonl")
    (source,) = open_sources(DatasetConfig(cuts_path=str(tmp_path / "cuts.jsonl")), allow_commands=True)
    (conversation,) = source.shards[0].read()
    samples = load_audio(conversation.audio_turns[0], AudioOptions())
    np.testing.assert_array_equal(samples, CLIPS[0].samples())


def test_commands_in_json_lines_are_refused(tmp_path):
    line = {"audio_filepath": "pipe:cat x", "duration": 1.0, "text": "x"}
    path = tmp_path / "m.json"
    path.write_text(json.dumps(line))
    with pytest.raises(ValueError, match=r"m\.json:1.*pipe:cat x"):
        read(DatasetConfig(manifest_filepath=str(path)))
