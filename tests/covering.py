"""Which rows of the tables run without --full: a covering selection.

The tables of layouts are products of families, strategies, axes, methods and adapters. Each family runs once where it
is richest, each layout and each pair of axes once, each kind of fault once; every test that is no row of such a table
always runs. The rest runs with `make unit-full`, and the full products of tensor and of context parallelism with
`make parity-full`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

COVERING = {
    "parity/test_data_parallel.py": r"whisper-(?!ddp1|fsdp2$|hsdp2x2$).+|.*-hsdp2x2|dropout-(ddp4|fsdp4-checkpointing)",
    "parity/test_llm_families.py": (
        r"(?!llama-lora).*-hsdp2x2|qwen3-lora-fsdp2|llama-(ddp2|fsdp2-no-defer|fsdp4-checkpointing|2-fsdp2|4-ddp2)"
        r"|(nemotron-h|llama-tied)-ddp2|llama-(lora|fp32)-fsdp4-checkpointing"
    ),
    "parity/test_llm_packed.py": (
        r"(llama|gemma3|mistral)-hsdp2x2|llama-(ddp2|fsdp4-checkpointing|tied-fsdp2|lora-fsdp2|4-fsdp2|fp32-fsdp2)"
        r"|(labels-over-borders|leaking-attention|shifted-borders|loss-on-padding|local-token-mean|average)-fsdp2"
    ),
    "parity/test_tensor_parallel.py": (
        r".*-dp2-tp2-sp|(llama-odd|salm)-hsdp2x2-tp2-sp|llama-odd-(tp2|tp4-sp|dp2-tp2-sp-no-defer|dp2-tp2-offload)"
        r"|nemotron-h-mlp-dp2-tp2|(phi3|gpt-oss)-tp4|llama-odd-lora-dp2-tp2|phi3-lora-tp4-sp"
    ),
    "parity/test_randomness.py": (
        r"phi3-lora--(fsdp2|hsdp2x2|checkpointing|dp2-tp2-sp)|phi3--tp2-sp|llama-lora--dp2-tp2-sp|gpt2--ddp2"
        r"|phi3-lora-(wide-packs-fsdp2|packs-cp2-tp2-sp)|speech-(wide-fsdp2|packed-dp2-tp2-sp)"
    ),
    "parity/test_context.py": (
        r"llama-(ring-cp2-checkpointing|ulysses-dp2-cp2-no-defer|rows-(ring-cp2|allgather-cp2))|gpt-oss-rows-ring-cp2"
        r"|llama-(unsupervised|nothing|dynamic)-ring-dp2-cp2|phi3-long-ring-cp4"
    ),
    "parity/test_context_attention.py": (
        r".*-ring-2|(plain|window-5|sinks|tiny)-allgather-2|(plain|one-kv-head|many-heads|narrow-values|tiny)-ulysses-2"
        r"|(plain|window-5|tiny)-ring-4|plain-ring-[13]|many-heads-ulysses-3|plain-(allgather|ulysses)-4"
    ),
    "parity/test_hybrids.py": (
        r"nemotron-h-(hsdp2x2|fp32-fsdp4-checkpointing)|granite-hybrid-ddp2|mamba2-hsdp2x2"
        r"|bamba-(rows-fsdp2|lora-fsdp2|unsupervised-fsdp2|rows-state-dp2-cp2|fp32-all_to_all-cp2-checkpointing)"
    ),
    "parity/test_context_mamba.py": r"ragged-.*|one long document-.*|a group a head-.*",
    "verify/test_faults.py": (
        r"averaged_over_dp|never_synchronised|local_token_mean|labels_not_shifted|stale_rotary_buffer"
        r"|adapters_of_each_rank|ranks_with_the_same_data|norm_of_this_rank|statistics_of_each_rank"
        r"|peers_with_different_data|missing_sum_over_tp|sequence_cut_to_a_multiple"
    ),
    "e2e/test_strategies.py": r"automodel-(3|hsdp|tp2-sp)|ddp-4|nemo-tp2",
    "e2e/test_llm_strategies.py": r"(fsdp2-2|tp2-sp)-rows|(hsdp-2x2|ddp-2|cp2-ulysses-tp2-sp)-packs",
    "e2e/test_resume_layouts.py": r"(speech, dp 4|LLM, checkpointing|speech, fsdp2 to tp|LoRA, tp).*",
}
"""By file: the names of rows, between the brackets, that are kept."""

_TABLES = re.compile(
    r"layout_never_changes|dropout_is_the_same$|packs_train_as_rows|fault_breaks_the_parity_of_packs"
    r"|ranks_compute_what_one_process|documents_over_ranks|planted_fault_is_found|twenty_steps_are_the_same"
    r"|chain_of_layouts"
)


def is_beyond(item: pytest.Item) -> bool:
    """Whether a test is a row of a table and not part of the covering selection."""
    file = item.nodeid.partition("::")[0].removeprefix("tests/")
    name, _, row = item.name.partition("[")
    if file not in COVERING or not row or not _TABLES.search(name):
        return False
    return re.fullmatch(COVERING[file], row.removesuffix("]")) is None


def split(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that always run, and those beyond the selection."""
    beyond = [item for item in items if item.get_closest_marker("full") or is_beyond(item)]
    left_out = set(beyond)
    return [item for item in items if item not in left_out], beyond
