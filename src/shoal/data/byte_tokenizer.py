"""A tokenizer with one token per byte, which needs no file: for small models trained from nothing."""

from __future__ import annotations

from typing import Any

END, PAD = "<|end|>", "<|pad|>"


def byte_tokenizer() -> Any:
    """Returns a transformers tokenizer of 258 tokens: the 256 bytes, an end token and a padding token.

    Every text has exactly one encoding, as long as its UTF-8, and decodes to itself.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END, PAD)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD
    )
