#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that docs/cli.md is what the program's --help says; with --update, writes it.

    help_pages.py PROGRAM docs/cli.md [--update]
"""

import re
import subprocess
import sys
from pathlib import Path

INTRODUCTION = """# The command line

Made from `eadem --help` and `eadem COMMAND --help` by `tests/cli/help_pages.py PROGRAM docs/cli.md --update`; a test
keeps it so.
"""


def help_of(program, *command):
    return subprocess.run([program, *command, "--help"], check=True, capture_output=True, text=True).stdout


def page(program):
    overview = help_of(program)
    text = f"{INTRODUCTION}\n```\n{overview}```\n"
    for name in re.findall(r"^  (\w+) {3,}", overview.split("`eadem COMMAND")[0], re.MULTILINE):
        for command in [[name]] + ([[name, a] for a in ("train", "encode", "decode")] if name == "tokenizer" else []):
            text += f"\n## eadem {' '.join(command)}\n\n```\n{help_of(program, *command)}```\n"
    return text


def main(program, document, *options):
    expected = page(program)
    if "--update" in options:
        Path(document).write_text(expected, encoding="utf-8")
    elif Path(document).read_text(encoding="utf-8") != expected:
        print(f"{document} is not what {program} --help says; run this with --update")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
