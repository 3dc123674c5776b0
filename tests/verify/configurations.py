"""Configurations to verify, as data: the small ones of the planted faults, and shapes of public models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "configs"
_DATA: dict[str, Any] = {
    "tokenizer": "bytes",
    "dataset": {"type": "text", "path": "README.md"},
    "step_scheduler": {"global_batch_size": 64, "local_batch_size": 1, "max_steps": 10},
}


def text(model_type: str = "llama", sections: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """An LLM configuration of a model of the usual proportions; `changes` are fields of the model."""
    model = {
        "model_type": model_type,
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return {"model": {"config": {**model, **changes}}, **_DATA, **(sections or {})}


def hybrid(sections: dict[str, Any] | None = None) -> dict[str, Any]:
    """A configuration with Mamba-2 layers and one of attention."""
    sizes = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 32}
    layers = ["mamba", "attention"] * 2
    no_experts = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 512}
    return text("granitemoehybrid", sections, layer_types=layers, **sizes, **no_experts)


def speech(folder: Path, encoder: str = "parakeet", sections: dict[str, Any] | None = None) -> dict[str, Any]:
    """A SALM configuration whose folders hold nothing but configurations."""
    from transformers import LlamaConfig, ParakeetEncoderConfig, WhisperConfig

    LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    ).save_pretrained(folder / "llm")
    small: dict[str, Any] = {"num_hidden_layers": 4, "layerdrop": 0.0}
    dropouts = dict.fromkeys(("dropout", "activation_dropout", "attention_dropout", "dropout_positions"), 0.0)
    asr = (
        ParakeetEncoderConfig(**small, **dropouts)
        if encoder == "parakeet"
        else WhisperConfig(dropout=0.0, encoder_layers=4)
    )
    asr.save_pretrained(folder / "asr")
    return {
        "model": {
            "pretrained_llm": str(folder / "llm"),
            "pretrained_asr": str(folder / "asr"),
            "prompt_format": "chatml",
            "audio_locator_tag": "<|audio|>",
            "pretrained_weights": False,
            "perception": {"modality_adapter": {"stack_frames": 4 if encoder == "whisper" else 1}},
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
        },
        "trainer": {
            "devices": 2,
            "accelerator": "cpu",
            "max_steps": 10,
            "gradient_clip_val": 1.0,
            "strategy": {"_target_": "shoal.train.strategy.AutomodelParallelStrategy"},
            **(sections or {}),
        },
        "data": {"train_ds": {"sample_rate": 16000, "batch_size": 2, "cuts_path": "cuts.jsonl.gz"}},
    }
