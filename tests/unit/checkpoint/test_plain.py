"""Plain data survives JSON exactly and unknown things are refused with their path."""

import json
import math
from collections import Counter
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.plain import decode, encode


def _through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


@given(TREES)
def test_any_nesting_comes_back_equal_and_of_the_same_types(value):
    back = _through_json(value)
    assert back == value and repr(back) == repr(value)


def test_floats_are_exact_and_non_finite_ones_survive():
    assert [_through_json(x) for x in (0.1, 5e-324, math.inf, -math.inf)] == [
        0.1,
        5e-324,
        math.inf,
        -math.inf,
    ]
    assert math.isnan(_through_json(math.nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_tensors_keep_bits_dtype_and_shape(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = _through_json({"t": tensor})["t"]
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)


def test_numpy_and_counters():
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    back = _through_json({"a": array, "n": np.float64(0.1), "c": Counter({3: 2})})
    assert np.array_equal(back["a"], array) and back["a"].dtype == array.dtype
    assert back["n"] == 0.1 and back["c"] == Counter({3: 2}) and isinstance(back["c"], Counter)


def test_what_cannot_be_held_is_named():
    with pytest.raises(ValueError, match=r"extra\.loops\[1\]\.limit is a timedelta"):
        encode({"loops": [1, {"limit": timedelta(1)}]}, "extra")
    with pytest.raises(ValueError, match=r"unknown kind '\$code'"):
        decode({"$code": "x"})
