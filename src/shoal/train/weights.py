"""``model.init_from_checkpoint``, ``peft.adapter_path``: weights of an earlier run, without optimizer, step or data."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from shoal.checkpoint.adapters import ADAPTER_FILE, load_adapter
from shoal.checkpoint.parts import Part, has_export, parts_of
from shoal.checkpoint.state import load_state
from shoal.models.files import open_file, open_tensors
from shoal.models.init import store
from shoal.models.load import WeightSource, conversions_of, load_pretrained


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Fills every parameter and saved buffer of an assembled model, in any layout.

    Args:
        model: The assembled module.
        path: A checkpoint directory of ours, an exported folder (of a language model alone also any of Hugging
            Face's; of adapters, which then are all that is filled), a ``.safetensors`` file, or a folder that holds
            ``model.safetensors``, these two with the module's own parameter names.

    Raises:
        ValueError: The path is neither, or names or shapes differ; the message lists them.
    """
    path = Path(path)
    file = path / "model.safetensors" if path.is_dir() else path
    if (path / ".metadata").is_file():
        load_state(path, model=model)
    elif has_export(model) and (parts := exported_parts(model, path)):
        for part, folder in parts:
            _load_part(model, part, folder)
    elif file.is_file() and file.suffix == ".safetensors":
        _load_safetensors(model, file)
    else:
        raise ValueError(
            f"{str(path)!r} is neither a checkpoint directory of ours (with .metadata) nor a safetensors file or "
            "folder; repair: point model.init_from_checkpoint (adapters: peft.adapter_path) to one, or remove the key"
        )


def exported_parts(model: nn.Module, path: Path) -> list[tuple[Part, Path]]:
    """The parts of a model with their folders below `path`; empty when `path` is not an export of such a model."""
    parts = [(part, path / part.folder) for part in parts_of(model)]
    llm = next(folder for part, folder in parts if part.build is not None)
    return parts if any((llm / name).is_file() for name in ("config.json", ADAPTER_FILE)) else []


def _load_part(model: nn.Module, part: Part, folder: Path) -> None:
    if part.build is None:
        _load_safetensors(model.get_submodule(part.module), folder)
    elif (folder / ADAPTER_FILE).is_file():
        load_adapter(model, part, folder)
    else:
        submodule = model.get_submodule(part.module)
        assert isinstance(submodule, PreTrainedModel)
        load_pretrained(submodule, WeightSource(part.module, folder), conversions_of(part.skeleton()))


def _load_safetensors(model: nn.Module, source: Path) -> None:
    """Fills a module from a safetensors file, or a folder of them, with the module's own names."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    targets = {**dict(model.named_parameters()), **buffers}
    tensors = open_tensors(source) if source.is_dir() else open_file(source)
    missing, unexpected = sorted(targets.keys() - tensors.keys()), sorted(tensors.keys() - targets.keys())
    shapes = {name: tuple(tensors[name].get_shape()) for name in tensors.keys() & targets.keys()}
    wrong = sorted(name for name, shape in shapes.items() if shape != tuple(targets[name].shape))
    if missing or unexpected or wrong:
        raise ValueError(
            f"{str(source)!r} does not fit the model: missing {missing[:12]}, "
            f"unexpected {unexpected[:12]}, of another shape {wrong[:12]}"
        )
    for name, target in targets.items():
        store(tensors[name][...], target)
