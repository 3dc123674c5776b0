"""SALM: a speech encoder whose embeddings stand among the token embeddings of a language model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shoal.kernels.logits import linear_head, logit_transforms
from shoal.kernels.loss import token_losses
from shoal.kernels.packable import packable
from shoal.kernels.vocab import VocabShard, vocab_parallel_losses
from shoal.models.dropout import DropoutState
from shoal.models.rotary import steady_rotation
from shoal.parallel.context.share import ContextParallel, Share
from shoal.parallel.tensor import TensorParallel
from shoal.speech import splice
from shoal.speech.batch_norm import unobserved
from shoal.speech.perception import AudioPerception, is_frozen
from shoal.speech.seeds import fold_in
from shoal.speech.shared_clips import encode_shared

Mode = Literal["loss", "loss_per_row", "generate"]
log = logging.getLogger(__name__)


class SALM(nn.Module):
    """Perception, embedding, splice, language model and loss in one forward, which is the root of sharding.

    Nothing touches a parameter outside `forward`. Every forward runs perception, also without audio, so that
    all ranks take part in the same collectives; a micro-batch without audio then adds zero times its output.

    Packed, the conversations of a micro-batch stand one after the other in one row without padding; positions
    restart in each, labels stay inside each, and attention is told their borders. That changes no number, only what
    is computed on padding. Generation pads in any case.

    Args:
        llm: A causal language model of transformers. Packed, its attention is `shoal.kernels.attention_hf`'s.
        perception: Gives embeddings of the LLM's hidden size.
        placeholder_id: Token id that stands for one clip; it may lie beyond the LLM's vocabulary.
        packed: Packs the conversations of a micro-batch instead of padding them.

    Raises:
        ValueError: The LLM cannot be packed; see `shoal.kernels.packable`.
    """

    dropout_state: DropoutState | None = None
    """What dropout modules know about the tokens, set by assembly."""

    tensor_parallel: TensorParallel | None = None
    """How `llm` is cut over ranks, set by assembly."""

    context_parallel: ContextParallel | None = None
    """How ranks share the tokens of a micro-batch, set by assembly."""

    def __init__(
        self, llm: PreTrainedModel, perception: AudioPerception, *, placeholder_id: int, packed: bool = False
    ) -> None:
        super().__init__()
        if packed:
            packable(llm)
        steady_rotation(llm)
        self.llm = llm
        self.perception = perception
        self.placeholder_id = placeholder_id
        self.packed = packed
        self._llm_arguments = frozenset(inspect.signature(llm.forward).parameters)
        self._transforms = _chunkable(llm)

    def forward(
        self, micro_batch: Mapping[str, Any], mode: Mode = "loss", **generation: Any
    ) -> dict[str, Tensor]:
        """Runs one micro-batch.

        Args:
            micro_batch: `audios` [B_aud, T] float32 and `audio_lens` [B_aud] (B_aud may be 0), `input_ids`
                and `loss_mask` [B, S] right-padded, `text_lens` [B], `sample_ids` and `sample_seeds` [B].
            mode: "loss" gives sums over the micro-batch, "loss_per_row" the same sums for each conversation [B],
                "generate" gives `tokens`; see `generate`.
            generation: Arguments of `generate`.

        Returns:
            `loss_sum` (with gradient), `num_tokens` and `num_correct` over the supervised tokens, in float32
            (float64 for a float64 model); without a supervised token all are 0 and so is every gradient. Besides,
            `num_positions` of the LLM and how many of them are no padding, `num_real_positions`. Under context
            parallelism all of these are over this rank's tokens.

        Raises:
            ValueError: Placeholders and clips do not match; see `shoal.speech.splice.plan`. Or context-parallel ranks
                did not get the same micro-batch. Raised before any other collective of this forward.
        """
        if mode == "generate":
            return {"tokens": self._generate(micro_batch, **generation)}
        layout = self._plan(micro_batch, "packed" if self.packed else "right")
        share = self._share(micro_batch, layout)
        embeddings = self._embed(micro_batch, layout, share)
        labels, real, conversations = layout.labels, layout.attention_mask, layout.conversation
        if share is None:
            arguments = self._llm_inputs(embeddings, layout)
        else:  # after the shift: the next token may lie on another rank
            arguments = share.inputs(inputs_embeds=embeddings, position_ids=layout.position_ids)
            labels, real = share.labels(labels, splice.IGNORE), share.is_real
            conversations = share.tokens(conversations)
        conversation = conversations.flatten() if mode == "loss_per_row" else None
        num_rows = layout.num_conversations
        if self._transforms is None:
            loss_sum, num_correct = self._full_losses(arguments, labels, conversation, num_rows)
        else:
            loss_sum, num_correct = self._chunked_losses(arguments, labels, conversation, num_rows)
        supervised = (labels != splice.IGNORE).flatten().to(loss_sum.dtype)
        return {
            "loss_sum": loss_sum,
            "num_tokens": _sums(supervised, conversation, num_rows),
            "num_correct": num_correct,
            "num_positions": labels.new_tensor(labels.numel()),
            "num_real_positions": real.sum(),
        }

    def generate(
        self,
        micro_batch: Mapping[str, Any],
        *,
        max_new_tokens: int,
        eos_token_id: int | list[int],
        pad_token_id: int,
        **options: Any,
    ) -> Tensor:
        """Continues every row of a micro-batch; greedy unless `options` say otherwise.

        Collective: with a sharded model all ranks call it equally often and stop together.

        Args:
            micro_batch: As for `forward`; the rows are prompts, `loss_mask` is not read.
            max_new_tokens: Bound on the new tokens of each row.
            eos_token_id: A row ends with any of these.
            pad_token_id: Fills rows that ended.
            options: Passed to `transformers.GenerationMixin.generate`.

        Returns:
            New tokens [B, N] int64, with the end token, N <= max_new_tokens.

        Raises:
            ValueError: The model is in training mode, where caches and dropout would make the result wrong.
        """
        output = self(
            micro_batch,
            mode="generate",
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            **options,
        )
        tokens: Tensor = output["tokens"]
        return tokens

    def train(self, mode: bool = True) -> SALM:
        """Sets the mode; a wholly frozen LLM and frozen parts of perception stay in eval mode."""
        super().train(mode)
        if is_frozen(self.llm):
            self.llm.train(False)
        return self

    def _plan(self, micro_batch: Mapping[str, Any], arrangement: splice.Arrangement) -> splice.Layout:
        return splice.plan(
            micro_batch["input_ids"],
            micro_batch["loss_mask"],
            micro_batch["text_lens"],
            self.perception.output_lengths(micro_batch["audio_lens"]),
            placeholder_id=self.placeholder_id,
            sample_ids=micro_batch["sample_ids"],
            arrangement=arrangement,
        )

    def _share(self, micro_batch: Mapping[str, Any], layout: splice.Layout) -> Share | None:
        """This rank's tokens among those of the packed conversations; None when it has them all."""
        if self.context_parallel is None:
            return None
        if layout.cu_seqlens is None:
            raise ValueError(
                f"cp_size = {self.context_parallel.group.size()}: 1 for conversations that are padded; repair: "
                "model.packed_sequences: true"
            )
        return self.context_parallel.share({**micro_batch, "cu_seqlens": layout.cu_seqlens})

    def _embed(
        self, micro_batch: Mapping[str, Any], layout: splice.Layout, share: Share | None = None
    ) -> Tensor:
        """Returns the spliced embeddings [R, L, H] of a micro-batch; under context parallelism of all its tokens."""
        audios, audio_lens = micro_batch["audios"], micro_batch["audio_lens"]
        if self.dropout_state is not None and self.training:
            samples, positions = micro_batch["sample_seeds"][layout.conversation], layout.position_ids
            if share is not None:
                samples, positions = share.tokens(samples), share.tokens(positions)
            self.dropout_state.publish_text(samples, positions)
        # The placeholder may have no row in the embedding table: look up 0, the result is not used.
        ids = micro_batch["input_ids"].masked_fill(~layout.is_text, 0)
        text: Tensor = self.llm.get_input_embeddings()(ids)
        if len(audio_lens) == 0:
            return splice.splice(text + 0.0 * self._silence(audios).to(text.dtype), text[:0], layout)
        seeds = fold_in(micro_batch["sample_seeds"][layout.clip_row], layout.clip_ordinal)
        if share is None:
            clips, _ = self.perception(audios, audio_lens, seeds)
        else:
            clips = encode_shared(
                self.perception,
                audios,
                audio_lens,
                seeds,
                layout.clip_lens,
                share.attention.group,
                lambda: self._silence(audios),
            )
        return splice.splice(text, clips.to(text.dtype), layout)

    def _silence(self, audios: Tensor) -> Tensor:
        """Runs perception on a short silent clip; returns the sum of its output, a scalar."""
        samples = self.perception.minimum_samples
        clip = audios.new_zeros(1, samples)
        lens = torch.full((1,), samples, dtype=torch.int64, device=audios.device)
        with unobserved(self.perception):
            embeddings, _ = self.perception(clip, lens, torch.zeros_like(lens))
        total: Tensor = embeddings.sum()
        return total

    def _llm_inputs(self, embeddings: Tensor, layout: splice.Layout) -> dict[str, Any]:
        """Returns the arguments of the LLM for embeddings [R, L, H].

        No padding mask: rows are right-padded and attention is causal, so no token sees padding, and no query
        is fully masked (which would turn gradients into NaN in some attention kernels).
        """
        arguments: dict[str, Any] = {"inputs_embeds": embeddings, "use_cache": False}
        if "position_ids" in self._llm_arguments:
            arguments["position_ids"] = layout.position_ids
        if layout.cu_seqlens is not None:
            arguments |= {f"cu_seq_lens_{side}": layout.cu_seqlens for side in "qk"}
            arguments |= {f"max_length_{side}": layout.max_seqlen for side in "qk"}
        return arguments

    def _chunked_losses(
        self, arguments: Mapping[str, Any], labels: Tensor, conversation: Tensor | None, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        """Returns loss and hits of labels [R, L], summed over all or over each conversation [B]."""
        hidden: Tensor = self.llm.base_model(**arguments).last_hidden_state.flatten(0, 1)
        labels = labels.flatten()
        if conversation is None:
            return self._head_losses(hidden, labels)
        rows = [conversation == row for row in range(num_rows)]
        sums = [self._head_losses(hidden[row], labels[row]) for row in rows]
        return torch.stack([loss for loss, _ in sums]), torch.stack([correct for _, correct in sums])

    def _head_losses(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the summed loss and the hits of hidden states [N, H] with labels [N]."""
        assert self._transforms is not None
        head: Any = self.llm.get_output_embeddings()  # type: ignore[no-untyped-call]
        return token_losses(
            hidden,
            head.weight,
            labels,
            bias=head.bias,
            ignore_index=splice.IGNORE,
            vocab=self._vocab,
            **self._transforms,
        )

    @property
    def _vocab(self) -> VocabShard | None:
        """The part of the vocabulary that logits are of; None when they are of all of it."""
        return None if self.tensor_parallel is None else self.tensor_parallel.vocab

    def _full_losses(
        self, arguments: Mapping[str, Any], labels: Tensor, conversation: Tensor | None, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        """Returns what `_chunked_losses` does, of the model's own logits at the columns that have a label."""
        columns = (labels != splice.IGNORE).any(0).nonzero()[:, 0]
        if "logits_to_keep" in self._llm_arguments:
            logits: Tensor = self.llm(**arguments, logits_to_keep=columns).logits.flatten(0, 1)
        else:
            logits = self.llm(**arguments).logits[:, columns].flatten(0, 1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if conversation is not None:
            conversation = conversation.view_as(labels)[:, columns].flatten()
        labels = labels[:, columns].flatten()
        if self._vocab is None:
            losses = F.cross_entropy(logits, labels, ignore_index=splice.IGNORE, reduction="none")
            hits = (logits.argmax(-1) == labels) & (labels != splice.IGNORE)
        else:
            losses, hits = vocab_parallel_losses(logits, labels, self._vocab, ignore_index=splice.IGNORE)
        correct = hits.to(losses.dtype)
        return _sums(losses, conversation, num_rows), _sums(correct, conversation, num_rows)

    @torch.no_grad()
    def _generate(self, micro_batch: Mapping[str, Any], **options: Any) -> Tensor:
        if self.training:
            raise ValueError("SALM.generate in training mode: call model.eval() first")
        prompts = {**micro_batch, "loss_mask": torch.zeros_like(micro_batch["loss_mask"])}
        layout = self._plan(prompts, "left")
        embeddings = self._embed(prompts, layout)
        llm: Any = self.llm
        whole = nullcontext() if self.tensor_parallel is None else self.tensor_parallel.gathering_logits()
        with whole, self._attention_over_padding():
            tokens: Tensor = llm.generate(
                inputs_embeds=embeddings,
                attention_mask=layout.attention_mask.long(),
                synced_gpus=self._is_sharded(),
                **{"do_sample": False, **options},
            )
        return tokens

    @contextmanager
    def _attention_over_padding(self) -> Iterator[None]:
        """Runs the LLM with transformers' own attention: that of packs takes neither a mask nor a cache."""
        if not self.packed:
            yield
            return
        llm: Any = self.llm
        name = llm.config._attn_implementation
        llm.set_attn_implementation("sdpa" if llm._supports_sdpa else "eager")
        try:
            yield
        finally:
            llm.set_attn_implementation(name)

    def _is_sharded(self) -> bool:
        sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters())
        return sharded and dist.get_world_size() > 1


def _chunkable(llm: PreTrainedModel) -> dict[str, Any] | None:
    """Returns what the LLM does to its logits, or None where only its own forward knows."""
    try:
        linear_head(llm)
        transforms: dict[str, Any] = dict(logit_transforms(llm.config))
    except ValueError as error:
        log.info("the loss takes the whole logits of the supervised positions: %s", error)
        return None
    return transforms


def _sums(values: Tensor, conversation: Tensor | None, num_rows: int) -> Tensor:
    """Returns the sum of values [N], or with the conversation [N] of each the sums [B] of all conversations."""
    if conversation is None:
        return values.sum()
    return values.new_zeros(num_rows).index_add(0, conversation, values)
