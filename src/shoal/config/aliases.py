"""Names that users of NeMo and AutoModel already have in their YAML, and what they are called here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

StrategyKind = Literal["ddp", "automodel", "model_parallel"]

_LIGHTNING_STRATEGIES = (
    "lightning.pytorch.strategies",
    "pytorch_lightning.strategies",
    "lightning.pytorch.strategies.ddp",
    "pytorch_lightning.strategies.ddp",
    "lightning.pytorch.strategies.model_parallel",
    "pytorch_lightning.strategies.model_parallel",
)

NEMO_MODEL_PARALLEL = "nemo.core.ModelParallelStrategy"
"""NeMo's documents call Lightning's class so, with sizes spelled data_parallel and tensor_parallel."""

STRATEGIES: Mapping[str, StrategyKind] = {
    "auto": "ddp",
    "ddp": "ddp",
    **{f"{module}.DDPStrategy": "ddp" for module in _LIGHTNING_STRATEGIES[:4]},
    **{f"{module}.ModelParallelStrategy": "model_parallel" for module in _LIGHTNING_STRATEGIES[:2]},
    **{f"{module}.ModelParallelStrategy": "model_parallel" for module in _LIGHTNING_STRATEGIES[4:]},
    NEMO_MODEL_PARALLEL: "model_parallel",
    "nemo.collections.speechlm2.parts.parallel.AutomodelParallelStrategy": "automodel",
    "shoal.AutomodelParallelStrategy": "automodel",
    "shoal.train.strategy.AutomodelParallelStrategy": "automodel",
}
"""Values of trainer.strategy (a text) and of trainer.strategy._target_."""

STRATEGY_TARGETS: Mapping[StrategyKind, str] = {
    "ddp": "lightning.pytorch.strategies.DDPStrategy",
    "automodel": "shoal.train.strategy.AutomodelParallelStrategy",
    "model_parallel": "lightning.pytorch.strategies.ModelParallelStrategy",
}
"""The name a resolved configuration is saved with."""

SIZE_KEYS: Mapping[StrategyKind, Mapping[str, str]] = {
    "ddp": {},
    "automodel": {
        name: name for name in ("dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size")
    },
    "model_parallel": {"data_parallel_size": "dp_size", "tensor_parallel_size": "tp_size"},
}
"""How each strategy's block spells the sizes, and what they are here."""

NEMO_SIZE_KEYS: Mapping[str, str] = {"data_parallel": "dp_size", "tensor_parallel": "tp_size"}

DISTRIBUTED_STRATEGIES: Mapping[str, str] = {
    "fsdp2": "fsdp2",
    "ddp": "ddp",
    "megatron_fsdp": "megatron_fsdp",
    "megatron-fsdp": "megatron_fsdp",
    "mfsdp": "megatron_fsdp",
}

TARGETS: Mapping[str, str] = {
    "nemo.core.optim.lr_scheduler.CosineAnnealing": "shoal.train.optim.CosineAnnealing",
    "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained": "shoal.models.auto.AutoModelForCausalLM.from_pretrained",
    "nemo_automodel.NeMoAutoModelForCausalLM.from_config": "shoal.models.auto.AutoModelForCausalLM.from_config",
}

PERCEPTION_TARGETS = frozenset(
    {
        "nemo.collections.speechlm2.modules.AudioPerceptionModule",
        "nemo.collections.speechlm2.modules.perception.AudioPerceptionModule",
        "shoal.speech.perception.AudioPerception",
    }
)

_CONFORMERS = (
    "nemo.collections.asr.modules.ConformerEncoder",
    "nemo.collections.asr.modules.conformer_encoder.ConformerEncoder",
)
_IDENTITIES = (
    "nemo.collections.speechlm2.modules.perception.IdentityConnector",
    "nemo.collections.speechlm2.modules.IdentityConnector",
)
ADAPTER_KINDS: Mapping[str, str] = {
    **dict.fromkeys(_CONFORMERS, "conformer"),
    **dict.fromkeys(_IDENTITIES, "identity"),
}
SPEC_AUGMENT_TARGETS = frozenset({"nemo.collections.asr.modules.SpectrogramAugmentation"})

CONFORMER_AS_BUILT: Mapping[str, tuple[object, ...]] = {
    "feat_out": (-1, None),
    "subsampling_factor": (1,),
    "self_attention_model": ("rel_pos",),
    "att_context_size": ((-1, -1), None),
    "att_context_style": ("regular",),
    "conv_norm_type": ("batch_norm",),
    "conv_context_size": (None,),
    "untie_biases": (True,),
    "causal_downsampling": (False,),
    "reduction": (None,),
    "reduction_position": (None,),
    "reduction_factor": (1,),
    "dropout_pre_encoder": (0, 0.0),
    "dropout_emb": (0, 0.0),
}
"""Keys of NeMo's ConformerEncoder that are read, with the only values our adapter implements."""

CONFORMER_INERT = frozenset({"subsampling", "subsampling_conv_channels", "pos_emb_max_len"})
"""Keys that have no effect with subsampling_factor 1 and full attention, in NeMo as here."""

ENCODER_KEYS: Mapping[str, str] = {
    "n_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "conv_kernel_size": "conv_kernel_size",
    "subsampling_factor": "subsampling_factor",
    "subsampling_conv_channels": "subsampling_conv_channels",
    "dropout": "dropout",
    "dropout_att": "attention_dropout",
}
"""NeMo's names of encoder settings and those of the transformers configuration."""

LORA_KEYS: Mapping[str, str] = {"dim": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}

PRECISIONS: Mapping[object, str] = {
    32: "32-true",
    "32": "32-true",
    64: "64-true",
    "64": "64-true",
    16: "16-mixed",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "bf16-automodel": "bf16-flash",
}

DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp16": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.float64": "float64",
}

_SCHEDULES: Mapping[str, str] = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved1f1b": "Interleaved1F1B",
    "dfs": "Interleaved1F1B",
    "loopedbfs": "LoopedBFS",
    "zerobubble": "InterleavedZeroBubble",
    "interleavedzerobubble": "InterleavedZeroBubble",
    "vschedule": "ZBVZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}

SCHEDULE_NAMES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "dfs", "v_schedule", "zero_bubble")


def canonical_schedule(name: str) -> str | None:
    """Returns torch's name of a pipeline schedule, written in any case, with or without ``_``, or None."""
    return _SCHEDULES.get(name.lower().replace("_", ""))


# ----------------------------------------------------------------------------- the LLM recipe, AutoModel's names

LLM_RECIPES = frozenset({"llm", "TrainFinetuneRecipeForNextTokenPrediction"})

MODEL_FACTORIES: Mapping[str, str] = {
    "from_pretrained": "pretrained_model_name_or_path",
    "from_config": "config",
}
"""The last word of a model's ``_target_`` and the key it needs."""

BACKEND_TARGETS = frozenset(
    {
        "nemo_automodel.components.models.common.BackendConfig",
        "nemo_automodel.components.models.common.utils.BackendConfig",
        "nemo_automodel.components.moe.utils.BackendConfig",
    }
)

BACKEND_AS_BUILT: Mapping[str, tuple[object, ...]] = {
    "fake_balanced_gate": (False,),
    "enable_hf_state_dict_adapter": (True,),
    "enable_fsdp_optimizations": (True, False),
}
"""Keys that AutoModel's own model classes need; models here are transformers', sharded in one way."""

_LLM_DATA = "nemo_automodel.components.datasets.llm"
DATASETS: Mapping[str, str] = {
    f"{_LLM_DATA}.squad.make_squad_dataset": "squad",
    f"{_LLM_DATA}.hellaswag.HellaSwag": "hellaswag",
    f"{_LLM_DATA}.chat_dataset.ChatDataset": "chat",
    f"{_LLM_DATA}.ChatDataset": "chat",
    f"{_LLM_DATA}.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset": "instruction",
    f"{_LLM_DATA}.ColumnMappedTextInstructionDataset": "instruction",
}

DATASET_KEYS: Mapping[str, str] = {
    "path_or_dataset": "path",
    "path_or_dataset_id": "path",
    "dataset_name": "path",
    "num_samples_limit": "limit_dataset_samples",
}

DATASET_AS_BUILT: Mapping[str, tuple[object, ...]] = {
    "pad_to_max_length": (False, None),
    "padding": (False, None, "do_not_pad"),
}
"""Rows are padded to the longest of their micro-batch, or packed."""

LOADER_TARGETS = frozenset(
    {"torchdata.stateful_dataloader.StatefulDataLoader", "torch.utils.data.DataLoader"}
)
COLLATERS = frozenset({"default_collater", "packed_sequence_thd_collater"})
PACKING: Mapping[str, str] = {"thd": "greedy", "neat": "best_fit"}

LOSSES: Mapping[str, str] = {
    "MaskedCrossEntropy": "full",
    "ChunkedCrossEntropy": "chunked",
    "FusedLinearCrossEntropy": "chunked",
}
LOSS_AS_BUILT: Mapping[str, tuple[object, ...]] = {
    "fp32_upcast": (True,),
    "ignore_index": (-100,),
    "reduction": ("sum",),
}

RNG_TARGETS = frozenset({"nemo_automodel.components.training.rng.StatefulRNG"})
PEFT_TARGETS = frozenset({"nemo_automodel.components._peft.lora.PeftConfig"})
