"""``model.init_from_checkpoint``: weights from an earlier run, without its optimizer, step or data position."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import nn

from shoal.checkpoint.state import load_state
from shoal.models.init import store


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Fills every parameter and saved buffer of an assembled model, in any layout.

    Args:
        model: The assembled module.
        path: A checkpoint directory of ours, a ``.safetensors`` file, or a folder that holds ``model.safetensors``
            with the module's own parameter names.

    Raises:
        ValueError: The path is neither, or names or shapes differ; the message lists them.
    """
    path = Path(path)
    file = path / "model.safetensors" if path.is_dir() else path
    if (path / ".metadata").is_file():
        load_state(path, model=model)
    elif file.is_file() and file.suffix == ".safetensors":
        _load_safetensors(model, file)
    else:
        raise ValueError(
            f"model.init_from_checkpoint = {str(path)!r}: neither a checkpoint directory of ours (with .metadata) nor "
            "a safetensors file or folder; repair: point to one, or remove the key"
        )


def _load_safetensors(model: nn.Module, file: Path) -> None:
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    targets = {**dict(model.named_parameters()), **buffers}
    with safe_open(file, framework="pt") as tensors:
        names = set(tensors.keys())
        missing, unexpected = sorted(targets.keys() - names), sorted(names - targets.keys())
        shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in names & targets.keys()}
        wrong = sorted(name for name, shape in shapes.items() if shape != tuple(targets[name].shape))
        if missing or unexpected or wrong:
            raise ValueError(
                f"model.init_from_checkpoint = {str(file)!r} does not fit the model: missing {missing[:12]}, "
                f"unexpected {unexpected[:12]}, of another shape {wrong[:12]}"
            )
        for name, target in targets.items():
            store(tensors.get_tensor(name), target)
