# SPDX-License-Identifier: Apache-2.0
"""The program of a rank other than 0 of several: _rank.py EXTENSION LIFE ARGUMENTS DESCRIPTOR RANK PARENT.

It runs without the package and without site-packages: the extension that the parent uses is loaded from its file. LIFE
is a function of it, and ARGUMENTS are the JSON of the parent's own.
"""
import importlib.machinery
import importlib.util
import json
import os
import sys


def main(extension: str, life: str, arguments: str, descriptor: str, rank: str, parent: str) -> None:
    loader = importlib.machinery.ExtensionFileLoader("_eadem", extension)
    spec = importlib.util.spec_from_file_location("_eadem", extension, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    getattr(module, life)(descriptor, rank, parent, **json.loads(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # nothing is left to do, and the interpreter's end takes time
