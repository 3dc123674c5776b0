"""Finds where a mismatch comes from: what has to be on for it, the first layer, the first parameter, the kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.config.schema import FSDP2Config
from shoal.parallel.layers import transformer_layers
from shoal.verify.cause import Cause, Evidence, infer
from shoal.verify.compare import Comparison, compare, tensor_errors
from shoal.verify.layers import first_output, last_gradient
from shoal.verify.parity import train_on_mesh
from shoal.verify.ranks import RanksFailed, run_ranks
from shoal.verify.record import Record
from shoal.verify.reference import Contributions, build_plain, contributions, train_plain
from shoal.verify.task import MeshLayout, Task


@dataclass(frozen=True)
class Variant:
    """The same run with one thing switched off."""

    name: str
    task: Task
    layout: MeshLayout


def find_cause(
    task: Task, layout: MeshLayout, comparison: Comparison | None, failed: RanksFailed | None, timeout: float
) -> Cause:
    """Reruns a wrong task with one thing off at a time, then with every module watched.

    Args:
        task: What is wrong.
        layout: On which layout.
        comparison: How it is wrong; None when ranks failed.
        failed: How ranks failed; None when they did not.
        timeout: Of one run, in seconds.
    """
    plain = _plain(task, timeout)
    necessary = tuple(
        variant.name
        for variant in variants(task, layout)
        if not _is_wrong(variant, plain if variant.task is task else _plain(variant.task, timeout), timeout)
    )
    if comparison is None:
        assert failed is not None
        kind = "hang" if all(f.reason in ("hung", "stopped") for f in failed.failures) else "crash"
        return Cause(kind, str(failed), necessary)
    module, parts, names = _alone(task, timeout)
    ranks = run_ranks(lambda rank: train_on_mesh(task, layout, capture=True), layout.world, timeout=timeout)
    axes, bound = layout.axes, comparison.tolerance
    evidence = Evidence(
        comparison,
        plain,
        ranks,
        parts,
        axes,
        task.max_norm,
        necessary,
        first_output(ranks, parts.captured, axes, bound),
        last_gradient(ranks, parts.captured, names, axes, bound),
        _module_differs(plain, module, comparison.tolerance),
    )
    return infer(evidence)


def variants(task: Task, layout: MeshLayout) -> Iterator[Variant]:
    """The run with each axis, and each part of the step, switched off."""
    axes, sizes = layout.axes, layout.sizes
    if axes["dp"] > 1:
        alone = replace(sizes, dp_size=1, dp_replicate_size=None, ep_size=1)
        yield Variant("dp", task, replace(layout, sizes=alone, moe=None, world=layout.world // axes["dp"]))
    if axes["dp_replicate"] > 1:
        yield Variant("dp_replicate", task, replace(layout, sizes=replace(sizes, dp_replicate_size=None)))
    for axis in ("tp", "cp", "pp"):
        if axes[axis] > 1:
            yield Variant(axis, task, _without(layout, axis))
    if axes["ep"] > 1:
        yield Variant("ep", task, replace(layout, sizes=replace(sizes, ep_size=1), moe=None))
    strategy = layout.strategy
    if isinstance(strategy, FSDP2Config) and strategy.sequence_parallel:
        plain = replace(layout, strategy=replace(strategy, sequence_parallel=False))
        yield Variant("sequence parallel", task, plain)
    if layout.checkpoint_llm or layout.checkpoint_perception:
        kept = replace(layout, checkpoint_llm=False, checkpoint_perception=False)
        yield Variant("activation checkpointing", task, kept)
    if len(task.draw(0)) > axes["dp"]:
        fewer = replace(task, draw=lambda step: task.draw(step)[: axes["dp"]])
        yield Variant("accumulation", fewer, layout)
    if task.max_norm is not None:
        yield Variant("clipping", replace(task, max_norm=None), layout)


def _without(layout: MeshLayout, axis: str) -> MeshLayout:
    sizes = replace(layout.sizes, **{f"{axis}_size": 1})
    changed = replace(layout, sizes=sizes, world=layout.world // layout.axes[axis])
    if sizes.ep_size > 1 and (changed.axes["dp"] * sizes.cp_size) % sizes.ep_size:
        changed = replace(changed, sizes=replace(sizes, ep_size=1), moe=None)
    if axis == "pp":
        changed = replace(changed, pipeline=None)
    strategy = changed.strategy
    if axis == "tp" and isinstance(strategy, FSDP2Config):
        changed = replace(changed, strategy=replace(strategy, sequence_parallel=False))
    return changed


def _plain(task: Task, timeout: float) -> Record:
    return run_ranks(lambda rank: train_plain(task), 1, timeout=timeout, group=False)[0]


def _is_wrong(variant: Variant, plain: Record, timeout: float) -> bool:
    """Whether a variant fails, too."""
    task, layout = variant.task, variant.layout
    try:
        ranks = run_ranks(lambda rank: train_on_mesh(task, layout), layout.world, timeout=timeout)
    except RanksFailed:
        return True
    return not compare(task, plain, ranks).equal


def _alone(task: Task, timeout: float) -> tuple[Record, Contributions, list[str]]:
    """The plain process again, through the trainable module: numbers, contributions, and names of layers."""

    def run(rank: int) -> tuple[Record, Contributions, list[str]]:
        module = build_plain(task)
        layers = {id(layer) for layer in transformer_layers(module)}
        names = [name for name, child in module.named_modules() if id(child) in layers]
        return train_plain(task, plain_loss=False), contributions(task), names

    return run_ranks(run, 1, timeout=timeout, group=False)[0]


def _module_differs(plain: Record, module: Record, tolerance: float) -> bool:
    """Whether the trainable module is wrong by itself, in one process: against another way to the same loss."""
    errors = tensor_errors([module.gradients[0]], plain.gradients[0]).values()
    loss = abs(module.losses[0] - plain.losses[0]) / max(abs(plain.losses[0]), 1e-300)
    return loss > tolerance or any(not worst.error <= tolerance for worst in errors)


__all__ = ["Variant", "find_cause", "variants"]
