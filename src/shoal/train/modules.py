"""The LightningModule around a trainable module: it assembles the model, runs the step and logs sums over counts.

Lightning's batch is one optimizer step: this rank's list of micro-batches. Optimisation is manual, so that one
step function serves every layout; Lightning keeps the loops, loggers, callbacks and progress bars.
"""

from __future__ import annotations

import logging
import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from shoal.config.values import TargetConfig
from shoal.data.batch import StepBatch
from shoal.data.position import StreamPosition
from shoal.mesh.collectives import all_reduce_sum
from shoal.models.assemble import ModelPlan, Numerics, assemble
from shoal.parallel.model import ParallelModel
from shoal.train.kernel_check import check_kernels
from shoal.train.layout import layout_table
from shoal.train.optim import build_optimizer, build_scheduler
from shoal.train.precision import ShoalPrecision
from shoal.train.step import StepHeader, StepResult, agree_on_step, to_device, train_step
from shoal.train.strategy import agreed_checkpointing, distributed_setup, leave_model_to_module
from shoal.train.weights import load_weights

log = logging.getLogger(__name__)


class ShoalModule(pl.LightningModule):
    """Trains any module whose forward maps a micro-batch to ``loss_sum``, ``num_correct`` and ``num_tokens``.

    Args:
        plan: What to build; nothing is built before the processes are connected.
        optimizer: Target and arguments, over the parameters that train.
        lr_scheduler: Target and arguments, or what makes it of the optimizer; stepped once per optimizer step.
        gradient_clip_val: Bound of the global gradient norm; None never scales.
        seed: Names the random numbers of dropout together with the step and the micro-batch.
        sample_rate: Of the audio, to report seconds; None for a model without audio.
        validation_sets: Names of the validation sets, in the order of the loaders.
        init_from_checkpoint: Weights to start from instead: a checkpoint of ours, or a safetensors file or folder.
        tokenizer: Saved beside the model, for whoever opens the export; None copies the one of the model's source.
    """

    def __init__(
        self,
        plan: ModelPlan,
        optimizer: TargetConfig,
        lr_scheduler: TargetConfig | Callable[[Optimizer], LRScheduler] | None = None,
        *,
        gradient_clip_val: float | None = None,
        seed: int = 0,
        sample_rate: int | None = 16000,
        validation_sets: Sequence[str] = ("default",),
        init_from_checkpoint: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.plan = plan
        self.optimizer_config = optimizer
        self.scheduler_config = lr_scheduler
        self.gradient_clip_val = gradient_clip_val
        self.seed = seed
        self.sample_rate = sample_rate
        self.validation_sets = tuple(validation_sets)
        self.init_from_checkpoint = init_from_checkpoint
        self.tokenizer = tokenizer
        self.stream_position = StreamPosition()
        self.stop_agreed = False
        self.last_result: StepResult | None = None
        self.left_out: Counter[str] = Counter()
        self.step_values: dict[str, float] = {}
        self.last_validation: dict[str, float] = {}
        self.layout = ""
        self._parallel: ParallelModel | None = None
        self._validation_sums: Tensor = torch.zeros(0)
        self._last_step_end = 0.0

    # ------------------------------------------------------------------------------------------ assembly

    @property
    def parallel(self) -> ParallelModel:
        """The assembled model; exists after `configure_model`."""
        if self._parallel is None:
            raise RuntimeError("the model is assembled in configure_model, once the processes are connected")
        return self._parallel

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        """Adds none; it is the first hook that sees the Trainer, before Lightning's own, less helpful refusal."""
        for key, ours, off in (
            ("gradient_clip_val", "ShoalModule(gradient_clip_val=...)", (None, 0)),
            ("accumulate_grad_batches", "global_micro_batches of the data module", (1,)),
        ):
            value = getattr(self.trainer, key)
            if value not in off:
                raise ValueError(
                    f"Trainer({key}={value}): the training step does this itself, for every layout alike; "
                    f"repair: remove it and use {ours}"
                )
        return []

    @override
    def setup(self, stage: str) -> None:
        leave_model_to_module(self.trainer.strategy)
        # What sharding and kernels keep from a validation is used again in training, which tensors of torch's inference
        # mode cannot be. (Lightning itself leaves it out under gloo, so that only NCCL would show it.)
        for loop in (self.trainer.fit_loop.epoch_loop.val_loop, self.trainer.validate_loop):
            loop.inference_mode = False

    @override
    def configure_model(self) -> None:
        if self._parallel is not None:
            return
        strategy = self.trainer.strategy
        setup = distributed_setup(strategy)
        precision = strategy.precision_plugin
        assert isinstance(precision, ShoalPrecision)
        llm, perception = agreed_checkpointing(strategy)
        plan = replace(
            self.plan,
            checkpoint_llm=self.plan.checkpoint_llm or llm,
            checkpoint_perception=self.plan.checkpoint_perception or perception,
        )
        numerics = Numerics(precision.plan.stored, precision.plan.policy, precision.plan.autocast)
        self._parallel = assemble(plan, setup, numerics, strategy.root_device)
        self.model = self._parallel.module
        if self.init_from_checkpoint is not None:
            load_weights(self.model, self.init_from_checkpoint)
        kernels = check_kernels(
            self.model, self.model.get_submodule(plan.llm), precision.plan.compute, strategy.root_device
        )
        self.layout = layout_table(setup, precision.plan.name, self.model, kernels)
        if self.trainer.is_global_zero:
            print(self.layout, flush=True)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.optimizer_config, self.model)
        scheduler = build_scheduler(self.scheduler_config, optimizer, self.trainer.max_steps)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # ---------------------------------------------------------------------------------------------- steps

    @override
    def transfer_batch_to_device(
        self, batch: StepBatch, device: torch.device, dataloader_idx: int
    ) -> StepBatch:
        return batch  # micro-batches move one at a time, just before they run

    @override
    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        model, step = self.parallel, self.global_step
        stop = any(getattr(callback, "stop_requested", bool)() for callback in self._callbacks())
        header = self._agreed(batch, stop_requested=stop)
        if header.num_tokens == 0:
            log.warning("step %d has no supervised token on any rank: its loss and gradients are 0", step)
        result = train_step(
            model,
            batch,
            self._optimizer(),
            step=step,
            seed=self.seed,
            max_norm=self.gradient_clip_val,
            header=header,
        )
        self.last_result = result
        self._count_left_out(batch.skipped)
        self._log_step(result, is_packed="cu_seqlens" in batch.micro_batches[0])
        if (scheduler := self._scheduler()) is not None:
            scheduler.step()
        self.stream_position = batch.position
        self.stop_agreed = header.stop_requested
        return torch.tensor(result.loss, dtype=torch.float64)

    @override
    def on_train_end(self) -> None:
        if self.left_out and self._is_first_of_peers():
            log.warning("left out of the data, or cut, by reason: %s", dict(self.left_out))

    @override
    def on_validation_epoch_start(self) -> None:
        self._validation_sums = torch.zeros(len(self.validation_sets), 3, dtype=torch.float64)

    @override
    def validation_step(self, batch: StepBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        model = self.parallel
        self._agreed(batch)
        for micro_batch in batch.micro_batches:
            out = model.forward(to_device(micro_batch, model.device))
            sums = torch.stack(
                [out["loss_sum"].double(), out["num_correct"].double(), out["num_tokens"].double()]
            )
            self._validation_sums[dataloader_idx] += sums.cpu()

    @override
    def on_validation_epoch_end(self) -> None:
        model = self.parallel
        sums = all_reduce_sum(self._validation_sums.to(model.device), model.loss_group).cpu()
        self.last_validation = {}
        rows = dict(zip(self.validation_sets, sums, strict=True))
        for name, row in rows.items():
            self._log_validation(f"_{name}", row)
        self._log_validation("", sums.sum(dim=0))
        self._last_step_end = time.perf_counter()  # the next step's rates are its own

    # -------------------------------------------------------------------------------------------- logging

    def _log_validation(self, suffix: str, sums: Tensor) -> None:
        """Loss, its exponential and accuracy per supervised token; a set without any is left out, not reported as 0."""
        loss, correct, tokens = sums.tolist()
        if not tokens:
            return
        values = {"loss": loss / tokens, "ppl": perplexity(loss / tokens), "acc": correct / tokens}
        for name, value in values.items():
            self.last_validation[f"val_{name}{suffix}"] = value
            self.log(f"val_{name}{suffix}", value, prog_bar=not suffix, batch_size=1)

    def _count_left_out(self, skipped: Mapping[str, int]) -> None:
        """Tells of every reason once, when it comes up; `on_train_end` tells the sums of this rank's data."""
        for reason in skipped.keys() - self.left_out.keys() if self._is_first_of_peers() else ():
            log.warning(
                "step %d: %d left out of the data, or cut: %s", self.global_step, skipped[reason], reason
            )
        self.left_out.update(skipped)

    def _is_first_of_peers(self) -> bool:
        """Whether this rank speaks for those that get the same data."""
        setup = distributed_setup(self.trainer.strategy)
        if setup is None:
            return True
        place = setup.mesh_context.coordinate
        return not (place.pp or place.cp or place.tp)

    def _log_step(self, result: StepResult, *, is_packed: bool) -> None:
        now = time.perf_counter()
        elapsed = now - self._last_step_end if self._last_step_end else float("nan")
        self._last_step_end = now
        header = result.header
        values = {
            "loss": result.loss,
            "learning_rate": self._optimizer().param_groups[0]["lr"],
            "grad_norm": result.gradient_norm,
            "tokens_per_second": header.num_tokens / elapsed,
            "padding_share": result.padding_share,
            "memory_gb": _peak_memory_gb(self.parallel.device),
            "train_accuracy": result.accuracy,
            "num_tokens": float(header.num_tokens),
            "num_samples": float(header.num_samples),
        }
        if self.sample_rate is not None:
            values["audio_seconds"] = header.audio_seconds
            values["audio_seconds_per_second"] = header.audio_seconds / elapsed
            values["audio_padding_share"] = header.audio_padding_share
        if is_packed:
            values["packing_efficiency"] = 1.0 - result.padding_share
        self.step_values = values
        # Every step logs its loss, which a checkpoint may be ranked by. The rest is for loggers, and Lightning's
        # bookkeeping of a dozen values is milliseconds: only the steps that loggers see pay for it.
        self.log("loss", result.loss, batch_size=1)
        if self.global_step % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self.log_dict({name: value for name, value in values.items() if name != "loss"}, batch_size=1)

    # -------------------------------------------------------------------------------------------- helpers

    def _agreed(self, batch: StepBatch, *, stop_requested: bool = False) -> StepHeader:
        """The header of a step, agreed on by every rank of the job."""
        model = self.parallel
        return agree_on_step(
            batch,
            model.group,
            model.device,
            sample_rate=self.sample_rate or 1,
            stop_requested=stop_requested,
            everyone=None if model.group is None else dist.group.WORLD,
        )

    def _callbacks(self) -> list[Any]:
        return list(getattr(self.trainer, "callbacks", ()))

    def _optimizer(self) -> Any:
        return self.optimizers()

    def _scheduler(self) -> LRScheduler | None:
        scheduler = self.lr_schedulers()
        assert scheduler is None or isinstance(scheduler, LRScheduler)
        return scheduler


def perplexity(loss: float) -> float:
    """Returns exp(loss) of a mean token loss in nats; infinity where that is too large for a float."""
    return math.exp(loss) if loss < 700.0 else math.inf


def _peak_memory_gb(device: torch.device) -> float:
    """Peak memory in 10^9 bytes: of the device's allocator, or of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
