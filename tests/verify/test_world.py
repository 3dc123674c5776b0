"""The layout that is verified has every axis of the configured one."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import ConfigError, LLMConfig
from shoal.config.schema import (
    DistributedConfig,
    FSDP2Config,
    MixedPrecisionConfig,
    OffloadConfig,
    ParallelismSizes,
)
from shoal.verify.world import scale_layout


def scaled(
    world: int | None = None, configured: int | None = None, **sizes: Any
) -> tuple[int, dict[str, int]]:
    config = LLMConfig(distributed=DistributedConfig(sizes=ParallelismSizes(**sizes)))
    layout = scale_layout(config, configured, world).layout
    return layout.world, {axis: size for axis, size in layout.axes.items() if size > 1}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (2, {"dp": 2})),
        ({"tp_size": 8}, (4, {"dp": 2, "tp": 2})),
        ({"tp_size": 8, "dp_size": 1}, (2, {"tp": 2})),
        ({"dp_size": 16, "dp_replicate_size": 4}, (4, {"dp": 4, "dp_replicate": 2})),
        ({"dp_size": 16, "dp_replicate_size": 4, "tp_size": 4}, (8, {"dp": 4, "dp_replicate": 2, "tp": 2})),
        ({"cp_size": 4, "ep_size": 8}, (4, {"dp": 2, "cp": 2, "ep": 2})),
        ({"pp_size": 4, "tp_size": 4}, (8, {"dp": 2, "tp": 2, "pp": 2})),
    ],
)
def test_the_fewest_ranks_with_every_axis(sizes: dict[str, int], expected: Any) -> None:
    assert scaled(**sizes) == expected


def test_axes_grow_towards_the_configured_ones() -> None:
    assert scaled(8, tp_size=8, dp_size=1) == (8, {"tp": 8})
    assert scaled(8, tp_size=8) == (8, {"dp": 2, "tp": 4})
    assert scaled(4, tp_size=8) == (4, {"dp": 2, "tp": 2})
    assert scaled(8) == (8, {"dp": 8})
    assert scaled(8, dp_size=64, dp_replicate_size=2) == (8, {"dp": 8, "dp_replicate": 2})
    assert scaled(configured=64, tp_size=4) == (4, {"dp": 2, "tp": 2})


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="--world-size 16") as error:
        scaled(tp_size=2, cp_size=2, pp_size=2)
    assert error.value.findings[0].rule == "verify-world"
    assert scaled(16, tp_size=2, cp_size=2, pp_size=2)[0] == 16
    with pytest.raises(ConfigError, match="a multiple of 4"):
        scaled(6, tp_size=4)


def test_options_are_kept_but_precision_and_pinned_memory() -> None:
    options = FSDP2Config(
        mp_policy=MixedPrecisionConfig(),
        offload_policy=OffloadConfig(),
        reshard_after_forward=False,
        activation_checkpointing=True,
    )
    config = LLMConfig(distributed=DistributedConfig(options=options, activation_checkpointing=True))
    layout = scale_layout(config, None, None).layout
    assert layout.strategy == FSDP2Config(
        offload_policy=OffloadConfig(pin_memory=False), reshard_after_forward=False
    )
    assert layout.checkpoint_llm is True
