"""What the documents say is true: examples load, links lead somewhere, make targets exist."""

import re
from pathlib import Path

import pytest
import yaml

from shoal.config import LLMConfig, SpeechConfig, load_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def test_the_readmes_examples_load() -> None:
    llm, example = blocks(ROOT / "README.md", "yaml")
    assert isinstance(load_config(yaml.safe_load(llm), world_size=8), LLMConfig)
    (command,) = (
        line for text in blocks(ROOT / "README.md", "sh") for line in text.splitlines() if "run.yaml" in line
    )
    config = load_config(yaml.safe_load(example), command.split()[3:])
    assert isinstance(config, SpeechConfig)
    assert config.trainer.max_steps == 200
    assert config.trainer.strategy.kind == "automodel"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not target.startswith(("https://", "http://")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for text in blocks(path, "sh"):
        for names in re.findall(r"^make ([a-z -]+)", text, re.MULTILINE):
            assert set(names.split()) <= targets


def test_files_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)(?:::(\w+))?`", text):
        path = next(
            (base / name[0] for base in (ROOT, ROOT / "src" / "shoal") if (base / name[0]).exists()), None
        )
        assert path is not None, f"{name[0]} does not exist"
        assert not name[1] or f"def {name[1]}(" in path.read_text()
