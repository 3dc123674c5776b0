"""Lightning strategies: who opens the process group, builds the mesh, and leaves the model alone.

The LightningModule assembles its own parallel model in `configure_model`; a strategy provides the mesh. Lightning's
own `DDPStrategy` and `ModelParallelStrategy` work too: `distributed_setup` reads their sizes, and
`leave_model_to_module` keeps DDPStrategy from wrapping the LightningModule, whose training step runs many
micro-batches and therefore needs the wrapper inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from shoal.config.schema import (
    CheckpointingMode,
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MoEParallelizerConfig,
    ParallelismSizes,
)
from shoal.mesh.axes import MeshAxisName
from shoal.parallel.setup import DistributedSetup
from shoal.train.precision import ShoalPrecision, shoal_precision


class AutomodelParallelStrategy(ModelParallelStrategy):
    """Trains on the five-axis mesh (pp, dp_replicate, dp_shard, cp, tp); the module shards itself on it.

    Args:
        dp_size: Data-parallel size; None infers it from the world size and the other sizes.
        dp_replicate_size: Replicas of the sharded model (hybrid sharding); None or 1 shards over all of dp.
        tp_size, pp_size, cp_size, ep_size: Degrees of the other axes.
        distributed_config: `FSDP2Config`, or its fields as a mapping.
        moe_config: `MoEParallelizerConfig`, or its fields as a mapping; only with ep_size > 1.
        activation_checkpointing_llm: Recompute the LLM's layers in backward.
        activation_checkpointing_perception: Recompute the speech encoder's layers in backward.
        save_distributed_checkpoint: Every rank writes its own shards.
        process_group_backend: nccl or gloo; None chooses by the device.
        timeout: Of collectives.

    Raises:
        ConfigError: (in `setup_environment`, on every rank) the sizes do not fit the world or each other.
    """

    def __init__(
        self,
        dp_size: int | None = None,
        dp_replicate_size: int | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        cp_size: int = 1,
        ep_size: int = 1,
        distributed_config: FSDP2Config | MegatronFSDPConfig | Mapping[str, Any] | None = None,
        moe_config: MoEParallelizerConfig | Mapping[str, Any] | None = None,
        activation_checkpointing_llm: CheckpointingMode = False,
        activation_checkpointing_perception: bool = False,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            data_parallel_size=1,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.sizes = ParallelismSizes(
            dp_size=dp_size,
            dp_replicate_size=dp_replicate_size,
            tp_size=tp_size,
            pp_size=pp_size,
            cp_size=cp_size,
            ep_size=ep_size,
        )
        self.distributed_config = _options(FSDP2Config, distributed_config) or FSDP2Config()
        self.moe_config = _options(MoEParallelizerConfig, moe_config)
        self.activation_checkpointing_llm = activation_checkpointing_llm
        self.activation_checkpointing_perception = activation_checkpointing_perception
        self._setup: DistributedSetup | None = None

    @property
    def distributed_setup(self) -> DistributedSetup:
        """Strategy options and mesh; exists once the processes are connected."""
        if self._setup is None:
            raise RuntimeError("the mesh does not exist before setup_environment has connected the processes")
        return self._setup

    @property
    def moe_mesh(self) -> Any:
        """The mesh (pp, ep_shard, ep), or None without expert parallelism."""
        return self.distributed_setup.mesh_context.moe_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self.distributed_setup.mesh_context.mesh(MeshAxisName.DP)
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    @override
    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        self._setup = DistributedSetup.build(
            strategy=self.distributed_config,
            parallelism_sizes=self.sizes,
            moe_parallel_config=self.moe_config,
            activation_checkpointing=self.activation_checkpointing_llm,
            world_size=self.world_size,
        )
        self._device_mesh = self._setup.mesh_context.device_mesh
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self._device_mesh

    @override
    def model_to_device(self) -> None:
        """Does nothing: assembly has placed every parameter, and offloaded ones must stay on the host."""

    @property
    def precision_plugin(self) -> Precision:
        """Always ours: Lightning's plugins would convert the module and autocast on top of the FSDP2 policy."""
        return shoal_precision(self._precision_plugin) if self._precision_plugin else ShoalPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else shoal_precision(plugin)


_SETUPS: WeakKeyDictionary[Strategy, DistributedSetup] = WeakKeyDictionary()
"""Meshes of stock strategies, which have no place for them; building one opens process groups."""


def distributed_setup(strategy: Strategy) -> DistributedSetup | None:
    """The mesh and options of a connected strategy; None for one process without a process group.

    Collective the first time, when the strategy is one of Lightning's own.

    Raises:
        ValueError: A strategy that Shoal's modules do not run under.
    """
    if isinstance(strategy, AutomodelParallelStrategy):
        return strategy.distributed_setup
    if isinstance(strategy, SingleDeviceStrategy):
        return None
    if strategy not in _SETUPS:
        _SETUPS[strategy] = _setup_of_stock(strategy)
    return _SETUPS[strategy]


def _setup_of_stock(strategy: Strategy) -> DistributedSetup:
    if isinstance(strategy, ModelParallelStrategy):
        data, tensor = strategy._data_parallel_size, strategy._tensor_parallel_size
        assert isinstance(data, int) and isinstance(tensor, int)  # "auto" is resolved in setup_environment
        return DistributedSetup.build(
            strategy="fsdp2",
            parallelism_sizes=ParallelismSizes(dp_size=data, tp_size=tensor),
            world_size=strategy.world_size,
        )
    if isinstance(strategy, DDPStrategy):
        flags = {
            key: value for key, value in strategy._ddp_kwargs.items() if key in DDPConfig.__dataclass_fields__
        }
        unknown = sorted(set(strategy._ddp_kwargs) - set(flags))
        if unknown:
            raise ValueError(
                f"trainer.strategy: DDPStrategy({', '.join(unknown)}=...) is not supported; repair: remove it"
            )
        return DistributedSetup.build(strategy=DDPConfig(**flags), world_size=strategy.world_size)
    raise ValueError(
        f"trainer.strategy = {type(strategy).__name__}: one of AutomodelParallelStrategy, DDPStrategy, "
        "ModelParallelStrategy"
    )


def leave_model_to_module(strategy: Strategy) -> None:
    """Prepares a stock strategy, before it sets up, for a module that parallelises itself.

    Lightning's DDPStrategy would wrap the LightningModule, run a whole training step inside one DDP forward and
    average gradients; its wrapping is switched off here, on the instance.
    """
    if isinstance(strategy, AutomodelParallelStrategy):
        return
    strategy.precision_plugin = shoal_precision(strategy.precision_plugin)
    if isinstance(strategy, DDPStrategy):
        if strategy._ddp_comm_hook is not None or strategy._model_averaging_period is not None:
            raise ValueError(
                "trainer.strategy: DDPStrategy(ddp_comm_hook / model_averaging_period) would change the gradients; "
                "repair: remove it"
            )
        strategy.configure_ddp = lambda: None  # type: ignore[method-assign]


def agreed_checkpointing(strategy: Strategy) -> tuple[bool, bool]:
    """Whether the LLM's and the perception's layers are recomputed, as the strategy says."""
    if isinstance(strategy, AutomodelParallelStrategy):
        llm = strategy.distributed_setup.activation_checkpointing
        return bool(llm), strategy.activation_checkpointing_perception
    return False, False


def _options(kind: type[Any], value: Any) -> Any:
    """A dataclass of options from itself, from a mapping of its fields, or from None."""
    return kind(**value) if isinstance(value, Mapping) else value
