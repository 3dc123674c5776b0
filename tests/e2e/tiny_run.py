"""Writes what a whole run needs, in miniature: an LLM folder, a speech encoder folder, audio and a YAML mapping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.tiny import tiny_llama, tiny_tokenizer

SAMPLE_RATE = 16000
WORDS = "the a one two three four five six seven eight nine ten cat dog sat ran on mat".split()  # noqa: SIM905


def write_models(root: Path) -> dict[str, str]:
    """Saves a tiny Llama with its tokenizer and a tiny Whisper; returns their folders by configuration key."""
    llm, asr = root / "llm", root / "asr"
    if not asr.is_dir():
        tiny_llama().save_pretrained(llm)
        tiny_tokenizer().save_pretrained(llm)
        config = WhisperConfig(
            d_model=16,
            encoder_layers=2,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_source_positions=50,
            vocab_size=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            dropout=0.0,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            WhisperForConditionalGeneration(config).save_pretrained(asr)
        WhisperFeatureExtractor(chunk_length=1).save_pretrained(asr)
    return {"pretrained_llm": str(llm), "pretrained_asr": str(asr)}


def write_manifest(root: Path, name: str, num_clips: int, seed: int) -> Path:
    """Writes clips of 0.3 to 2 s with transcripts of 1 to 6 words as a NeMo manifest."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    lines = []
    for index in range(num_clips):
        seconds = float(generator.uniform(0.3, 2.0))
        audio = 0.1 * generator.standard_normal(int(seconds * SAMPLE_RATE)).astype("float32")
        soundfile.write(folder / f"{index}.wav", audio, SAMPLE_RATE)
        text = " ".join(generator.choice(WORDS, int(generator.integers(1, 7))))
        duration = len(audio) / SAMPLE_RATE
        lines.append(json.dumps({"audio_filepath": f"{index}.wav", "duration": duration, "text": text}))
    manifest = folder / "manifest.jsonl"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


def configuration(root: Path, *, num_clips: int = 23, **trainer: Any) -> dict[str, Any]:
    """A whole speech YAML as data; `trainer` adds to or replaces keys of its section."""
    train = write_manifest(root, "train", num_clips, seed=0)
    valid = write_manifest(root, "valid", 7, seed=1)

    def source(manifest: Path) -> list[dict[str, Any]]:
        return [
            {"type": "nemo", "manifest_filepath": str(manifest), "tags": {"context": "say what you hear"}}
        ]

    return {
        "model": {
            **write_models(root),
            "prompt_format": "chatml",
            "audio_locator_tag": "<|audio|>",
            "freeze_params": [r"^perception\.encoder\..+$"],
            "perception": {"modality_adapter": {"stack_frames": 4}},
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 3e-3, "weight_decay": 0.01},
            "lr_scheduler": {
                "_target_": "nemo.core.optim.lr_scheduler.CosineAnnealing",
                "warmup_steps": 2,
                "min_lr": 1e-4,
            },
        },
        "trainer": {
            "devices": 1,
            "accelerator": "cpu",
            "max_steps": 6,
            "global_micro_batches": 4,
            "gradient_clip_val": 1.0,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            **trainer,
        },
        "data": {
            "train_ds": {"input_cfg": source(train), "batch_size": 2, "shuffle": True, "seed": 5},
            "validation_ds": {
                "batch_size": 3,
                "datasets": {"one": {"input_cfg": source(valid)}, "two": {"input_cfg": source(train)}},
            },
        },
    }


AUTOMODEL = "nemo.collections.speechlm2.parts.parallel.AutomodelParallelStrategy"
"""The strategy's name in the YAML files that users already have."""
