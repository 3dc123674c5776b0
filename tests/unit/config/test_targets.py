"""A target is judged by where its object is defined: first from the source on disk, then by the object itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.config import ConfigError
from shoal.config.targets import check_target, resolve_target

# Each walks from an allowed package into something it only imports; all of them resolve in plain Python.
FORBIDDEN = (
    "lhotse.utils.os.system",
    "torch.optim.lr_scheduler.warnings.warn",
    "lightning.pytorch.callbacks.model_checkpoint.shutil.rmtree",
    "transformers.utils.hub.os.system",
)
IMPORTED_CLASSES = (
    "torch.optim.lr_scheduler.Counter",
    "lhotse.utils.Path",
    "torch.optim.lr_scheduler.partial",
)


def _getattr_path(name: str) -> object:
    """What a naive resolver would return."""
    import importlib

    head, *rest = name.split(".")
    found: object = importlib.import_module(head)
    module = head
    for part in rest:
        if not hasattr(found, part):
            module = f"{module}.{part}"
            found = importlib.import_module(module)
        else:
            found = getattr(found, part)
            module = f"{module}.{part}"
    return found


@pytest.mark.parametrize("name", [*FORBIDDEN, *IMPORTED_CLASSES])
def test_paths_through_allowed_packages_are_refused(name: str) -> None:
    assert callable(_getattr_path(name)), "the path must exist, or refusing it proves nothing"
    assert check_target(name).limit is not None
    with pytest.raises(ConfigError, match="target"):
        resolve_target(name)


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.eval", "torch.load", "torch.optim", "lhotse.utils", "shoal..optim", "", "AdamW"],
)
def test_other_names_are_refused(name: str) -> None:
    assert check_target(name).limit is not None
    with pytest.raises(ConfigError):
        resolve_target(name)


@pytest.mark.parametrize(
    "name",
    [
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.CosineAnnealingLR",
        "lightning.pytorch.callbacks.ModelCheckpoint",
        "transformers.get_cosine_schedule_with_warmup",
        "transformers.AutoConfig.from_pretrained",
        "shoal.config.values.Range",
    ],
)
def test_classes_and_listed_factories_resolve(name: str) -> None:
    assert check_target(name).limit is None
    assert callable(resolve_target(name))


def test_object_decides_when_the_source_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    # A lazy module binds names the source does not show; the object still must be defined in an allowed place.
    import shoal.config.values as values

    monkeypatch.setattr(values, "Smuggled", __import__("collections").Counter, raising=False)
    assert check_target("shoal.config.values.Smuggled").limit is None
    with pytest.raises(ConfigError, match="defined in collections"):
        resolve_target("shoal.config.values.Smuggled")


def test_function_is_refused_unless_listed() -> None:
    assert "function" in (check_target("shoal.config.errors.Finding").limit or "function")
    assert "function" in str(check_target("shoal.config.targets.check_target").limit)
    with pytest.raises(ConfigError):
        resolve_target("shoal.config.targets.check_target")


def test_user_may_allow_a_module() -> None:
    assert check_target("fractions.Fraction").limit is not None
    assert resolve_target("fractions.Fraction", allow=("fractions",))(1, 2) == 0.5
    # Allowing one module allows nothing it imports.
    assert check_target("fractions.Decimal", allow=("fractions",)).limit is not None


def test_alias_of_nemo_resolves_to_ours() -> None:
    assert resolve_target("nemo.core.optim.lr_scheduler.CosineAnnealing").__module__ == "shoal.train.optim"


def test_checking_imports_nothing() -> None:
    names = [*FORBIDDEN, *IMPORTED_CLASSES, "torch.optim.AdamW", "transformers.Trainer"]
    code = (
        "import sys; from shoal.config.targets import check_target;"
        f"[check_target(name) for name in {names}];"
        "print(*({'torch', 'transformers', 'lhotse', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
