"""Makes the quickstart's starting point: Whisper's decoder as a GPT-2, and a projection that fits it.

A layer of Whisper's decoder is a GPT-2 layer with a cross-attention in the middle. It becomes two GPT-2 layers here:
one with the self-attention, one with the cross-attention and the feed-forward. In a causal language model both attend
to everything before them, audio and text alike, so this is not Whisper any more, and untrained it babbles. Training
has to teach it to tell audio from text and to write plain words.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, WhisperForConditionalGeneration
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.whisper.modeling_whisper import WhisperAttention, WhisperDecoderLayer
from transformers.pytorch_utils import Conv1D

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
_WHISPER_START, _WHISPER_END = (
    50257,
    50256,
)  # <|startoftranscript|>, <|endoftext|> of the English-only vocabulary
# The user's audio, then the answer between two marks; nothing else stands in a prompt.
_TEMPLATE = (
    "{% for m in messages %}"
    f"{{% if m['role'] == 'assistant' %}}{START}{{{{ m['content'] }}}}{END}"
    "{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)
# Embeddings of audio are this much larger than the encoder's frames, so that what the layers add to them on the way
# up is small beside them: every layer's keys and values then read nearly what Whisper's read, the encoder's output.
_AUDIO_GAIN = 10.0


def write_starting_point(
    whisper: WhisperForConditionalGeneration,
    tokenizer_file: Path,
    num_pieces: int,
    stack_frames: int,
    language_model: Path,
    checkpoint: Path,
) -> None:
    """Write the language model's folder, and a checkpoint of the whole speech model.

    Args:
        whisper: An English-only Whisper.
        tokenizer_file: Its `tokenizer.json`.
        num_pieces: Size of the vocabulary: the first pieces in the order of their merges, which is that of their
            frequency, so the first merges alone are a byte-pair encoding too.
        stack_frames: Encoder frames that the projection turns into one embedding.
        language_model: Folder for the GPT-2 and its tokenizer, in transformers' layout.
        checkpoint: The file for `model.init_from_checkpoint`.
    """
    tokenizer = _short_tokenizer(tokenizer_file, num_pieces)
    model = _causal_decoder(whisper, num_pieces, tokenizer)
    model.save_pretrained(language_model)
    tokenizer.save_pretrained(language_model)
    tensors: dict[str, Tensor] = {f"llm.{name}": tensor for name, tensor in model.named_parameters()}
    encoder = whisper.model.encoder
    tensors |= {f"perception.encoder.{name}": tensor for name, tensor in encoder.named_parameters()}
    tensors |= _mean_projection(encoder.config.d_model, stack_frames)
    partial = checkpoint.with_name(f"partial-{checkpoint.name}")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(checkpoint)


def _mean_projection(width: int, stack_frames: int) -> dict[str, Tensor]:
    """The projection that gives the mean of the stacked frames, times the gain."""
    eye = torch.eye(width) * (_AUDIO_GAIN / stack_frames)
    return {"perception.proj.weight": eye.repeat(1, stack_frames), "perception.proj.bias": torch.zeros(width)}


def _short_tokenizer(tokenizer_file: Path, num_pieces: int) -> PreTrainedTokenizerFast:
    whole = json.loads(tokenizer_file.read_text(encoding="utf-8"))["model"]
    pieces = {piece: index for piece, index in whole["vocab"].items() if index < num_pieces}
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in whole["merges"]]
    merges = [pair for pair in pairs if "".join(pair) in pieces]
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (START, END, PAD)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = _TEMPLATE
    return fast


@torch.no_grad()
def _causal_decoder(
    whisper: WhisperForConditionalGeneration, num_pieces: int, tokenizer: PreTrainedTokenizerFast
) -> GPT2LMHeadModel:
    decoder = whisper.model.decoder
    start, end, pad = (tokenizer.convert_tokens_to_ids(token) for token in (START, END, PAD))
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=decoder.embed_positions.num_embeddings,
        n_embd=decoder.config.d_model,
        n_layer=2 * decoder.config.decoder_layers,
        n_head=decoder.config.decoder_attention_heads,
        n_inner=decoder.config.decoder_ffn_dim,
        activation_function=decoder.config.activation_function,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(
            0
        )  # for what Whisper does not fill: the first half of the text layers' feed-forwards
        model = GPT2LMHeadModel(config)
    body = model.transformer
    body.wte.weight[:num_pieces] = decoder.embed_tokens.weight[:num_pieces]
    body.wte.weight[start] = decoder.embed_tokens.weight[_WHISPER_START]
    body.wte.weight[end] = decoder.embed_tokens.weight[_WHISPER_END]
    body.wpe.weight.copy_(decoder.embed_positions.weight)
    frame_scale = float(whisper.model.encoder.layer_norm.weight.mean())
    for index, layer in enumerate(decoder.layers):
        _fill_text_layer(body.h[2 * index], layer)
        _fill_audio_layer(body.h[2 * index + 1], layer, frame_scale)
    body.ln_f.load_state_dict(decoder.layer_norm.state_dict())
    return model


def _fill_text_layer(block: GPT2Block, layer: WhisperDecoderLayer) -> None:
    """Self-attention, and a feed-forward that adds nothing until it is trained."""
    attention = layer.self_attn
    block.ln_1.load_state_dict(layer.self_attn_layer_norm.state_dict())
    _fill_attention(block, attention, attention.q_proj.weight, attention.q_proj.bias, scale=1.0)
    nn.init.zeros_(block.mlp.c_proj.weight)


def _fill_audio_layer(block: GPT2Block, layer: WhisperDecoderLayer, frame_scale: float) -> None:
    """Cross-attention and feed-forward.

    In GPT-2 one norm serves queries, keys and values; in Whisper only queries have one, and keys and values read the
    encoder's output as it is. So the norm here has no affine part: the queries take theirs into their weights, and
    keys and values take the scale that normalising removes from the encoder's frames.
    """
    norm, attention = layer.encoder_attn_layer_norm, layer.encoder_attn
    query = attention.q_proj.weight * norm.weight
    bias = attention.q_proj.bias + attention.q_proj.weight @ norm.bias
    nn.init.ones_(block.ln_1.weight)
    nn.init.zeros_(block.ln_1.bias)
    _fill_attention(block, attention, query, bias, scale=frame_scale)
    block.ln_2.load_state_dict(layer.final_layer_norm.state_dict())
    _fill_linear(block.mlp.c_fc, layer.fc1)
    _fill_linear(block.mlp.c_proj, layer.fc2)


def _fill_attention(
    block: GPT2Block, source: WhisperAttention, query: Tensor, query_bias: Tensor, scale: float
) -> None:
    """GPT-2 has one transposed matrix for query, key and value; Whisper's keys have no bias."""
    weights = [query, scale * source.k_proj.weight, scale * source.v_proj.weight]
    biases = [query_bias, torch.zeros_like(query_bias), source.v_proj.bias]
    block.attn.c_attn.weight.copy_(torch.cat(weights).T)
    block.attn.c_attn.bias.copy_(torch.cat(biases))
    _fill_linear(block.attn.c_proj, source.out_proj)


def _fill_linear(target: Conv1D, source: nn.Linear) -> None:
    """GPT-2's linear layers keep their matrix transposed."""
    target.weight.copy_(source.weight.T)
    target.bias.copy_(source.bias)
