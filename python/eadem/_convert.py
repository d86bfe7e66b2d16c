# SPDX-License-Identifier: Apache-2.0
"""convert: a model in the other file format, or with its weights stored in other types."""

from __future__ import annotations

import os
from typing import Any, Callable, Optional, Union

from eadem import _arguments, _eadem, _models
from eadem._eadem import InvalidArgument

Path = Union[str, "os.PathLike[str]"]


def convert(model: Path, out: Path, *, type: str = "as-is", calibrate: Optional[Path] = None,
            calibrate_tokens: int = 1 << 15, tokenizer: bool = True, force: bool = False, device: str = "cpu",
            threads: int = 0, isa: str = "",
            on_progress: Optional[Callable[[str, int, int, str], None]] = None) -> list[dict[str, Any]]:
    """Writes `model` to `out`: a .gguf file when its name ends so, else a directory in Hugging Face layout.

    type              how matrices are stored: "as-is", a dtype, or a quantized type, as `eadem convert --type` takes
                      them; norms and biases are never rounded
    calibrate         a UTF-8 text that the model runs over first, so that an error costs what the inputs of its column
                      are worth (an importance matrix)
    calibrate_tokens  at most so many tokens of it
    tokenizer         False: leave the tokenizer out
    force             overwrite `out`
    device, isa       what `calibrate` runs on
    threads           of the conversion; 0: one for each core
    on_progress       called with "loading", "calibrating" or "converting", what is done, what there is, and the name
                      of the tensor; it may raise to stop

    The output appears whole or not at all. The result is a dict for each tensor: `name`, `from` (its name in `model`),
    `type`, `bytes`, `largest_error` and `relative_error` of rounding, and with `calibrate` `relative_output_error`
    where the text reached the tensor. Warnings go to the logger "eadem".
    """
    if _arguments.integer("calibrate_tokens", calibrate_tokens) < 1:
        raise InvalidArgument(f"calibrate_tokens is {calibrate_tokens}; expected at least 1")
    if _arguments.integer("threads", threads) < 0:
        raise InvalidArgument(f"threads is {threads}; expected 0 or more")
    if on_progress is not None and not callable(on_progress):
        raise InvalidArgument(f"on_progress is {_arguments.given(on_progress)}; expected a function or None")
    return _eadem.convert(
        _models.located("model", model), _arguments.path("out", out), type=_arguments.string("type", type),
        calibrate=None if calibrate is None else _arguments.path("calibrate", calibrate),
        calibrate_tokens=calibrate_tokens, tokenizer=_arguments.boolean("tokenizer", tokenizer),
        force=_arguments.boolean("force", force), device=_arguments.string("device", device), threads=threads,
        isa=_arguments.string("isa", isa), on_progress=on_progress)
