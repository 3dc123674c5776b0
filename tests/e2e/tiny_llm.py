"""Writes what a whole LLM run needs, in miniature: a model folder, texts and a YAML mapping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny import tiny_llama, tiny_tokenizer

WORDS = "the a one two three four five six seven eight nine ten cat dog sat ran on mat".split()  # noqa: SIM905


def write_model(root: Path) -> Path:
    """Saves a tiny Llama with its tokenizer; returns the folder."""
    folder = root / "llm"
    if not folder.is_dir():
        tiny_llama(eos_token_id=2).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


def write_chats(root: Path, name: str, num_rows: int, seed: int) -> Path:
    """Writes chats of two or four turns with 1 to 9 words each."""
    generator = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(generator.choice(WORDS, int(generator.integers(1, 10))))

    rows = [
        {
            "messages": [
                {"role": ("user", "assistant")[turn % 2], "content": text()}
                for turn in range(2 * int(generator.integers(1, 3)))
            ]
        }
        for _ in range(num_rows)
    ]
    file = root / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


PACKED: dict[str, Any] = {  # a size that no number of ranks divides
    "packed_sequence": {"packed_sequence_size": 95, "packing_strategy": "best_fit", "open_packs": 4},
    "step_scheduler": {"global_batch_size": 4, "local_batch_size": 1},
}


def configuration(root: Path, *, num_rows: int = 43, **sections: dict[str, Any]) -> dict[str, Any]:
    """A whole LLM YAML as data; `sections` add to or replace keys of theirs."""
    base: dict[str, dict[str, Any]] = {
        "model": {"pretrained_model_name_or_path": str(write_model(root))},
        "dataset": {"type": "chat", "path": str(write_chats(root, "train", num_rows, seed=0))},
        "validation_dataset": {"type": "chat", "path": str(write_chats(root, "valid", 7, seed=1))},
        "validation_dataset_train": {"type": "chat", "path": str(root / "train.jsonl")},
        "step_scheduler": {
            "global_batch_size": 8,
            "local_batch_size": 2,
            "num_epochs": 9,
            "max_steps": 20,
            "val_every_steps": 10,
            "ckpt_every_steps": 1000,
            "save_checkpoint_every_epoch": False,
        },
        "rng": {"seed": 5},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 3e-3, "weight_decay": 0.01},
        "lr_scheduler": {"lr_warmup_steps": 3, "lr_decay_style": "cosine"},
        "checkpoint": {
            "checkpoint_dir": str(root / "run"),
            "save_consolidated": False,
            "model_save_format": "torch_save",
        },
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return {**base, "precision": "32-true"}
