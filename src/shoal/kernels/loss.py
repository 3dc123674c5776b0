"""Cross-entropy of a language model's head that never holds the logits of all tokens at once.

`token_losses` computes logits, loss and gradients for a chunk of tokens at a time and keeps only the gradients of
the hidden states [N, H] and of the weight [V, H]; `reference_token_losses` says the same in a few lines with full
logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shoal.kernels.vocab import (
    VocabShard,
    accumulation_dtype,
    check_shard,
    losses_and_gradient,
)
from shoal.mesh.regions import gather_features

CHUNK_ELEMENTS = 2**24
"""Logits of one chunk when no chunk size is given: 64 MiB in float32."""


@dataclass(frozen=True)
class _Terms:
    """What stands between the head's product and the loss; see `token_losses`."""

    softcap: float | None
    logit_scale: float | None
    label_smoothing: float
    z_loss: float


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    vocab: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums the cross-entropy over all tokens with a label, chunk by chunk.

    A token's logits are z = softcap * tanh(logit_scale * (weight @ hidden + bias) / softcap), its loss is
    (1 - label_smoothing) * (lse(z) - z[label]) + label_smoothing * (lse(z) - mean(z)) + z_loss * lse(z)**2.
    The product has the dtype of `hidden`, as a linear layer's has; everything after it, and the sum of the
    weight's gradient over chunks, is float32 (float64 for float64). Under autocast the product has its dtype.

    Gradients are computed together with the loss, so the largest things held are the gradients themselves and
    `chunk_size` rows of logits. Tokens without a label cost nothing and their hidden states are not read. When
    no token has one, the loss is 0 and the gradients are 0, not absent.

    With `vocab` the head's rows are spread over a group whose ranks hold the same hidden states and labels. Each
    multiplies by its own rows; a chunk costs one all-gather of five numbers per token, and chunks grow with the
    number of ranks. Results are identical on every rank. The gradients of weight and bias are complete for their
    rows; that of the hidden states is this rank's share, to be summed over the group by whoever copied them to its
    ranks.

    Args:
        hidden: [N, H], floating point.
        weight: [V, H], or [V_local, H] with `vocab`, a plain tensor: a DTensor has to be gathered, as it is inside
            the forward of the module that owns it. It may be frozen, or be the input embedding as well.
        labels: [N] int64 in [0, V), or `ignore_index`; already shifted. Ids of the whole vocabulary.
        bias: [V] or [V_local], for heads that have one.
        ignore_index: The label of tokens that carry no loss.
        softcap: Bound of the logits, as Gemma 2 has it (arXiv 2408.00118, section 2).
        logit_scale: Factor of the logits, as Cohere and (inverted) Granite have it.
        label_smoothing: In [0, 1], share of the target spread evenly over the vocabulary.
        z_loss: Weight of the squared log-partition (arXiv 2204.02311, section 5).
        chunk_size: Tokens per chunk, the same on every rank; chosen for 64 MiB of float32 logits when not given.
        vocab: The rank's part of the vocabulary, where a group shares it.

    Returns:
        The loss summed over the labelled tokens, a scalar with gradient that can be differentiated once, and the
        number of labelled tokens whose label has the largest logit, a scalar without; both float32 (float64).

    Raises:
        ValueError: Shapes do not fit, or an argument is out of its range.
    """
    _check(hidden, weight, labels, bias, label_smoothing, softcap, chunk_size)
    if vocab is not None:
        check_shard(weight.shape[0], labels, vocab, ignore_index, label_smoothing)
    labelled = (labels != ignore_index).nonzero()[:, 0]
    if len(labelled) < len(labels):
        hidden, labels = hidden.index_select(0, labelled), labels.index_select(0, labelled)
    hidden, weight, bias = _in_autocast_dtype(hidden, weight, bias)
    rows = _rows_per_chunk(weight, vocab) if chunk_size is None else chunk_size
    terms = _Terms(softcap, logit_scale, label_smoothing, z_loss)
    with torch.autocast(hidden.device.type, enabled=False):
        sums: tuple[Tensor, Tensor] = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, labels, terms, vocab, rows, torch.is_grad_enabled()
        )
    return sums


def _in_autocast_dtype(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a linear layer would multiply: cast under autocast, else as they are."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _rows_per_chunk(weight: Tensor, vocab: VocabShard | None) -> int:
    """Tokens of a chunk; ranks with fewer rows of the head, or none, must cut the tokens as the others do."""
    num_columns = weight.shape[0] if vocab is None else vocab.num_longest
    return max(1, CHUNK_ELEMENTS // num_columns)


def reference_token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Says what `token_losses` computes, with all logits at once and torch's own cross-entropy."""
    logits = F.linear(hidden, weight, bias).to(accumulation_dtype(hidden))
    if logit_scale is not None:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if vocab is not None:
        logits = gather_features(logits, vocab.group, vocab.num_total)
    loss_sum = F.cross_entropy(
        logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )
    labelled = labels != ignore_index
    loss_sum = loss_sum + z_loss * logits[labelled].logsumexp(-1).square().sum()
    return loss_sum, (logits.detach().argmax(-1) == labels)[labelled].sum().to(logits.dtype)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks; backward only scales what forward has computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        terms: _Terms,
        vocab: VocabShard | None,
        chunk_size: int,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(hidden)
        wanted = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and wanted[2] else None
        loss_sum, num_correct = hidden.new_zeros((), dtype=dtype), hidden.new_zeros((), dtype=dtype)
        for start in range(0, len(labels), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = F.linear(hidden[rows], weight, bias).to(dtype)
            losses, correct, grad_logits = _losses_and_gradient(
                logits, labels[rows], terms, vocab, any(wanted)
            )
            loss_sum += losses.sum()
            num_correct += correct.sum()
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None and dtype == hidden.dtype:
                grad_weight.addmm_(grad_logits.t(), hidden[rows])
            elif grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[rows]
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(num_correct)
        return loss_sum, num_correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("token_losses: the gradients were handed out; call backward once")
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [
            None if gradient is None else gradient.mul_(grad_loss).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None, None)


def _losses_and_gradient(
    logits: Tensor, labels: Tensor, terms: _Terms, vocab: VocabShard | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a chunk's losses [C], hits [C] and the gradient of the head's product; overwrites `logits` [C, V]."""
    if terms.logit_scale is not None:
        logits.mul_(terms.logit_scale)
    tanh = None
    if terms.softcap is not None:
        tanh = logits.div_(terms.softcap).tanh_()
        logits = tanh * terms.softcap
    losses, correct, gradient = losses_and_gradient(
        logits,
        labels,
        vocab,
        label_smoothing=terms.label_smoothing,
        z_loss=terms.z_loss,
        with_gradient=with_gradient,
    )
    if with_gradient and tanh is not None:
        gradient.mul_(tanh.square_().neg_().add_(1.0))
    if with_gradient and terms.logit_scale is not None:
        gradient.mul_(terms.logit_scale)
    return losses, correct, gradient


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    label_smoothing: float,
    softcap: float | None,
    chunk_size: int | None,
) -> None:
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, labels {list(labels.shape)}"
    fits = hidden.dim() == weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or labels.shape != hidden.shape[:1] or (bias is not None and bias.shape != weight.shape[:1]):
        shapes += "" if bias is None else f", bias {list(bias.shape)}"
        raise ValueError(f"token_losses: {shapes} do not fit; give [N, H], [V, H], [N] and, if any, [V]")
    if isinstance(weight, DTensor):
        raise ValueError(
            f"token_losses: weight is sharded ({weight.placements}); call the loss inside the forward of the "
            "module that owns the weight, where it is gathered"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: {label_smoothing} is outside [0, 1]")
    if softcap is not None and softcap <= 0.0:
        raise ValueError(f"softcap: {softcap} is not positive; give None for logits without a bound")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size: {chunk_size} is below 1; give None to have it chosen")
