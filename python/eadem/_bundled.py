# SPDX-License-Identifier: Apache-2.0
"""Where the models that come with the package lie."""

import importlib.metadata
import logging
import os
import sysconfig
from pathlib import Path
from typing import Optional, Union

from eadem.errors import NotFound

DEFAULT_MODEL = "stories"
_LOG = logging.getLogger("eadem")


def folders() -> list[Path]:
    """Folders that may hold bundled models, best first."""
    found = []
    try:
        for file in importlib.metadata.files("eadem") or ():
            if file.name == "config.json" and file.parts[-5:-2] == ("share", "eadem", "assets"):
                found.append(Path(str(file.locate())).resolve().parents[1])
                break
    except importlib.metadata.PackageNotFoundError:
        pass  # imported from somewhere else than an installation
    found.append(Path(sysconfig.get_path("data")) / "share/eadem/assets")
    found.append(Path(__file__).resolve().parents[1] / "share/eadem/assets")  # pip install --target
    return list(dict.fromkeys(found))


def find(name: str) -> Optional[str]:
    """The directory of the bundled model ``name``, or None."""
    if name in ("", ".", "..") or "/" in name or os.sep in name:
        return None
    for folder in folders():
        if (folder / name / "model.safetensors").is_file():
            return str(folder / name)
    return None


def resolve(model: Union[str, "os.PathLike[str]", None]) -> str:
    """The path of ``model``: a path as it is, a bundled name, or for None the default bundled model."""
    name = DEFAULT_MODEL if model is None else os.fsdecode(model)
    if model is not None and os.path.exists(name):
        return name
    path = find(name)
    if path is None:
        looked = ", ".join(map(str, folders()))
        if model is None:
            raise NotFound(f"no model given, and the bundled model '{name}' is not installed (looked in {looked})")
        raise NotFound(f"{name}: no such file or directory, and no bundled model of that name (looked in {looked})")
    if model is None:
        _LOG.info("no model given: using the bundled model '%s' (%s)", name, path)
    return path
