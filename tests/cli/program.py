# SPDX-License-Identifier: Apache-2.0
"""What the tests of the built program share. Each is called as `TEST PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]`."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

PROGRAM = sys.argv[1]
ROOT = Path(sys.argv[2])
GOLDEN = ROOT / "tests/data/golden"
DATA = ROOT / "tests/data"
STORIES = ROOT / "assets/stories"
GGUF_STORIES = DATA / "stories260K"


class Result:
    def __init__(self, process):
        self.code = process.returncode
        self.out = process.stdout
        self.err = process.stderr


def eadem(*arguments, stdin=b"", **options):
    arguments = [argument if isinstance(argument, bytes) else str(argument) for argument in arguments]
    process = subprocess.run([PROGRAM, *arguments], input=stdin, capture_output=True, timeout=120, **options)
    process.stdout = process.stdout.decode()
    process.stderr = process.stderr.decode(errors="replace")
    return Result(process)


class ProgramTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def refused(self, code, words, *arguments, **options):
        """The program fails with `code`, says `words`, and leaves stdout empty."""
        result = eadem(*arguments, **options)
        self.assertEqual((result.code, result.out), (code, ""), result.err)
        self.assertIn("eadem: error: ", result.err)
        for word in [words] if isinstance(words, str) else words:
            self.assertIn(word, result.err)
        return result

    def done(self, *arguments, **options):
        result = eadem(*arguments, **options)
        self.assertEqual(result.code, 0, result.err)
        return result


class Terminal:
    """The program on a terminal of its own."""

    def __init__(self, *arguments, **environment):
        self.seen = b""
        self.pid, self.controller = pty.fork()
        if self.pid == 0:
            os.execve(PROGRAM, [PROGRAM, *map(str, arguments)], {**os.environ, "TERM": "xterm", **environment})

    def type(self, text):
        os.write(self.controller, text if isinstance(text, bytes) else text.encode())

    def read_until(self, words, seconds=60):
        """What is shown up to `words`, which must come; all of it so far is in `seen`."""
        words = words.encode() if isinstance(words, str) else words
        shown, deadline = b"", time.monotonic() + seconds
        while words not in shown:
            readable = select.select([self.controller], [], [], max(0, deadline - time.monotonic()))[0]
            try:
                piece = os.read(self.controller, 1) if readable else b""
            except OSError:  # the program has ended
                piece = b""
            if not piece:
                raise AssertionError(f"{words} did not come after {self.seen}")
            shown += piece
            self.seen += piece
        return shown

    def end(self, seconds=60):
        """Waits for the end. Returns the exit code, or minus the signal, and the rest that was shown."""
        rest, deadline = b"", time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not select.select([self.controller], [], [], 0.1)[0]:
                continue
            try:
                piece = os.read(self.controller, 65536)
            except OSError:
                break
            rest += piece
            self.seen += piece
        else:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.controller)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), rest


def main():
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
