"""Case 7: documents whose length the chunks do not divide lose keys, or their padding is seen.

Documents of 7, 3 and 1 tokens on two ranks of a cp group take 8, 4 and 4. Logits of the real tokens and all gradients
are those of each document alone, and stay so when the hidden states of padding are huge.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.config.schema import ContextMethod
from shoal.parallel.context.share import make_context_parallel
from shoal.parallel.context.split import DualChunks, local_index
from tests.unit.kernels.families import VOCAB, InDouble, tiny_model
from tests.zygote import RankRunner

LENS = (7, 3, 1)
IDS = torch.randint(4, VOCAB, (1, sum(LENS)), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.randn(sum(LENS), VOCAB, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
POSITIONS = torch.cat([torch.arange(length) for length in LENS])[None]


def one_by_one() -> dict[str, Tensor]:
    with InDouble():
        model = tiny_model("llama")
        logits = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in IDS.split(LENS, 1)], 1)[0]
        loss = (logits * WEIGHTS).sum()
    loss.backward()
    return {"logits": logits.detach(), **_gradients(model)}


def on_rank(rank: int, world: int, method: ContextMethod, fill: float | None) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    with InDouble():
        model: Any = tiny_model("llama", attention="sdpa")
        batch = {
            "input_ids": IDS,
            "loss_mask": torch.ones_like(IDS, dtype=torch.bool),
            "cu_seqlens": torch.tensor([0, *LENS]).cumsum(0).int(),
        }
        share = make_context_parallel(model, group, method).share(batch)
        if fill is not None:
            model.model.embed_tokens.register_forward_hook(
                lambda module, inputs, out: torch.where(share.is_real[None, :, None], out, fill)
            )
        logits = model(
            input_ids=share.tokens(IDS),
            position_ids=share.tokens(POSITIONS),
            use_cache=False,
            context=share.attention,
        ).logits[0]
        loss = (logits * WEIGHTS[share.index])[share.is_real].sum()
    loss.backward()
    gradients = _gradients(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
    real = share.is_real
    return {"logits": logits.detach()[real], "index": share.index[real], "gradients": gradients}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_nothing_is_cut_off() -> None:
    layouts = [DualChunks(LENS, 2, rank) for rank in range(2)]
    assert [layout.num_local for layout in layouts] == [8, 8]
    places = [local_index(layout, (0, 7, 10), torch.device("cpu")) for layout in layouts]
    real = torch.cat([index[is_real] for index, is_real in places])
    assert sorted(real.tolist()) == list(range(11))  # every token once


@pytest.mark.parametrize("fill", [None, 1e6])
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_logits_and_gradients_are_those_of_each_document(
    ranks: RankRunner, method: ContextMethod, fill: float | None
) -> None:
    expected = one_by_one()
    results = ranks(on_rank, 2, method, fill)
    for result in results:
        torch.testing.assert_close(
            result["logits"], expected["logits"][result["index"]], rtol=1e-10, atol=1e-10
        )
    for name, gradient in results[0]["gradients"].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10)
