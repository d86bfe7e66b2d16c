# SPDX-License-Identifier: Apache-2.0
"""LLM: text in, text out."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any, Callable, Mapping, Optional, Sequence, Union

import numpy as np

from eadem import _arguments, _eadem
from eadem._eadem import Completion, InvalidArgument, PagedKVCacheConfig, StaticKVCacheConfig
from eadem._models import BUNDLED, bundled_model, located
from eadem._tokenizer import Messages, Tokenizer, conversations, options


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request's text is drawn. Raises InvalidArgument naming the field, its value and its range.

    temperature         [0, 1e6]; 0 is greedy
    top_k               [0, 2**31); 0 is off
    top_p               (0, 1]; 1 is off
    min_p               [0, 1]; 0 is off
    typical_p           (0, 1]; 1 is off. Keeps the tokens whose surprise is nearest to the expected one, of this total
                        probability (as in transformers), after the other filters
    repetition_penalty  [0.01, 100]; 1 is off. Divides the positive logits of all tokens that the prompt or the text
                        has, and multiplies negative ones (as in transformers)
    presence_penalty    [-2, 2]; 0 is off. Is subtracted from the logits of the tokens that the text has, without the
                        prompt (as in the OpenAI API and vLLM)
    frequency_penalty   [-2, 2]; 0 is off. Likewise, times how often the text has the token
    max_tokens          at least 1
    seed                None: a fresh one per request, reported in Completion.seed
    stop                strings that end the text, across token borders; not part of it
    stop_token_ids      tokens that end the text
    ignore_eos          go on after the end of sequence
    logit_bias          {token id: [-100, 100]}, at most 300 tokens; None is off. Is added to the logits before anything
                        else (as in the OpenAI API): at -100 a token is hardly ever drawn, at 100 hardly any other one
    min_tokens          [0, max_tokens]; until the text has so many tokens, neither the end of sequence nor one of
                        stop_token_ids is drawn, and stop strings do not end it (as in vLLM)
    bad_words           texts that no answer has: the token that would complete one is not drawn. Each is spelled as the
                        tokenizer spells it at the beginning of a text and behind a space (as in vLLM), and may begin in
                        the prompt
    bad_words_ids       the same as lists of token ids (as in transformers)
    allowed_token_ids   None, or the only tokens that are drawn, at least one
    logprobs            [0, 20]; how many of the likeliest tokens Completion.top_logprobs lists at each place of the text
    prompt_logprobs     None, or [0, 20]: Completion.prompt_logprobs and that many in prompt_top_logprobs. Log-probabilities
                        are those of the model: no bias, penalty, mask, temperature or filter changes them
    logits_processors   functions (token_ids, logits) -> None or array, called in order before each token is drawn.
                        `token_ids` is an int32 array of prompt and text, `logits` a float32 array [vocab] to change in
                        place; an array that is returned takes its place. What follows, log-probabilities too, starts
                        from the outcome
    token_mask          None, or a function (token_ids) -> None or an int32 array [ceil(vocab / 32)], called before each
                        token: bit t % 32 of word t // 32 says whether token t may be drawn, as grammars state it
    num_beams           [1, 16]; more than 1: beam search as transformers' generate does it. Needs temperature=0, gives the
                        n best of so many beams, best first (Completion.score), and goes with max_tokens, min_tokens,
                        stop_token_ids, ignore_eos and logprobs alone. Texts come when the search has ended
    length_penalty      [-10, 10]; a beam's score is its log-probability / tokens ** length_penalty
    early_stopping      when a search ends that has num_beams finished beams: True at once; False when the best running one
                        is worse than they are at its length; "never" when none can become better at any length
    n                   [1, 1024]; answers to each prompt, which share what the cache holds of it. Answer j has the seed
                        seed + j

    Logits processors and token_mask run on a thread of the engine; an exception in one, or a mask that allows nothing,
    gives that completion finish_reason "error". They may not call the LLM that they serve.

    dataclasses.replace(params, temperature=0) gives a changed copy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 256
    seed: Optional[int] = None
    stop: Union[str, Sequence[str]] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logit_bias: Optional[Mapping[int, float]] = None
    min_tokens: int = 0
    bad_words: Union[str, Sequence[str]] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids: Optional[Sequence[int]] = None
    logprobs: int = 0
    prompt_logprobs: Optional[int] = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: Union[bool, str] = False
    n: int = 1
    logits_processors: Sequence[Callable[[np.ndarray, np.ndarray], Optional[np.ndarray]]] = ()
    token_mask: Optional[Callable[[np.ndarray], Optional[np.ndarray]]] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", tuple(_arguments.strings("stop", self.stop)))
        object.__setattr__(self, "stop_token_ids", tuple(_arguments.integers("stop_token_ids", self.stop_token_ids)))
        biases = _arguments.expect("logit_bias", self.logit_bias, (Mapping, type(None)), "a mapping or None")
        object.__setattr__(self, "logit_bias", {_arguments.integer("a token of logit_bias", token):
                                                _arguments.real(f"logit_bias for token {token}", bias)
                                                for token, bias in biases.items()} if biases else None)
        object.__setattr__(self, "bad_words", tuple(_arguments.strings("bad_words", self.bad_words)))
        words = _arguments.expect("bad_words_ids", self.bad_words_ids, (list, tuple), "a list of lists of int")
        object.__setattr__(self, "bad_words_ids", tuple(
            tuple(_arguments.integers("bad_words_ids", word)) for word in words))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids",
                               tuple(_arguments.integers("allowed_token_ids", self.allowed_token_ids)))
        processors = _arguments.expect("logits_processors", self.logits_processors, (list, tuple), "a list of functions")
        for function in (*processors, *(() if self.token_mask is None else (self.token_mask,))):
            if not callable(function):
                name = "token_mask" if function is self.token_mask else "logits_processors"
                raise InvalidArgument(f"{name} is {_arguments.given(function)}; expected a function")
        object.__setattr__(self, "logits_processors", tuple(processors))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidArgument(f"early_stopping is {_arguments.given(self.early_stopping)}; expected True, False or "
                                  "'never'")
        self._native()  # checks

    def _native(self) -> _eadem.NativeSamplingParams:
        reals = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                 "length_penalty")
        return _eadem.NativeSamplingParams(
            **{name: _arguments.real(name, getattr(self, name)) for name in reals},
            **{name: _arguments.integer(name, getattr(self, name))
               for name in ("top_k", "max_tokens", "min_tokens", "logprobs", "num_beams", "n")},
            **{name: None if getattr(self, name) is None else _arguments.integer(name, getattr(self, name))
               for name in ("seed", "prompt_logprobs")},
            logit_bias=self.logit_bias or {}, bad_words=list(self.bad_words),
            bad_words_ids=[list(word) for word in self.bad_words_ids],
            allowed_token_ids=None if self.allowed_token_ids is None else list(self.allowed_token_ids),
            early_stopping=str(self.early_stopping), stop=list(self.stop),
            stop_token_ids=list(self.stop_token_ids), ignore_eos=_arguments.boolean("ignore_eos", self.ignore_eos))


class LLM:
    """A model with its tokenizer.

    model        a directory in Hugging Face layout, a .safetensors with its config.json beside it, a .gguf, the name of
                 a bundled model, or of one in a cache of this machine: "org/name", "org/name:Q4_K_M", "org/name@main",
                 "llama3.2:1b" (docs/models.md). None: the bundled model
    device       "cpu", "cuda", "cuda:1"; see list_devices()
    threads      CPU threads; 0: one per core that the process may use, within the quota of a container
    prefill_threads
                 CPU threads of steps of many tokens; 0: as many
    pin          bind CPU threads to processors, and place weights and caches in their memory nodes
    isa          CPU instruction set; "": the best one, see available_isas()
    mode         "performance" or "accuracy": what precision is chosen where nothing else says so
    weights, activations, kv_dtype
                 "f32" or "bf16", for weights and kv_dtype also "f16", and for kv_dtype "int8" or "fp8_e4m3"; None: as the
                 mode, model and checkpoint say
    matmul_input "f32", "bf16" or "int8": the narrowest type to which products may round their activations; None: int8,
                 in mode "accuracy" f32. It rounds no further than a product gains by
    kv_cache     StaticKVCacheConfig or PagedKVCacheConfig; None: up to eight prompts run side by side, in memory for one
                 sequence of the model's context, or for eight of 2048 tokens if that is more, and less where memory is
                 short. Prompts that begin alike share what was computed, unless prefix_caching=False
    max_num_batched_tokens
                 new tokens of one step; longer prompts take several. None: 512 on a CPU, 2048 on other devices
    disabled_fusions
                 name or names of fusions to leave out; "all"
    pack_cache   a folder in which to keep the weights as the CPU's kernels want them, which later loads map instead of
                 packing: a first token comes sooner, decoding is a tenth slower or more. Takes about as much disk as
                 the model. None: no such cache
    speculate    "lookup", "mtp", or a draft model as for `model`: let steps compute proposed tokens beside their own, so
                 that an answer takes fewer steps; completions stay the same. "lookup" proposes what followed the last
                 tokens where they stood before, "mtp" what the model's own head for multi-token prediction samples, a
                 draft model with the same tokenizer what it samples. "none": nothing
    draft_tokens tokens to propose at most for a prompt in a step, 1 to 15; of them as many as pay, which is measured
    tensor_parallel_size
                 processes that the model is divided over, on the CPU; `threads` and `prefill_threads` are those of all
    deterministic_across_tp
                 give the same bits for every number of processes up to 4, one included, whose bits are others than
                 without this

    Raises NotFound, DataCorrupted, Unsupported or OutOfMemory. Threads may share an LLM: prompts of their calls run
    side by side. Messages go to logging.getLogger("eadem").
    """

    def __init__(self, model: Optional[Union[str, os.PathLike[str]]] = None, *, device: str = "cpu", threads: int = 0,
                 prefill_threads: int = 0, pin: bool = True, isa: str = "", mode: str = "performance",
                 weights: Optional[str] = None, activations: Optional[str] = None,
                 matmul_input: Optional[str] = None, kv_dtype: Optional[str] = None,
                 kv_cache: Optional[Union[StaticKVCacheConfig, PagedKVCacheConfig]] = None,
                 max_num_batched_tokens: Optional[int] = None, disabled_fusions: Union[str, Sequence[str]] = (),
                 pack_cache: Optional[Union[str, os.PathLike[str]]] = None,
                 speculate: Union[str, os.PathLike[str]] = "none", draft_tokens: int = 8,
                 tensor_parallel_size: int = 1, deterministic_across_tp: bool = False) -> None:
        if model is None:
            path = bundled_model()
            logging.getLogger("eadem").info("no model given: using the bundled model '%s' (%s)", BUNDLED, path)
        else:
            path = located("model", model)
        ranks = _arguments.tensor_parallel_size(tensor_parallel_size, deterministic_across_tp)
        arguments = _arguments.engine(
            path=path, ranks=ranks, device=device, threads=threads, prefill_threads=prefill_threads, pin=pin, isa=isa, mode=mode, weights=weights, activations=activations,
            matmul_input=matmul_input, kv_dtype=kv_dtype, max_num_batched_tokens=max_num_batched_tokens,
            disabled_fusions=disabled_fusions, pack_cache=pack_cache)
        self._llm = _eadem.Llm(
            _arguments.cache("kv_cache", kv_cache), _arguments.rank_program(arguments, ranks.num_ranks),
            speculate if speculate in ("none", "lookup", "mtp", "") else located("speculate", speculate),
            _arguments.integer("draft_tokens", draft_tokens), **arguments)
        self._tokenizer = Tokenizer(self._llm.tokenizer)

    def generate(self, prompts: Union[str, Sequence[str], Sequence[Sequence[int]]],
                 params: Optional[SamplingParams] = None, *,
                 on_text: Optional[Callable[[int, str], object]] = None,
                 parse_special: bool = False) -> list[Completion]:
        """params.n completions per prompt, in order: those of the first prompt, then those of the second.

        prompts  one text, texts, or lists of token ids. An empty text starts from the beginning-of-sequence token.
        params   None: default_params
        on_text  called as on_text(completion_index, piece) on this thread, as text becomes complete

        parse_special
                 read special tokens such as <|im_end|> from the texts; otherwise they are text like any other, as in a
                 prompt that somebody typed

        A prompt that is refused (too long for the cache) gives a completion with finish_reason "error", whose `error`
        says why; the others are not affected. Ctrl-C, or an exception of on_text, stops at the next step and is raised.
        Releases the GIL.
        """
        return self._generate(_arguments.prompts(prompts), self._params("params", params), on_text,
                              _arguments.boolean("parse_special", parse_special))

    def chat(self, messages: Union[Messages, Sequence[Messages]], sampling_params: Optional[SamplingParams] = None, *,
             tools: Optional[Sequence[Mapping[str, Any]]] = None,
             documents: Optional[Sequence[Mapping[str, Any]]] = None, chat_template: Optional[str] = None,
             add_generation_prompt: bool = True, continue_final_message: bool = False,
             chat_template_kwargs: Optional[Mapping[str, Any]] = None,
             on_text: Optional[Callable[[int, str], object]] = None) -> list[Completion]:
        """The model's answer to each conversation, in order; sampling_params.n of them.

        messages         a conversation in the shapes of OpenAI's API, such as [{"role": "user", "content": "Hi"}]; or a
                         list of conversations. Contents are texts or lists of text parts; reasoning is read from
                         `reasoning_content`, `thinking` or `reasoning`
        sampling_params  None: default_params
        tools            [{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}]
        documents        texts to answer from, where the template knows them
        chat_template    the name of one of the model's templates, or the text of a template; None: `tool_use` if there
                         are tools and the model has it, else the default one
        add_generation_prompt
                         begin an answer
        continue_final_message
                         continue the last message instead; needs add_generation_prompt=False
        chat_template_kwargs
                         more variables of the template, such as {"enable_thinking": False}
        on_text          called as on_text(completion_index, piece) on this thread, as text becomes complete

        An answer ends at chat_stop_token_ids and where sampling_params say; with ignore_eos, only there. Text of a
        message never becomes a special token. Raises NotFound when the model has no chat template, Unsupported for one
        that cannot be read, and InvalidArgument for what it refuses. Otherwise as generate.
        """
        params = self._params("sampling_params", sampling_params)
        chat_options = options(tools=tools, documents=documents, chat_template=chat_template,
                               variables=chat_template_kwargs or {}, add_generation_prompt=add_generation_prompt,
                               continue_final_message=continue_final_message, openai=True)
        chat = self._tokenizer._chat
        prompts = [chat.encode(_arguments.json("messages", each), chat_options) for each in conversations(messages)[0]]
        if not params.ignore_eos:
            stops = [*params.stop_token_ids, *self.chat_stop_token_ids]
            params = dataclasses.replace(params, stop_token_ids=stops)
        return self._generate(prompts, params, on_text, False)

    def _params(self, name: str, params: Optional[SamplingParams]) -> SamplingParams:
        if params is None:
            params = self.default_params
        checked: SamplingParams = _arguments.expect(name, params, SamplingParams, "SamplingParams or None")
        return checked

    def _generate(self, prompts: Union[list[str], list[list[int]]], params: SamplingParams,
                  on_text: Optional[Callable[[int, str], object]], parse_special: bool) -> list[Completion]:
        if on_text is not None and not callable(on_text):
            raise InvalidArgument(f"on_text is {_arguments.given(on_text)}; expected a function or None")
        return self._llm.generate(prompts, params._native(), on_text, parse_special, list(params.logits_processors),
                                  params.token_mask)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. It keeps the LLM alive."""
        return self._tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, over the defaults of SamplingParams."""
        native = self._llm.default_params
        return SamplingParams(**{field.name: getattr(native, field.name) for field in dataclasses.fields(SamplingParams)
                                 if field.name not in ("logits_processors", "token_mask")})

    @property
    def cache_counters(self) -> dict[str, int]:
        """What requests found in the cache so far: blocks of prompts that were there (hits) or had to be computed
        (misses), blocks given to other tokens (evictions), and requests that lost their blocks to others and computed
        them again (preemptions)."""
        return self._llm.cache_counters

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a text."""
        return self._llm.eos_token_ids

    @property
    def chat_stop_token_ids(self) -> list[int]:
        """Tokens that end an answer of chat(): the template's end of turn, and what the model's files name."""
        return self._llm.chat_stop_token_ids(self._tokenizer._chat)
