"""Plain data <-> JSON, for everything in a checkpoint that is not a large tensor.

Schedulers, random generators, loops and callbacks keep small Python values. They are written as JSON, which
can be read back without running any code, and never as pickle. JSON alone would lose tuples, integer keys,
counters and arrays; those become a one-key object whose key starts with `$`. Floats survive exactly (shortest
repr of a double, and NaN and infinities as Python's json writes them).
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_TAG = "$"


def encode(value: Any, where: str = "value") -> Any:
    """Turn plain Python data, numpy arrays and small plain tensors into JSON-able data.

    Args:
        value: any nesting of None, bool, int, float, str, bytes, list, tuple, dict, Counter, ndarray, Tensor.
        where: how an error names `value`.

    Raises:
        ValueError: a value of another kind; the message names the path to it.
    """
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, dict):
        return _encode_dict(value, where)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        return {"$tensor": _encode_tensor(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
        return {"$array": {"dtype": value.dtype.str, "shape": list(value.shape), "data": content}}
    raise ValueError(f"{where} is a {type(value).__qualname__}, which a checkpoint cannot hold as plain data")


def decode(value: Any) -> Any:
    """Undo `encode`. Tensors come back on the CPU.

    Raises:
        ValueError: an object with an unknown `$` key.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith(_TAG):
        return {key: decode(item) for key, item in value.items()}
    return _decode_tagged(tag, value[tag])


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    encoded = [(encode(key, where), encode(item, f"{where}.{key}")) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [list(pair) for pair in encoded]}
    if all(isinstance(key, str) and not key.startswith(_TAG) for key in value):
        return dict(encoded)
    return {"$items": [list(pair) for pair in encoded]}


def _decode_tagged(tag: str, content: Any) -> Any:
    if tag == "$tuple":
        return tuple(decode(item) for item in content)
    if tag == "$items":
        return {decode(key): decode(item) for key, item in content}
    if tag == "$counter":
        return Counter({decode(key): decode(item) for key, item in content})
    if tag == "$bytes":
        return base64.b64decode(content)
    if tag == "$tensor":
        return _decode_tensor(content)
    if tag == "$array":
        flat = np.frombuffer(base64.b64decode(content["data"]), dtype=np.dtype(content["dtype"]))
        return flat.reshape(content["shape"]).copy()
    raise ValueError(f"unknown kind {tag!r} in the plain data of a checkpoint")


def _encode_tensor(tensor: Tensor) -> dict[str, Any]:
    # Through raw bytes: numpy has no bfloat16.
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    content = base64.b64encode(flat.numpy().tobytes()).decode("ascii")
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": content}


def _decode_tensor(content: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, content["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown tensor dtype {content['dtype']!r} in the plain data of a checkpoint")
    data = bytearray(base64.b64decode(content["data"]))
    if not data:
        return torch.empty(content["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(content["shape"])
