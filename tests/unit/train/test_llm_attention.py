"""Which attention an LLM configuration takes: packs need a kernel that knows documents."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import LLMConfig, load_config
from shoal.kernels.attention_hf import PACKED_ATTENTION, registered_backend
from shoal.train.llm_plans import attention_name, causal_lm_plan
from tests.verify import configurations

PACKS = {"packed_sequence": {"packed_sequence_size": 64}}


def configured(attn: str, sections: dict[str, Any]) -> LLMConfig:
    source = configurations.text(sections=sections)
    source["model"]["backend"] = {"attn": attn}
    config = load_config(source)
    assert isinstance(config, LLMConfig)
    return config


@pytest.mark.parametrize(
    ("attn", "sections", "name"),
    [
        ("auto", {}, None),
        ("auto", PACKS, PACKED_ATTENTION),
        ("auto", {"distributed": {"cp_size": 2}}, PACKED_ATTENTION),
        ("sdpa", {}, "sdpa"),
        ("sdpa", PACKS, PACKED_ATTENTION),
        ("sdpa", {"distributed": {"cp_size": 2}}, "sdpa"),
    ],
)
def test_name_of_the_attention(attn: str, sections: dict[str, Any], name: str | None) -> None:
    assert attention_name(configured(attn, sections)) == name


@pytest.mark.parametrize("attn", ["auto", "sdpa"])
def test_packs_run_the_kernel_that_is_named(attn: str) -> None:
    causal_lm_plan(configured(attn, PACKS))
    assert registered_backend(PACKED_ATTENTION) == attn
