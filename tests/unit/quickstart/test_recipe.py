"""The quickstart's recipe and its scripts agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.config import SpeechConfig, load_config

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "examples" / "speechlm2" / "conf" / "quickstart.yaml"


def _constant(script: str, name: str) -> str:
    text = (ROOT / "scripts" / "quickstart" / script).read_text()
    match = re.search(rf"^{name} = (\S+)", text, re.MULTILINE)
    assert match is not None, f"{script} has no {name}"
    return match[1]


def test_the_recipe_loads_and_fits_the_prepared_data() -> None:
    config = load_config(CONFIG, world_size=2)
    assert isinstance(config, SpeechConfig)
    assert config.trainer.strategy.kind == "automodel"
    assert config.model.perception.modality_adapter.stack_frames == int(_constant("fetch.py", "STACK_FRAMES"))
    manifests = [source.cuts_path for source in config.data.train_ds.input_cfg or ()]
    assert manifests == ["data/quickstart/cuts_train.jsonl.gz", "data/quickstart/cuts_derived.jsonl.gz"]


def test_held_out_clips_are_in_no_set_of_the_recipe() -> None:
    held_out = _constant("run.py", "HELDOUT")
    assert "cuts_heldout" in held_out
    assert "heldout" not in CONFIG.read_text()
