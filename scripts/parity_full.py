"""Generates docs/parity_tensor.md: the full product of tensor-parallel layouts and model families.

    python scripts/parity_full.py               runs every cell, writes the document after each row
    python scripts/parity_full.py --resume      keeps the cells that an earlier call has finished
    python scripts/parity_full.py --family NAME [--family ...]

A cell trains two steps of a tiny model in fp64 under a layout and in one plain process that uses none of the parallel
code: initial weights, losses, gradient norms, every gradient by name and the weights after AdamW. It shows the largest
relative error of all of these; the limit is 1e-10. Cells that were not run are shown as such.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # this tree and no other that may be installed

from scripts.parity_cells import Cells, cell_of  # noqa: E402 (needs the path above)
from shoal.config.schema import FSDP2Config, ParallelismSizes  # noqa: E402
from tests.parity.harness import Case, Layout, Record, reference, run_layout  # noqa: E402
from tests.parity.hybrids import hybrid_case, run_in_double  # noqa: E402
from tests.parity.packed_text import rows_of  # noqa: E402
from tests.parity.test_tensor_parallel import LORA  # noqa: E402
from tests.parity.text import text_case  # noqa: E402
from tests.unit.kernels.families import InDouble  # noqa: E402
from tests.zygote import RankRunner  # noqa: E402

DOCUMENT = ROOT / "docs" / "parity_tensor.md"
RESULTS = ROOT / "benchmarks" / "results" / "parity_tensor.json"
NUM_MICRO_BATCHES = {1: {1: 1, 2: 2, 4: 4}, 2: {1: 2, 2: 4, 4: 8}}
"""By accumulation and data-parallel size."""


def layouts() -> dict[str, Layout]:
    """{tp 1, 2, 4} x {sequence parallel} x {dp 1, 2, HSDP 2x2}, at most eight ranks."""
    table = {}
    for dp, replicas in ((1, None), (2, None), (4, 2)):
        for tp in (1, 2, 4):
            for sequence in (False, True) if tp > 1 else (False,):
                name = f"{'hsdp' if replicas else 'dp'}{dp} tp{tp}{' sp' if sequence else ''}"
                sizes = ParallelismSizes(tp_size=tp, dp_replicate_size=replicas)
                table[name] = Layout(
                    name, dp * tp, sizes=sizes, fsdp2=FSDP2Config(sequence_parallel=sequence)
                )
    return {name: layout for name, layout in table.items() if layout.world <= 8}


def families() -> dict[str, Any]:
    """Makes the case of a family for a number of micro-batches."""
    names = (
        "llama",
        "llama-odd",
        "llama-tied",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma3",
        "phi3",
        "smollm3",
        "gpt-oss",
    )
    names += ("mixtral", "qwen3-moe")
    table: dict[str, Any] = {name: lambda count, name=name: text_case(name, count) for name in names}
    table["llama-odd, LoRA"] = lambda count: text_case("llama-odd", count, lora=LORA)
    table["phi3, LoRA"] = lambda count: text_case("phi3", count, lora=LORA)
    table["SALM, Whisper"] = lambda count: Case(num_micro_batches=count, without_audio=(count - 1,))
    table["SALM, Parakeet"] = lambda count: Case(encoder="parakeet", optimizer="sgd", num_micro_batches=count)
    table["nemotron-h, packs"] = lambda count: hybrid_case("nemotron-h", count)
    return table


def expected_of(case: Case) -> Record:
    """The plain process; for packs of a hybrid that is rows, with transformers' own scan."""
    if not is_hybrid(case):
        return reference(case)
    with InDouble():
        return reference(rows_of(case))


def is_hybrid(case: Case) -> bool:
    """Whether a case has Mamba layers, which transformers computes in float32."""
    return case.family == "nemotron-h"


def run(selected: list[str], resume: bool) -> Cells:
    """Runs the cells that are not there yet."""
    done, ranks = Cells(RESULTS, resume), RankRunner()
    try:
        for family, make in families().items():
            if selected and family not in selected:
                continue
            for accumulation in (1, 2):
                row = f"{family} | {accumulation}"
                references: dict[int, Record] = {}
                for name, layout in layouts().items():
                    if name in done.row(row):
                        continue
                    dp = layout.world // layout.sizes.tp_size
                    count = NUM_MICRO_BATCHES[accumulation][dp]
                    case = make(count)
                    if count not in references:
                        references[count] = expected_of(case)
                    run_case = run_in_double if is_hybrid(case) else run_layout
                    done.put(row, name, cell_of(ranks, case, layout, references[count], run_case))
                print(row, done.row(row), flush=True)
                DOCUMENT.write_text(document(done))
    finally:
        ranks.close()
    return done


def document(done: Cells) -> str:
    """The table, cells that were not run included."""
    names = list(layouts())
    about = "A cell" + (__doc__ or "").partition("A cell")[2].strip("\n")
    lines = [
        "# Tensor and sequence parallelism never change the numbers",
        "",
        f"Generated by `make parity-full` at commit {done.origin()}. {about}",
        "",
        "Every layout runs on gloo; `sp` is sequence parallelism. The sequence lengths are ragged and mostly odd.",
        "",
        "| family | accumulation | " + " | ".join(names) + " |",
        "| --- | --- |" + " --- |" * len(names),
    ]
    for family in families():
        for accumulation in (1, 2):
            row = f"{family} | {accumulation}"
            cells = done.cells.get(row, {})
            lines.append(f"| {row} | " + " | ".join(cells.get(name, "not run") for name in names) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--family", action="append", default=[])
    options = parser.parse_args()
    return run(options.family, options.resume).verdict()


if __name__ == "__main__":
    sys.exit(main())
