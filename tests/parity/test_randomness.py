"""Law 5: initial values and dropout are the same on every layout, in every composition, packed, and recomputed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal.models.causal_lm as causal_lm
import shoal.models.dropout as dropout
import shoal.parallel.tensor.apply as tensor_apply
from shoal.config.llm import CompileConfig
from shoal.config.schema import FSDP2Config, ParallelismSizes
from shoal.models.assemble import ModelPlan, Numerics, assemble, assemble_in_place
from shoal.models.causal_lm import CausalLM
from shoal.parallel.setup import DistributedSetup
from tests.families import tiny_lm
from tests.parity.harness import Case, Layout, Record, assert_parity, reference, run_layout
from tests.parity.randomness import LORA, language_model, speech, text
from tests.zygote import RankRunner

SP = FSDP2Config(sequence_parallel=True)
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("ddp2", 2, "ddp"),
        Layout("fsdp2", 2),
        Layout("fsdp4", 4),
        Layout("hsdp2x2", 4, sizes=ParallelismSizes(dp_replicate_size=2)),
        Layout("checkpointing", 2, checkpoint_llm=True, checkpoint_perception=True),
        Layout("tp2", 2, sizes=ParallelismSizes(tp_size=2)),
        Layout("tp2-sp", 2, sizes=ParallelismSizes(tp_size=2), fsdp2=SP),
        Layout("dp2-tp2-sp", 4, sizes=ParallelismSizes(tp_size=2), fsdp2=SP, checkpoint_llm=True),
        Layout("cp2", 2, sizes=ParallelismSizes(cp_size=2), checkpoint_llm=True),
        Layout("cp2-tp2-sp", 4, sizes=ParallelismSizes(cp_size=2, tp_size=2), fsdp2=SP),
    )
}
VARIANTS: dict[str, tuple[Callable[..., Case], dict[str, Any]]] = {
    "phi3": (text, {"family": "phi3"}),
    "phi3-lora": (text, {"family": "phi3", "lora": LORA}),
    "llama-lora": (text, {"family": "llama", "lora": LORA}),
    # A bias of keys has no gradient but rounding noise, which AdamW would blow up: hence SGD.
    "gpt2": (text, {"family": "gpt2", "optimizer": "sgd"}),
    "speech": (speech, {}),
}
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "": {},
    "one-by-one": {"rows": 1},
    "wide": {"rows": 4},
    "packs": {"rows": 3, "packs": True},
    "wide-packs": {"rows": 6, "packs": True},
    "packed": {"packed": True},
    "compiled": {"compile": CompileConfig(enabled=True, backend="aot_eager")},
}
DATA_PARALLEL = ("ddp2", "fsdp2", "fsdp4", "hsdp2x2", "checkpointing")
TENSOR_PARALLEL = ("tp2", "tp2-sp", "dp2-tp2-sp")
TABLE = [
    *(("phi3-lora", "", layout) for layout in (*DATA_PARALLEL, *TENSOR_PARALLEL)),
    *(("phi3", "", layout) for layout in ("hsdp2x2", "checkpointing", *TENSOR_PARALLEL)),
    *(("llama-lora", "", layout) for layout in ("fsdp2", "dp2-tp2-sp")),
    *(("gpt2", "", layout) for layout in ("ddp2", "checkpointing")),
    *(("phi3-lora", composition, "fsdp2") for composition in ("one-by-one", "wide", "packs", "wide-packs")),
    *(("phi3-lora", "packs", layout) for layout in ("checkpointing", "dp2-tp2-sp", "cp2-tp2-sp")),
    *((variant, "", "cp2") for variant in ("phi3", "phi3-lora")),
    ("phi3", "compiled", "checkpointing"),
    *(("speech", "", layout) for layout in ("ddp2", "hsdp2x2", "checkpointing")),
    *(("speech", composition, "fsdp2") for composition in ("one-by-one", "wide", "packed")),
    ("speech", "", "tp2-sp"),
    ("speech", "packed", "dp2-tp2-sp"),
    ("speech", "packed", "cp2"),
]


def case_of(variant: str, composition: str = "") -> Case:
    make, options = VARIANTS[variant]
    return make(**options, **COMPOSITIONS[composition])


@functools.cache
def expected(variant: str) -> Record:
    return reference(case_of(variant))


@pytest.mark.parametrize(("variant", "composition", "layout"), TABLE)
def test_dropout_is_the_same(ranks: RankRunner, variant: str, composition: str, layout: str) -> None:
    case = case_of(variant, composition)
    actual = ranks(run_layout, LAYOUTS[layout].world, case, LAYOUTS[layout], timeout=240.0)[0]
    assert_parity(actual, expected(variant), case)


@pytest.mark.parametrize("variant", ["phi3-lora", "gpt2"])
def test_dropout_is_the_same_in_packs_of_one_process(variant: str) -> None:
    whole, packs = (replace(case_of(variant, name), max_norm=None) for name in ("", "wide-packs"))
    assert_parity(reference(packs), reference(whole), whole)


# ---------------------------------------------------------------------------------------------------------- refusals


def between_projections(case: Case) -> nn.Module:
    module = language_model(replace(case, family="llama"))
    module.llm.model.layers[1].mlp.inner_dropout = nn.Dropout(0.1)
    return module


def attention_dropout(case: Case) -> nn.Module:
    return CausalLM(tiny_lm("llama", attention_dropout=0.25))


def bare(case: Case) -> nn.Module:
    return tiny_lm("phi3", resid_pdrop=0.25)


REFUSALS: dict[str, tuple[Callable[[Case], nn.Module], str, str]] = {
    "attention": (
        attention_dropout,
        "llm",
        r"with tp_size = 2:\nllm\.model\.layers\.0\.self_attn\.attention_dropout: dropout 0\.25 .*set it to 0",
    ),
    "bare": (
        bare,
        "",
        r"with tp_size = 2:\nmodel\.layers\.0\.resid_attn_dropout\.p: dropout 0\.25 .*set it to 0",
    ),
    "between": (
        between_projections,
        "llm",
        r"model\.layers\.1\.mlp\.inner_dropout stands between projections",
    ),
}


def refused(rank: int, world: int, name: str, sizes: ParallelismSizes) -> str:
    build, llm, _ = REFUSALS[name]
    setup = DistributedSetup.build(parallelism_sizes=sizes, world_size=world)
    plan = ModelPlan(lambda: build(Case()), llm=llm)
    try:
        (assemble if llm else assemble_in_place)(plan, setup, Numerics(), torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSALS)
def test_what_ranks_would_draw_differently_is_refused_on_all_of_them(ranks: RankRunner, name: str) -> None:
    for message in ranks(refused, 2, name, ParallelismSizes(tp_size=2)):
        assert re.search(REFUSALS[name][2], message), message
    assert ranks(refused, 2, name, ParallelismSizes()) == ["", ""]  # data parallelism alone


# ---------------------------------------------------------------------------------------------------- planted faults


def rank_in_the_key(patch: pytest.MonkeyPatch) -> None:
    """Each rank draws its own masks; rank 0, and one process, draw the right ones."""
    honest = dropout.derive_key
    rank = dist.get_rank() if dist.is_initialized() else 0
    patch.setattr(dropout, "derive_key", lambda tag, seed, step, name: honest(tag, seed + rank, step, name))


def row_in_the_key(patch: pytest.MonkeyPatch) -> None:
    """A sample is known by its row in the micro-batch."""
    honest = causal_lm.tokens_of

    def tokens(micro_batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(len(micro_batch["sample_seeds"]))
        return honest({**micro_batch, "sample_seeds": rows})

    patch.setattr(causal_lm, "tokens_of", tokens)


def column_in_the_key(patch: pytest.MonkeyPatch) -> None:
    """A token is known by its column, also in a pack."""
    honest = causal_lm.tokens_of

    def tokens(micro_batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        samples, positions = honest(micro_batch)
        return samples, torch.arange(positions.shape[1]).expand_as(positions)

    patch.setattr(causal_lm, "tokens_of", tokens)


def local_features(patch: pytest.MonkeyPatch) -> None:
    """Each tensor-parallel rank counts its features from 0."""
    _change_places(patch, lambda module: setattr(module, "feature_start", 0))


def first_tokens(patch: pytest.MonkeyPatch) -> None:
    """Each sequence-parallel rank takes the mask of the first tokens."""
    _change_places(patch, lambda module: setattr(module, "token_part", (0, module.token_part[1])))


def _change_places(patch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    honest = tensor_apply.place_dropout

    def place(model: nn.Module, *others: Any) -> None:
        honest(model, *others)  # type: ignore[arg-type]
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                change(module)

    patch.setattr(tensor_apply, "place_dropout", place)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str, str]] = {
    "rank": (rank_in_the_key, "phi3-lora", "", "fsdp2"),
    "row": (row_in_the_key, "phi3-lora", "wide", "fsdp2"),
    "column": (column_in_the_key, "phi3-lora", "packs", "fsdp2"),
    "features": (local_features, "phi3-lora", "", "tp2"),
    "tokens": (first_tokens, "phi3", "", "tp2-sp"),
}


def run_with_fault(rank: int, world: int, fault: str) -> Record | None:
    plant, variant, composition, layout = FAULTS[fault]
    plant(pytest.MonkeyPatch())  # this rank is a forked process: the fault dies with it
    return run_layout(rank, world, case_of(variant, composition), LAYOUTS[layout])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(ranks: RankRunner, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plant, variant, composition, layout = FAULTS[fault]
    actual = ranks(run_with_fault, LAYOUTS[layout].world, fault)[0]
    plant(
        monkeypatch
    )  # the plain process has it too: what is to be noticed is that masks then follow the layout
    case = case_of(variant, composition)
    with pytest.raises(AssertionError):
        assert_parity(actual, reference(case_of(variant)), case)
