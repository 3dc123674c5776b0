"""Reading what an evaluation runs on."""

from pathlib import Path

import pytest
import yaml

from shoal.data.conversation import AudioTurn, TextTurn
from shoal.evaluate.generate import reference_of
from shoal.evaluate.inputs import ConversationLoader, read_inputs
from shoal.speech.prompts import PromptFormatter
from tests.tiny import tiny_tokenizer
from tests.unit.evaluate import corpus

WRITERS = [corpus.nemo_manifest, corpus.cuts_manifest, corpus.conversation_manifest]


@pytest.mark.parametrize("write", WRITERS)
def test_each_kind_of_manifest_is_told_from_its_first_line(write, tmp_path: Path) -> None:
    conversations = read_inputs(str(write(tmp_path)), system_prompt="you hear")
    assert [c.id for c in conversations] == corpus.clip_names()
    assert [reference_of(c) for c in conversations] == list(corpus.TEXTS)
    assert [c.duration for c in conversations] == pytest.approx(corpus.SECONDS)
    assert conversations[0].turns[0] == TextTurn("system", "you hear")


def test_a_list_of_sources_and_the_users_prompt(tmp_path: Path) -> None:
    manifest = corpus.nemo_manifest(tmp_path)
    sources = [
        {"type": "nemo", "manifest_filepath": str(manifest), "tags": {"context": "say"}},
        {"type": "nemo", "manifest_filepath": str(manifest)},
    ]
    (tmp_path / "inputs.yaml").write_text(yaml.safe_dump(sources))
    conversations = read_inputs(str(tmp_path / "inputs.yaml"), user_prompt="what is it")
    assert len(conversations) == 2 * len(corpus.TEXTS)
    assert conversations[0].turns[0] == TextTurn("user", "say")
    assert conversations[-1].turns[0] == TextTurn("user", "what is it")
    assert isinstance(conversations[-1].turns[1], AudioTurn)


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_inputs(str(tmp_path / "absent.jsonl"))
    with pytest.raises(ValueError, match=r"the first line has the keys \['words'\]"):
        read_inputs(str(corpus.write_lines(tmp_path / "a.jsonl", [{"words": 1}])))
    skipped = {"audio_filepath": "x.wav", "duration": 1.0, "_skipme": True}
    with pytest.raises(ValueError, match="holds not one example"):
        read_inputs(str(corpus.write_lines(tmp_path / "b.jsonl", [skipped])))
    (tmp_path / "c.yaml").write_text("- {type: nemo, manifest: x}")
    with pytest.raises(ValueError, match="inputs.0.manifest"):
        read_inputs(str(tmp_path / "c.yaml"))


def test_unusable_audio_is_an_error_that_names_the_sample(tmp_path: Path) -> None:
    conversations = read_inputs(str(corpus.nemo_manifest(tmp_path)))
    (tmp_path / "clip1.wav").write_bytes(b"no audio")
    loader = ConversationLoader(
        PromptFormatter(tiny_tokenizer(), "plain", "<|audio|>"), 16000, prompt_only=True
    )
    assert loader.load(conversations[2:])["sample_ids"] == ["clip2", "clip3", "clip4"]
    with pytest.raises(ValueError, match="clip1"):
        loader.load(conversations)
