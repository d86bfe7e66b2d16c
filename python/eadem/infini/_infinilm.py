# SPDX-License-Identifier: Apache-2.0
"""InfiniLM's `_infinilm`: Eadem's classes, and what such programs expect of them where Eadem's own differ."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any, Optional, Union

import numpy as np

import eadem
from eadem import DistConfig, HookHandle, HookRegistry, ModelConfig, _arguments, _arrays
from eadem._eadem import *  # the configuration of each family: LlamaConfig, Gemma3Config, …
from eadem._eadem import InvalidArgument

_LONGEST = 2**63 - 1


class CacheConfig:
    """A StaticKVCacheConfig or a PagedKVCacheConfig."""

    _eadem: Union[eadem.StaticKVCacheConfig, eadem.PagedKVCacheConfig]


class StaticKVCacheConfig(CacheConfig):
    """Contiguous memory for `max_batch_size` sequences of up to `max_cache_len` tokens; the model's context where that is
    not stated."""

    def __init__(self, max_batch_size: int = 1, max_cache_len: int = _LONGEST) -> None:
        self._max_batch_size = _at_least_one("max_batch_size", max_batch_size)
        self._max_cache_len = _at_least_one("max_cache_len", max_cache_len)
        self._eadem = eadem.StaticKVCacheConfig(self._max_batch_size,
                                                0 if self._max_cache_len == _LONGEST else self._max_cache_len)

    def max_batch_size(self) -> int:
        return self._max_batch_size

    def max_cache_len(self) -> int:
        return self._max_cache_len


class PagedKVCacheConfig(CacheConfig):
    """Blocks of `block_size` tokens out of `max_kv_memory_bytes`, for steps of up to eight sequences."""

    def __init__(self, max_kv_memory_bytes: int, block_size: int = 16) -> None:
        self._max_kv_memory_bytes = _at_least_one("max_kv_memory_bytes", max_kv_memory_bytes)
        self._block_size = _at_least_one("block_size", block_size)
        self._eadem = eadem.PagedKVCacheConfig(self._max_kv_memory_bytes, self._block_size)

    def max_kv_memory_bytes(self) -> int:
        return self._max_kv_memory_bytes

    def block_size(self) -> int:
        return self._block_size


class InferEngine(eadem.InferEngine):
    __doc__ = eadem.InferEngine.__doc__

    @dataclasses.dataclass
    class Input(eadem.InferEngine.Input):
        """One step, as eadem.InferEngine.Input. Of temperature, top_k and top_p, None stands for the default; without a
        seed each step draws with a fresh one."""

        input_ids: Any = None
        temperature: Any = 1.0
        top_k: Any = 50
        top_p: Any = 1.0
        seed: Any = None

    def _make(self, config: Any, ranks: Any, cache_config: Any, arguments: dict[str, Any]) -> None:
        super()._make(config, ranks, _native(cache_config), arguments)

    def forward(self, input: eadem.InferEngine.Input, *, return_logits: bool = False,
                return_hidden_states: bool = False) -> eadem.InferEngine.Output:
        _arguments.expect("input", input, eadem.InferEngine.Input, "InferEngine.Input")
        if input.input_ids is None:
            raise InvalidArgument("input_ids is None; expected token ids [batch, seq]")
        defaults = {field.name: field.default for field in dataclasses.fields(InferEngine.Input)}
        chosen: dict[str, Any] = {name: defaults[name] for name in ("temperature", "top_k", "top_p")
                                  if getattr(input, name) is None}
        if input.seed is None:
            _, lengths = _arrays.rows("input_ids", input.input_ids, input.input_lengths)
            chosen["seed"] = np.array([secrets.randbits(63) for _ in lengths], np.int64)
        return super().forward(dataclasses.replace(input, **chosen), return_logits=return_logits,
                               return_hidden_states=return_hidden_states)

    def state_dict(self) -> list[dict[str, np.ndarray]]:  # type: ignore[override]
        """Copies of the parameters by name: a dict for each rank, in the order of ranks."""
        state = super().state_dict()
        return state if isinstance(state, list) else [state]

    def reset_cache(self, cache_config: Optional[Any] = None) -> None:
        super().reset_cache(_native(cache_config))


def _at_least_one(name: str, value: Any) -> int:
    number = _arguments.integer(name, value)
    if number < 1:
        raise InvalidArgument(f"{name} is {number}; expected at least 1")
    return number


def _native(cache_config: Any) -> Any:
    return cache_config._eadem if isinstance(cache_config, CacheConfig) else cache_config
