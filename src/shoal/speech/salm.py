"""SALM: a speech encoder whose embeddings stand among the token embeddings of a language model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shoal.speech import splice
from shoal.speech.batch_norm import unobserved
from shoal.speech.perception import AudioPerception, is_frozen
from shoal.speech.seeds import fold_in

Mode = Literal["loss", "loss_per_row", "generate"]


class SALM(nn.Module):
    """Perception, embedding, splice, language model and loss in one forward, which is the root of sharding.

    Nothing touches a parameter outside `forward`. Every forward runs perception, also without audio, so that
    all ranks take part in the same collectives; a micro-batch without audio then adds zero times its output.

    Args:
        llm: A causal language model of transformers.
        perception: Gives embeddings of the LLM's hidden size.
        placeholder_id: Token id that stands for one clip; it may lie beyond the LLM's vocabulary.
    """

    def __init__(self, llm: PreTrainedModel, perception: AudioPerception, *, placeholder_id: int) -> None:
        super().__init__()
        self.llm = llm
        self.perception = perception
        self.placeholder_id = placeholder_id
        self._llm_arguments = frozenset(inspect.signature(llm.forward).parameters)

    def forward(
        self, micro_batch: Mapping[str, Any], mode: Mode = "loss", **generation: Any
    ) -> dict[str, Tensor]:
        """Runs one micro-batch.

        Args:
            micro_batch: `audios` [B_aud, T] float32 and `audio_lens` [B_aud] (B_aud may be 0), `input_ids`
                and `loss_mask` [B, S] right-padded, `text_lens` [B], `sample_ids` and `sample_seeds` [B].
            mode: "loss" gives sums over the micro-batch, "loss_per_row" the same sums for each row [B],
                "generate" gives `tokens`; see `generate`.
            generation: Arguments of `generate`.

        Returns:
            `loss_sum` (with gradient), `num_tokens` and `num_correct` over the supervised tokens, in float32
            (float64 for a float64 model); without a supervised token all are 0 and so is every gradient.

        Raises:
            ValueError: Placeholders and clips do not match; see `shoal.speech.splice.plan`. Raised before any
                collective of this forward.
        """
        if mode == "generate":
            return {"tokens": self._generate(micro_batch, **generation)}
        embeddings, layout = self._embed(micro_batch, padding="right")
        losses, correct, supervised = self._token_losses(embeddings, layout)
        dims = 1 if mode == "loss_per_row" else (0, 1)
        return {
            "loss_sum": losses.sum(dims),
            "num_tokens": supervised.sum(dims).to(losses.dtype),
            "num_correct": correct.sum(dims).to(losses.dtype),
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

    def _embed(
        self, micro_batch: Mapping[str, Any], padding: Literal["right", "left"]
    ) -> tuple[Tensor, splice.Layout]:
        audios, audio_lens = micro_batch["audios"], micro_batch["audio_lens"]
        layout = splice.plan(
            micro_batch["input_ids"],
            micro_batch["loss_mask"],
            micro_batch["text_lens"],
            self.perception.output_lengths(audio_lens),
            placeholder_id=self.placeholder_id,
            sample_ids=micro_batch["sample_ids"],
            padding=padding,
        )
        # The placeholder may have no row in the embedding table: look up 0, the result is not used.
        ids = micro_batch["input_ids"].masked_fill(~layout.is_text, 0)
        text: Tensor = self.llm.get_input_embeddings()(ids)
        if len(audio_lens) == 0:
            return splice.splice(text + 0.0 * self._silence(audios).to(text.dtype), text[:0], layout), layout
        seeds = fold_in(micro_batch["sample_seeds"][layout.clip_row], layout.clip_ordinal)
        clips, _ = self.perception(audios, audio_lens, seeds)
        return splice.splice(text, clips.to(text.dtype), layout), layout

    def _silence(self, audios: Tensor) -> Tensor:
        """Runs perception on a short silent clip; returns the sum of its output, a scalar."""
        samples = self.perception.minimum_samples
        clip = audios.new_zeros(1, samples)
        lens = torch.full((1,), samples, dtype=torch.int64, device=audios.device)
        with unobserved(self.perception):
            embeddings, _ = self.perception(clip, lens, torch.zeros_like(lens))
        total: Tensor = embeddings.sum()
        return total

    def _token_losses(self, embeddings: Tensor, layout: splice.Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Returns cross-entropy, correctness and supervision, each [B, K], at the K labelled columns."""
        columns = (layout.labels != splice.IGNORE).any(0).nonzero()[:, 0]
        labels = layout.labels[:, columns]
        logits = self._logits(embeddings, layout, columns)
        if logits.dtype != torch.float64:
            logits = logits.float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=splice.IGNORE, reduction="none"
        )
        supervised = labels != splice.IGNORE
        return losses.view_as(labels), (logits.argmax(-1) == labels) & supervised, supervised

    def _logits(self, embeddings: Tensor, layout: splice.Layout, columns: Tensor) -> Tensor:
        """Returns logits [B, K, V] at `columns` [K].

        No padding mask: rows are right-padded and attention is causal, so no token sees padding, and no query
        is fully masked (which would turn gradients into NaN in some attention kernels).
        """
        arguments: dict[str, Any] = {"inputs_embeds": embeddings, "use_cache": False}
        if "position_ids" in self._llm_arguments:
            arguments["position_ids"] = layout.position_ids
        if "logits_to_keep" in self._llm_arguments:
            logits: Tensor = self.llm(**arguments, logits_to_keep=columns).logits
            return logits
        logits = self.llm(**arguments).logits
        return logits[:, columns]

    @torch.no_grad()
    def _generate(self, micro_batch: Mapping[str, Any], **options: Any) -> Tensor:
        if self.training:
            raise ValueError("SALM.generate in training mode: call model.eval() first")
        prompts = {**micro_batch, "loss_mask": torch.zeros_like(micro_batch["loss_mask"])}
        embeddings, layout = self._embed(prompts, padding="left")
        llm: Any = self.llm
        tokens: Tensor = llm.generate(
            inputs_embeds=embeddings,
            attention_mask=layout.attention_mask.long(),
            synced_gpus=self._is_sharded(),
            **{"do_sample": False, **options},
        )
        return tokens

    def _is_sharded(self) -> bool:
        sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters())
        return sharded and dist.get_world_size() > 1
