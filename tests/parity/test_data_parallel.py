"""Law 1 for data parallelism: DDP, FSDP2 and hybrid sharding against one plain process."""

from __future__ import annotations

import functools

import pytest
import torch

from shoal.config.schema import DDPConfig, FSDP2Config, OffloadConfig, ParallelismSizes
from tests.parity.harness import Case, Layout, Record, assert_parity, reference, run_layout
from tests.zygote import RankRunner

HSDP = ParallelismSizes(dp_replicate_size=2)

LAYOUTS = [
    Layout("ddp1", 1, "ddp"),
    Layout("ddp2", 2, "ddp"),
    Layout("ddp4", 4, "ddp", checkpoint_llm=True, checkpoint_perception=True),
    Layout(
        "ddp2-bucket-view", 2, "ddp", ddp=DDPConfig(gradient_as_bucket_view=True, find_unused_parameters=True)
    ),
    Layout("fsdp1", 1),
    Layout("fsdp2", 2),
    Layout("fsdp2-no-defer", 2, fsdp2=FSDP2Config(defer_fsdp_grad_sync=False)),
    Layout("fsdp2-no-reshard", 2, fsdp2=FSDP2Config(reshard_after_forward=False)),
    Layout("fsdp2-offload", 2, fsdp2=FSDP2Config(offload_policy=OffloadConfig(pin_memory=False))),
    Layout("fsdp4-checkpointing", 4, checkpoint_llm=True, checkpoint_perception=True),
    Layout("hsdp2x2", 4, sizes=HSDP),
    Layout("hsdp2x2-no-defer", 4, sizes=HSDP, fsdp2=FSDP2Config(defer_fsdp_grad_sync=False)),
]
CASES = {
    "whisper": Case(),
    "parakeet": Case(encoder="parakeet", freeze=(r"^perception\.encoder\..+",)),
    # A bias before a batch norm has no gradient but rounding noise, which AdamW would blow up: hence SGD.
    "parakeet-batch-norm": Case(encoder="parakeet", optimizer="sgd"),
    "frozen-encoder-lora": Case(
        freeze=(r"^llm\..+", r"^perception\.encoder\..+"),
        lora={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
    ),
    "tied": Case(tied=True),
    # Of attention probabilities and of LoRA's input; the encoder has none.
    "dropout": Case(
        dropout=0.2, lora={"r": 4, "lora_dropout": 0.3, "target_modules": ["q_proj", "down_proj"]}
    ),
    "one-rank-unsupervised": Case(num_micro_batches=4, unsupervised=(1, 3)),
    "fp32-sgd": Case(dtype=torch.float32, optimizer="sgd"),
}
BY_NAME = {layout.name: layout for layout in LAYOUTS}
# Every case once at its richest layouts, every layout once with the first case.
TABLE = [("whisper", layout.name) for layout in LAYOUTS] + [
    (case, layout) for case in CASES if case != "whisper" for layout in ("ddp2", "fsdp2", "hsdp2x2")
]
# Recomputed layers draw what they drew before.
TABLE += [("dropout", "ddp4"), ("dropout", "fsdp4-checkpointing")]


@functools.cache
def expected(case: str) -> Record:
    return reference(CASES[case])


@pytest.mark.parametrize(("case", "layout"), TABLE)
def test_layout_never_changes_the_numbers(ranks: RankRunner, case: str, layout: str) -> None:
    row = BY_NAME[layout]
    actual = ranks(run_layout, row.world, CASES[case], row)[0]
    assert_parity(actual, expected(case), CASES[case])
