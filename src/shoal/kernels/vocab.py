"""Cross-entropy of logits whose vocabulary is spread over the ranks of a group.

A rank holds the logits of its own range of ids and never sees another's: one exchange of five numbers per token
gives every rank the same losses. `reference_vocab_parallel_losses` says the same with gathered logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shoal.mesh.regions import chunk_bounds, chunk_size, gather_features


@dataclass(frozen=True)
class VocabShard:
    """The range of ids whose rows of the head this rank holds; ranges of a group follow each other by rank.

    Attributes:
        group: The ranks that share the vocabulary.
        start: First id of this rank; `num_total` for a rank without ids.
        num_local: Number of its ids, possibly 0.
        num_total: Size of the vocabulary.

    Raises:
        ValueError: The range does not lie inside the vocabulary.
    """

    group: ProcessGroup
    start: int
    num_local: int
    num_total: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_local < 0 or not 0 < self.num_total >= self.start + self.num_local:
            raise ValueError(
                f"VocabShard: ids {self.start} to {self.start + self.num_local} do not lie in a vocabulary of "
                f"{self.num_total}; VocabShard.of(num_total, group) computes the range"
            )

    @classmethod
    def of(cls, num_total: int, group: ProcessGroup) -> VocabShard:
        """Returns this rank's range as `torch.chunk` and `Shard(0)` cut it: equal parts, the last ones fewer."""
        start, end = chunk_bounds(num_total, group.size(), group.rank())
        return cls(group, start, end - start, num_total)

    @property
    def num_longest(self) -> int:
        """Most ids that a rank of the group holds when they are spread evenly; the same on every rank."""
        return chunk_size(self.num_total, self.group.size())


def vocab_parallel_losses(
    logits: Tensor,
    labels: Tensor,
    vocab: VocabShard,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns each token's cross-entropy, and whether its label has the largest logit.

    A token's loss is (1 - label_smoothing) * (lse(z) - z[label]) + label_smoothing * (lse(z) - mean(z)) +
    z_loss * lse(z)**2 over the logits z of the whole vocabulary, in float32 (float64 for float64). Of equal largest
    logits the first counts, as in `Tensor.argmax`. Communicates once: an all-gather of five numbers per token with a
    label (largest logit, sum of exponentials, label's logit, mean, vote on the label); not at all without such a
    token.

    Every rank has the same number of tokens and the same labels, and differentiates the same function of the
    losses. A rank's gradient is that of this one function with respect to its own logits: complete, not to be summed.

    Args:
        logits: [N, V_local], floating point.
        labels: [N] int64 in [0, V), ids of the whole vocabulary, or `ignore_index`; already shifted.
        vocab: Which ids the columns of `logits` are.
        ignore_index: The label of tokens that carry no loss: theirs is 0, they are not correct, and their logits
            are not read.
        label_smoothing: In [0, 1], share of the target spread evenly over the vocabulary.
        z_loss: Weight of the squared log-partition (arXiv 2204.02311, section 5).

    Returns:
        Losses [N], which can be differentiated once, and correct [N] bool; identical on every rank of the group.

    Raises:
        ValueError: Shapes do not fit, or an argument is out of its range.
    """
    check_shard(logits.shape[-1], labels, vocab, ignore_index, label_smoothing)
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        shapes = f"logits {list(logits.shape)}, labels {list(labels.shape)}"
        raise ValueError(f"vocab_parallel_losses: {shapes} do not fit; give [N, {vocab.num_local}] and [N]")
    labelled = (labels != ignore_index).nonzero()[:, 0]
    given = logits.index_select(0, labelled)
    with torch.autocast(logits.device.type, enabled=False):
        some, correct = _VocabParallelLosses.apply(  # type: ignore[no-untyped-call]
            given, labels.index_select(0, labelled), vocab, label_smoothing, z_loss, torch.is_grad_enabled()
        )
    losses = some.new_zeros(len(labels)).index_copy(0, labelled, some)
    return losses, torch.zeros_like(labels, dtype=torch.bool).index_copy(0, labelled, correct)


def reference_vocab_parallel_losses(
    logits: Tensor,
    labels: Tensor,
    vocab: VocabShard,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Says what `vocab_parallel_losses` computes, with all logits on every rank and torch's own cross-entropy.

    For ranges as `VocabShard.of` cuts them.
    """
    whole = gather_features(logits.to(accumulation_dtype(logits)), vocab.group, vocab.num_total)
    losses = F.cross_entropy(
        whole, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    labelled = labels != ignore_index
    losses = losses + (z_loss * whole.logsumexp(-1).square()).where(labelled, 0.0)
    return losses, (whole.detach().argmax(-1) == labels) & labelled


class _VocabParallelLosses(torch.autograd.Function):
    """Losses and their gradient in one pass, where the logits were; backward only scales what forward has computed.

    The logits are rows picked for this function alone, so that it may overwrite them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab: VocabShard,
        label_smoothing: float,
        z_loss: float,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        wanted = with_gradient and ctx.needs_input_grad[0]
        losses, correct, gradient = losses_and_gradient(
            logits.to(accumulation_dtype(logits)),
            labels,
            vocab,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            with_gradient=wanted,
        )
        ctx.gradient, ctx.dtype = gradient if wanted else None, logits.dtype
        ctx.mark_non_differentiable(correct)
        return losses, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradient is None:
            raise RuntimeError("vocab_parallel_losses: the gradient was handed out; call backward once")
        gradient, ctx.gradient = ctx.gradient, None
        return (gradient.mul_(grad_losses[:, None]).to(ctx.dtype), None, None, None, None, None)


def losses_and_gradient(
    logits: Tensor,
    labels: Tensor,
    vocab: VocabShard | None,
    *,
    label_smoothing: float,
    z_loss: float,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes losses, hits and the losses' gradient where the logits are.

    Args:
        logits: [C, V] or, with `vocab`, this rank's [C, V_local]; float32 or float64, overwritten.
        labels: [C] int64, ids of the whole vocabulary, all of them given.
        vocab: The rank's part, or None when the logits are whole.
        label_smoothing: As in `vocab_parallel_losses`.
        z_loss: As in `vocab_parallel_losses`.
        with_gradient: Whether the third result means anything.

    Returns:
        Losses [C], correct [C] bool, and the gradient of each token's loss with respect to its own logits, with the
        shape of `logits`.
    """
    num_total = logits.shape[-1] if vocab is None else vocab.num_total
    columns, owned = _own_columns(labels, vocab)
    peak, first = _local_peak(logits, 0 if vocab is None else vocab.start)
    # A label is the first largest logit where the sum of votes is 1: an equal logit before it votes against it.
    vote = (first == labels).to(logits.dtype) - (first < labels).to(logits.dtype)
    target = _at(logits, columns).where(owned, 0.0)
    mean = logits.sum(-1) / num_total if label_smoothing else torch.zeros_like(peak)
    # The buffer of the logits becomes that of the exponentials and then of the gradient.
    gradient = logits.sub_(peak[:, None]).exp_()
    parts = torch.stack([peak, gradient.sum(-1), target, mean, vote])
    peaks, totals, targets, means, votes = _of_every_rank(parts, vocab).unbind(1)
    highest = peaks.amax(0)
    total = (totals * (peaks - highest).exp()).sum(0)
    log_partition = highest + total.log()
    losses = (1.0 - label_smoothing) * (log_partition - targets.sum(0))
    if label_smoothing:
        losses += label_smoothing * (log_partition - means.sum(0))
    losses += z_loss * log_partition.square()
    if with_gradient:
        gradient.mul_(((peak - highest).exp() * (1.0 + 2.0 * z_loss * log_partition) / total)[:, None])
        if label_smoothing:
            gradient -= label_smoothing / num_total
        _add_at(gradient, columns, owned.to(gradient.dtype) * (label_smoothing - 1.0))
    return losses, votes.where(peaks == highest, 0.0).sum(0) == 1.0, gradient


def _of_every_rank(parts: Tensor, vocab: VocabShard | None) -> Tensor:
    """Returns the parts [K, C] of all ranks of the group as [W, K, C], in the order of ranks.

    Every rank then adds up the same numbers in the same order, so that results do not differ in a bit.
    """
    if vocab is None or parts.numel() == 0:
        return parts[None]
    size, (num_parts, num_tokens) = vocab.group.size(), parts.shape
    gathered = parts.new_empty(size * num_parts, num_tokens)
    dist.all_gather_single(gathered, parts, group=vocab.group)
    return gathered.view(size, num_parts, num_tokens)


def _own_columns(labels: Tensor, vocab: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Returns the column [C] of each label, any one where the rank has none, and where it has one [C] bool."""
    if vocab is None:
        return labels, torch.ones_like(labels, dtype=torch.bool)
    columns = labels - vocab.start
    owned = (columns >= 0) & (columns < vocab.num_local)
    return columns.where(owned, 0), owned


def _local_peak(logits: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Returns the largest of each row [C], always finite unless a logit is inf or nan, and its first id [C].

    Without columns, or with nothing but -inf in them, the first is the least finite number, so that subtracting it
    is safe; without columns the id lies past every label.
    """
    least = torch.finfo(logits.dtype).min
    if logits.shape[-1] == 0:
        nothing = logits.new_full(logits.shape[:1], least)
        return nothing, torch.full_like(nothing, torch.iinfo(torch.int64).max, dtype=torch.int64)
    peak, first = logits.max(-1)
    return peak.clamp(min=least), first + start


def _at(logits: Tensor, columns: Tensor) -> Tensor:
    if logits.shape[-1] == 0:
        return logits.new_zeros(logits.shape[:1])
    return logits.gather(-1, columns[:, None])[:, 0]


def _add_at(gradient: Tensor, columns: Tensor, values: Tensor) -> None:
    if gradient.shape[-1] > 0:
        gradient.scatter_add_(-1, columns[:, None], values[:, None])


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Returns what losses of a tensor are computed in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def check_shard(
    num_local: int, labels: Tensor, vocab: VocabShard, ignore_index: int, label_smoothing: float
) -> None:
    """Raises ValueError when a rank's part is not what `vocab` says or a label is no id of the vocabulary.

    Unlike an index into all logits, a label that no rank holds would not fail by itself.
    """
    if num_local != vocab.num_local:
        raise ValueError(
            f"vocab: this rank's part has {num_local} ids, but VocabShard.num_local is {vocab.num_local}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: {label_smoothing} is outside [0, 1]")
    outside = labels[((labels < 0) | (labels >= vocab.num_total)) & (labels != ignore_index)]
    if len(outside):
        raise ValueError(
            f"labels: {int(outside[0])} is neither in [0, {vocab.num_total}) nor the ignored {ignore_index}"
        )
