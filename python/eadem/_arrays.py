# SPDX-License-Identifier: Apache-2.0
"""Checked conversions to what the extension takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from eadem import _arguments
from eadem._eadem import InvalidArgument


def numeric(name: str, value: Any) -> np.ndarray:
    """`value` as an array, whose rows have one length."""
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of unequal lengths
        raise InvalidArgument(f"{name} is no array: {error}") from None
    if array.dtype.kind == "O":
        raise InvalidArgument(f"{name} is a {type(value).__name__}; expected an array of numbers")
    return array


def integers(name: str, value: Any, dtype: type = np.int32) -> np.ndarray:
    """`value` as a contiguous array of `dtype`; refuses other kinds of numbers and values out of its range."""
    array = numeric(name, value)
    if array.size == 0:
        return np.zeros(array.shape, dtype)
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} has dtype {array.dtype}; expected integers")
    limits = np.iinfo(dtype)
    if int(array.min()) < limits.min or int(array.max()) > limits.max:
        raise InvalidArgument(f"{name} holds values from {array.min()} to {array.max()}; expected {limits.min} to "
                              f"{limits.max}")
    return np.asarray(array, dtype, order="C")


def per_request(name: str, value: Any, batch: int, dtype: type) -> np.ndarray:
    """A scalar or [batch] as [batch]."""
    if np.dtype(dtype).kind == "i":
        array = integers(name, value, dtype)
    else:
        array = numeric(name, value)
        if array.dtype.kind not in "fiu":
            raise InvalidArgument(f"{name} has dtype {array.dtype}; expected numbers")
        array = array.astype(dtype)
    if array.ndim > 1 or (array.ndim == 1 and array.shape[0] != batch):
        raise InvalidArgument(f"{name} has shape {list(array.shape)}; expected a scalar or [{batch}]")
    return np.ascontiguousarray(np.broadcast_to(array, (batch,)))


def parameter(value: Any) -> Any:
    """What load_param passes on: NumPy has no DLPack for the bfloat16 of ml_dtypes, so that its bits are passed."""
    if isinstance(value, np.ndarray) and value.dtype.name == "bfloat16":
        return value.view(np.uint16)
    if isinstance(value, np.generic) or not any(hasattr(value, name) for name in ("__dlpack__", "__array_interface__")):
        raise InvalidArgument(f"param is {_arguments.given(value)}; expected an array (NumPy, or with DLPack)")
    return value


def rows(name: str, value: Any, lengths: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids as a packed [tokens] and the lengths [batch] of its rows.

    `value` is [batch, seq], of which each row counts up to its length, or packed [tokens].
    """
    ids = integers(name, value)
    if ids.ndim == 1:
        return ids, integers("lengths", [ids.shape[0]] if lengths is None else lengths).reshape(-1)
    if ids.ndim != 2:
        raise InvalidArgument(f"{name} has shape {list(ids.shape)}; expected [batch, seq] or packed [tokens]")
    batch, width = ids.shape
    if lengths is None:
        return ids.reshape(-1), np.full(batch, width, np.int32)
    counts = integers("lengths", lengths)
    if counts.shape != (batch,) or (counts < 1).any() or (counts > width).any():
        raise InvalidArgument(f"lengths {counts.tolist()} do not fit {name} of shape {list(ids.shape)}")
    return np.ascontiguousarray(ids[np.arange(width) < counts[:, None]]), counts
