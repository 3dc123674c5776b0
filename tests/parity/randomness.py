"""Models with dropout in every place a module can have it, and the same documents in many compositions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.config.seeds import derive_seed
from shoal.config.speech import ModalityAdapterConfig, PerceptionConfig, SpecAugmentConfig
from shoal.data.text import Tokens
from shoal.data.text_batches import packed, padded
from shoal.kernels.attention_hf import PACKED_ATTENTION, register_attention
from shoal.models.causal_lm import CausalLM
from shoal.speech.perception import AudioPerception
from shoal.speech.salm import SALM
from tests.families import VOCAB, tiny_lm
from tests.parity.harness import Case
from tests.tiny import PLACEHOLDER, ragged_micro_batch, tiny_encoder

PAD = 3
DROPOUTS = {
    "phi3": {"resid_pdrop": 0.2},
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.0},
    "llama": {},
}
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.3, "target_modules": "all-linear"}
NUM_DOCUMENTS = 12


def language_model(case: Case, *, packs: bool = False) -> CausalLM:
    """A tiny LLM with dropout on its residual stream; GPT-2 has it behind the embedding, too."""
    llm: Any = tiny_lm(case.family, **DROPOUTS[case.family])
    if packs:
        register_attention()
        llm.set_attn_implementation(PACKED_ATTENTION)
    return CausalLM(llm)


def documents(step: int) -> list[tuple[str, Tokens]]:
    """Names and tokens of the documents of a step, of 4 to 17 tokens each."""
    generator = torch.Generator().manual_seed(100 + step)
    found = []
    for number in range(NUM_DOCUMENTS):
        length = int(torch.randint(4, 18, (), generator=generator))
        ids = torch.randint(4, VOCAB, (length,), generator=generator)
        answer = int(torch.randint(1, length, (), generator=generator))
        mask = torch.arange(length) >= length - answer
        found.append((f"{step}-{number}", Tokens(ids.numpy(), mask.numpy())))
    return found


def draw(case: Case, step: int, *, rows: int = 3, packs: bool = False) -> list[dict[str, Any]]:
    """The documents of a step in micro-batches of `rows` of them, as rows or as packs."""
    batches = []
    whole = documents(step)
    for start in range(0, NUM_DOCUMENTS, rows):
        names, tokens = zip(*whole[start : start + rows], strict=True)
        size = sum(len(document.input_ids) for document in tokens) + 5
        seeds = [derive_seed("sample", 0, 0, name) for name in names]
        batches.append(
            {
                "audios": torch.zeros(0, 0),
                "audio_lens": torch.zeros(0, dtype=torch.int64),
                **(packed(tokens, size, PAD) if packs else padded(tokens, PAD)),
                "sample_ids": list(names),
                "sample_seeds": torch.tensor(seeds),
                "is_empty": False,
            }
        )
    return batches


def text(family: str, *, rows: int = 3, packs: bool = False, **changes: Any) -> Case:
    """The same numbers are due for every `rows` and `packs`."""
    return Case(
        partial(language_model, packs=packs), partial(draw, rows=rows, packs=packs), family, **changes
    )


def speech_model(case: Case) -> SALM:
    """A tiny SALM with SpecAugment, and dropout in the speech encoder, before the projection, and in the LLM."""
    settings = PerceptionConfig(
        modality_adapter=ModalityAdapterConfig(stack_frames=4),
        spec_augment=SpecAugmentConfig(freq_masks=2, time_masks=2, freq_width=20, time_width=20),
    )
    encoder: Any = tiny_encoder("whisper")
    for layer in encoder.layers:
        layer.fc2 = nn.Sequential(layer.fc2, nn.Dropout(0.2))
    llm = tiny_lm("phi3", **DROPOUTS["phi3"])
    if case.packed:
        register_attention()
        llm.set_attn_implementation(PACKED_ATTENTION)
    perception = AudioPerception(encoder, None, settings, llm.config.hidden_size)
    perception.proj = nn.Sequential(nn.Dropout(0.3), perception.proj)
    return SALM(llm, perception, placeholder_id=PLACEHOLDER, packed=case.packed)


def draw_speech(case: Case, step: int, *, rows: int = 2) -> list[dict[str, Any]]:
    """Eight conversations with a clip each, of up to three windows of the encoder, two or more to a micro-batch."""
    generator = torch.Generator().manual_seed(200 + step)
    singles = [ragged_micro_batch(generator, number, rows=1) for number in range(8)]
    return [join(singles[start : start + rows]) for start in range(0, 8, rows)]


def join(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """One micro-batch of several."""
    return {
        "audios": _stacked([batch["audios"] for batch in batches], 0.0),
        "audio_lens": torch.cat([batch["audio_lens"] for batch in batches]),
        "input_ids": _stacked([batch["input_ids"] for batch in batches], PAD),
        "loss_mask": _stacked([batch["loss_mask"] for batch in batches], False),
        "text_lens": torch.cat([batch["text_lens"] for batch in batches]),
        "sample_ids": [name for batch in batches for name in batch["sample_ids"]],
        "sample_seeds": torch.cat([batch["sample_seeds"] for batch in batches]),
        "is_empty": False,
    }


def _stacked(parts: list[torch.Tensor], value: float) -> torch.Tensor:
    width = max(part.shape[1] for part in parts)
    wide = [nn.functional.pad(part, (0, width - part.shape[1]), value=value) for part in parts]
    return torch.cat(wide)


def speech(*, rows: int = 2, **changes: Any) -> Case:
    """The same numbers are due for every `rows`, packed or not."""
    return Case(speech_model, partial(draw_speech, rows=rows), "phi3", perception=True, **changes)
