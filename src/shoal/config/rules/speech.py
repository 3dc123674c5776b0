"""Rules on the model and data sections of the speech recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.config.facts import Facts, llm_folder
from shoal.config.rules.base import Broken, Rule, size_key
from shoal.config.speech import DatasetConfig, InputConfig, SpeechConfig

_ATTENTION_PACKAGES = {"te": "transformer_engine", "flash": "flash_attn"}

_SOURCE_KEYS: Mapping[str, tuple[str, ...]] = {
    "lhotse": ("cuts_path",),
    "lhotse_as_conversation": ("cuts_path", "shar_path", "manifest_filepath"),
    "lhotse_shar": ("shar_path",),
    "nemo": ("manifest_filepath",),
    "nemo_tarred": ("manifest_filepath", "tarred_audio_filepaths"),
    "multimodal_conversation": ("manifest_filepath",),
    "txt": ("paths",),
    "group": ("input_cfg",),
}
"""What each type of source reads; one of them must be there, for nemo_tarred all."""


def data_sets(config: SpeechConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Yields every data set that is loaded, with its key; the block above named sets is none itself."""
    for name in ("train_ds", "validation_ds", "test_ds", "predict_ds"):
        block = getattr(config.data, name)
        if block is None:
            continue
        if block.datasets:
            yield from ((f"data.{name}.datasets.{key}", item) for key, item in block.datasets.items())
        else:
            yield f"data.{name}", block


def _sources(entries: tuple[InputConfig, ...] | None, path: str) -> Iterator[tuple[str, InputConfig]]:
    for index, entry in enumerate(entries or ()):
        yield f"{path}.{index}", entry
        yield from _sources(entry.input_cfg, f"{path}.{index}.input_cfg")


def _llm_folder_has_config(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    folder = llm_folder(config)
    if folder is not None and facts.shape is None:
        yield Broken("model.pretrained_llm", str(folder), "a model folder with a readable config.json")


def _asr_folder_has_config(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    folder = Path(config.model.pretrained_asr)
    if folder.is_dir() and not (folder / "config.json").is_file():
        yield Broken("model.pretrained_asr", str(folder), "a model folder with a config.json")


def _patterns_compile(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    for name in ("freeze_params", "prevent_freeze_params"):
        for index, pattern in enumerate(getattr(config.model, name)):
            try:
                re.compile(pattern)
            except re.error as error:
                limit = f"a regular expression ({error})"
                yield Broken(f"model.{name}.{index}", pattern, limit)


def _attention_installed(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    attn = config.model.automodel_backend.attn
    package = _ATTENTION_PACKAGES.get(attn)
    if config.model.packed_sequences and attn == "flash":
        package = None  # packs take the kernel that comes with torch
    if package is not None and find_spec(package) is None:
        yield Broken(
            "model.automodel_backend.attn", attn, f"a kernel of an installed package; {package} is not"
        )


def _packs_need_borders(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    attn = config.model.automodel_backend.attn
    if config.model.packed_sequences and attn == "eager":
        limit = "auto, sdpa, flash or te: attention that is told where conversations end"
        yield Broken("model.automodel_backend.attn", attn, limit)


def _te_needs_packing(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    if config.model.automodel_backend.attn == "te" and not config.model.packed_sequences:
        yield Broken("model.automodel_backend.attn", "te", "auto, sdpa or flash for padded batches")


def _cp_needs_packing(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    cp_size = config.trainer.strategy.sizes.cp_size
    if cp_size > 1 and not config.model.packed_sequences:
        yield Broken(
            size_key(config, "cp_size"), cp_size, "1 for padded batches: their pads would be attended"
        )


def _eager_has_no_cp(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    attn, cp_size = config.model.automodel_backend.attn, config.trainer.strategy.sizes.cp_size
    if cp_size > 1 and attn == "eager":
        yield Broken("model.automodel_backend.attn", attn, "auto, sdpa, flash or te with cp_size > 1")


def _locator_tag(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    tag = config.model.audio_locator_tag
    if not tag.strip():
        yield Broken("model.audio_locator_tag", tag, "a text that is not blank")
    for path, block in data_sets(config):
        places: list[tuple[str, DatasetConfig | InputConfig]] = [(path, block)]
        places += _sources(block.input_cfg, f"{path}.input_cfg")
        for place, item in places:
            if item.audio_locator_tag not in (None, tag):
                key = f"{place}.audio_locator_tag"
                yield Broken(key, item.audio_locator_tag, f"model.audio_locator_tag = {tag}")


def _prompt_format(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    ours = config.model.prompt_format
    for path, block in data_sets(config):
        if block.prompt_format not in (None, ours):
            yield Broken(f"{path}.prompt_format", block.prompt_format, f"model.prompt_format = {ours}")


def _has_source(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    names = ("input_cfg", "cuts_path", "shar_path", "manifest_filepath")
    for path, block in data_sets(config):
        given = [name for name in names if getattr(block, name)]
        if len(given) != 1:
            limit = f"exactly one of {', '.join(names)}" + (
                f"; {', '.join(given)} are given" if given else ""
            )
            yield Broken(path, None, limit)


def _source_is_complete(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    for path, block in data_sets(config):
        for place, entry in _sources(block.input_cfg, f"{path}.input_cfg"):
            keys = _SOURCE_KEYS[entry.type]
            given = [key for key in keys if getattr(entry, key)]
            wanted = len(keys) if entry.type == "nemo_tarred" else 1
            if len(given) < wanted:
                yield Broken(
                    place, entry.type, f"{' and '.join(keys)} for type {entry.type}", f"add {keys[-1]}"
                )
            for key in _ALL_SOURCE_KEYS - set(keys):
                if getattr(entry, key):
                    limit = f"one of {', '.join(keys)} for type {entry.type}"
                    yield Broken(f"{place}.{key}", getattr(entry, key), limit, f"delete {key}")


_ALL_SOURCE_KEYS = {key for keys in _SOURCE_KEYS.values() for key in keys}


def _weights_agree(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    def groups(
        entries: tuple[InputConfig, ...] | None, path: str
    ) -> Iterator[tuple[str, tuple[InputConfig, ...]]]:
        if entries:
            yield path, entries
            for index, entry in enumerate(entries):
                yield from groups(entry.input_cfg, f"{path}.{index}.input_cfg")

    for path, block in data_sets(config):
        for place, entries in groups(block.input_cfg, f"{path}.input_cfg"):
            weighted = sum(entry.weight is not None for entry in entries)
            if 0 < weighted < len(entries):
                yield Broken(place, weighted, f"weights on all {len(entries)} entries of a group, or on none")


def _batch_has_limit(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    names = ("batch_size", "batch_duration", "batch_tokens", "bucket_batch_size")
    for path, block in data_sets(config):
        if all(getattr(block, name) is None for name in names):
            yield Broken(f"{path}.batch_size", None, f"one of {', '.join(names)}")


def _buckets(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    for path, block in data_sets(config):
        bins, sizes = block.bucket_duration_bins, block.bucket_batch_size
        if bins is not None and any(a >= b for a, b in zip(bins, bins[1:], strict=False)):
            yield Broken(f"{path}.bucket_duration_bins", bins, "upper bounds that increase")
        if sizes is not None and (bins is None or len(sizes) != len(bins)):
            count = "no bins" if bins is None else f"{len(bins)} bins"
            limit = f"one size per entry of bucket_duration_bins; there are {count}"
            yield Broken(f"{path}.bucket_batch_size", sizes, limit)


def _ranges(config: SpeechConfig, facts: Facts) -> Iterator[Broken]:
    for path, block in data_sets(config):
        for noun in ("duration", "tokens"):
            low: Any = getattr(block, f"min_{noun}")
            high: Any = getattr(block, f"max_{noun}")
            if low is not None and high is not None and low > high:
                yield Broken(f"{path}.min_{noun}", low, f"at most max_{noun} = {high}")


SPEECH_RULES: tuple[Rule, ...] = (
    Rule(
        "llm-folder-has-config",
        "speech",
        ("model.pretrained_llm",),
        _llm_folder_has_config,
        "a local model is described by its config.json",
        "check the folder",
    ),
    Rule(
        "asr-folder-has-config",
        "speech",
        ("model.pretrained_asr",),
        _asr_folder_has_config,
        "a local model is described by its config.json",
        "check the folder",
    ),
    Rule(
        "freeze-pattern",
        "speech",
        ("model.freeze_params", "model.prevent_freeze_params"),
        _patterns_compile,
        "the lists hold regular expressions",
        "fix the pattern",
    ),
    Rule(
        "attention-installed",
        "speech",
        ("model.automodel_backend",),
        _attention_installed,
        "a kernel that is named and missing is an error, not another kernel",
        "model.automodel_backend.attn: auto",
    ),
    Rule(
        "packed-attention",
        "speech",
        ("model.packed_sequences", "model.automodel_backend"),
        _packs_need_borders,
        "packed conversations do not see each other",
        "model.automodel_backend.attn: auto",
    ),
    Rule(
        "te-needs-packing",
        "speech",
        ("model.packed_sequences", "model.automodel_backend"),
        _te_needs_packing,
        "Transformer Engine's kernel is called for packed conversations",
        "model.packed_sequences: true",
    ),
    Rule(
        "cp-needs-packing",
        "speech",
        ("trainer.strategy", "model.packed_sequences"),
        _cp_needs_packing,
        "context parallelism cuts packed documents, not padded rows",
        "model.packed_sequences: true",
    ),
    Rule(
        "cp-needs-fused-attention",
        "speech",
        ("trainer.strategy", "model.automodel_backend"),
        _eager_has_no_cp,
        "the ring merges partial softmax sums, which eager attention does not give",
        "model.automodel_backend.attn: auto",
    ),
    Rule(
        "audio-locator-tag",
        "speech",
        ("model.audio_locator_tag", "data"),
        _locator_tag,
        "one tag marks the places of audio",
        "audio_locator_tag: ${model.audio_locator_tag}",
    ),
    Rule(
        "prompt-format",
        "speech",
        ("model.prompt_format", "data"),
        _prompt_format,
        "a model is trained on one prompt format",
        "prompt_format: ${model.prompt_format}",
    ),
    Rule("data-source", "speech", ("data",), _has_source, "a data set reads one source", "give one"),
    Rule(
        "source-keys",
        "speech",
        ("data",),
        _source_is_complete,
        "each type of source reads its own keys",
        "see the types of input_cfg",
    ),
    Rule(
        "source-weights",
        "speech",
        ("data",),
        _weights_agree,
        "a missing weight has no meaning beside given ones",
        "give every entry a weight",
    ),
    Rule(
        "batch-limit",
        "speech",
        ("data",),
        _batch_has_limit,
        "a batch without a limit holds the whole data",
        "batch_size: 4",
    ),
    Rule(
        "bucket-bounds", "speech", ("data",), _buckets, "buckets are intervals of length", "sort the bounds"
    ),
    Rule("length-range", "speech", ("data",), _ranges, "an empty range keeps nothing", "swap the bounds"),
)
