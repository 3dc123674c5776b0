"""Precision: the dtype parameters are stored in, and the dtype layers compute in, kept apart.

================ ============= ============== ===========================================================
``precision``     stored        computed       how
================ ============= ============== ===========================================================
``32-true``       float32       float32
``64-true``       float64       float64        proofs of layout independence
``bf16-mixed``    float32       bfloat16       FSDP2 casts in its policy; DDP and one process use autocast
``bf16-true``     bfloat16      bfloat16       no fp32 master weights: small updates are lost
================ ============= ============== ===========================================================

Gradients are accumulated and reduced in float32 (float64 for ``64-true``), loss sums are at least float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision

from shoal.config.schema import MixedPrecisionConfig

_ALIASES = {
    "32": "32-true",
    "bf16": "bf16-mixed",
    "64": "64-true",
    "bf16-flash": "bf16-true",
    "bf16-automodel": "bf16-true",
}


@dataclass(frozen=True)
class PrecisionPlan:
    """What a precision name means.

    Attributes:
        name: The name in the table above.
        stored: dtype of parameters, optimizer state and checkpoints.
        compute: dtype of matrix products; equal to `stored` unless precision is mixed.
    """

    name: str
    stored: torch.dtype
    compute: torch.dtype

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype to autocast to where no sharding policy casts the parameters; None when nothing is mixed."""
        return self.compute if self.compute != self.stored else None

    @property
    def policy(self) -> MixedPrecisionConfig | None:
        """The FSDP2 policy; None keeps the stored dtype for everything."""
        if self.stored in (torch.float32, torch.float64) and self.compute == self.stored:
            return None
        return MixedPrecisionConfig("bfloat16", "float32", None, cast_forward_inputs=True)


_PLANS = {
    plan.name: plan
    for plan in (
        PrecisionPlan("32-true", torch.float32, torch.float32),
        PrecisionPlan("64-true", torch.float64, torch.float64),
        PrecisionPlan("bf16-mixed", torch.float32, torch.bfloat16),
        PrecisionPlan("bf16-true", torch.bfloat16, torch.bfloat16),
    )
}


def precision_plan(name: str | int) -> PrecisionPlan:
    """Returns what `name` means.

    Raises:
        ValueError: The name is unknown, or its implementation needs a gradient scaler (fp16).

    >>> precision_plan("bf16-mixed").stored
    torch.float32
    """
    canonical = _ALIASES.get(str(name), str(name))
    if canonical not in _PLANS:
        raise ValueError(
            f"precision = {name!r}: one of {', '.join(sorted(_PLANS))}; fp16 needs a gradient scaler, which "
            "is not implemented; repair: bf16-mixed"
        )
    return _PLANS[canonical]


class ShoalPrecision(Precision):
    """Lightning's precision plugin for Shoal's modules: it remembers the plan and casts nothing.

    Lightning's own plugins convert whole modules and batches (audio samples included) and autocast on top of the
    FSDP2 policy. Here model assembly stores the parameters in the right dtype and the parallel model computes in
    the right dtype, so that nothing is left to a plugin.
    """

    def __init__(self, precision: str | int = "32-true") -> None:
        super().__init__()
        self.plan = precision_plan(precision)
        self.precision: Any = self.plan.name


def shoal_precision(plugin: Precision) -> ShoalPrecision:
    """Turns the plugin that Lightning chose for ``Trainer(precision=...)`` into ours."""
    return plugin if isinstance(plugin, ShoalPrecision) else ShoalPrecision(plugin.precision)
