"""Running statistics of batch norms: once per step, over all ranks, never in a recomputation."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.parallel.activation_checkpointing import checkpoint_module
from shoal.speech.batch_norm import (
    StepBatchNorm1d,
    unobserved,
    update_running_statistics,
    use_step_batch_norm,
)
from tests.tiny import ragged_micro_batches, tiny_salm
from tests.zygote import RankRunner


def frames(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [3 + 2 * torch.randn(b, 4, n, generator=generator) for b, n in shapes]


def step_norm() -> StepBatchNorm1d:
    return StepBatchNorm1d(nn.BatchNorm1d(4))


def test_outputs_and_gradients_are_those_of_the_plain_layer() -> None:
    plain, ours = nn.BatchNorm1d(4), step_norm()
    (x,) = frames((3, 7))
    results = []
    for norm in (plain, ours):
        leaf = x.clone().requires_grad_()
        norm(leaf).square().mul(torch.arange(7.0)).sum().backward()
        results.append((leaf.grad, norm.weight.grad, norm.bias.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    update_running_statistics(ours, None)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x))


def test_a_step_moves_once_towards_the_mean_weighted_by_frames() -> None:
    norm = step_norm()
    batches = frames((1, 5), (3, 10))
    for x in batches:
        norm(x)
    assert torch.equal(norm.running_mean, torch.zeros(4))
    update_running_statistics(norm, None)
    mean = (5 * batches[0].mean((0, 2)) + 30 * batches[1].mean((0, 2))) / 35
    variance = (5 * batches[0].var((0, 2)) + 30 * batches[1].var((0, 2))) / 35
    torch.testing.assert_close(norm.running_mean, 0.1 * mean)
    torch.testing.assert_close(norm.running_var, 0.9 * torch.ones(4) + 0.1 * variance)
    assert norm.num_batches_tracked == 1
    before = norm.running_mean.clone()
    update_running_statistics(norm, None)
    assert torch.equal(norm.running_mean, before) and norm.num_batches_tracked == 1


def test_stand_ins_and_eval_mode_do_not_count() -> None:
    norm = step_norm()
    (x,) = frames((2, 6))
    with unobserved(norm):
        norm(x)
    norm.eval()(x)
    update_running_statistics(norm.train(), None)
    assert torch.equal(norm.running_mean, torch.zeros(4)) and norm.num_batches_tracked == 0


def test_names_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)))
    names = list(model.state_dict())
    weight = model[1][0].weight
    use_step_batch_norm(model)
    assert list(model.state_dict()) == names
    assert isinstance(model[1][0], StepBatchNorm1d) and model[1][0].weight is weight


def buffers_after_a_step(batches: list[dict[str, Any]], group: Any, checkpointed: bool) -> dict[str, Tensor]:
    model = tiny_salm("parakeet")
    if checkpointed:
        for layer in model.perception.speech_encoder.layers():
            checkpoint_module(layer)
    for batch in batches:
        model(batch)["loss_sum"].backward()
    update_running_statistics(model, group)
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "norm" in name}


def test_recomputation_does_not_count() -> None:
    batches = ragged_micro_batches(2, seed=1)
    moved = buffers_after_a_step(batches, None, True)
    expected = buffers_after_a_step(batches, None, False)
    assert len(moved) == 6
    torch.testing.assert_close(moved, expected, rtol=0, atol=0)
    assert moved["perception.encoder.layers.0.conv.norm.running_mean"].abs().max() > 1e-4


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_stand_in_for_absent_audio_does_not_count(checkpointed: bool) -> None:
    batches = ragged_micro_batches(3, seed=1, without_audio=(1,))
    moved = buffers_after_a_step(batches, None, checkpointed)
    expected = buffers_after_a_step([batches[0], batches[2]], None, checkpointed)
    torch.testing.assert_close(moved, expected, rtol=0, atol=0)


def buffers_on_rank(rank: int, world_size: int) -> dict[str, Tensor]:
    batches = ragged_micro_batches(4, seed=1, without_audio=(2,))
    return buffers_after_a_step(batches[rank::world_size], dist.group.WORLD, False)


def test_ranks_end_with_the_statistics_of_one_process(ranks: RankRunner) -> None:
    expected = buffers_after_a_step(ragged_micro_batches(4, seed=1, without_audio=(2,)), None, False)
    for moved in ranks(buffers_on_rank, 2):
        torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-7)
