# SPDX-License-Identifier: Apache-2.0
"""The names of InfiniCore and InfiniLM, for programs that were written for these: only their imports change.

    import eadem.infini as infinicore
    from eadem.infini import AutoConfig, _infinilm
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from eadem import AutoConfig, _arguments, _arrays
from eadem._eadem import InvalidArgument
from eadem.infini import _infinilm

int32, int64 = np.int32, np.int64
float16, float32, float64 = np.float16, np.float32, np.float64

_DEVICES = {"cpu": "cpu", "cuda": "cuda", "nvidia": "cuda"}


class _DeviceType:
    """What device._underlying is."""

    def __init__(self, type: str) -> None:
        self.type = type


class device:
    """A device by its name ("cpu", "cuda" or "nvidia") and number; `device._underlying.type` is what InferEngine takes."""

    def __init__(self, name: str, index: int = 0) -> None:
        if name not in _DEVICES:
            raise InvalidArgument(f"device is {_arguments.given(name)}; expected one of {', '.join(_DEVICES)}")
        index = _arguments.integer("index", index)
        if index < 0 or (name == "cpu" and index != 0):
            raise InvalidArgument(f"device {name} has the index {index}; expected " + ("0" if name == "cpu" else "0, 1, …"))
        self._underlying = _DeviceType(_DEVICES[name] + (f":{index}" if index else ""))


class Tensor:
    """An array in host memory; `tensor._underlying` is what InferEngine takes."""

    def __init__(self, array: np.ndarray) -> None:
        self._underlying = array

    @property
    def shape(self) -> list[int]:
        return list(self._underlying.shape)

    @property
    def dtype(self) -> Any:
        return self._underlying.dtype

    def numpy(self) -> np.ndarray:
        return self._underlying

    def __array__(self, dtype: Optional[Any] = None, copy: Optional[bool] = None) -> np.ndarray:
        if copy:
            return np.array(self._underlying, dtype)
        return np.asarray(self._underlying, dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._underlying.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._underlying.__dlpack_device__()


def from_list(data: Any, dtype: Optional[Any] = None) -> Tensor:
    """A tensor of the numbers in nested lists."""
    array = _arrays.numeric("data", data)
    if array.dtype.kind not in "biuf":
        raise InvalidArgument(f"data has dtype {array.dtype}; expected numbers")
    return Tensor(array if dtype is None else array.astype(dtype))


def from_numpy(array: np.ndarray) -> Tensor:
    """A tensor over the array's own memory."""
    return Tensor(_arguments.expect("array", array, np.ndarray, "a NumPy array"))


__all__ = ["AutoConfig", "Tensor", "_infinilm", "device", "float16", "float32", "float64", "from_list", "from_numpy",
           "int32", "int64"]
