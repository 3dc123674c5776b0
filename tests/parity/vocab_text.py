"""Language models with every option of the loss, and text that an untrained one predicts in part."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import nn

from shoal.models.assemble import Numerics, assemble
from shoal.models.causal_lm import CausalLM
from tests.parity.harness import CPU, Case, plan_of
from tests.parity.text import build, draw, text_case

Kind = Literal["chunked", "full"]


def smoothed_case(kind: Kind, family: str, **changes: Any) -> Case:
    """A model whose loss, computed in one way or the other, has label smoothing and a z-loss."""
    changes = {"num_micro_batches": 3, "num_steps": 1, "unsupervised": (1,), **changes}
    return Case(functools.partial(_smoothed, kind), draw, family, **changes)


def _smoothed(kind: Kind, case: Case) -> nn.Module:
    plain = build(case)
    assert isinstance(plain, CausalLM)
    return CausalLM(plain.llm, loss=kind, label_smoothing=0.1, z_loss=0.01)


def partly_predicted(case: Case, step: int) -> list[dict[str, Any]]:
    """The batches of `draw`; every second token is the one that the initial model expects after those before it."""
    model = assemble(plan_of(text_case(case.family)), None, Numerics(stored=case.dtype), CPU).module
    assert isinstance(model, CausalLM)
    batches = draw(case, step)
    for batch in batches:
        ids = batch["input_ids"]
        for column in range(2, ids.shape[1], 2):
            with torch.no_grad():
                ids[:, column] = model.eval().llm(ids[:, :column]).logits[:, -1].argmax(-1)
    return batches
