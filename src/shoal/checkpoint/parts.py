"""The parts a trainable module is exported as, and the files that stand beside their weights.

A language model alone becomes one Hugging Face folder. A speech language model becomes one folder per child:
`llm/`, which transformers opens as it is, and for every other child (`perception/`) its tensors under its own
names with the configuration of its encoder.

Every checkpoint of a run carries this description in `hf/`, so that it can be exported later by any process, without
the run's YAML and without the folders the model came from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from shoal.checkpoint.store import CheckpointError, write_json
from shoal.models.folder import hf_config, hf_generation_config, read_json

DESCRIPTION = "hf"
_PARTS_FILE = "parts.json"
ADAPTER_CONFIG = "adapter_config.json"
_COMPANIONS: tuple[str, ...] = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


@dataclass(frozen=True)
class Part:
    """One folder of an export.

    Attributes:
        module: name of the child that it holds; empty for the trainable module itself.
        folder: where below the output it is written; empty for the output itself.
        build: makes its architecture, a transformers model; None for a part of our own.
        adapter: peft's configuration of the adapter it has, or None.
        trained: names inside the part of trained tensors that do not belong to an adapter, when it has one.
    """

    module: str
    folder: str
    build: Callable[[], PreTrainedModel] | None = None
    adapter: Any = None
    trained: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """What stands before the part's names in the trainable module."""
        return f"{self.module}." if self.module else ""

    def skeleton(self) -> PreTrainedModel:
        """The architecture on the meta device, without adapters."""
        assert self.build is not None
        with torch.device("meta"):
            return self.build()

    def adapted_skeleton(self) -> PreTrainedModel:
        """The architecture on the meta device with the adapter injected."""
        from peft import inject_adapter_in_model

        model: PreTrainedModel = inject_adapter_in_model(
            deepcopy(self.adapter), self.skeleton(), low_cpu_mem_usage=True
        )  # type: ignore[assignment]  # it returns the model it was given
        return model


def parts_of(module: nn.Module) -> tuple[Part, ...]:
    """The parts of a trainable module in any layout; nothing is copied.

    Raises:
        ValueError: it holds no transformers language model that could be exported.
    """
    if isinstance(module, PreTrainedModel):
        return (_language_part(module, "", ""),)
    children = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
    llm = getattr(module, "llm", None)
    if not isinstance(llm, PreTrainedModel):
        raise ValueError(f"{type(module).__name__} holds no transformers model called llm and has no export")
    if children == ["llm"]:
        return (_language_part(llm, "llm", ""),)
    return tuple(
        _language_part(llm, "llm", "llm") if name == "llm" else Part(name, name) for name in children
    )


def has_export(module: nn.Module) -> bool:
    """Whether `parts_of` knows what to do with the module."""
    return isinstance(module, PreTrainedModel) or isinstance(getattr(module, "llm", None), PreTrainedModel)


def _language_part(model: PreTrainedModel, module: str, folder: str) -> Part:
    def build() -> PreTrainedModel:
        skeleton: PreTrainedModel = original_class(model)(deepcopy(model.config))
        return skeleton

    configs = getattr(model, "peft_config", None)
    if not configs:
        return Part(module, folder, build)
    if list(configs) != ["default"]:
        raise ValueError(
            f"the model has the adapters {sorted(configs)}; only one, called default, is exported"
        )
    trained = tuple(
        name for name, p in model.named_parameters() if p.requires_grad and not is_adapter_name(name)
    )
    return Part(module, folder, build, configs["default"], trained)


def is_adapter_name(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return any(part.startswith("lora_") for part in name.split("."))


def original_class(model: nn.Module) -> type[Any]:
    """The class of a model as it was before `fully_shard` or `replicate` of torch put its own in front."""
    for kind in type(model).__mro__:
        if not any(base.__module__.startswith("torch.distributed.") for base in kind.__mro__):
            return kind
    raise ValueError(f"{type(model).__name__} is a class of torch.distributed")


# --------------------------------------------------------------------------------------- files beside the weights


def write_description(
    directory: Path, module: nn.Module, parts: Iterable[Part], tokenizer: Any = None
) -> None:
    """Write everything of an export except weights: `parts.json` and each part's folder. Local to one rank.

    Args:
        directory: is created.
        module: the trainable module the parts belong to; its configurations are read.
        parts: as `parts_of` gave them.
        tokenizer: saved with the language model; None copies the files beside the model's source, if there are any.
    """
    directory.mkdir(parents=True)
    listed = []
    for part in parts:
        target = directory / part.folder
        target.mkdir(exist_ok=True)
        child = module.get_submodule(part.module)
        if part.build is None:
            _write_own_part(target, child)
        else:
            assert isinstance(child, PreTrainedModel)
            _write_language_part(target, part, child, tokenizer)
        kind = "own" if part.build is None else "language model"
        listed.append({"module": part.module, "folder": part.folder, "kind": kind, "trained": part.trained})
    write_json(directory / _PARTS_FILE, {"format": 1, "parts": listed})


def _write_language_part(target: Path, part: Part, model: PreTrainedModel, tokenizer: Any) -> None:
    config = deepcopy(model.config)
    config.architectures = [original_class(model).__name__]
    config.dtype = model.dtype  # what is stored now, whatever the source was
    if (config.to_dict().get("quantization_config") or {}).get("quant_method") == "gguf":
        del config.quantization_config  # loading dequantised it, and vLLM would look for quantised weights
    config.save_pretrained(target)
    source = _source_of(model)
    if model.can_generate():
        _generation_config(model, source).save_pretrained(target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    elif source is not None:
        _copy_companions(source, target)
    if part.adapter is not None:
        adapter = deepcopy(part.adapter)
        adapter.inference_mode = True
        adapter.base_model_name_or_path = model.config._name_or_path or None
        adapter.save_pretrained(target)


def _generation_config(model: PreTrainedModel, source: Path | None) -> GenerationConfig:
    # A model built from a configuration has not read the file; it says, for instance, which tokens end an answer.
    if source is not None and (source / "generation_config.json").is_file():
        return hf_generation_config(source)
    assert model.generation_config is not None
    return model.generation_config


def _write_own_part(target: Path, child: nn.Module) -> None:
    encoder = getattr(child, "encoder", None)
    if isinstance(encoder, PreTrainedModel):
        encoder.config.save_pretrained(target)
        if (source := _source_of(encoder)) is not None:
            _copy_companions(source, target, ("preprocessor_config.json",))


def _source_of(model: PreTrainedModel) -> Path | None:
    """The local folder a model's configuration came from."""
    name = getattr(model.config, "_name_or_path", "")
    return Path(name) if name and Path(name).is_dir() else None


def _copy_companions(source: Path, target: Path, patterns: Iterable[str] = _COMPANIONS) -> None:
    for pattern in patterns:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def read_description(checkpoint: Path) -> tuple[Part, ...]:
    """The parts that a checkpoint describes in `hf/`.

    Raises:
        CheckpointError: there is no description, or it cannot be read.
    """
    directory = checkpoint / DESCRIPTION
    try:
        listed = json.loads((directory / _PARTS_FILE).read_text(encoding="utf-8"))["parts"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint} does not say how to export its model: cannot read {directory / _PARTS_FILE}: {error}"
        ) from error
    return tuple(_read_part(directory / one["folder"], one) for one in listed)


def _read_part(folder: Path, listed: dict[str, Any]) -> Part:
    module, name, trained = listed["module"], listed["folder"], tuple(listed["trained"])
    if listed["kind"] == "own":
        return Part(module, name, trained=trained)
    try:
        config = hf_config(folder)
        if (folder / ADAPTER_CONFIG).is_file():
            read_json(folder / ADAPTER_CONFIG)  # peft would not say which file is broken
    except ValueError as error:
        raise CheckpointError(str(error)) from error

    def build() -> PreTrainedModel:
        skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        return skeleton

    adapter = None
    if (folder / ADAPTER_CONFIG).is_file():
        from peft import PeftConfig

        adapter = PeftConfig.from_pretrained(str(folder))
    return Part(module, name, build, adapter, trained)


def copy_files(
    description: Path, part: Part, target: Path, *, adapters: bool, dtype: torch.dtype | None
) -> None:
    """Put a part's files into its folder of an export.

    Args:
        description: as `write_description` wrote it.
        part: one of its parts.
        target: the part's folder in the export; is created.
        adapters: only adapters are exported: their configuration is copied, the model's is not.
        dtype: of the exported weights, written into the model's configuration; None leaves it.
    """
    target.mkdir(parents=True, exist_ok=True)
    left_out = {_PARTS_FILE, "config.json" if adapters else ADAPTER_CONFIG}
    left_out |= {"generation_config.json"} if adapters else set()
    for file in (description / part.folder).iterdir():
        if file.is_file() and file.name not in left_out:
            shutil.copyfile(file, target / file.name)
    if part.build is not None and not adapters and dtype is not None:
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
