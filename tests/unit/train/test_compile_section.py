"""The compile section reaches the model."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from torch._inductor import list_mode_options

from shoal.config import ConfigError, LLMConfig, load_config
from shoal.config.llm import CompileConfig
from shoal.train.llm_plans import causal_lm_plan

EXAMPLE = Path(__file__).parents[3] / "examples" / "llm" / "pretrain_tiny.yaml"


def test_enabled_says_whether_layers_are_compiled() -> None:
    overrides = ["compile.enabled=true", "compile.backend=aot_eager", "compile.dynamic=true"]
    on, off = (load_config(EXAMPLE, given, world_size=1) for given in (overrides, overrides[1:]))
    assert isinstance(on, LLMConfig) and isinstance(off, LLMConfig)
    assert causal_lm_plan(off).compile is None
    plan = causal_lm_plan(on)
    assert plan.compile is not None
    assert (plan.compile.backend, plan.compile.dynamic) == ("aot_eager", True)


def test_a_mode_that_torch_does_not_know_is_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="compile.mode = 'max-autotun'.*\n.*max-autotune-no-cudagraphs"):
        load_config(EXAMPLE, ["compile.mode=max-autotun"], world_size=1)
    known = set(get_args(get_type_hints(CompileConfig)["mode"]))
    assert known == {"default", *list_mode_options()}
