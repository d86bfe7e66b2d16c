#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program on a terminal: the interactive session, and that no file can steer the terminal.

    terminal_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json
import os
import re
import shutil
import signal
import time
import struct
import subprocess

from program import PROGRAM, STORIES, ProgramTest, Terminal, eadem, main

# Sets a window's title, clears the screen as ESC does and as an 8-bit terminal does, rings.
EVIL = "\x1b]0;owned\x07 \x1b[2J \x9b2J"
EVIL_SHOWN = "\\x1b]0;owned\\x07 \\x1b[2J \\u009b2J"


def steering(shown):
    """What would steer a terminal in `shown` but our own marks: bold, dim, plain, and the wiping of a progress bar."""
    text = re.sub(rb"\x1b\[[012]m|\r\x1b\[K|\r\n", b"", shown).decode()  # raises where it is not UTF-8
    return [character for character in text if (ord(character) < 0x20 and character not in "\n\t")
            or 0x7F <= ord(character) < 0xA0]


def gguf(architecture):
    """A file without tensors that states its architecture alone."""
    text = lambda string: struct.pack("<Q", len(string)) + string
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"general.architecture") + struct.pack("<I", 8) + text(architecture)


class Injection(ProgramTest):
    def on_terminal(self, *arguments):
        terminal = Terminal(*arguments)
        code, _ = terminal.end()
        self.assertEqual(steering(terminal.seen), [], terminal.seen)
        return code, terminal.seen.decode()

    def evil_names(self):
        """The bundled model with one more tensor, whose name and dtype are evil."""
        model = self.folder / "model"
        shutil.copytree(STORIES, model)
        file = (model / "model.safetensors").read_bytes()
        size = int.from_bytes(file[:8], "little")
        header, data = json.loads(file[8:8 + size]), file[8 + size:]
        header[EVIL] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
        header = json.dumps(header).encode()
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data + b"\0" * 4)
        return model

    def test_architecture(self):
        path = self.folder / "evil.gguf"
        for architecture, shown in [(EVIL.encode(), EVIL_SHOWN), (b"caf\xe9 \x9b2J", "caf\\xe9 \\x9b2J")]:
            path.write_bytes(gguf(architecture))
            for result in [eadem("inspect", path), eadem("run", path, "-p", "a")]:
                self.assertEqual((result.code, result.out), (1, ""))
                self.assertIn(shown, result.err)
                self.assertEqual(steering(result.err.encode()), [])
            code, seen = self.on_terminal("inspect", path)
            self.assertEqual(code, 1)
            self.assertIn(shown, seen)

    def test_tensor_names(self):
        model = self.evil_names()
        code, seen = self.on_terminal("inspect", model, "--tensors")
        self.assertEqual(code, 0)
        self.assertIn(EVIL_SHOWN, seen)
        self.assertIn(EVIL, self.done("inspect", model, "--tensors").out)  # not a terminal: as it is
        tensors = json.loads(self.done("inspect", model, "--json").out)["tensors"]
        self.assertIn(EVIL, {tensor["name"] for tensor in tensors})
        self.assertEqual(self.on_terminal("run", model, "-p", "a")[0], 1)

    def test_dtypes(self):
        model = self.evil_names()
        file = (model / "model.safetensors").read_bytes()
        size = int.from_bytes(file[:8], "little")
        header = json.loads(file[8:8 + size])
        header[EVIL]["dtype"] = EVIL
        text = json.dumps(header).encode()
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + file[8 + size:])
        for arguments in [("inspect", model, "--tensors"), ("run", model, "-p", "a")]:
            self.on_terminal(*arguments)

    def test_file_names(self):
        for name in [EVIL.encode(), b"caf\xe9.gguf"]:
            path = os.fsdecode(os.fsencode(self.folder) + b"/" + name)
            result = eadem("inspect", path)
            self.assertEqual(result.code, 1)
            self.assertEqual(steering(result.err.encode()), [])
            shutil.copytree(STORIES, path)
            # JSON is UTF-8 whatever the path is.
            for command in (["inspect", path, "--json"], ["explain", path, "--json"]):
                self.assertIn(str(self.folder), self.done(*command).out)
                json.loads(eadem(*command).out)
            self.done("inspect", path)

    def test_texts(self):
        prompt = self.folder / "prompt.txt"
        prompt.write_text("Once\x1b[2J\x07 upon\r\n\ttime")
        run = ("run", "-f", prompt, "-n", "3", "--temp", "0", "--quiet")
        self.assertEqual(self.on_terminal(*run)[0], 0)
        self.assertIn("Once\\x1b[2J\\x07 upon", self.on_terminal(*run)[1])
        self.assertTrue(self.done(*run).out.startswith("Once\x1b[2J\x07 upon\r\n\ttime"))

    def test_tokens(self):
        token = self.done("tokenizer", "encode", "\x1b").out.split()[-1]
        self.assertIn("\\x1b", self.on_terminal("tokenizer", "decode", token)[1])
        self.assertIn("\x1b", self.done("tokenizer", "decode", token).out)


class Sessions(ProgramTest):
    def session(self, *options):
        terminal = Terminal("run", "-n", "5", "--temp", "0", *options, XDG_STATE_HOME=str(self.folder), LC_ALL="C")
        terminal.read_until("ends\r\n> ")
        return terminal

    def test_lines_are_edited_and_remembered(self):
        terminal = self.session()
        terminal.type("Once upé\x7fon\r")  # one key takes a character back, not a byte
        terminal.read_until("Once upon a time")
        terminal.read_until("> ")
        terminal.type("/bye\r")
        code, shown = terminal.end()
        self.assertEqual(code, 0)
        self.assertEqual(terminal.seen.count(b"tokens/s"), 2)  # at the end alone
        self.assertEqual(shown.count(b"tokens/s"), 2, shown)
        history = self.folder / "eadem/history"
        self.assertIn("Once\\040upon\n", history.read_text())
        self.assertEqual(history.stat().st_mode & 0o777, 0o600)

        terminal = self.session()
        terminal.type("\x1b[A\x1b[A")  # up twice: before /bye
        terminal.read_until("Once upon")
        terminal.type("\r")
        terminal.read_until("Once upon a time")
        terminal.read_until("> ")
        terminal.type("\x04")
        self.assertEqual(terminal.end()[0], 0)

    def test_a_history_that_cannot_be_written_is_no_error(self):
        terminal = Terminal("run", "-n", "2", XDG_STATE_HOME="/dev/null/nowhere")
        terminal.read_until("> ")
        terminal.type("Once\r")
        terminal.read_until("\n> ")
        terminal.type("/bye\r")
        self.assertEqual(terminal.end()[0], 0)

    def test_commands(self):
        terminal = self.session()
        terminal.type("/help\r")
        for words in ["/bye", "Ctrl-C", "> "]:
            terminal.read_until(words)
        terminal.type("/what is this\r")
        terminal.read_until("'/what' is no command")
        terminal.type("//a path\r")
        terminal.read_until("\r\n/a path")
        terminal.type("/bye\r")
        self.assertEqual(terminal.end()[0], 0)

    def test_ctrl_c_stops_an_answer_and_the_session_goes_on(self):
        terminal = Terminal("run", "-n", "-1", "--ignore-eos", "--temp", "0", XDG_STATE_HOME=str(self.folder))
        terminal.read_until("> ")
        for stopped_at in ["time", "there"]:
            terminal.type("Once upon a\r")
            terminal.read_until("Once upon a\r\n")
            terminal.read_until(stopped_at)
            terminal.type("\x03")
            shown = terminal.read_until("\n> ")
            self.assertLess(len(shown), 4000, shown)
        terminal.type("The cat\r")
        terminal.read_until("The cat\r\nThe cat")
        terminal.read_until("\n> ")
        terminal.type("\x04")
        self.assertEqual(terminal.end()[0], 0)

    def test_ctrl_c_at_the_prompt(self):
        terminal = self.session()
        for _ in range(3):  # clears a line, as often as one likes
            terminal.type("abc")
            terminal.read_until("abc")
            terminal.type("\x03")
            terminal.read_until("\n> ")
        terminal.type("\x03")
        terminal.read_until("Ctrl-C again")
        terminal.read_until("> ")
        terminal.type("Once\r")  # something between: the next one is a first one again
        terminal.read_until("Once\r\nOnce")
        terminal.read_until("\n> ")
        terminal.type("\x03")
        terminal.read_until("Ctrl-C again")
        terminal.read_until("> ")
        terminal.type("\x03")
        self.assertEqual(terminal.end()[0], 130)

    def test_a_line_survives_ctrl_z(self):
        terminal = self.session()
        terminal.type("Once")
        terminal.read_until("Once")
        time.sleep(0.5)  # until the program, which has shown the line, waits for a key again
        os.kill(terminal.pid, signal.SIGCONT)
        terminal.read_until("\r\n> Once")
        terminal.type(" upon\r")
        terminal.read_until("Once upon a time")
        terminal.read_until("> ")
        terminal.type("\x04")
        self.assertEqual(terminal.end()[0], 0)

    def test_keys_typed_ahead(self):
        terminal = Terminal("run", "-n", "2", XDG_STATE_HOME=str(self.folder))
        terminal.type("Once\r\x04")  # before the program asks
        terminal.read_until("> ")
        terminal.read_until("Once")
        self.assertEqual(terminal.end()[0], 0)

    def test_verbose_sessions_report_every_answer(self):
        terminal = self.session("--verbose")
        terminal.type("Once\r")
        terminal.read_until("first token after")
        terminal.read_until("> ")
        terminal.type("\x04")
        self.assertEqual(terminal.end()[0], 0)

    def test_results_elsewhere_and_questions_on_the_terminal(self):
        with open(self.folder / "out.txt", "wb") as out:
            process = subprocess.run([PROGRAM, "run", "-i", "-n", "2", "--temp", "0"], input=b"Once\n", stdout=out,
                                     stderr=subprocess.PIPE)
        self.assertEqual(process.returncode, 0)
        self.assertNotIn(b"> ", process.stderr)
        self.assertTrue((self.folder / "out.txt").read_text().startswith("Once"))


if __name__ == "__main__":
    main()
