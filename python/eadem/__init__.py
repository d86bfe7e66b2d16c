# SPDX-License-Identifier: Apache-2.0
"""Eadem: one engine that trains and serves transformer language models.

LLM          text in, text out
InferEngine  one step of a model over token ids, with its KV cache
Trainer      one optimizer step at a time
convert      a model in the other file format, or quantized
Sequential   a chain of modules with forward, backward and inference

Arrays come in as NumPy or anything else with DLPack (host memory) and go out as NumPy, without a copy where their
lifetime allows. Every long call releases the GIL. Objects may be shared between threads: prompts of all calls on an
LLM run side by side, calls on another object one at a time. Everything raised on purpose is an eadem.Error; its classes also derive from the built-in ones they stand for.
"""

from eadem import _eadem
from eadem._eadem import *  # the configuration of each family: LlamaConfig, Gemma3Config, …
from eadem._eadem import (
    Activation,
    Cancelled,
    Completion,
    DataCorrupted,
    DeviceError,
    DistConfig,
    Error,
    InvalidArgument,
    IoError,
    Linear,
    ModelConfig,
    NotFound,
    OutOfMemory,
    PagedKVCacheConfig,
    RMSNorm,
    RankFailed,
    Sequential,
    StaticKVCacheConfig,
    Unsupported,
    available_isas,
    list_devices,
)
from eadem._eadem import VERSION as __version__
from eadem._convert import convert
from eadem._engine import AutoConfig, CacheConfig, HookHandle, HookRegistry, InferEngine
from eadem._llm import LLM, SamplingParams
from eadem._models import bundled_model
from eadem._tokenizer import Tokenizer
from eadem._trainer import Trainer

for _class in (Error, InvalidArgument, NotFound, Unsupported, DataCorrupted, OutOfMemory, IoError, DeviceError, Cancelled,
               RankFailed):
    _class.__module__ = "eadem"
del _class

__all__ = [
    "LLM", "SamplingParams", "Completion", "Tokenizer", "bundled_model",
    "InferEngine", "HookRegistry", "HookHandle", "AutoConfig", "ModelConfig", "DistConfig", "CacheConfig",
    "StaticKVCacheConfig", "PagedKVCacheConfig",
    "convert", "Trainer", "Sequential", "Linear", "RMSNorm", "Activation",
    "Error", "InvalidArgument", "NotFound", "Unsupported", "DataCorrupted", "OutOfMemory", "IoError", "DeviceError",
    "Cancelled", "RankFailed",
    "available_isas", "list_devices", "__version__",
]
__all__ += _eadem.__all__
