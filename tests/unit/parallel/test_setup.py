"""DistributedSetup: defaults of the blocks, refusals before any communication, one mesh per strategy."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.config.errors import ConfigError
from shoal.config.schema import (
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MoEParallelizerConfig,
    ParallelismSizes,
    PipelineConfig,
)
from shoal.mesh.context import MeshContext
from shoal.models.assemble import ModelPlan, Numerics, assemble
from shoal.parallel.setup import DistributedSetup, refuse_unimplemented


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """Be rank 5 of 8."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
def test_everything_has_a_default() -> None:
    setup = DistributedSetup.build()
    assert setup.strategy_config == FSDP2Config()
    assert setup.pipeline_config is None and setup.moe_parallel_config is None
    assert setup.activation_checkpointing is False
    assert (setup.mesh_context.dp_size, setup.mesh_context.dp_rank) == (8, 5)


@pytest.mark.usefixtures("eight_ranks")
def test_blocks_that_are_needed_get_their_defaults() -> None:
    setup = DistributedSetup.build(parallelism_sizes=ParallelismSizes(pp_size=2, ep_size=4))
    assert setup.pipeline_config == PipelineConfig()
    assert setup.moe_parallel_config == MoEParallelizerConfig()
    given = PipelineConfig(pp_schedule="gpipe")
    assert DistributedSetup.build("fsdp2", ParallelismSizes(pp_size=2), given).pipeline_config == given


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize(
    ("strategy", "options", "axes"),
    [
        ("fsdp2", FSDP2Config(), ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
        ("megatron_fsdp", MegatronFSDPConfig(), ("dp", "cp", "tp")),
        (DDPConfig(static_graph=True), DDPConfig(static_graph=True), ("dp",)),
    ],
)
def test_each_strategy_has_its_mesh(strategy: Any, options: Any, axes: tuple[str, ...]) -> None:
    setup = DistributedSetup.build(strategy)
    assert setup.strategy_config == options
    assert setup.mesh_context.device_mesh.mesh_dim_names == axes


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"strategy": "zero"}, "strategy-known"),
        ({"strategy": {"name": "fsdp2"}}, "strategy-known"),
        ({"pipeline_config": PipelineConfig()}, "pipeline-block-needs-pp"),
        ({"moe_parallel_config": MoEParallelizerConfig()}, "moe-block-needs-ep"),
        ({"parallelism_sizes": ParallelismSizes(tp_size=3)}, "axes-divide-world"),
        (
            {"strategy": "ddp", "parallelism_sizes": ParallelismSizes(tp_size=2)},
            "tp-size-needs-fsdp2-or-megatron-fsdp",
        ),
        (
            {"strategy": FSDP2Config(activation_checkpointing="selective"), "activation_checkpointing": True},
            "activation-checkpointing-agrees",
        ),
    ],
)
def test_refusals_come_before_any_process_group_is_made(
    arguments: dict[str, Any], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MeshContext, "build", lambda *args: pytest.fail("process groups were made"))
    with pytest.raises(ConfigError) as refusal:
        DistributedSetup.build(**arguments)
    assert [finding.rule for finding in refusal.value.findings] == [rule]


@pytest.mark.usefixtures("eight_ranks")
def test_a_model_is_not_built_on_axes_that_would_only_replicate_it() -> None:
    sizes = ParallelismSizes(tp_size=2, pp_size=2, ep_size=2)
    with pytest.raises(ConfigError) as refusal:
        assemble(
            ModelPlan(lambda: pytest.fail("a model was built")),
            DistributedSetup.build(parallelism_sizes=sizes),
            Numerics(),
            torch.device("cpu"),
        )
    keys = [finding.key for finding in refusal.value.findings]
    assert keys == [f"parallelism_sizes.{axis}_size" for axis in ("pp", "ep")]
    refuse_unimplemented(DistributedSetup.build(parallelism_sizes=ParallelismSizes(dp_replicate_size=2)))


@pytest.mark.usefixtures("eight_ranks")
def test_partial_recomputation_is_not_taken_for_whole() -> None:
    setup = DistributedSetup.build(activation_checkpointing="selective")
    with pytest.raises(ConfigError, match="mode-not-implemented"):
        refuse_unimplemented(setup)


@pytest.mark.usefixtures("eight_ranks")
def test_checkpointing_on_the_options_alone_is_on() -> None:
    setup = DistributedSetup.build(FSDP2Config(activation_checkpointing=True))
    assert setup.activation_checkpointing is True


@pytest.mark.usefixtures("eight_ranks")
def test_a_world_that_is_not_the_process_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="the process group has 8 ranks"):
        DistributedSetup.build(world_size=4)


def test_a_process_group_is_needed() -> None:
    with pytest.raises(ValueError, match="initialize_distributed"):
        DistributedSetup.build()
