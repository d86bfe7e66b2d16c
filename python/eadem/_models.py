# SPDX-License-Identifier: Apache-2.0
"""Where models lie: those that came with the package, and those that a name finds on this machine."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from typing import Any

from eadem import _arguments, _eadem
from eadem._eadem import NotFound

BUNDLED = "stories"


def bundled_model(name: str = BUNDLED) -> str:
    """The directory of a model that came with the package; raises NotFound when it has none of that name."""
    wanted = f"share/eadem/assets/{name}/model.safetensors"
    try:
        files = importlib.metadata.files("eadem") or []
    except importlib.metadata.PackageNotFoundError:  # imported from a source tree
        files = []
    for file in files:
        if file.as_posix().endswith(wanted):
            return os.path.dirname(os.path.abspath(str(file.locate())))
    raise NotFound(f"no model '{name}' came with this package")


def located(argument: str, value: Any) -> str:
    """The path of the model that `value`, a path or a name, stands for; what a name found is logged."""
    text = _arguments.path(argument, value)
    if os.path.exists(text):
        return text
    try:
        bundled = os.path.dirname(bundled_model())
    except NotFound:
        bundled = ""
    path, notice = _eadem.locate_model(text, bundled)
    if notice:
        logging.getLogger("eadem").info("%s", notice)
    return path
