"""Every family that may be packed also shares its tokens among ranks: loss and every gradient, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from shoal.config.schema import ContextMethod
from shoal.kernels.attention_hf import register_attention
from shoal.kernels.packable import PACKABLE
from shoal.parallel.context.share import make_context_parallel
from tests.unit.kernels.families import VOCAB, InDouble, tiny_model
from tests.zygote import RankRunner

LENS = (5, 9, 1, 3, 12)  # with a window and a chunk of 4 in the families that have them
CHUNKED = "llama4_text"
DEAF = ("nemotron", "stablelm")
"""Their layers do not hand keyword arguments down to attention."""
BATCHES = 8
"""Families are compared several in one job of ranks, which costs more to start than a comparison."""


def micro_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    total = sum(LENS)
    return {
        "input_ids": torch.randint(4, VOCAB, (1, total), generator=generator),
        "loss_mask": torch.ones(1, total, dtype=torch.bool),
        "position_ids": torch.cat([torch.arange(length) for length in LENS])[None],
        "cu_seqlens": torch.tensor([0, *LENS]).cumsum(0).int(),
    }


def weights() -> Tensor:
    """A loss that weighs every logit differently."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(sum(LENS), VOCAB, generator=generator, dtype=torch.float64)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) > 3
    return found


def one_by_one(family: str) -> dict[str, Tensor]:
    """The model as it is, one document at a time, with transformers' own attention."""
    with InDouble():
        model, ids = tiny_model(family), micro_batch()["input_ids"]
        pieces = [model(input_ids=piece, use_cache=False).logits for piece in ids.split(LENS, 1)]
        loss = (torch.cat(pieces, 1)[0] * weights()).sum()
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def on_ranks(family: str, method: ContextMethod) -> dict[str, Tensor]:
    """Loss and gradients, summed over the ranks."""
    group = dist.group.WORLD
    assert group is not None
    with InDouble():
        model = tiny_model(family, attention="sdpa" if tiny_model(family)._supports_sdpa else "eager")
        if not model._supports_sdpa:
            register_attention("shoal")  # what the recipe builds it with
            model.config._attn_implementation = "shoal"
        share = make_context_parallel(model, group, method).share(batch := micro_batch())
        logits = model(
            input_ids=share.tokens(batch["input_ids"]),
            position_ids=share.tokens(batch["position_ids"]),
            use_cache=False,
            context=share.attention,
        ).logits[0]
        loss = (logits * weights()[share.index])[share.is_real].sum()
    loss.backward()
    found = {"loss": loss.detach(), **gradients(model)}
    for value in found.values():
        dist.all_reduce(value, group=group)
    return found


def compare(rank: int, world: int, families: list[str], method: ContextMethod) -> dict[str, str]:
    """What is wrong with each family."""
    wrong = {}
    for family in families:
        try:
            actual, expected = on_ranks(family, method), one_by_one(family)
        except Exception as error:
            wrong[family] = f"{type(error).__name__}: {error}"[:300]
            continue
        largest = max(float(value.abs().max()) for name, value in expected.items() if name != "loss")
        for name, value in expected.items():
            scale = max(float(value.abs().max()), 1e-3 * largest)
            if not float((actual[name] - value).abs().max()) <= 1e-10 * scale:
                wrong[family] = name
    return wrong


@pytest.mark.parametrize("number", range(BATCHES))
def test_every_family(ranks: RankRunner, number: int) -> None:
    families = [one for one in sorted(PACKABLE - {*DEAF, CHUNKED})[number::BATCHES]]
    assert families
    assert ranks(compare, 2, families, "ring", timeout=120) == [{}, {}]


def test_chunked_attention(ranks: RankRunner) -> None:
    assert ranks(compare, 2, [CHUNKED], "ulysses") == [{}, {}]
    for wrong in ranks(compare, 2, [CHUNKED], "ring"):
        assert "cp_method = 'ring' cannot compute chunked attention" in wrong[CHUNKED]


def test_families_that_do_not_say_where_tokens_lie_are_refused(ranks: RankRunner) -> None:
    for wrong in ranks(compare, 2, list(DEAF), "ring"):
        assert set(wrong) == set(DEAF)
        assert all(
            "does not hand keyword arguments down to attention" in message for message in wrong.values()
        )
