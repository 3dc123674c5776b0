"""Rules on the sections of the LLM recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from shoal.config.facts import Facts
from shoal.config.llm import LLMConfig
from shoal.config.rules.base import Broken, Check, Rule, layout_of
from shoal.config.rules.trainer import STORED_DTYPES
from shoal.config.text import TextDatasetConfig


def _packing_needs_one_row(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    rows = config.step_scheduler.local_batch_size
    if config.packed_sequence.packed_sequence_size > 0 and rows != 1:
        yield Broken(
            "step_scheduler.local_batch_size", rows, "1 with packed sequences: a pack is a batch already"
        )


def _batch_divides(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    steps, dp_size = config.step_scheduler, layout_of(config, facts.world_size).dp_size
    if dp_size is None or steps.global_batch_size % (steps.local_batch_size * dp_size) == 0:
        return
    rows = steps.local_batch_size * dp_size
    limit = f"a multiple of local_batch_size * dp_size = {rows}"
    repair = f"step_scheduler.global_batch_size: {-(-steps.global_batch_size // rows) * rows}"
    yield Broken("step_scheduler.global_batch_size", steps.global_batch_size, limit, repair)


def _one_model_source(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    model = config.model
    if model is None:
        if facts.options.to_train:
            yield Broken("model", None, "a model to train", "model.pretrained_model_name_or_path: FOLDER")
        return
    given = [key for key in ("pretrained_model_name_or_path", "config") if getattr(model, key) is not None]
    if len(given) != 1:
        limit = "one of model.pretrained_model_name_or_path (weights) and model.config (random weights)"
        yield Broken("model", tuple(given) or None, limit, "give exactly one of them")
    if isinstance(model.config, Mapping) and "model_type" not in model.config:
        yield Broken("model.config", dict(model.config), "fields with a model_type", "model_type: llama")


def _one_attention(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    model = config.model
    if model is not None and model.attn_implementation != "auto" and model.backend.attn != "auto":
        limit = "auto when model.backend.attn chooses the kernel"
        yield Broken("model.attn_implementation", model.attn_implementation, limit)


def _transformer_engine_installed(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    if config.model is not None and config.model.backend.attn == "te" and not find_spec("transformer_engine"):
        limit = "a kernel of an installed package; transformer_engine is not"
        yield Broken("model.backend.attn", "te", limit)


def _packs_need_borders(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    model = config.model
    if model is None or config.packed_sequence.packed_sequence_size == 0:
        return
    limit = "auto, or a kernel that is told where documents end"
    if model.attn_implementation not in ("auto", "shoal", "flash_attention_2"):
        yield Broken(
            "model.attn_implementation", model.attn_implementation, f"{limit}: shoal, flash_attention_2"
        )
    if model.backend.attn not in ("auto", "sdpa", "flash", "te"):
        yield Broken("model.backend.attn", model.backend.attn, f"{limit}: sdpa, flash or te")


def _eager_has_no_cp(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    model, cp_size = config.model, config.distributed.sizes.cp_size
    if model is None or cp_size == 1:
        return
    limit = f"another kernel with cp_size = {cp_size}: its scores would miss the tokens of other ranks"
    for key, value in (
        ("attn_implementation", model.attn_implementation),
        ("backend.attn", model.backend.attn),
    ):
        if value == "eager":
            yield Broken(f"model.{key}", value, limit, f"model.{key}: auto")


def _data_to_train_on(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    if facts.options.to_train and config.dataset is None:
        yield Broken("dataset", None, "a data set to train on", "dataset: {type: chat, path: train.jsonl}")


def _datasets(config: LLMConfig) -> Iterator[tuple[str, TextDatasetConfig]]:
    if config.dataset is not None:
        yield "dataset", config.dataset
    for name, dataset in config.validation_datasets.items():
        yield "validation_dataset" if name == "default" else f"validation_dataset_{name}", dataset


def _columns_are_known(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    for key, dataset in _datasets(config):
        columns = set(dataset.column_mapping)
        if dataset.type != "instruction":
            if columns:
                limit = "given only with type: instruction"
                yield Broken(f"{key}.column_mapping", dict(dataset.column_mapping), limit, "delete it")
        elif "answer" not in columns or len(columns) < 2 or columns - {"context", "question", "answer"}:
            limit = "answer, and context or question or both, each with the name of its column"
            yield Broken(f"{key}.column_mapping", dict(dataset.column_mapping), limit)


def _tokens_have_no_rows(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    for key, dataset in _datasets(config):
        several = dataset.type == "tokens" and not isinstance(dataset.path, str)
        if several:
            yield Broken(f"{key}.path", dataset.path, "one folder with type: tokens", f"{key}.path: FOLDER")


def _truncation_has_length(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    for key, dataset in _datasets(config):
        if dataset.truncation and dataset.seq_length is None:
            yield Broken(
                f"{key}.truncation", True, "with seq_length, the longest document", f"{key}.seq_length: 2048"
            )
        if dataset.truncation and dataset.type in ("text", "tokens"):
            limit = f"false with type: {dataset.type}, whose documents are split into pieces of seq_length"
            yield Broken(f"{key}.truncation", True, limit, f"{key}.truncation: false")


def _dtype_fits_precision(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    dtype = config.model.torch_dtype if config.model is not None else None
    if dtype == "float16":
        yield Broken(
            "model.torch_dtype",
            dtype,
            "not float16, whose gradients need a scaler",
            "model.torch_dtype: bfloat16",
        )
    elif dtype not in (None, "auto") and config.precision is not None:
        stored = STORED_DTYPES[config.precision]
        if dtype != stored:
            limit = f"{stored}, the dtype that precision: {config.precision} stores weights in"
            yield Broken(
                "model.torch_dtype", dtype, limit, "give only one of model.torch_dtype and precision"
            )


def _ranks_draw_alike(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    if not config.rng.ranked:
        yield Broken(
            "rng.ranked", False, "true: each micro-batch has its own numbers, on whatever rank it runs"
        )


def _backend_exists(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    if facts.options.to_train and config.dist_env.backend == "nccl" and facts.accelerators == 0:
        yield Broken("dist_env.backend", "nccl", "gloo or absent: this machine has no GPU")


def _adapters_have_targets(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    peft = config.peft
    if peft is not None and not peft.match_all_linear and not peft.target_modules:
        limit = "names of modules, or peft.match_all_linear: true"
        yield Broken("peft.target_modules", peft.target_modules, limit)
    if peft is not None and peft.match_all_linear and peft.target_modules:
        limit = "absent with peft.match_all_linear: true"
        yield Broken("peft.target_modules", peft.target_modules, limit, "keep one of the two")


def _schedule_fits(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    schedule = config.lr_scheduler
    if schedule is None:
        return
    warmup, decay, name = schedule.lr_warmup_steps, schedule.lr_decay_steps, "lr_decay_steps"
    if decay is None:
        decay, name = config.step_scheduler.max_steps, "step_scheduler.max_steps"
    if warmup is not None and decay is not None and warmup >= decay:
        limit = f"less than {name} = {decay}"
        yield Broken("lr_scheduler.lr_warmup_steps", warmup, limit, "shorten the warm-up")
    if (schedule.lr_decay_style == "WSD") != (schedule.wsd_decay_steps is not None):
        limit = "given with lr_decay_style: WSD, and only with it"
        yield Broken("lr_scheduler.wsd_decay_steps", schedule.wsd_decay_steps, limit, "wsd_decay_steps: 100")


def _only_training_data_is_shuffled(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    if config.validation_dataloader.shuffle:
        yield Broken("validation_dataloader.shuffle", True, "false: all of it is seen every time")
    if config.validation_dataloader.drop_last:
        yield Broken("validation_dataloader.drop_last", True, "false: all of it is seen every time")
    if config.dataloader.batch_size is not None:
        limit = "absent: step_scheduler.local_batch_size is the batch size of training"
        yield Broken("dataloader.batch_size", config.dataloader.batch_size, limit, "delete it")


def _ci_is_not_ours(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    if config.ci is not None:
        yield Broken(
            "ci", dict(config.ci), "settings of AutoModel's own tests, which say nothing about a run"
        )


def _rule(
    identifier: str, keys: tuple[str, ...], check: Check, why: str, repair: str, *, notice: bool = False
) -> Rule:
    return Rule(identifier, "llm", keys, check, why, repair, notice=notice)


_DATA_KEYS = ("dataset", "validation_datasets")


def _modes_are_inductors(config: LLMConfig, facts: Facts) -> Iterator[Broken]:
    section = config.compile
    if section.backend not in (None, "inductor") and section.mode != "default":
        yield Broken("compile.mode", section.mode, f"default with compile.backend = {section.backend}")


LLM_RULES: tuple[Rule, ...] = (
    _rule(
        "llm-model", ("model",), _one_model_source, "weights or an architecture to start from", "name a model"
    ),
    _rule(
        "llm-attention", ("model",), _one_attention, "one key chooses the kernel", "delete one of the keys"
    ),
    _rule(
        "te-installed",
        ("model",),
        _transformer_engine_installed,
        "a kernel that is named and missing is an error, not another kernel",
        "model.backend.attn: auto",
    ),
    _rule(
        "packing-attention",
        ("model", "packed_sequence"),
        _packs_need_borders,
        "packed documents do not see each other",
        "attn_implementation: auto",
    ),
    _rule(
        "cp-attention",
        ("model", "distributed"),
        _eager_has_no_cp,
        "attention meets the tokens of other ranks part by part",
        "attn_implementation: auto",
    ),
    _rule("llm-dataset", ("dataset",), _data_to_train_on, "training needs documents", "add dataset"),
    _rule("text-columns", _DATA_KEYS, _columns_are_known, "a row is read by column", "name the columns"),
    _rule("tokens-folder", _DATA_KEYS, _tokens_have_no_rows, "a corpus is one folder", "name one folder"),
    _rule("truncation", _DATA_KEYS, _truncation_has_length, "a cut needs a length", "seq_length: 2048"),
    _rule("llm-dtype", ("model", "precision"), _dtype_fits_precision, "one stored dtype", "drop one key"),
    _rule("rng-ranked", ("rng",), _ranks_draw_alike, "nothing random depends on a rank", "rng.ranked: true"),
    _rule(
        "llm-backend", ("dist_env",), _backend_exists, "NCCL talks between GPUs", "delete dist_env.backend"
    ),
    _rule(
        "peft-targets",
        ("peft",),
        _adapters_have_targets,
        "adapters stand beside layers",
        "match_all_linear: true",
    ),
    _rule("lr-schedule", ("lr_scheduler",), _schedule_fits, "warm-up, then decay", "use fitting steps"),
    _rule(
        "validation-is-whole",
        ("dataloader", "validation_dataloader"),
        _only_training_data_is_shuffled,
        "a perplexity is over the same documents every time",
        "leave it out",
    ),
    _rule("ci-section", ("ci",), _ci_is_not_ours, "not about training", "delete ci", notice=True),
    Rule(
        "packing-needs-one-row",
        "llm",
        ("packed_sequence", "step_scheduler"),
        _packing_needs_one_row,
        "a pack is a batch already",
        "step_scheduler.local_batch_size: 1",
    ),
    Rule(
        "global-batch-divides",
        "llm",
        ("step_scheduler", "distributed"),
        _batch_divides,
        "a step is a whole number of micro-batches on every rank",
        "use a multiple",
    ),
    Rule(
        "compile-mode-needs-inductor",
        "llm",
        ("compile",),
        _modes_are_inductors,
        "other backends have no modes",
        "compile.mode: default",
    ),
)
