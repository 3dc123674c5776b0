"""Finds where a mismatch comes from: what has to be on for it, the first layer, the first parameter, the kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.config.schema import FSDP2Config
from shoal.parallel.layers import transformer_layers
from shoal.verify.cause import Cause, Evidence, infer
from shoal.verify.compare import batch_problems, compare, tensor_errors
from shoal.verify.layers import first_output, last_gradient
from shoal.verify.parity import deal_on_mesh, train_on_mesh
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


def find_cause(task: Task, layout: MeshLayout, failed: RanksFailed | None, timeout: float) -> Cause:
    """Reruns a wrong task with one thing off at a time, then with every module watched.

    Args:
        task: What is wrong.
        layout: On which layout.
        failed: How ranks failed; None when they did not.
        timeout: Of one run, in seconds.
    """
    plain = _plain(task, timeout)
    necessary = tuple(
        variant.name
        for variant in variants(task, layout)
        if not _is_wrong(variant, plain if variant.task is task else _plain(variant.task, timeout), timeout)
    )
    if failed is not None:
        return _cause_of_failure(task, layout, failed, necessary, timeout)
    first = replace(task, num_steps=1)
    if "clipping" not in necessary:  # a wrong norm would scale right gradients wrongly
        first = replace(first, max_norm=None)
    return infer(_first_step(first, layout, necessary, timeout))


def _cause_of_failure(
    task: Task, layout: MeshLayout, failed: RanksFailed, necessary: tuple[str, ...], timeout: float
) -> Cause:
    """Ranks that fail together may have got micro-batches of different shapes: deal them once more without training."""
    problems: list[str] = []
    with contextlib.suppress(RanksFailed):
        ranks = run_ranks(lambda rank: deal_on_mesh(task, layout), layout.world, timeout=timeout)
        problems = batch_problems(task, ranks)
    if problems:
        return Cause("batches", "; ".join([*problems, str(failed)]), necessary)
    kind = "hang" if all(f.reason in ("hung", "stopped") for f in failed.failures) else "crash"
    return Cause(kind, str(failed), necessary)


def _first_step(task: Task, layout: MeshLayout, necessary: tuple[str, ...], timeout: float) -> Evidence:
    """Takes the first step alone, with every module watched."""
    plain = _plain(task, timeout)
    module, parts, names = _alone(task, timeout)
    ranks = run_ranks(lambda rank: train_on_mesh(task, layout, capture=True), layout.world, timeout=timeout)
    comparison, axes = compare(task, plain, ranks), layout.axes
    bound = comparison.tolerance
    return Evidence(
        comparison,
        plain,
        ranks,
        parts,
        axes,
        task.max_norm,
        necessary,
        first_output(ranks, parts.captured, axes, bound),
        last_gradient(ranks, parts.captured, names, axes, bound),
        _module_differs(plain, module, bound),
    )


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
        return train_plain(task, independent=False), contributions(task), names

    return run_ranks(run, 1, timeout=timeout, group=False)[0]


def _module_differs(plain: Record, module: Record, tolerance: float) -> bool:
    """Whether the trainable module is wrong by itself, in one process: against another way to the same loss."""
    errors = tensor_errors([module.gradients[0]], plain.gradients[0]).values()
    loss = abs(module.losses[0] - plain.losses[0]) / max(abs(plain.losses[0]), 1e-300)
    return loss > tolerance or any(not worst.error <= tolerance for worst in errors)


__all__ = ["Variant", "find_cause", "variants"]
