"""Text for the parity harness: language models of many families, and ragged documents."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from shoal.models.causal_lm import CausalLM
from tests.families import VOCAB, tiny_lm
from tests.parity.harness import Case


def build(case: Case) -> nn.Module:
    llm = tiny_lm(case.family)
    for module in llm.modules():
        if type(module).__name__.endswith("RMSNorm") and (exact := _EXACT.get(_epsilon_of(module))):
            module.forward = functools.partial(exact, module)
    if hasattr(llm.config, "_experts_implementation"):
        llm.set_experts_implementation("eager")  # the grouped kernel has no float64
    return CausalLM(llm)


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return norm.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon))


def _gemma_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return norm._norm(x) * (1.0 + norm.weight)


# transformers casts to float32 in its norms. Where ranks hold parts of a sum, each part is then rounded by itself,
# which hides what float64 is to show.
_EXACT = {"variance_epsilon": _norm, "eps": _gemma_norm}


def _epsilon_of(norm: nn.Module) -> str:
    if hasattr(norm, "gate") or "Gated" in type(norm).__name__:
        return ""
    return (
        "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps" if hasattr(norm, "_norm") else ""
    )


def draw(case: Case, step: int) -> list[dict[str, Any]]:
    """Documents of unequal lengths and numbers, with unequally many supervised tokens; one batch has none."""
    generator = torch.Generator().manual_seed(100 + step)
    batches = [_micro_batch(generator, rows=1 + index % 3) for index in range(case.num_micro_batches)]
    for index in case.unsupervised:
        batches[index]["loss_mask"] = torch.zeros_like(batches[index]["loss_mask"])
    return batches


def _micro_batch(generator: torch.Generator, rows: int) -> dict[str, Any]:
    lens = torch.randint(4, 18, (rows,), generator=generator)
    columns = torch.arange(int(lens.max()))
    ids = torch.randint(4, VOCAB, (rows, len(columns)), generator=generator)
    answers = (lens.float() * torch.rand(rows, generator=generator)).long().clamp(1)
    inside = columns < lens[:, None]
    return {
        "audios": torch.zeros(0, 0),
        "audio_lens": torch.zeros(0, dtype=torch.int64),
        "input_ids": ids.masked_fill(~inside, 3),
        "loss_mask": inside & (columns >= (lens - answers)[:, None]),
        "text_lens": lens,
        "sample_ids": [str(row) for row in range(rows)],
        "sample_seeds": torch.zeros(rows, dtype=torch.int64),
        "is_empty": False,
    }


def text_case(family: str, num_micro_batches: int = 5, **changes: Any) -> Case:
    return Case(build, draw, family, num_micro_batches=num_micro_batches, **changes)
