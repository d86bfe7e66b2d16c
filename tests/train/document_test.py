#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What docs/train.md tells to do works, in its order: files below `<!-- write: NAME -->` are written, `sh` blocks are run.

    document_test.py PROGRAM SOURCE_DIR [DIRECTORY]

Works in DIRECTORY, which is made anew, and shows what each command says; else in a temporary one, and is silent.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"(?:^<!-- write: (\S+) -->\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def main(program, source, directory):
    # The working directory is as deep as build/train in the repository.
    work = directory / "build/train"
    work.mkdir(parents=True)
    for name in ("docs", "assets", "CONTRIBUTING.md"):
        (directory / name).symlink_to(source / name)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    count = 0
    for name, language, text in BLOCK.findall((source / "docs/train.md").read_text(encoding="utf-8")):
        if name:
            (work / name).write_text(text, encoding="utf-8")
        elif language == "sh":
            for command in text.splitlines():
                print(f"$ {command}")
                result = subprocess.run(["bash", "-c", command], cwd=work, env=environment, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=250)
                print(result.stdout, end="")
                # A command stopped after a second may have finished before.
                allowed = (0, 124, 130) if command.startswith("timeout") else (0,)
                if result.returncode not in allowed:
                    sys.exit(f"docs/train.md: `{command}` exited with {result.returncode}:\n{result.stdout}")
                count += 1
    assert count >= 10, f"{count} commands"
    refused = subprocess.run([program, "train", "changed.toml", "--resume"], cwd=work, capture_output=True, text=True)
    assert refused.returncode == 1 and "training.learning_rate is 0.003 in the checkpoint and 0.005" in refused.stderr


if __name__ == "__main__":
    arguments = [Path(argument).resolve() for argument in sys.argv[1:]]
    if len(arguments) == 3:
        shutil.rmtree(arguments[2], ignore_errors=True)
        main(*arguments)
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(*arguments, Path(folder))
