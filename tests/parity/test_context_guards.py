"""The parity of context parallelism can fail: each planted fault is noticed, and peers with other data are refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shoal.kernels.attention_parts as parts_module
import shoal.models.causal_lm as causal_lm_module
import shoal.parallel.context.ring as ring_module
import shoal.parallel.context.share as share_module
import shoal.parallel.context.split as split_module
import shoal.parallel.model as model_module
import tests.parity.harness as harness
from shoal.config.schema import FSDP2Config, ParallelismSizes
from tests.parity.harness import Case, Layout, Record, assert_parity, reference, run_layout
from tests.parity.packed_text import packed_case, rows_of
from tests.unit.kernels.families import InDouble
from tests.zygote import RankRunner

CASES = {family: packed_case(family, 3) for family in ("llama", "mistral")}
CP2 = ParallelismSizes(cp_size=2)
RING, ALLGATHER = (
    Layout("ring", 2, sizes=CP2),
    Layout("allgather", 2, sizes=CP2, fsdp2=FSDP2Config(cp_method="allgather")),
)
ULYSSES = Layout("ulysses", 2, sizes=CP2, fsdp2=FSDP2Config(cp_method="ulysses"))


def labels_shifted_after_the_split() -> None:
    """Shifts within what a rank holds: its chunks lose their last targets, or get a token of another chunk."""
    causal_lm_module.shifted_labels = lambda ids, mask: ids.masked_fill(~mask, causal_lm_module.IGNORE)

    def labels(self: share_module.Share, values: Tensor, ignore: int) -> Tensor:
        own = self.tokens(values).masked_fill(~self.is_real, ignore)
        return F.pad(own[:, 1:], (0, 1), value=ignore)

    share_module.Share.labels = labels  # type: ignore[method-assign]


def tokens_counted_by_every_peer() -> None:
    honest = harness.agree_on_step

    def counted(*arguments, **options):  # type: ignore[no-untyped-def]
        header = honest(*arguments, **options)
        return dataclasses.replace(header, num_tokens=2 * header.num_tokens)

    harness.agree_on_step = counted


def losses_summed_over_dp_only() -> None:
    model_module.ParallelModel.loss_group = property(lambda self: self.group, lambda *_: None)  # type: ignore[assignment]


def masked_rows_merged() -> None:
    """What torch's CPU kernel says of a row without keys: a log-sum-exp of 0, and whatever output."""
    honest = parts_module._KERNELS["sdpa"]

    def zero(*arguments):  # type: ignore[no-untyped-def]
        out, lse = honest.forward(*arguments)
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    parts_module._KERNELS["sdpa"] = dataclasses.replace(honest, forward=zero)


def local_positions() -> None:
    """Counts positions within what the rank holds."""
    honest = causal_lm_module._shared_inputs

    def counted(micro_batch, share):  # type: ignore[no-untyped-def]
        inputs = honest(micro_batch, share)
        return {**inputs, "position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}

    causal_lm_module._shared_inputs = counted


class _Still:
    """A rotation that does not move."""

    def __init__(self, tensors: list[Tensor], *_: object) -> None:
        self.tensors = tensors

    def wait(self) -> list[Tensor]:
        return self.tensors


def backward_stays_at_home() -> None:
    """Recomputes every step with this rank's own keys, and keeps their gradients."""
    honest, rotation = ring_module._Ring.backward, ring_module.Rotation

    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        ring_module.Rotation = _Still  # type: ignore[assignment,misc]
        try:
            return honest(ctx, *grads)
        finally:
            ring_module.Rotation = rotation  # type: ignore[misc]

    ring_module._Ring.backward = staticmethod(backward)  # type: ignore[method-assign,assignment]


def keys_in_rank_order() -> None:
    """Takes the gathered tokens for documents as they come."""
    import shoal.parallel.context.allgather as allgather_module
    import shoal.parallel.context.ulysses as ulysses_module

    def unsorted(layout, device):  # type: ignore[no-untyped-def]
        return split_module.gathered_places(layout, device).sort().values

    allgather_module.gathered_places = unsorted
    ulysses_module.gathered_places = unsorted


FAULTS: dict[str, tuple[Callable[[], None], str, tuple[Layout, ...]]] = {
    "labels-after-split": (labels_shifted_after_the_split, "llama", (RING,)),
    "counted-twice": (tokens_counted_by_every_peer, "llama", (RING,)),
    "losses-over-dp": (losses_summed_over_dp_only, "llama", (RING,)),
    "masked-rows": (masked_rows_merged, "mistral", (RING,)),
    "local-positions": (local_positions, "llama", (RING, ULYSSES)),
    "backward-at-home": (backward_stays_at_home, "llama", (RING,)),
    "rank-order": (keys_in_rank_order, "llama", (ALLGATHER, ULYSSES)),
}


def run_with_fault(rank: int, world: int, fault: str, layout: Layout) -> Record | None:
    plant, family, _ = FAULTS[fault]
    plant()  # this rank is a forked process: the fault dies with it
    with InDouble():
        return run_layout(rank, world, CASES[family], layout)


@functools.cache
def expected(family: str) -> Record:
    with InDouble():
        return reference(rows_of(CASES[family]))


@pytest.mark.parametrize(
    ("fault", "layout"), [(name, layout) for name, (_, _, layouts) in FAULTS.items() for layout in layouts]
)
def test_a_planted_fault_breaks_parity(ranks: RankRunner, fault: str, layout: Layout) -> None:
    family = FAULTS[fault][1]
    actual = ranks(run_with_fault, layout.world, fault, layout, timeout=90)[0]
    with pytest.raises(AssertionError, match="not close|gradients differ"):
        assert_parity(actual, expected(family), CASES[family])


def run_with_other_data(rank: int, world: int, case: Case, layout: Layout, key: str) -> str:
    """One peer's data differs; returns what it says."""

    honest = harness.deal

    def tampered(batches, model):  # type: ignore[no-untyped-def]
        if rank == 1:
            values = batches[0][key].clone()
            values.view(-1)[1] = ~values.view(-1)[1] if values.dtype == torch.bool else values.view(-1)[1] + 1
            batches[0][key] = values
        return honest(batches, model)

    harness.deal = tampered
    try:
        run_layout(rank, world, case, layout)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", ["input_ids", "cu_seqlens", "sample_seeds"])
def test_peers_with_other_data_are_refused_on_every_rank(ranks: RankRunner, key: str) -> None:
    for message in ranks(run_with_other_data, 2, CASES["llama"], RING, key):
        assert "the micro-batch" in message and "differs between ranks" in message, message
        assert "give all cp ranks of a data-parallel coordinate the same data" in message
