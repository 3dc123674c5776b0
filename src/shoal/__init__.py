"""Shoal trains language models and speech-language models on any mesh of devices.

The names below are imported on first use: `import shoal` alone imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.config import load_config
    from shoal.config.schema import DDPConfig, FSDP2Config, MegatronFSDPConfig, ParallelismSizes
    from shoal.data.broadcast import BroadcastingDataLoader
    from shoal.mesh import MeshAxisName, MeshContext, initialize_distributed
    from shoal.models.auto import AutoModelForCausalLM
    from shoal.parallel.managers import DDPManager, FSDP2Manager, gradient_sync
    from shoal.parallel.setup import DistributedSetup
    from shoal.speech.salm import SALM
    from shoal.train.strategy import AutomodelParallelStrategy

__version__ = "0.1.0"

_WHERE = {
    "AutoModelForCausalLM": "shoal.models.auto",
    "AutomodelParallelStrategy": "shoal.train.strategy",
    "BroadcastingDataLoader": "shoal.data.broadcast",
    "DDPConfig": "shoal.config.schema",
    "DDPManager": "shoal.parallel.managers",
    "DistributedSetup": "shoal.parallel.setup",
    "FSDP2Config": "shoal.config.schema",
    "FSDP2Manager": "shoal.parallel.managers",
    "MegatronFSDPConfig": "shoal.config.schema",
    "MeshAxisName": "shoal.mesh",
    "MeshContext": "shoal.mesh",
    "ParallelismSizes": "shoal.config.schema",
    "SALM": "shoal.speech.salm",
    "gradient_sync": "shoal.parallel.managers",
    "initialize_distributed": "shoal.mesh",
    "load_config": "shoal.config",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])


__all__ = [
    "AutoModelForCausalLM",
    "AutomodelParallelStrategy",
    "BroadcastingDataLoader",
    "DDPConfig",
    "DDPManager",
    "DistributedSetup",
    "FSDP2Config",
    "FSDP2Manager",
    "MegatronFSDPConfig",
    "MeshAxisName",
    "MeshContext",
    "ParallelismSizes",
    "SALM",
    "__version__",
    "gradient_sync",
    "initialize_distributed",
    "load_config",
]
