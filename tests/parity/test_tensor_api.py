"""`shoal.AutoModelForCausalLM` cut over tensor-parallel ranks: loaded from slices, whole logits, same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM as Transformers

import shoal
from shoal.config.schema import DDPConfig, FSDP2Config, ParallelismSizes
from shoal.parallel.managers import gradient_sync
from tests.families import VOCAB, tiny_lm
from tests.parity.harness import relative_errors
from tests.zygote import RankRunner

IDS = torch.randint(4, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))


def loss_of(model: Any) -> torch.Tensor:
    logits = model(input_ids=IDS, use_cache=False).logits
    assert logits.shape == (*IDS.shape, model.config.vocab_size)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def use_plain_experts(model: Any) -> None:
    """The grouped kernel has no float64."""
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")


def load_and_run(
    rank: int, world: int, folder: str, sequence_parallel: bool, dp_size: int
) -> tuple[float, dict[str, torch.Tensor], list[int]]:
    setup = shoal.DistributedSetup.build(
        strategy=FSDP2Config(sequence_parallel=sequence_parallel),
        parallelism_sizes=ParallelismSizes(tp_size=world // dp_size),
    )
    model = shoal.AutoModelForCausalLM.from_pretrained(folder, distributed_setup=setup, dtype=torch.float64)
    use_plain_experts(model)
    with gradient_sync(model):
        loss = loss_of(model)
        (loss / dp_size).backward()
    gradients = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad)
        for name, p in model.named_parameters()
    }
    model.eval()
    prompt = IDS[:, :3]
    with torch.no_grad():
        tokens = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return float(loss), gradients, tokens.flatten().tolist()


def spread_by_hand(
    rank: int, world: int, plan: dict[str, str] | None
) -> tuple[float, dict[str, torch.Tensor]]:
    setup = shoal.DistributedSetup.build(parallelism_sizes=ParallelismSizes(tp_size=world))
    manager = shoal.FSDP2Manager(FSDP2Config(tp_plan=plan), setup.mesh_context)
    model = manager.parallelize(tiny_lm("llama-tied", torch.float64))
    with gradient_sync(model):
        loss = loss_of(model)
        loss.backward()
    return float(loss), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def summed_after_each(rank: int, world: int, strategy: str) -> dict[str, torch.Tensor]:
    """The same micro-batch twice, summed over the ranks after each; nothing says that the first is not the last."""
    options = DDPConfig() if strategy == "ddp" else FSDP2Config(sequence_parallel=True)
    sizes = ParallelismSizes() if strategy == "ddp" else ParallelismSizes(tp_size=world)
    setup = shoal.DistributedSetup.build(strategy=options, parallelism_sizes=sizes)
    model: Any = shoal.AutoModelForCausalLM.from_config(
        tiny_lm("qwen3").config, distributed_setup=setup, dtype=torch.float64
    )
    found = []
    for sync in ((True, True), (False, True)):
        for last in sync:
            with gradient_sync(model, last):
                loss_of(model).backward()
        found.append(
            {
                name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
                for name, p in model.named_parameters()
            }
        )
        model.zero_grad()
    each, once = found
    return {name: (each[name] - once[name]).abs().max() for name in once if once[name].abs().max() > 0}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_what_is_summed_is_not_summed_again(ranks: RankRunner, strategy: str) -> None:
    for errors in ranks(summed_after_each, 2, strategy):
        assert len(errors) > 10 and max(errors.values()) < 1e-10


PLANS: list[dict[str, str] | None] = [
    None,
    {
        "model.embed_tokens": "embedding_rowwise",
        "lm_head": "colwise_rep",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
]


@pytest.mark.parametrize("plan", PLANS, ids=["family", "own"])
def test_a_manager_cuts_a_model_that_has_its_weights(ranks: RankRunner, plan: dict[str, str] | None) -> None:
    plain = tiny_lm("llama-tied", torch.float64)
    loss = loss_of(plain)
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for actual, gradients in ranks(spread_by_hand, 2, plan):
        assert actual == pytest.approx(float(loss), rel=1e-10)
        assert max(relative_errors(gradients, expected).values()) < 1e-10


@pytest.mark.parametrize("family", ["llama-odd", "gpt-oss", "phi3", "qwen3-moe"])
@pytest.mark.parametrize(("sequence_parallel", "dp_size"), [(False, 1), (True, 2)])
def test_a_checkpoint_in_slices_is_the_model(
    ranks: RankRunner, tmp_path: Path, family: str, sequence_parallel: bool, dp_size: int
) -> None:
    tiny_lm(family, torch.float64).save_pretrained(tmp_path)
    plain = Transformers.from_pretrained(tmp_path, dtype=torch.float64)
    use_plain_experts(plain)
    loss = loss_of(plain)
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    tokens = plain.eval().generate(input_ids=IDS[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
    for actual in ranks(load_and_run, 2 * dp_size, str(tmp_path), sequence_parallel, dp_size):
        assert actual[0] == pytest.approx(float(loss), rel=1e-10)
        assert max(relative_errors(actual[1], expected).values()) < 1e-10
        assert actual[2] == tokens.flatten().tolist()
