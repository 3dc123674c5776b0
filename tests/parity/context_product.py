"""The product of context-parallel layouts and models: `make parity-full` runs all of it, the tests a selection."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from shoal.config.schema import ContextMethod, FSDP2Config, MambaContextMethod, ParallelismSizes
from tests.parity.harness import Case, Layout, Record, reference, replace, run_layout
from tests.parity.hybrids import hybrid_case, run_in_double
from tests.parity.packed_text import packed_case, rows_of
from tests.unit.kernels.families import InDouble

METHODS: tuple[ContextMethod, ...] = ("ring", "allgather", "ulysses")
MAMBA_METHODS: tuple[MambaContextMethod, ...] = ("all_to_all", "state")
ATTENTION = ("llama", "qwen3", "gemma3", "mistral", "gpt-oss", "smollm3", "phi3", "deepseek-v3", "qwen3-moe")
ROUTED = ("deepseek-v3", "qwen3-moe")
HYBRIDS = ("nemotron-h", "bamba", "granite-hybrid", "mamba2")
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
CONVERSATIONS = {
    "whisper": Case(unsupervised=(1,)),
    # A bias before a batch norm has no gradient but rounding noise, which AdamW would blow up: hence SGD.
    "parakeet": Case(encoder="parakeet", optimizer="sgd"),
    "frozen-encoder-lora": Case(
        freeze=(r"^llm\..+", r"^perception\.encoder\..+"),
        lora={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
    ),
}
"""Five micro-batches: ragged, one without audio, on two ranks one of them empty; some have fewer clips than ranks."""


@dataclass(frozen=True)
class Model:
    """What the ranks train, what the plain process trains, and how much the numbers may differ.

    kind: Attention, Scan (Mamba-2 layers) or Speech.
    recomputed: Whether several data-parallel ranks recompute its activations.
    """

    kind: str
    case: Case
    plain: Case
    limit: float = 1e-10
    mamba_cp: MambaContextMethod = "auto"
    recomputed: bool = True

    @property
    def is_speech(self) -> bool:
        """Whether it has an encoder, which like the LLM under it computes in float64 as it is."""
        return self.kind == "Speech"

    @property
    def train(self) -> Callable[[int, int, Case, Layout], Record | None]:
        """What a rank does."""
        return run_layout if self.is_speech else run_in_double

    def under(self, layout: Layout) -> Layout:
        """The layout for this model."""
        if layout.sizes.cp_size > 1:
            layout = replace(layout, fsdp2=replace(layout.fsdp2, mamba_cp=self.mamba_cp))
        if not self.recomputed:
            layout = replace(layout, checkpoint_llm=False)
        return replace(layout, checkpoint_perception=layout.checkpoint_llm and self.is_speech)


@functools.cache
def layouts() -> dict[str, Layout]:
    """{cp 1; cp 2, 4 by each method} x {tp 1, 2, 2 with sequence parallel} x {dp 1, 2, HSDP 2x2}."""
    table = {}
    for cp, method in ((1, None), *((cp, method) for method in METHODS for cp in (2, 4))):
        for tp, sequence in ((1, False), (2, False), (2, True)):
            for dp, replicas in ((1, None), (2, None), (4, 2)):
                kind = f"{'hsdp' if replicas else 'dp'}{dp}"
                name = f"{method or ''} cp{cp} tp{tp}{' sp' * sequence} {kind}".strip()
                sizes = ParallelismSizes(cp_size=cp, tp_size=tp, dp_replicate_size=replicas)
                options = FSDP2Config(sequence_parallel=sequence)
                if method:
                    options = replace(options, cp_method=method)
                table[name] = Layout(name, cp * tp * dp, sizes=sizes, fsdp2=options, checkpoint_llm=dp > 1)
    return table


@functools.cache
def models() -> dict[str, Model]:
    """Ragged packs: five micro-batches (GraniteMoeHybrid eight), one of two data-parallel ranks gets an empty one."""
    table = {}
    cases = {name: packed_case(name) for name in ATTENTION}
    cases |= {f"{name}, LoRA": packed_case(name, lora=LORA) for name in ("llama", "gemma3")}
    for name, case in cases.items():
        # Routers and Mamba layers of transformers cast to float32, and `InDouble` does not reach into recomputation.
        table[name] = Model("Attention", case, rows_of(case), recomputed=case.family not in ROUTED)
    for name in HYBRIDS:
        case = hybrid_case(name)
        for method in MAMBA_METHODS:
            table[f"{name}, {method}"] = Model("Scan", case, rows_of(case), 1e-8, method, recomputed=False)
    for name, case in CONVERSATIONS.items():
        table[f"SALM, {name}"] = Model("Speech", replace(case, packed=True), case)
    return table


def may_refuse(model: str, layout: str) -> bool:
    """Whether a model does not run under a layout: models have four heads, and Mamba-2 has no tensor-parallel plan."""
    parts = layout.split()
    if "tp2" in parts and model.startswith("mamba2"):
        return True
    return {"ulysses", "cp4", "tp2"} <= {*parts}


@functools.cache
def expected(model: str) -> Record:
    """What the plain process computes."""
    with nullcontext() if models()[model].is_speech else InDouble():
        return reference(models()[model].plain)
