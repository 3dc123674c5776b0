"""Law 1 for packs: under every layout they train as the same documents do in rows, in one process.

The second half plants faults that users of other systems met with packs, and with text in general; each is noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal.data.text_batches as text_batches
from tests.parity.harness import Record, assert_parity, reference, run_layout
from tests.parity.packed_text import packed_case, rows_of
from tests.parity.test_guards import average_over_ranks, local_token_mean, never_synchronise
from tests.parity.test_llm_families import LAYOUTS, LORA
from tests.zygote import RankRunner

CASES = {
    **{
        family: packed_case(family)
        for family in ("llama", "llama-tied", "qwen3", "gemma3", "smollm3", "mistral")
    },
    "llama-lora": packed_case("llama", lora=LORA),
    "llama-1": packed_case("llama", 2),
    "llama-4": packed_case("llama", 8, unsupervised=(1,)),
    "llama-fp32": packed_case("llama", dtype=torch.float32, optimizer="sgd"),
}
TABLE = [
    *((family, "hsdp2x2") for family in ("llama", "qwen3", "gemma3", "smollm3", "mistral")),
    *(("llama", layout) for layout in LAYOUTS if layout != "hsdp2x2"),
    *((case, "fsdp2") for case in ("llama-tied", "gemma3", "llama-lora", "llama-1", "llama-4", "llama-fp32")),
    *((case, "ddp2") for case in ("llama-lora", "llama-1", "llama-4")),
]


@functools.cache
def rows_reference(name: str) -> Record:
    """What the documents give in rows, in one process."""
    return reference(rows_of(CASES[name]))


@pytest.mark.parametrize(("name", "layout"), TABLE)
def test_packs_train_as_rows_do(ranks: RankRunner, name: str, layout: str) -> None:
    case, row = CASES[name], LAYOUTS[layout]
    actual = ranks(run_layout, row.world, case, row)[0]
    assert_parity(actual, rows_reference(name), case)


# ------------------------------------------------------------------------------------------ planted faults


def change_packs(change: Callable[[dict[str, Any]], None]) -> None:
    """Lets every pack pass through `change`."""
    honest = text_batches.packed

    def faulty(rows: Any, size: int, pad_id: int) -> dict[str, Any]:
        pack = honest(rows, size, pad_id)
        change(pack)
        return pack

    text_batches.packed = faulty


def labels_over_borders() -> None:
    """Supervises the first token of a document, whose predecessor is another document's last."""
    change_packs(lambda pack: pack["loss_mask"][0].index_fill_(0, pack["cu_seqlens"][1:-1].long(), True))


def leaking_attention() -> None:
    """Forgets the borders inside a pack."""
    change_packs(
        lambda pack: pack.update(cu_seqlens=pack["cu_seqlens"][[0, -1]], max_seqlen=int(pack["text_lens"]))
    )


def shifted_borders() -> None:
    """Puts the first border one token too late: that token sees the wrong document."""

    def shift(pack: dict[str, Any]) -> None:
        borders = pack["cu_seqlens"].clone()
        borders[1] += 1
        pack.update(cu_seqlens=borders, max_seqlen=int(borders.diff().max()))

    change_packs(shift)


def loss_on_padding() -> None:
    """Supervises what lies behind the last document."""
    change_packs(lambda pack: pack["loss_mask"][0, int(pack["text_lens"]) :].fill_(True))


FAULTS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "labels-over-borders": (labels_over_borders, ("fsdp2", "ddp2")),
    "leaking-attention": (leaking_attention, ("fsdp2", "ddp2")),
    "shifted-borders": (shifted_borders, ("fsdp2",)),
    "loss-on-padding": (loss_on_padding, ("fsdp2",)),
    "local-token-mean": (local_token_mean, ("fsdp2", "ddp2", "hsdp2x2")),
    "average": (average_over_ranks, ("fsdp2", "ddp2", "hsdp2x2")),
    "no-synchronisation": (never_synchronise, ("fsdp2", "ddp2")),
}


def run_with_fault(rank: int, world: int, fault: str, layout: str) -> Record | None:
    FAULTS[fault][0]()  # this rank is a forked process: the fault dies with it
    return run_layout(rank, world, CASES["llama"], LAYOUTS[layout])


@pytest.mark.parametrize(
    ("fault", "layout"), [(name, one) for name, (_, found) in FAULTS.items() for one in found]
)
def test_a_planted_fault_breaks_the_parity_of_packs(ranks: RankRunner, fault: str, layout: str) -> None:
    actual = ranks(run_with_fault, LAYOUTS[layout].world, fault, layout)[0]
    with pytest.raises(AssertionError):
        assert_parity(actual, rows_reference("llama"), CASES["llama"])
