"""Generates docs/parity_context.md: the full product of context-parallel layouts and models.

    python scripts/parity_context.py               runs every cell, writes the document after each job of ranks
    python scripts/parity_context.py --resume      keeps the cells that an earlier call has finished
    python scripts/parity_context.py --model NAME --layout PART ...

A cell trains two steps of a tiny model in fp64 on ragged packs under a layout, with accumulation, and in one plain
process: initial weights, losses, gradient norms, every gradient by name and the weights after AdamW (SGD for Parakeet).
It shows the largest relative error of all of these. The plain process has each document or conversation in a padded row
of its own, attention and Mamba layers of transformers, and none of the parallel code. Every layout runs on gloo; `sp`
is sequence parallelism. Layouts of several data-parallel ranks recompute activations, except where routers or Mamba
layers cast to float32, which the harness prevents only where they are computed the first time.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # this tree and no other that may be installed

from scripts.parity_cells import LIMIT, Cells, cells_of  # noqa: E402 (needs the path above)
from shoal.config.schema import FSDP2Config, MambaContextMethod, ParallelismSizes  # noqa: E402
from tests.parity.harness import Case, Layout, Record, reference, replace, run_layout  # noqa: E402
from tests.parity.hybrids import hybrid_case, run_in_double  # noqa: E402
from tests.parity.packed_text import packed_case, rows_of  # noqa: E402
from tests.parity.test_context import LORA, METHODS  # noqa: E402
from tests.parity.test_context_speech import CASES as CONVERSATIONS  # noqa: E402
from tests.unit.kernels.families import InDouble  # noqa: E402
from tests.zygote import RankRunner  # noqa: E402

DOCUMENT = ROOT / "docs" / "parity_context.md"
RESULTS = ROOT / "benchmarks" / "results" / "parity_context.json"
ATTENTION = ("llama", "qwen3", "gemma3", "mistral", "gpt-oss", "smollm3", "phi3", "deepseek-v3", "qwen3-moe")
ROUTED = ("deepseek-v3", "qwen3-moe")
HYBRIDS = ("nemotron-h", "bamba", "granite-hybrid", "mamba2")
MAMBA_METHODS: tuple[MambaContextMethod, ...] = ("all_to_all", "state")
SCAN_LIMIT = 1e-8
TOGETHER = 8
"""Models that one job of ranks trains."""


@dataclass(frozen=True)
class Model:
    """A column of a table: what the ranks train, what the plain process trains, and how much they may differ."""

    table: str
    case: Case
    plain: Case
    limit: float = LIMIT
    mamba_cp: MambaContextMethod = "auto"
    recomputed: bool = True

    @property
    def is_speech(self) -> bool:
        """Whether it has an encoder, which like the LLM under it computes in float64 as it is."""
        return self.table == "Speech"

    def under(self, layout: Layout) -> Layout:
        """The layout for this model."""
        if layout.sizes.cp_size > 1:
            layout = replace(layout, fsdp2=replace(layout.fsdp2, mamba_cp=self.mamba_cp))
        if not self.recomputed:
            layout = replace(layout, checkpoint_llm=False)
        return replace(layout, checkpoint_perception=layout.checkpoint_llm and self.is_speech)


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


def models() -> dict[str, Model]:
    """Ragged packs: five micro-batches (GraniteMoeHybrid eight), one of two data-parallel ranks gets an empty one."""
    table = {}
    cases = {name: packed_case(name) for name in ATTENTION}
    cases |= {f"{name}, LoRA": packed_case(name, lora=LORA) for name in ("llama", "gemma3")}
    for name, case in cases.items():
        table[name] = Model("Attention", case, rows_of(case), recomputed=case.family not in ROUTED)
    for name in HYBRIDS:
        case = hybrid_case(name)
        for method in MAMBA_METHODS:
            table[f"{name}, {method}"] = Model(
                "Attention and scan", case, rows_of(case), SCAN_LIMIT, method, False
            )
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


def jobs(done: Cells, selected: list[str], parts: list[str]) -> Iterator[tuple[Layout, list[str]]]:
    """Layouts and the models to train under each; those of most ranks last."""
    for name, layout in sorted(layouts().items(), key=lambda item: item[1].world):
        if parts and not any(part in name for part in parts):
            continue
        for is_speech in (False, True):
            todo = [
                model
                for model in selected or models()
                if name not in done.row(model) and models()[model].is_speech == is_speech
            ]
            for first in range(0, len(todo), TOGETHER):
                yield layout, todo[first : first + TOGETHER]


def run(selected: list[str], parts: list[str], resume: bool) -> Cells:
    """Runs the cells that are not there yet."""
    done, ranks = Cells(RESULTS, resume), RankRunner()
    try:
        for layout, names in jobs(done, selected, parts):
            chosen = [models()[name] for name in names]
            pairs = [(model.case, model.under(layout)) for model in chosen]
            records, limits = [expected(name) for name in names], [model.limit for model in chosen]
            train = run_layout if chosen[0].is_speech else run_in_double
            cells = cells_of(ranks, pairs, records, train, limits)
            for name, cell in zip(names, cells, strict=True):
                done.put(name, layout.name, cell)
                print(layout.name, name, cell, sep=" | ", flush=True)
            DOCUMENT.write_text(document(done))
    finally:
        ranks.close()
    return done


def document(done: Cells) -> str:
    """The tables, cells that were not run included: layouts downwards, models across."""
    about = "A cell" + (__doc__ or "").partition("A cell")[2].strip("\n")
    lines = [
        "# Context parallelism never changes the numbers",
        "",
        f"Generated by `make parity-full` at commit {done.origin()}.",
        "",
        *about.splitlines(),
    ]
    refusals: list[str] = []
    for table in dict.fromkeys(model.table for model in models().values()):
        columns = {name: model for name, model in models().items() if model.table == table}
        lines += ["", f"## {table}", "", f"| layout | {' | '.join(columns)} |"]
        lines += ["| --- |" + " --- |" * len(columns)]
        lines += [f"| limit | {' | '.join(f'{model.limit:.0e}' for model in columns.values())} |"]
        for layout in layouts():
            cells = [_brief(done.row(name).get(layout, "not run"), refusals) for name in columns]
            lines.append(f"| {layout} | {' | '.join(cells)} |")
    if refusals:
        lines += ["", "## Refused", "", "Before anything is trained, on every rank:", ""]
        lines += [f"{number}. {reason}" for number, reason in enumerate(refusals, 1)]
    return "\n".join(lines) + "\n"


def _brief(cell: str, refusals: list[str]) -> str:
    """A cell, a refusal as the number of its reason."""
    if not cell.startswith("refused"):
        return cell
    reason = cell.partition("limit:")[2].strip() or cell
    if reason not in refusals:
        refusals.append(reason)
    return f"refused ({refusals.index(reason) + 1})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--layout", action="append", default=[], help="part of a layout's name")
    options = parser.parse_args()
    done = run(options.model, options.layout, options.resume)
    return done.verdict(lambda model: models()[model].limit, may_refuse)


if __name__ == "__main__":
    sys.exit(main())
