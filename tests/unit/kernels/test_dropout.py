"""Counter-based dropout: its definition, its statistics, and that no part of a mask depends on how it is computed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.kernels.dropout import LEVELS, counter_dropout, keep_mask, reference_keep, token_keys

KEY = 0x1234_5678_9ABC_DEF0
Mask = Callable[[Tensor, int, float, int], Tensor]


def rows(num: int = 8, length: int = 256, first: int = 1000) -> Tensor:
    """Keys of tokens of neighbouring samples, [num, length]."""
    return token_keys(torch.arange(first, first + num)[:, None], torch.arange(length))


def test_every_element_is_that_of_the_reference() -> None:
    generator = random.Random(0)
    for _ in range(40):
        sample, start = generator.randrange(2**31), generator.randrange(1000)
        first, p = generator.randrange(5000), generator.choice([0.05, 0.1, 0.5, 0.9])
        key = generator.randrange(2**63)
        keys = token_keys(torch.tensor([[sample]]), torch.arange(start, start + 3))
        mask = keep_mask(keys, 7, p, key, first)
        expected = [
            [reference_keep(sample, start + t, first + f, p, key) for f in range(7)] for t in range(3)
        ]
        assert mask.tolist() == [expected]
        assert torch.equal(keep_mask(keys, 7, p, torch.tensor(key), first), mask)  # a key on a device


@pytest.mark.parametrize("start", [0, 1, 6, 7])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_slice_has_the_mask_of_the_whole(start: int, width: int) -> None:
    keys = rows(3, 11)
    whole = keep_mask(keys, 12, 0.3, KEY)
    assert torch.equal(keep_mask(keys, width, 0.3, KEY, start), whole[..., start : start + width])
    assert torch.equal(keep_mask(keys[1:, 4:9], 12, 0.3, KEY), whole[1:, 4:9])
    assert torch.equal(keep_mask(keys.flatten(), 12, 0.3, KEY), whole.flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_value_and_gradient_are_those_of_the_kept_elements(dtype: torch.dtype) -> None:
    keys, p = rows(2, 9), 0.4
    x = torch.randn(2, 9, 6, dtype=dtype, requires_grad=True)
    scale = 1.0 / (1.0 - round(p * LEVELS) / LEVELS)
    expected = torch.where(keep_mask(keys, 6, p, KEY), x.detach() * scale, 0.0)
    out = counter_dropout(x, p, KEY, keys)
    assert out.dtype == dtype and torch.equal(out, expected)
    gradient = torch.randn_like(x)
    out.backward(gradient)
    assert torch.equal(x.grad, torch.where(keep_mask(keys, 6, p, KEY), gradient * scale, 0.0))
    again = counter_dropout(x, p, KEY, keys)
    assert torch.equal(again, out)  # as a recomputation sees it


def test_the_ends_of_the_range_of_p() -> None:
    x, keys = torch.randn(2, 5, 4, requires_grad=True), rows(2, 5)
    assert counter_dropout(x, 0.0, KEY, keys) is x
    gone = counter_dropout(x, 1.0, KEY, keys)
    assert torch.equal(gone, torch.zeros_like(x))
    gone.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert keep_mask(keys, 4, 1.0 - 1.0 / LEVELS, KEY).sum() == 0
    assert counter_dropout(x.detach(), 1.0 - 1.0 / LEVELS, KEY, keys).isfinite().all()


def test_one_byte_per_element_is_kept_for_backward() -> None:
    x = torch.randn(4, 64, 128, requires_grad=True)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        counter_dropout(x, 0.1, KEY, rows(4, 64))
    assert sum(tensor.numel() * tensor.element_size() for tensor in kept) == x.numel()


def test_p_is_rounded_without_bias() -> None:
    x = torch.ones(64, 256, 256, dtype=torch.float64)
    for p in (1e-4, 0.1, 1 / 3):
        mean = float(counter_dropout(x, p, KEY, rows(64)).mean())
        assert abs(mean - 1.0) < 4.5 * math.sqrt(p / (1 - p) / x.numel())


# --------------------------------------------------------------------------------------------------- statistics


def weak_mask(tokens: Tensor, num_features: int, p: float, key: int) -> Tensor:
    """A mask without mixing between token and feature, as a cheaper hash would give it."""
    mixed = (tokens ^ key)[..., None] + torch.arange(num_features) * 0x9E3779B9
    return (mixed >> 16) % LEVELS >= round(p * LEVELS)


def keep_rates(mask: Mask, p: float) -> dict[str, float]:
    """Number of kept elements, overall and by feature, token and sample, in standard deviations of what is due.

    Of all: the deviation itself. Of the parts: the deviation of the mean square of theirs, which is 1 when the parts
    are as unequal as independent elements make them.
    """
    keep = mask(rows(16), 256, p, KEY).double()
    stay = 1 - round(p * LEVELS) / LEVELS
    found = {}
    for name, dims in {"all": (0, 1, 2), "feature": (0, 1), "token": (2,), "sample": (1, 2)}.items():
        counts = keep.sum(dims)
        due = keep.numel() / counts.numel()
        scores = (counts - due * stay) / math.sqrt(due * stay * (1 - stay))
        if name == "all":
            found[name] = abs(float(scores))
        else:
            found[name] = abs(float((scores**2).mean()) - 1) / math.sqrt(2 / counts.numel())
    return found


def correlations(mask: Mask) -> dict[str, float]:
    """Correlation of masks that should have nothing in common, in standard deviations."""
    p = 0.5
    base = mask(rows(), 256, p, KEY)
    pairs = {f"feature+{d}": (base[..., :-d], base[..., d:]) for d in (1, 2, 3, 16)}
    pairs |= {f"token+{d}": (base[:, :-d], base[:, d:]) for d in (1, 2, 7)}
    pairs |= {f"sample+{d}": (base[:-d], base[d:]) for d in (1, 2, 4)}
    pairs |= {f"key^{bit}": (base, mask(rows(), 256, p, KEY ^ 1 << bit)) for bit in (0, 1, 31, 32, 62)}
    pairs["transposed"] = (base[0], base[0].T)
    signs = {name: (a.double() * 2 - 1, b.double() * 2 - 1) for name, (a, b) in pairs.items()}
    return {name: abs(float((a * b).sum())) / math.sqrt(a.numel()) for name, (a, b) in signs.items()}


def squares(mask: Mask) -> float:
    """Chi-square of the 16 patterns of two features of two tokens, over its 15 degrees of freedom."""
    worst = 0.0
    for token_step, feature_step in ((1, 1), (1, 2), (3, 5), (128, 128)):
        keep = mask(rows(), 256, 0.5, KEY).long()
        corner = keep[:, :-token_step, :-feature_step]
        below, right = keep[:, token_step:, :-feature_step], keep[:, :-token_step, feature_step:]
        pattern = corner + 2 * below + 4 * right + 8 * keep[:, token_step:, feature_step:]
        # Overlapping squares are not independent: take those that do not share an element.
        disjoint = pattern[:, :: 2 * token_step, :: 2 * feature_step].flatten()
        counts = torch.bincount(disjoint, minlength=16).double()
        expected = len(disjoint) / 16
        worst = max(worst, float(((counts - expected) ** 2 / expected).sum()) / 15)
    return worst


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_keep_rate_is_right_overall_and_in_every_part(p: float) -> None:
    found = keep_rates(keep_mask, p)
    assert max(found.values()) < 3.5, found


def test_modules_steps_samples_tokens_and_features_are_independent() -> None:
    found = correlations(keep_mask)
    assert max(found.values()) < 3.5, found
    assert squares(keep_mask) < 2.5


def test_the_statistics_notice_a_mask_without_mixing() -> None:
    assert max(correlations(weak_mask).values()) > 20
    assert squares(weak_mask) > 20
    assert max(keep_rates(weak_mask, 0.1).values()) > 20


def test_long_runs_of_samples_and_positions_do_not_share_masks() -> None:
    keys = token_keys(torch.arange(512)[:, None], torch.arange(2048)).flatten()
    assert len(keys.unique()) == len(keys)
    words = keep_mask(keys, 64, 0.5, KEY).long() << torch.arange(64)
    assert len(words.sum(-1).unique()) == len(keys)
