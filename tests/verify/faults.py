"""Faults to plant: each changes one function of the parallel code in this process, before ranks are forked from it.

Code that one plain process runs as well is changed on ranks alone, by asking for an open process group. A process
that has planted a fault is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Fault = Callable[[], None]
FAULTS: dict[str, Fault] = {}


def fault(plant: Fault) -> Fault:
    """Registers a fault under the name of its function."""
    FAULTS[plant.__name__] = plant
    return plant


# ----------------------------------------------------------------------------------- reduction of gradients


@fault
def averaged_over_dp() -> None:
    """FSDP2 keeps torch's own factor, which averages."""
    from shoal.parallel import fsdp2

    fsdp2._sum_gradients = lambda *_: None  # type: ignore[assignment]


@fault
def averaged_by_ddp() -> None:
    """DDP runs without the summing hook."""
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel.register_comm_hook = lambda *_: None  # type: ignore[method-assign, assignment]


@fault
def summed_twice() -> None:
    """DDP's gradients are complete after its hook, and summed again."""
    from shoal.parallel import ddp

    def finish(group: Any, bucket: Any) -> Any:
        dist.all_reduce(bucket.buffer(), group=group)
        return (
            dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        )

    finish.__annotations__ = ddp.sum_gradients_hook.__annotations__
    ddp.sum_gradients_hook = finish


@fault
def never_synchronised() -> None:
    """DDP is told at every micro-batch that another one follows."""
    from shoal.verify import parity

    _change_model(parity, lambda model: {"gradient_sync": lambda last: _sync_of(model)(False)})


def _sync_of(model: Any) -> Callable[[bool], Any]:
    return model.gradient_sync


@fault
def only_the_last_micro_batch() -> None:
    """Gradients are reset between the micro-batches of a step."""
    from shoal.verify import parity

    def forward_of(model: Any) -> dict[str, Any]:
        def forward(micro_batch: Any) -> Any:
            for parameter in model.module.parameters():
                parameter.grad = None
            return model.forward(micro_batch)

        return {"forward": forward}

    _change_model(parity, forward_of)


def _change_model(module: Any, change: Callable[[Any], dict[str, Any]]) -> None:
    """Changes the parallel model that `module` gets from assembly."""
    assemble = module.assemble

    def changed(*arguments: Any, **named: Any) -> Any:
        model = assemble(*arguments, **named)
        return replace(model, **change(model))

    module.assemble = changed


# ------------------------------------------------------------------------------------------------- the loss


@fault
def loss_times_dp_size() -> None:
    """The loss is multiplied by the number of ranks, to undo an average that nobody takes."""
    _on_ranks("shoal.models.causal_lm", "CausalLM.forward", _times_world)


def _times_world(out: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**out, "loss_sum": out["loss_sum"] * dist.get_world_size()}


@fault
def local_token_mean() -> None:
    """Each rank divides by the tokens that it has itself."""
    from shoal.train import step
    from shoal.verify import parity

    agree = parity.agree_on_step

    def local(batch: Any, group: Any, device: Any, **options: Any) -> Any:
        header = agree(batch, group, device, **options)
        return replace(header, num_tokens=sum(map(step.num_supervised, batch.micro_batches)))

    parity.agree_on_step = local


@fault
def mean_of_micro_batches() -> None:
    """Each micro-batch divides by its own tokens; all weigh the same."""

    def mean(out: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**out, "loss_sum": out["loss_sum"] / out["num_tokens"].clamp(min=1) * 10}

    _on_ranks("shoal.models.causal_lm", "CausalLM.forward", mean)


@fault
def labels_not_shifted() -> None:
    """On ranks, a position predicts its own token."""

    def keep(ids: Tensor, mask: Tensor) -> Tensor:
        return ids.masked_fill(~mask, -100)

    _replaced_on_ranks("shoal.models.causal_lm", "shifted_labels", keep)


@fault
def labels_not_shifted_anywhere() -> None:
    """The trainable module is wrong by itself, on one process as well."""
    from shoal.models import causal_lm

    causal_lm.shifted_labels = lambda ids, mask: ids.masked_fill(~mask, -100)


@fault
def tokens_cut_off() -> None:
    """Rows are cut to a multiple of 4 tokens on their way to the device."""
    from shoal.train import step

    move = step.to_device

    def cut(micro_batch: Any, device: Any) -> Any:
        moved = dict(move(micro_batch, device))
        length = moved["input_ids"].shape[1] // 4 * 4
        if length:
            moved |= {name: moved[name][:, :length] for name in ("input_ids", "loss_mask")}
        return moved

    step.to_device = cut


# ----------------------------------------------------------------------------------------------- the forward


@fault
def stale_rotary_buffer() -> None:
    """Rotary frequencies lose precision on ranks, as a buffer does that is cast or restored with the weights."""
    from shoal.models import assemble

    fill = assemble.fill

    def stale(module: nn.Module, *arguments: Any) -> None:
        fill(module, *arguments)
        for name, buffer in module.named_buffers():
            if dist.is_initialized() and "inv_freq" in name:
                buffer.copy_(buffer.bfloat16().float())

    assemble.fill = stale


@fault
def adapters_of_each_rank() -> None:
    """Adapters start from the generator of the rank."""
    from shoal.models import init

    derive = init.derive_seed

    def ranked(*parts: Any) -> int:
        own = dist.get_rank() if dist.is_initialized() and "lora" in str(parts) else 0
        return derive(*parts) + own

    init.derive_seed = ranked


# -------------------------------------------------------------------------------------------------- the data


@fault
def ranks_with_the_same_data() -> None:
    """Every data-parallel rank takes the micro-batches of the first."""
    from shoal.verify import parity

    deal = parity.deal
    parity.deal = lambda batches, model, empty: deal(batches, _at_dp_rank(model, 0), empty)


@fault
def peers_with_different_data() -> None:
    """The data loader is seeded by the rank, so tensor-parallel peers draw differently."""
    from shoal.verify import parity

    deal = parity.deal
    parity.deal = lambda batches, model, empty: deal(
        batches, _at_dp_rank(model, dist.get_rank() % model.dp_size), empty
    )


def _at_dp_rank(model: Any, rank: int) -> Any:
    class Elsewhere:
        dp_size, dp_rank = model.dp_size, rank

    return Elsewhere


# ---------------------------------------------------------------------------------- norm, clipping, optimizer


@fault
def norm_of_this_rank() -> None:
    """The norm is taken of this rank's shards and never combined."""
    from shoal.train import step

    step.gradient_norm = lambda parameters, norm_type=2.0: _norm(parameters)


@fault
def replicas_in_the_norm() -> None:
    """Squares are summed over all ranks, replicas of a parameter included."""
    from shoal.train import step

    def norm(parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
        square = _norm(parameters).square()
        dist.all_reduce(square)
        return square.sqrt()

    step.gradient_norm = norm


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    return torch.stack([g.norm() for g in local if g.numel()]).norm()


@fault
def not_clipped() -> None:
    """Gradients are never scaled."""
    from shoal.train import step

    step.scale_gradients = lambda *_: None  # type: ignore[assignment]


@fault
def stepped_twice() -> None:
    """The optimizer takes a hidden second step on ranks."""
    from shoal.verify.record import Recording

    step = Recording.step

    def twice(self: Recording) -> None:
        step(self)
        self.optimizer.step()

    Recording.step = twice  # type: ignore[method-assign]


@fault
def statistics_of_each_rank() -> None:
    """Batch normalisation moves its running statistics by what this rank saw."""
    from shoal.train import step

    update = step.update_running_statistics
    step.update_running_statistics = lambda module, group: update(module, None)


@fault
def encoder_skipped_without_audio() -> None:
    """A micro-batch without audio does not run the encoder, whose shards the other ranks then wait for."""
    _replaced_on_ranks(
        "shoal.speech.salm", "SALM._silence", lambda self, audios: torch.zeros((), dtype=torch.float64)
    )


# ------------------------------------------------------------------------------------------ tensor parallelism


@fault
def missing_sum_over_tp() -> None:
    """Gradients of whole parameters that are partial over the tensor-parallel ranks are left as they are."""
    from shoal.parallel.tensor.apply import TensorParallel

    TensorParallel.sum_partial_gradients = lambda self: None  # type: ignore[method-assign]


@fault
def norms_left_out_of_the_sum() -> None:
    """The list of partial gradients lacks the norms."""
    from shoal.parallel.tensor import apply

    partial = apply.partial_parameters
    apply.partial_parameters = lambda model, blocks: [n for n in partial(model, blocks) if "norm" not in n]


@fault
def key_values_left_out_of_the_sum() -> None:
    """Key-value heads that ranks share are taken for complete."""
    from shoal.parallel.tensor import apply

    partial = apply.partial_parameters
    apply.partial_parameters = lambda model, blocks: [
        n for n in partial(model, blocks) if "k_proj" not in n and "v_proj" not in n
    ]


@fault
def complete_gradients_summed_over_tp() -> None:
    """Every whole parameter is taken for partial."""
    from torch.distributed.tensor import DTensor

    from shoal.parallel.tensor import apply

    apply.partial_parameters = lambda model, blocks: [
        name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)
    ]


@fault
def sequence_cut_to_a_multiple() -> None:
    """Under sequence parallelism tokens beyond a multiple of 8 are dropped instead of padded."""
    from shoal.parallel.tensor.apply import TensorParallel

    scatter = TensorParallel.scatter

    def cut(self: TensorParallel, hidden: Tensor) -> Tensor:
        whole = hidden.shape[1]
        length = whole // 8 * 8
        out = scatter(self, torch.cat([hidden[:, :length], torch.zeros_like(hidden[:, length:])], dim=1))
        self.length = whole
        return out

    TensorParallel.scatter = cut  # type: ignore[method-assign]


@fault
def input_gradient_not_summed() -> None:
    """What enters a cut block does so by the identity, whose backward sums nothing."""
    from shoal.mesh import regions

    regions.copy = lambda tensor, group: tensor


@fault
def norms_counted_twice() -> None:
    """Whole parameters count once for each tensor-parallel rank in the gradient norm."""
    from torch.distributed.tensor import DTensor

    from shoal.train import step

    norm = step.gradient_norm

    def counted(parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
        listed = list(parameters)
        whole = [p for p in listed if not (isinstance(p, DTensor) and p.device_mesh.ndim > 1)]
        if len(whole) == len(listed):  # nothing is cut: no tensor parallelism
            return norm(listed)
        both, again = norm(listed), norm(whole)
        return (both.square() + again.square()).sqrt()

    step.gradient_norm = counted


# ----------------------------------------------------------------------------------------- context parallelism


@fault
def labels_shifted_after_the_split() -> None:
    """Each rank shifts the labels of the tokens that it holds, so that its chunks lose their last targets."""
    from torch.nn.functional import pad

    from shoal.parallel.context.share import Share

    def labels(self: Share, shifted: Tensor, ignore: int) -> Tensor:
        whole = pad(shifted[:, :-1], (1, 0), value=ignore)
        own = self.tokens(whole).masked_fill(~self.is_real, ignore)
        return pad(own[:, 1:], (0, 1), value=ignore)

    Share.labels = labels  # type: ignore[method-assign]


@fault
def tokens_counted_by_every_context_rank() -> None:
    """The supervised tokens of a micro-batch count once for each rank that shares them."""
    from shoal.verify import parity

    agree = parity.agree_on_step

    def counted(*arguments: Any, **named: Any) -> Any:
        header = agree(*arguments, **named)
        return replace(header, num_tokens=2 * header.num_tokens)

    parity.agree_on_step = counted


@fault
def positions_of_this_rank() -> None:
    """Positions are counted within what a rank holds."""
    from shoal.models import causal_lm

    inputs = causal_lm._shared_inputs

    def counted(micro_batch: Any, share: Any) -> dict[str, Any]:
        given = inputs(micro_batch, share)
        return {**given, "position_ids": torch.arange(given["input_ids"].shape[1])[None]}

    causal_lm._shared_inputs = counted


@fault
def key_gradients_stay_at_home() -> None:
    """The ring's backward does not bring the gradients of visiting keys back to their rank."""
    from shoal.parallel.context import ring

    class Still:
        def __init__(self, tensors: list[Tensor], *_: Any) -> None:
            self.tensors = tensors

        def wait(self) -> list[Tensor]:
            return self.tensors

    backward, moving = ring._Ring.backward, ring.Rotation

    def at_home(ctx: Any, *gradients: Any) -> Any:
        ring.Rotation = Still  # type: ignore[assignment, misc]
        try:
            return backward(ctx, *gradients)
        finally:
            ring.Rotation = moving  # type: ignore[misc]

    ring._Ring.backward = staticmethod(at_home)  # type: ignore[method-assign, assignment]


@fault
def states_begin_at_zero() -> None:
    """Every chunk of a document scans from 0 instead of from the state that the chunk before it ends with."""
    from shoal.parallel.context import mamba

    right = mamba._first_states
    mamba._first_states = lambda *arguments: right(*arguments) * 0


@fault
def clips_of_other_ranks_without_gradient() -> None:
    """Embeddings of clips are gathered from the other ranks by a collective that autograd does not see."""
    from shoal.speech import shared_clips

    gather = shared_clips.gather

    def one_way(tensor: Tensor, group: Any) -> Tensor:
        whole = gather(tensor.detach(), group)
        rows = len(tensor) * group.rank()
        return torch.cat([whole[:rows], tensor, whole[rows + len(tensor) :]])

    shared_clips.gather = one_way


# -------------------------------------------------------------------------------------------------- helpers


def _target(module: str, path: str) -> tuple[Any, str]:
    import importlib

    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _on_ranks(module: str, path: str, change: Callable[[Any], Any]) -> None:
    """Changes what a function returns, on ranks alone."""
    owner, name = _target(module, path)
    original = getattr(owner, name)

    def changed(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        return change(result) if dist.is_initialized() else result

    setattr(owner, name, changed)


def _replaced_on_ranks(module: str, path: str, replacement: Callable[..., Any]) -> None:
    """Replaces a function, on ranks alone."""
    owner, name = _target(module, path)
    original = getattr(owner, name)

    def chosen(*arguments: Any, **named: Any) -> Any:
        return (replacement if dist.is_initialized() else original)(*arguments, **named)

    setattr(owner, name, chosen)
