# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that the extension takes: an error names the argument, what was expected and what was given."""

from __future__ import annotations

import dataclasses
import json as _json
import numbers
import os
import sys
from typing import Any, Mapping, Optional, Sequence, Union

from eadem import _eadem
from eadem._eadem import DistConfig, InvalidArgument, PagedKVCacheConfig, StaticKVCacheConfig, Unsupported


def given(value: Any) -> str:
    """`value` as an error shows it: its type, and itself where it is short."""
    if value is None:
        return "None"
    text = repr(value)
    name = type(value).__name__
    return f"{text} ({name})" if len(text) <= 40 else f"a {name}"


def expect(name: str, value: Any, types: Union[type, tuple[type, ...]], expected: str) -> Any:
    """`value`, or InvalidArgument when it is none of `types`."""
    if not isinstance(value, types) or (isinstance(value, bool) and types in (int, float)):
        raise InvalidArgument(f"{name} is {given(value)}; expected {expected}")
    return value


def string(name: str, value: Any) -> str:
    return text(name, expect(name, value, str, "a str"))


def text(name: str, value: str) -> str:
    """`value`, which has UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name} has no UTF-8: {error}") from None
    return value


def integer(name: str, value: Any) -> int:
    """`value` as an int that fits 64 bits; NumPy's integers are taken, bool is not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidArgument(f"{name} is {given(value)}; expected an int")
    if not -2**63 <= int(value) < 2**63:
        raise InvalidArgument(f"{name} is {int(value)}; expected an int of 64 bits")
    return int(value)


def real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidArgument(f"{name} is {given(value)}; expected a number")
    return float(value)


def boolean(name: str, value: Any) -> bool:
    return expect(name, value, bool, "True or False")


def strings(name: str, value: Any) -> list[str]:
    """One str, or several."""
    if isinstance(value, str):
        return [text(name, value)]
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(each, str) for each in value):
        raise InvalidArgument(f"{name} is {given(value)}; expected a str or a sequence of str")
    return [text(name, each) for each in value]


def integers(name: str, value: Any) -> list[int]:
    try:
        items = list(value)
    except TypeError:
        raise InvalidArgument(f"{name} is {given(value)}; expected a sequence of int") from None
    return [integer(f"{name}[{index}]", item) for index, item in enumerate(items)]


def path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise InvalidArgument(f"{name} is {given(value)}; expected a path")
    return os.fspath(value)


_path = path  # for functions with an argument of that name


def step_tokens(value: Any) -> int:
    """max_num_batched_tokens; 0 stands for None: as many as the device computes well."""
    if value is None:
        return 0
    if integer("max_num_batched_tokens", value) < 1:
        raise InvalidArgument(f"max_num_batched_tokens is {value}; expected at least 1, or None")
    return int(value)


def dist(ranks: DistConfig) -> dict[str, Any]:
    return {"tp_device_ids": list(ranks.tp_device_ids), "deterministic_across_tp": ranks.deterministic_across_tp,
            "dp_size": ranks.dp_size, "pp_size": ranks.pp_size, "ep_size": ranks.ep_size}


def engine(*, device: Any, threads: Any, prefill_threads: Any, pin: Any, isa: Any, mode: Any, weights: Any,
           activations: Any, matmul_input: Any, kv_dtype: Any, max_num_batched_tokens: Any, disabled_fusions: Any,
           ranks: DistConfig, path: str = "", config: str = "", max_logit_rows: Any = 0, pack_cache: Any = None,
           device_name: str = "device") -> dict[str, Any]:
    """The arguments that every engine takes. They are JSON, because the processes of other ranks get them, too.

    `config` is the text of a config.json, which only those processes read; `device_name` what the caller calls `device`.
    """
    optional = {name: None if value is None else text(name, expect(name, value, str, "a str or None"))
                for name, value in (("weights", weights), ("activations", activations),
                                    ("matmul_input", matmul_input), ("kv_dtype", kv_dtype))}
    return {"path": os.path.abspath(path) if path else "", "config": config,
            **dist(ranks),
            "max_logit_rows": integer("max_logit_rows", max_logit_rows),
            "pack_cache": None if pack_cache is None else os.path.abspath(_path("pack_cache", pack_cache)),
            "device": string(device_name, device), "threads": integer("threads", threads),
            "prefill_threads": integer("prefill_threads", prefill_threads), "pin": boolean("pin", pin),
            "isa": string("isa", isa), "mode": string("mode", mode), **optional,
            "max_num_batched_tokens": step_tokens(max_num_batched_tokens),
            "disabled_fusions": strings("disabled_fusions", disabled_fusions)}


def cache(name: str, value: Any) -> Optional[Union[StaticKVCacheConfig, PagedKVCacheConfig]]:
    types = (StaticKVCacheConfig, PagedKVCacheConfig, type(None))
    return expect(name, value, types, "StaticKVCacheConfig, PagedKVCacheConfig or None")


def ranks(name: str, value: Any) -> DistConfig:
    return expect(name, DistConfig() if value is None else value, DistConfig, "DistConfig or None")


def tensor_parallel_size(value: Any, deterministic_across_tp: Any) -> DistConfig:
    size = integer("tensor_parallel_size", value)
    if not 1 <= size <= 1024:
        raise InvalidArgument(f"tensor_parallel_size is {size}; expected 1 to 1024")
    return DistConfig(size, boolean("deterministic_across_tp", deterministic_across_tp))


def rank_program(arguments: dict[str, Any], ranks: int, life: str = "follow_rank") -> list[str]:
    """The command that the processes of ranks 1, 2, … run; none for one rank. `life`: what the extension calls it."""
    if ranks == 1:
        return []
    if not sys.executable:
        raise Unsupported(f"{ranks} ranks are processes of this interpreter, and sys.executable does not name it")
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_rank.py")
    return [sys.executable, "-I", "-S", program, os.path.abspath(_eadem.__file__), life, _json.dumps(arguments)]


def prompts(value: Any) -> Union[list[str], list[list[int]]]:
    """One text, texts, or lists of token ids, as a list of one kind."""
    if isinstance(value, str):
        value = [value]
    expected = "a str, a sequence of str, or a sequence of lists of token ids"
    if isinstance(value, (Mapping, set, frozenset)):  # whose texts would be keys, or have no order
        raise InvalidArgument(f"prompts is {given(value)}; expected {expected}")
    try:
        items: Sequence[Any] = list(value)
    except TypeError:
        raise InvalidArgument(f"prompts is {given(value)}; expected {expected}") from None
    texts: list[str] = []
    ids: list[list[int]] = []
    for index, item in enumerate(items):
        if isinstance(item, str):
            texts.append(text(f"prompt {index}", item))
        elif isinstance(item, (bytes, bytearray, Mapping)) or not hasattr(item, "__iter__"):
            raise InvalidArgument(f"prompt {index} is {given(item)}; prompts are {expected}")
        else:
            tokens = integers(f"prompt {index}", item)
            for token in tokens:
                if not -2**31 <= token < 2**31:
                    raise InvalidArgument(f"prompt {index} holds the token id {token}; expected 32 bits")
            ids.append(tokens)
    if texts and ids:
        raise InvalidArgument("prompts mix texts and lists of token ids")
    return ids or texts


def json(name: str, value: Any) -> str:
    """`value` as JSON. Dataclasses and what has model_dump(), as answers of OpenAI's client, become objects."""
    def plain(item: Any) -> Any:
        if callable(getattr(item, "model_dump", None)):
            return item.model_dump()
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return dataclasses.asdict(item)
        if isinstance(item, Mapping):
            return dict(item)
        raise TypeError(f"{given(item)} is no dict, list, str, number, bool or None")

    try:
        text = _json.dumps(value, default=plain, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} has no UTF-8: it holds a lone surrogate") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name}: {error}") from None
    return text
