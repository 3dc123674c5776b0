"""Tiny models, a tiny tokenizer and ragged micro-batches, for tests in one process and on ranks.

Everything is random but repeatable, builds in milliseconds and needs no file.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    ParakeetEncoder,
    ParakeetEncoderConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from shoal.config.speech import ModalityAdapterConfig, PerceptionConfig
from shoal.data.batch import empty_micro_batch as data_empty_micro_batch
from shoal.speech.perception import AudioPerception
from shoal.speech.salm import SALM

HIDDEN = 32
VOCAB = 64
PLACEHOLDER = 70
"""Beyond the vocabulary, as a locator tag added to a tokenizer without resizing the embedding is."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = """
the a one two three four five six seven eight nine ten cat dog sat ran on mat say what you hear please
transcribe system user assistant is not and of to in it was for with as his her they be at have this
"""


def _seeded(build: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def tiny_llama(dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Returns a two-layer Llama of width 32 over 64 tokens."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
    }
    config = LlamaConfig(**{**settings, **changes})
    return _seeded(lambda: LlamaForCausalLM._from_config(config, dtype=dtype), seed)


def tiny_whisper(dtype: torch.dtype = torch.float32, *, seed: int = 1, **changes: Any) -> WhisperEncoder:
    """Returns a two-layer Whisper encoder of width 16 with windows of 1 s."""
    settings: dict[str, Any] = {
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_layers": 1,
        "num_mel_bins": 80,
        "max_source_positions": 50,
        "dropout": 0.0,
        "init_std": 0.2,
        "attn_implementation": "sdpa",
    }
    config = WhisperConfig(**{**settings, **changes})
    return _seeded(lambda: WhisperEncoder._from_config(config, dtype=dtype), seed)


def tiny_parakeet(dtype: torch.dtype = torch.float32, *, seed: int = 1, **changes: Any) -> ParakeetEncoder:
    """Returns a two-layer FastConformer of width 16 without dropout."""
    settings: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "conv_kernel_size": 5,
        "subsampling_conv_channels": 8,
        "dropout": 0.0,
        "activation_dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        "initializer_range": 0.2,
        "attn_implementation": "sdpa",
    }
    config = ParakeetEncoderConfig(**{**settings, **changes})
    return _seeded(lambda: ParakeetEncoder._from_config(config, dtype=dtype), seed)


def tiny_encoder(kind: Literal["whisper", "parakeet"], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns a tiny encoder of either family."""
    return tiny_whisper(dtype) if kind == "whisper" else tiny_parakeet(dtype)


def tiny_salm(
    encoder: Literal["whisper", "parakeet"] = "whisper",
    dtype: torch.dtype = torch.float32,
    *,
    perception: PerceptionConfig | None = None,
    chunk_seconds: float | None = None,
    **llama: Any,
) -> SALM:
    """Returns a SALM in training mode; Whisper's 50 Hz are stacked to 12.5 Hz. The weights are repeatable."""
    if perception is None:
        stacked = ModalityAdapterConfig(stack_frames=4 if encoder == "whisper" else 1)
        perception = PerceptionConfig(modality_adapter=stacked)

    def build() -> SALM:
        front = AudioPerception(
            tiny_encoder(encoder, dtype), None, perception, HIDDEN, chunk_seconds=chunk_seconds
        )
        return SALM(tiny_llama(dtype, **llama), front, placeholder_id=PLACEHOLDER)

    return _seeded(build, 2).train()


def tiny_tokenizer(*, pad_is_eos: bool = False, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """Returns a word-level tokenizer of less than 64 tokens with ChatML markers."""
    special = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "\n"]
    vocab = {word: index for index, word in enumerate(special + _WORDS.split())}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>" if pad_is_eos else "<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "\n"],
    )
    fast.chat_template = chat_template
    return fast


def ragged_micro_batch(
    generator: torch.Generator, index: int, *, rows: int = 2, without_audio: bool = False
) -> dict[str, Any]:
    """Returns a micro-batch of rows with different text lengths, clip lengths and supervised counts."""
    lens = torch.randint(6, 16, (rows,), generator=generator)
    ids = torch.randint(4, VOCAB, (rows, int(lens.max())), generator=generator)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    columns = torch.arange(ids.shape[1])
    for row, length in enumerate(lens.tolist()):
        answer = int(torch.randint(1, length - 3, (1,), generator=generator))
        mask[row] = (columns >= length - answer) & (columns < length)
        if not without_audio:
            ids[row, 1] = PLACEHOLDER
    ids[columns >= lens[:, None]] = 3
    clips = 0 if without_audio else rows
    audio_lens = torch.randint(4000, 24000, (clips,), generator=generator)
    audios = _noise(generator, audio_lens)
    return {
        "audios": audios,
        "audio_lens": audio_lens,
        "input_ids": ids,
        "loss_mask": mask,
        "text_lens": lens,
        "sample_ids": [f"clip-{index}-{row}" for row in range(rows)],
        "sample_seeds": torch.randint(0, 2**31 - 1, (rows,), generator=generator),
        "is_empty": False,
    }


def _noise(generator: torch.Generator, audio_lens: Tensor) -> Tensor:
    if len(audio_lens) == 0:
        return torch.zeros(0, 0)
    width = int(audio_lens.max())
    noise = 0.1 * torch.randn(len(audio_lens), width, generator=generator)
    return noise * (torch.arange(width) < audio_lens[:, None])


def empty_micro_batch() -> dict[str, Any]:
    """Returns the zero-weight micro-batch that keeps a rank without data in step with the others."""
    return data_empty_micro_batch(pad_id=3)


def ragged_micro_batches(n: int, seed: int, *, without_audio: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Returns n micro-batches with unequal rows, lengths and supervised counts; some may be without audio."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ragged_micro_batch(generator, index, rows=1 + index % 3, without_audio=index in without_audio)
        for index in range(n)
    ]
