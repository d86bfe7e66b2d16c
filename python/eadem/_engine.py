# SPDX-License-Identifier: Apache-2.0
"""InferEngine: a model on a device, with its KV cache, one step at a time."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Callable, Mapping, Optional, Sequence, Union

import numpy as np

from eadem import _arguments, _arrays, _eadem
from eadem._eadem import DistConfig, InvalidArgument, ModelConfig, PagedKVCacheConfig, StaticKVCacheConfig
from eadem._models import located
from eadem._state import load_all

CacheConfig = Union[StaticKVCacheConfig, PagedKVCacheConfig]


class AutoConfig:
    """Typed configurations from files."""

    @staticmethod
    def from_pretrained(path: Union[str, os.PathLike[str]]) -> ModelConfig:
        """The configuration in a config.json, the directory around it, a .gguf, or a model by its name (as in LLM).

        Raises NotFound, DataCorrupted, or Unsupported naming the keys that are not honoured.
        """
        return _eadem.config_from_pretrained(located("path", path))


class HookHandle:
    """A registered hook."""

    def __init__(self, registry: HookRegistry, hook: _Hook) -> None:
        self._registry: Optional[HookRegistry] = registry
        self._hook = hook

    def remove(self) -> None:
        """Ends the hook. Again, or after clear(): nothing happens."""
        if self._registry is not None:
            self._registry._remove(self._hook)
            self._registry = None


@dataclasses.dataclass(eq=False)
class _Hook:
    name: str
    callback: Callable[[str, np.ndarray, int], object]
    rank: Optional[int]
    unfuse: bool
    id: int = 0  # of the engine's hook; 0: there is none


class HookRegistry:
    """Callbacks on the values that a step makes; `InferEngine.hooks`.

    They fire in program order, on the thread that called forward. Without hooks a step does nothing for them. An
    exception of a callback ends the step and is raised by forward. A callback must not call its own engine.

    A registry of one's own, HookRegistry(), serves the engine that it is given to, `engine.hooks = registry`; its names
    are looked up then.
    """

    def __init__(self) -> None:
        self._hooks: list[_Hook] = []
        self._engine: Optional[_eadem.Engine] = None

    def register_hook(self, name: str, callback: Callable[[str, np.ndarray, int], object], *,
                      rank: Optional[int] = None, unfuse: bool = False) -> HookHandle:
        """`name`: a value's name, or a pattern in which "*" stands for any characters, "?" for one, [ab] for one of those.

        "model.layers.*.mlp.gated_activation.y" is the input of every down projection. Called as callback(name, tensor,
        layer_idx); the tensor is a copy, layer_idx is -1 outside the layers. Raises NotFound, with the nearest names,
        when no value matches (names() lists all), or when a fusion keeps it inside a kernel.

        rank    with several: the one whose values are seen. None: those of each, one after another in the order of
                ranks; a part of the value, or all of it, as each has it
        unfuse  switch off the fusions that keep such values inside their kernels. The steps have the same bits and are
                slower; the cache is emptied
        """
        if not callable(callback):
            raise InvalidArgument(f"callback is {_arguments.given(callback)}; expected a function")
        hook = _Hook(_arguments.string("name", name), callback,
                     None if rank is None else _arguments.integer("rank", rank), _arguments.boolean("unfuse", unfuse))
        if self._engine is not None:
            self._register(self._engine, hook)
        self._hooks.append(hook)
        return HookHandle(self, hook)

    def names(self) -> list[str]:
        """Names of all values that steps of the engine make; none without an engine."""
        return [] if self._engine is None else self._engine.value_names()

    def clear(self) -> None:
        """Forgets all callbacks."""
        for hook in self._hooks[:]:
            self._remove(hook)

    def has_hooks(self) -> bool:
        return bool(self._hooks)

    @staticmethod
    def _register(engine: _eadem.Engine, hook: _Hook) -> None:
        rank = -1 if hook.rank is None else hook.rank
        if hook.rank is not None and not 0 <= rank < 2**31:
            raise InvalidArgument(f"rank is {rank}; expected at least 0, or None")
        hook.id = engine.register_hook(hook.name, hook.callback, rank, hook.unfuse)

    def _remove(self, hook: _Hook) -> None:
        if hook in self._hooks:
            if self._engine is not None:
                self._engine.remove_hook(hook.id)
            self._hooks.remove(hook)

    def _attach(self, engine: _eadem.Engine) -> None:
        """Registers all hooks with the engine, or none where one is refused."""
        if self._engine is not None:
            raise InvalidArgument("the HookRegistry serves another engine")
        try:
            for hook in self._hooks:
                self._register(engine, hook)
        except Exception:
            for hook in self._hooks:
                if hook.id != 0:
                    engine.remove_hook(hook.id)
                    hook.id = 0
            raise
        self._engine = engine

    def _detach(self) -> None:
        for hook in self._hooks:
            if self._engine is not None:
                self._engine.remove_hook(hook.id)
            hook.id = 0
        self._engine = None


_SAMPLING = np.dtype({"names": [name for name, _, _ in _eadem.sampling_fields()],
                      "formats": [kind for _, kind, _ in _eadem.sampling_fields()],
                      "offsets": [offset for _, _, offset in _eadem.sampling_fields()],
                      "itemsize": _eadem.SAMPLING_BYTES})


def _sampling_bytes(input: InferEngine.Input, batch: int) -> np.ndarray:
    """What the extension reads of the sampling parameters: a struct per sequence."""
    rows = np.zeros(batch, _SAMPLING)
    for name in _SAMPLING.names or ():
        rows[name] = _arrays.per_request(name, getattr(input, name), batch, _SAMPLING[name].type)
    return rows.view(np.uint8)


class InferEngine:
    """A model on a device, with its KV cache. Threads may share one; their calls run one at a time.

    config           a configuration, such as LlamaConfig. The parameters are unset: load_param each of parameter_names(), or
                     load_random, or use from_pretrained
    distributed_config
                     DistConfig: the ranks of tensor or expert parallelism. Each but this process is one of its own, which ends
                     with this one; None: one rank. With several, `threads` are those of all. With
                     deterministic_across_tp every number of ranks up to 4 gives the same bits
    device_type      "cpu", "cuda", "cuda:1"; see list_devices()
    cache_config     StaticKVCacheConfig or PagedKVCacheConfig; None: one sequence of the model's context
    max_num_batched_tokens
                     most new tokens of one step; None: 512 on a CPU, 2048 on other devices
    max_logit_rows   most rows of logits of one step; 0: one per sequence

    threads, prefill_threads, pin, isa, mode, weights, activations, matmul_input, kv_dtype, disabled_fusions:
        as in LLM.
    """

    _source: Optional[str] = None  # where from_pretrained found the model

    @dataclasses.dataclass
    class Input:
        """One step: some new tokens of each of some sequences.

        input_ids      [batch, seq], of which each row counts up to its input length, or all sequences packed [tokens]
        position_ids   like input_ids: what the model takes for each token's position, as its rotary embedding does;
                       None: its place in the sequence, from cache_lengths. Which tokens it attends to follows from its
                       place alone
        cache_lengths  [batch] tokens of each sequence already in the cache, as steps since the last reset_cache wrote
                       them; None: zeros
        input_lengths  [batch] new tokens of each sequence; None: seq, or one sequence of all tokens
        block_tables   [batch, max_blocks] where each sequence's tokens are, -1 behind its last block. Needed with a paged
                       cache; with a static one, its rows [batch, 1], None: 0, 1, … A block is used once in a step, but
                       that sequences may share those that all of them have cached
        rows           [batch] with a paged cache and a model with attention windows: which of the max_batch_size rings
                       of blocks keeps each sequence's windows from its first step to its last; None: 0, 1, …
        slot_mapping   [tokens] block * block_size + offset: where each new token is stored. Its blocks follow those
                       that block_tables name, which may end with those of cached tokens, or be None where there are
                       none; in a static cache, row * max_cache_len + place. None: from block_tables
        temperature, top_k, top_p, min_p, typical_p, repetition_penalty, presence_penalty, frequency_penalty, seed
                       one for all, or [batch]; as in SamplingParams, but that the token is the likeliest one unless
                       temperature says otherwise. The same seed at the same position draws the same token. Penalties
                       look at the tokens in the cache and of this step
        prompt_length  one for all, or [batch]: tokens at the sequence's start that presence_penalty and
                       frequency_penalty do not count
        top_logprobs   one for all, or [batch]: [0, 20] likeliest tokens to list for the token that is drawn
        all_logits     logits of every token instead of each sequence's last; the engine needs max_logit_rows of as many
                       tokens for it
        """

        input_ids: Any
        position_ids: Any = None
        cache_lengths: Any = None
        input_lengths: Any = None
        block_tables: Any = None
        rows: Any = None
        slot_mapping: Any = None
        temperature: Any = 0.0
        top_k: Any = 0
        top_p: Any = 1.0
        min_p: Any = 0.0
        typical_p: Any = 1.0
        repetition_penalty: Any = 1.0
        presence_penalty: Any = 0.0
        frequency_penalty: Any = 0.0
        prompt_length: Any = 0
        top_logprobs: Any = 0
        seed: Any = 0
        all_logits: bool = False

    @dataclasses.dataclass
    class Output:
        """Result of a step; the arrays are the caller's own.

        output_ids     [batch, 1] int32 drawn; -1 where the logits are not finite
        logprobs       [batch, 1] float32, natural logarithm of the probability of output_ids
        logits         float32 [batch, vocab], with all_logits packed [tokens, vocab]; None unless asked for
        hidden_states  packed [tokens, hidden] before the head; None unless asked for
        top_ids        [batch, 20] int32: each sequence's top_logprobs likeliest tokens, in falling order, then -1; None
                       unless some sequence asks
        top_logprobs   [batch, 20] float32, natural logarithm of their probabilities, then NaN; likewise
        """

        output_ids: np.ndarray
        logprobs: np.ndarray
        logits: Optional[np.ndarray] = None
        hidden_states: Optional[np.ndarray] = None
        top_ids: Optional[np.ndarray] = None
        top_logprobs: Optional[np.ndarray] = None

    def __init__(self, config: ModelConfig, distributed_config: Optional[DistConfig] = None, device_type: str = "cpu",
                 cache_config: Optional[CacheConfig] = None, *, threads: int = 0, prefill_threads: int = 0,
                 pin: bool = True, isa: str = "", mode: str = "performance", weights: Optional[str] = None,
                 activations: Optional[str] = None, matmul_input: Optional[str] = None,
                 kv_dtype: Optional[str] = None, max_num_batched_tokens: Optional[int] = None, max_logit_rows: int = 0,
                 disabled_fusions: Union[str, Sequence[str]] = ()) -> None:
        _arguments.expect("config", config, ModelConfig, "LlamaConfig or another configuration")
        ranks = _arguments.ranks("distributed_config", distributed_config)
        self._make(config, ranks, cache_config, _arguments.engine(
            config=_eadem.config_text(config) if ranks.num_ranks > 1 else "", ranks=ranks, device=device_type,
            device_name="device_type", threads=threads, prefill_threads=prefill_threads, pin=pin, isa=isa, mode=mode,
            weights=weights, activations=activations, matmul_input=matmul_input, kv_dtype=kv_dtype,
            max_num_batched_tokens=max_num_batched_tokens, max_logit_rows=max_logit_rows,
            disabled_fusions=disabled_fusions))

    @classmethod
    def from_pretrained(cls, path: Union[str, os.PathLike[str]], distributed_config: Optional[DistConfig] = None,
                        device_type: str = "cpu", cache_config: Optional[CacheConfig] = None, *, threads: int = 0,
                        prefill_threads: int = 0, pin: bool = True, isa: str = "", mode: str = "performance",
                        weights: Optional[str] = None, activations: Optional[str] = None,
                        matmul_input: Optional[str] = None, kv_dtype: Optional[str] = None,
                        max_num_batched_tokens: Optional[int] = None, max_logit_rows: int = 0,
                        disabled_fusions: Union[str, Sequence[str]] = (),
                        pack_cache: Optional[Union[str, os.PathLike[str]]] = None) -> InferEngine:
        """The model at `path` (a path or a name, as in LLM) with its weights; `pack_cache` as in LLM."""
        self = cls.__new__(cls)
        path = located("path", path)
        ranks = _arguments.ranks("distributed_config", distributed_config)
        self._make(None, ranks, cache_config, _arguments.engine(
            path=path, ranks=ranks, device=device_type,
            device_name="device_type", threads=threads, prefill_threads=prefill_threads, pin=pin, isa=isa, mode=mode,
            weights=weights, activations=activations, matmul_input=matmul_input, kv_dtype=kv_dtype,
            max_num_batched_tokens=max_num_batched_tokens, max_logit_rows=max_logit_rows,
            disabled_fusions=disabled_fusions, pack_cache=pack_cache))
        self._source = os.path.abspath(path)
        return self

    def _make(self, config: Optional[ModelConfig], ranks: DistConfig, cache_config: Any, arguments: dict[str, Any]) -> None:
        self._engine = _eadem.Engine(config, cache_config=_arguments.cache("cache_config", cache_config),
                                     rank_program=_arguments.rank_program(arguments, ranks.num_ranks), **arguments)
        self._hooks = HookRegistry()
        self._hooks._attach(self._engine)

    @property
    def hooks(self) -> HookRegistry:
        """Callbacks on the values that steps make. One that was made elsewhere can be put in its place."""
        return self._hooks

    @hooks.setter
    def hooks(self, registry: HookRegistry) -> None:
        _arguments.expect("hooks", registry, HookRegistry, "a HookRegistry")
        if registry is self._hooks:
            return
        registry._attach(self._engine)
        self._hooks._detach()
        self._hooks = registry

    def load_param(self, name: str, param: Any) -> None:
        """Sets a parameter from a floating array, read in place (NumPy or DLPack on the host; uint16 is bf16's bits).

        Raises NotFound, or InvalidArgument naming both shapes, or the place of a value that is not finite.
        """
        self._engine.load_param(_arguments.string("name", name), _arrays.parameter(param))

    def load_random(self, seed: int, stddev: float = 0.02) -> None:
        """Sets every parameter to values that depend on `seed` and its name alone."""
        self._engine.load_random(_arguments.integer("seed", seed), _arguments.real("stddev", stddev))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets every parameter, as load_param does, from arrays by name.

        Raises NotFound, and changes nothing, unless the names are those of parameter_names(). A shape or value that is
        refused ends it in between.
        """
        load_all(self, state)

    def state_dict(self) -> Union[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
        """Copies of the parameters by name; with several ranks a list of the part of each rank, in the order of ranks.

        Names and order of rows are those of Hugging Face layout, whatever file the model came from.
        """
        dicts: list[dict[str, np.ndarray]] = self._engine.state_dicts()
        return dicts if len(dicts) > 1 else dicts[0]

    def save_pretrained(self, path: Union[str, os.PathLike[str]],
                        tokenizer: Optional[Union[str, os.PathLike[str]]] = None) -> None:
        """Writes the model into the directory `path` in Hugging Face layout; makes it if it is missing.

        Weights are written as plain numbers; quantized ones are decoded, and those of a GGUF file get the names and the
        order of rows of that layout. `tokenizer`: a directory or .gguf whose tokenizer goes along; None: that of the
        model's own files, if there is one, with its generation_config.json. Each file is replaced at once.
        """
        self._engine.save_pretrained(os.fspath(path), self._source, None if tokenizer is None else os.fspath(tokenizer))

    def parameter_names(self) -> list[str]:
        return self._engine.parameter_names()

    def forward(self, input: Input, *, return_logits: bool = False, return_hidden_states: bool = False) -> Output:
        """Runs one step and draws a token per sequence. Releases the GIL.

        Raises InvalidArgument, naming the sequence and both values, for an input that contradicts itself, the model or
        the cache; nothing has changed then.
        """
        _arguments.expect("input", input, InferEngine.Input, "InferEngine.Input")
        ids, lengths = _arrays.rows("input_ids", input.input_ids, input.input_lengths)
        batch = len(lengths)
        positions = np.zeros(0, np.int32)
        if input.position_ids is not None:
            if np.shape(input.position_ids) != np.shape(input.input_ids):
                raise InvalidArgument(f"position_ids has shape {list(np.shape(input.position_ids))}; input_ids has "
                                      f"{list(np.shape(input.input_ids))}")
            positions, _ = _arrays.rows("position_ids", input.position_ids, input.input_lengths)
        cached = np.zeros(batch, np.int32) if input.cache_lengths is None else _arrays.integers(
            "cache_lengths", input.cache_lengths).reshape(-1)
        tables: list[list[int]] = []
        given = np.asarray(input.block_tables) if hasattr(input.block_tables, "__array__") else input.block_tables
        if given is not None and not hasattr(given, "__iter__"):
            raise InvalidArgument(f"block_tables is {_arguments.given(given)}; expected [batch, max_blocks]")
        for row in given if given is not None else ():
            blocks = _arrays.integers("block_tables", row).reshape(-1).tolist()
            while blocks and blocks[-1] == -1:
                blocks.pop()
            tables.append(blocks)
        rings = np.zeros(0, np.int32) if input.rows is None else _arrays.integers(
            "rows", input.rows).reshape(-1)
        slots = np.zeros(0, np.int64) if input.slot_mapping is None else _arrays.integers(
            "slot_mapping", input.slot_mapping, np.int64).reshape(-1)
        drawn, logprobs, top_ids, top_logprobs, logits, hidden = self._engine.forward(
            ids, lengths, cached, positions, tables, rings, slots,
            _sampling_bytes(input, batch),
            _arguments.boolean("all_logits", input.all_logits), _arguments.boolean("return_logits", return_logits),
            _arguments.boolean("return_hidden_states", return_hidden_states))
        if input.all_logits:
            last = np.cumsum(lengths) - 1
            drawn, logprobs = drawn[last], logprobs[last]
            if top_ids is not None:
                top_ids, top_logprobs = top_ids[last], top_logprobs[last]
        return InferEngine.Output(drawn[:, None], logprobs[:, None], logits, hidden, top_ids, top_logprobs)

    def reset_cache(self, cache_config: Optional[CacheConfig] = None) -> None:
        """Empties the cache, or makes another one. Parameters stay."""
        self._engine.reset_cache(_arguments.cache("cache_config", cache_config))

    @property
    def max_batch_size(self) -> int:
        """Most sequences of one step."""
        return self._engine.geometry[0]

    @property
    def max_sequence_length(self) -> int:
        """Most tokens of one sequence."""
        return self._engine.geometry[1]

    @property
    def block_size(self) -> int:
        """Tokens of one block of the cache; a static cache has one block per sequence."""
        return self._engine.geometry[2]

    @property
    def num_blocks(self) -> int:
        return self._engine.geometry[3]

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values."""
        return self._engine.geometry[4]
