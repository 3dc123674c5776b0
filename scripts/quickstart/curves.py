"""Reads what a run logged, and draws its loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # no display is needed to write a file
from matplotlib import pyplot
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@dataclass(frozen=True)
class Curve:
    """A logged number: optimizer steps, counted from 1, and values."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


def read_curve(run: Path, name: str) -> Curve:
    """One number of the TensorBoard log of a run; an empty curve where the run never logged it."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    scalars = events.Scalars(name) if name in events.Tags()["scalars"] else []
    return Curve(tuple(scalar.step + 1 for scalar in scalars), tuple(scalar.value for scalar in scalars))


def plot_loss(training: Curve, validation: Curve, path: Path) -> None:
    """Write a PNG with the training loss per supervised token, and the validation loss where there is one."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(training.steps, training.values, color="tab:blue", alpha=0.3, linewidth=1)
    axes.plot(training.steps, _smooth(training.values), color="tab:blue", label="training, mean of 10 steps")
    if validation.steps:
        axes.plot(validation.steps, validation.values, "o-", color="tab:orange", label="validation")
    axes.set(xlabel="optimizer step", ylabel="loss per token (nats)", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _smooth(values: tuple[float, ...], width: int = 10) -> list[float]:
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
