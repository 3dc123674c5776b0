"""The trainable module of the LLM recipe: a transformers causal LM and its loss in one forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.kernels.attention_hf import is_registered
from shoal.kernels.logits import linear_head, logit_transforms
from shoal.kernels.loss import token_losses
from shoal.kernels.vocab import VocabShard, vocab_parallel_losses
from shoal.models.dropout import DropoutState, tokens_of
from shoal.models.rotary import steady_rotation
from shoal.parallel.context.share import ContextParallel, Share
from shoal.parallel.tensor import TensorParallel

IGNORE = -100
"""The label of a position that carries no loss."""


class CausalLM(nn.Module):
    """Maps a micro-batch of documents to sums of token losses; its one forward is the root of sharding.

    Nothing touches a parameter outside `forward`. Rows are right-padded and attention is causal, so no token sees
    padding and no mask is needed. A pack (with ``cu_seqlens``) gives attention the borders of its documents.

    Args:
        llm: A causal language model of transformers.
        loss: ``chunked`` multiplies hidden states by the head a chunk of tokens at a time, ``full`` takes the
            model's own logits of all supervised tokens; the same numbers.
        label_smoothing: Share of the target spread over the vocabulary.
        z_loss: Weight of the squared log-partition.

    Raises:
        ValueError: ``chunked`` does not know what the model does to its logits, or the head is adapted.
    """

    tensor_parallel: TensorParallel | None = None
    """How `llm` is cut over ranks, set by assembly."""

    context_parallel: ContextParallel | None = None
    """How ranks share the tokens of a micro-batch, set by assembly."""

    dropout_state: DropoutState | None = None
    """What dropout modules know about the tokens, set by assembly."""

    def __init__(
        self,
        llm: PreTrainedModel,
        *,
        loss: Literal["chunked", "full"] = "chunked",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        steady_rotation(llm)
        self.llm = llm
        self._chunked = loss == "chunked"
        self._smoothing, self._z_loss = label_smoothing, z_loss
        self._arguments = frozenset(inspect.signature(llm.forward).parameters)
        self._transforms: dict[str, Any] = {}
        if self._chunked:
            try:
                linear_head(llm)
                self._transforms |= logit_transforms(llm.config)
            except ValueError as error:
                raise ValueError(f"loss_fn.kind = 'chunked': {error}; repair: loss_fn.kind=full") from None

    def forward(self, micro_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Runs one micro-batch.

        Args:
            micro_batch: `input_ids` int64 and `loss_mask` bool [B, S], right-padded. A pack has B = 1, and
                `position_ids` [1, S], `cu_seqlens` int32 [N + 1] and `max_seqlen`; its mask is False on each
                document's first token.

        Returns:
            `loss_sum` (with gradient), `num_tokens` and `num_correct` over the supervised tokens, scalars in
            float32 (float64 for a float64 model); without a supervised token all are 0 and so is every gradient.
            Under context parallelism they are over this rank's tokens.
        """
        share = None if self.context_parallel is None else self.context_parallel.share(micro_batch)
        if self.dropout_state is not None and self.training:
            samples, positions = tokens_of(micro_batch)
            if share is not None:
                samples, positions = share.tokens(samples), share.tokens(positions)
            self.dropout_state.publish_text(samples, positions)
        labels = shifted_labels(micro_batch["input_ids"], micro_batch["loss_mask"])
        if share is not None:  # after the shift: the next token may lie on another rank
            labels = share.labels(labels, IGNORE)
        arguments = self._inputs(micro_batch) if share is None else _shared_inputs(micro_batch, share)
        if self._chunked:
            loss_sum, num_correct = self._chunked_losses(arguments, labels)
        else:
            loss_sum, num_correct = self._full_losses(arguments, labels)
        num_tokens = (labels != IGNORE).sum().to(loss_sum.dtype)
        return {"loss_sum": loss_sum, "num_tokens": num_tokens, "num_correct": num_correct}

    def _inputs(self, micro_batch: Mapping[str, Any]) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": micro_batch["input_ids"], "use_cache": False}
        if "cu_seqlens" in micro_batch:
            borders, longest = micro_batch["cu_seqlens"], micro_batch["max_seqlen"]
            if not is_registered(self.llm.config._attn_implementation):
                borders, longest = _with_padding(borders, longest, micro_batch["input_ids"].shape[1])
            arguments |= {
                "position_ids": micro_batch["position_ids"],
                "cu_seq_lens_q": borders,
                "cu_seq_lens_k": borders,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        return arguments

    def _chunked_losses(self, arguments: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden: Tensor = self.llm.base_model(**arguments).last_hidden_state
        head: Any = self.llm.get_output_embeddings()  # type: ignore[no-untyped-call]
        return token_losses(
            hidden.flatten(0, 1),
            head.weight,
            labels.flatten(),
            bias=head.bias,
            label_smoothing=self._smoothing,
            z_loss=self._z_loss,
            vocab=self._vocab,
            **self._transforms,
        )

    @property
    def _vocab(self) -> VocabShard | None:
        """The part of the vocabulary that logits are of; None when they are of all of it."""
        return None if self.tensor_parallel is None else self.tensor_parallel.vocab

    def _full_losses(self, arguments: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        columns = (labels != IGNORE).any(0).nonzero()[:, 0]
        labels = labels[:, columns].flatten()
        if "logits_to_keep" in self._arguments:
            logits: Tensor = self.llm(**arguments, logits_to_keep=columns).logits.flatten(0, 1)
        else:
            logits = self.llm(**arguments).logits[:, columns].flatten(0, 1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self._vocab is not None:
            losses, hits = vocab_parallel_losses(
                logits,
                labels,
                self._vocab,
                ignore_index=IGNORE,
                label_smoothing=self._smoothing,
                z_loss=self._z_loss,
            )
            return losses.sum(), hits.sum().to(losses.dtype)
        loss_sum = F.cross_entropy(
            logits, labels, ignore_index=IGNORE, label_smoothing=self._smoothing, reduction="sum"
        )
        supervised = labels != IGNORE
        if self._z_loss:
            loss_sum = loss_sum + self._z_loss * logits[supervised].logsumexp(-1).square().sum()
        correct = (logits.detach().argmax(-1) == labels) & supervised
        return loss_sum, correct.sum().to(loss_sum.dtype)


def shifted_labels(input_ids: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns the label of each position, its next token where that one is supervised, else -100; [B, S] int64.

    A document's first token is never supervised, so that no label reaches over a border.
    """
    following = input_ids.masked_fill(~loss_mask, IGNORE)[:, 1:]
    return F.pad(following, (0, 1), value=IGNORE)


def _with_padding(borders: Tensor, longest: int, length: int) -> tuple[Tensor, int]:
    """Borders and longest document with the padding behind the last one as a document of its own.

    flash-attention leaves what it computes for tokens outside of all documents unset, in forward and in backward, and
    it would reach the gradients of every layer before it.
    """
    end = borders.new_tensor([length])
    return torch.cat([borders, end]), max(longest, length - int(borders[-1]))


def _shared_inputs(micro_batch: Mapping[str, Any], share: Share) -> dict[str, Any]:
    """What the model gets of this rank's tokens; their positions are those in the whole documents."""
    ids = micro_batch["input_ids"]
    positions = micro_batch.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return share.inputs(input_ids=ids, position_ids=positions)
