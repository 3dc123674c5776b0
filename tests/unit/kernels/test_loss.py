"""The chunked loss equals the plain one in value and in every gradient, and holds no more than it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shoal.kernels.loss import reference_token_losses, token_losses
from tests.unit.kernels.largest import Largest
from tests.zygote import RankRunner

IGNORE = -100
TOKENS, HIDDEN, VOCAB = 37, 16, 50
TERMS: dict[str, dict[str, float]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.3},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "all": {"softcap": 2.0, "logit_scale": 0.5, "label_smoothing": 0.2, "z_loss": 0.1},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def problem(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Hidden states, weight and bias with gradient, and labels of which two thirds are given."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[::3] = IGNORE
    return {
        "hidden": leaf(TOKENS, HIDDEN),
        "weight": leaf(VOCAB, HIDDEN),
        "bias": leaf(VOCAB),
        "labels": labels,
    }


def outcome(
    loss: Callable[..., tuple[Tensor, Tensor]], given: dict[str, Tensor], **terms: Any
) -> dict[str, Tensor]:
    """Loss, hits and the gradients of a quarter of the loss, by name."""
    loss_sum, num_correct = loss(**given, **terms)
    leaves = {name: value for name, value in given.items() if value.requires_grad}
    gradients = torch.autograd.grad(0.25 * loss_sum, list(leaves.values()))
    return {"loss": loss_sum.detach(), "correct": num_correct, **dict(zip(leaves, gradients, strict=True))}


def assert_equal(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == reference.keys()
    for name, expected in reference.items():
        assert ours[name].dtype == expected.dtype, name
        error = (ours[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
@pytest.mark.parametrize("chunk_size", [1, 7, None], ids=["chunks of 1", "chunks of 7", "one chunk"])
def test_equals_the_reference(dtype: torch.dtype, terms: dict[str, float], chunk_size: int | None) -> None:
    given = problem(dtype)
    ours = outcome(token_losses, given, **terms, chunk_size=chunk_size)
    assert_equal(ours, outcome(reference_token_losses, given, **terms), TOLERANCE[dtype])
    assert ours["loss"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_hits_are_counted_over_labelled_tokens_only() -> None:
    given = problem()
    best = (given["hidden"] @ given["weight"].t() + given["bias"]).argmax(-1)
    given["labels"] = torch.where(torch.arange(TOKENS) % 2 == 0, best, IGNORE)
    assert token_losses(**given, chunk_size=5)[1] == math.ceil(TOKENS / 2)
    given["labels"][0] = (best[0] + 1) % VOCAB
    assert token_losses(**given, chunk_size=5)[1] == math.ceil(TOKENS / 2) - 1


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
def test_without_labels_loss_and_gradients_are_zero_and_not_absent(terms: dict[str, float]) -> None:
    given = problem(torch.float32)
    given["labels"] = torch.full((TOKENS,), IGNORE)
    for name, value in outcome(token_losses, given, **terms).items():
        assert torch.equal(value, torch.zeros_like(value)), name
    nothing = problem()
    nothing |= {"hidden": nothing["hidden"][:0], "labels": nothing["labels"][:0]}
    assert token_losses(**nothing)[0] == 0


def test_hidden_states_of_unlabelled_tokens_are_not_read() -> None:
    given = problem()
    expected = outcome(token_losses, given)
    with torch.no_grad():
        given["hidden"][given["labels"] == IGNORE] = math.nan
    assert_equal(outcome(token_losses, given), expected, 0.0)


@pytest.mark.parametrize("frozen", [("weight", "bias"), ("hidden",), ("hidden", "bias")])
def test_only_what_is_trained_gets_a_gradient(frozen: tuple[str, ...]) -> None:
    given = problem()
    expected = outcome(reference_token_losses, given)
    for name in frozen:
        given[name].requires_grad_(False)
        del expected[name]
    assert_equal(outcome(token_losses, given, chunk_size=7), expected, 1e-12)


def test_tied_embedding() -> None:
    """The weight is the input embedding as well: its gradient is the sum of both uses."""
    ids = torch.arange(TOKENS) % VOCAB

    def tied(loss: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        given = problem()
        hidden = nn.functional.embedding(ids, given["weight"]).tanh()
        loss(hidden, given["weight"], given["labels"])[0].backward()
        assert given["weight"].grad is not None
        return given["weight"].grad

    torch.testing.assert_close(tied(token_losses), tied(reference_token_losses), rtol=1e-12, atol=1e-12)


def test_without_gradient_mode_no_gradient_is_computed() -> None:
    given = problem()
    expected = outcome(reference_token_losses, given)
    with torch.no_grad(), Largest() as largest:
        loss_sum, num_correct = token_losses(**given, chunk_size=1)
    assert not loss_sum.requires_grad
    torch.testing.assert_close(loss_sum, expected["loss"])
    assert num_correct == expected["correct"]
    # Neither the weight's gradient [V, H] nor the hidden states' appears; a copy of the labelled rows does.
    assert largest.numbers == int((given["labels"] != IGNORE).sum()) * HIDDEN


@pytest.mark.parametrize("terms", [TERMS["plain"], TERMS["all"]], ids=["plain", "all"])
def test_never_holds_the_logits_of_all_tokens(terms: dict[str, float]) -> None:
    tokens, hidden, vocab, chunk = 64, 4, 1000, 8
    given = (torch.randn(tokens, hidden, requires_grad=True), torch.randn(vocab, hidden, requires_grad=True))
    labels = torch.randint(0, vocab, (tokens,))
    with Largest() as largest:
        token_losses(*given, labels, **terms, chunk_size=chunk)[0].backward()
    assert largest.numbers == chunk * vocab
    with Largest() as largest:
        reference_token_losses(*given, labels, **terms)[0].backward()
    assert largest.numbers == tokens * vocab


def test_autocast_multiplies_in_its_dtype_and_sums_in_fp32() -> None:
    given = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = outcome(token_losses, given)
        reference = outcome(reference_token_losses, given)
    assert ours["loss"].dtype == torch.float32
    assert_equal(ours, reference, TOLERANCE[torch.bfloat16])
    exact = outcome(reference_token_losses, given)
    assert (ours["hidden"] - exact["hidden"]).abs().max() > 1e-5, "autocast had no effect"


def test_sums_of_many_chunks_stay_exact_in_half_precision() -> None:
    """One chunk per token: a sum of the weight's gradient in bfloat16 would stop growing."""
    tokens = 4096
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss_sum, _ = token_losses(hidden, weight, torch.zeros(tokens, dtype=torch.int64), chunk_size=1)
    loss_sum.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert weight.grad.flatten().tolist() == [-tokens / 2, tokens / 2]


def test_backward_runs_once() -> None:
    loss_sum, _ = token_losses(**problem())
    loss_sum.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call backward once"):
        loss_sum.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(VOCAB, HIDDEN + 1)}, r"hidden \[37, 16\], weight \[50, 17\]"),
        ({"labels": torch.zeros(TOKENS + 1, dtype=torch.int64)}, r"labels \[38\]"),
        ({"bias": torch.zeros(VOCAB + 1)}, r"bias \[51\]"),
        ({"label_smoothing": 1.5}, r"label_smoothing: 1\.5 is outside"),
        ({"softcap": 0.0}, r"softcap: 0\.0 is not positive"),
        ({"chunk_size": 0}, r"chunk_size: 0 is below 1"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_losses(**{**problem(), **change})


class TiedHead(nn.Module):
    """A root of sharding whose forward embeds, and computes the loss with the same, gathered weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64)
        self.inner = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.inner(self.embed(ids)).tanh()
        return token_losses(hidden, self.embed.weight, labels, chunk_size=5)[0]


def _tied_batch(rank: int) -> tuple[Tensor, Tensor]:
    ids = (torch.arange(TOKENS) * (rank + 3)) % VOCAB
    # Rank 1 has no labelled token at all, and takes part nevertheless.
    labels = torch.where(torch.arange(TOKENS) % (rank + 2) == 0, ids.roll(-1), IGNORE)
    return ids, labels if rank != 1 else torch.full_like(labels, IGNORE)


def on_shards(rank: int, world: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    model = TiedHead()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    model.set_gradient_divide_factor(1.0)
    model.inner.set_gradient_divide_factor(1.0)
    model(*_tied_batch(rank)).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}


def refused_when_sharded(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,))
    given = problem()
    given["weight"] = distribute_tensor(given["weight"].detach(), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="weight is sharded") as error:
        token_losses(**given)
    return str(error.value)


def test_inside_the_forward_of_a_sharded_root(ranks: RankRunner) -> None:
    plain = TiedHead()
    for rank in range(2):
        plain(*_tied_batch(rank)).backward()
    for gradients in ranks(on_shards, 2):
        assert gradients.keys() == {name for name, _ in plain.named_parameters()}
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_sharded_weight_is_refused(ranks: RankRunner) -> None:
    assert all("inside the forward" in message for message in ranks(refused_when_sharded, 2))
