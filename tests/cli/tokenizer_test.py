#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""eadem tokenizer, as a user meets it.

    tokenizer_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json
import signal
import subprocess
import time

from program import PROGRAM, STORIES, ProgramTest, main


class Tokenizer(ProgramTest):
    def test_train_encode_decode(self):
        (self.folder / "text.txt").write_text("the cat and the dog and the cat " * 50)
        made = self.folder / "made"
        arguments = ["tokenizer", "train", self.folder / "text.txt", "--vocab-size", "270", "--special", "<|end|>",
                     "--eos", "<|end|>", "-o", made]
        self.assertEqual(self.done(*arguments).out, "")
        self.refused(1, "--force", *arguments)
        self.done(*arguments, "--force")
        text = "the cat — café <|end|>"
        ids = self.done("tokenizer", "encode", "-m", made, text).out
        self.assertEqual(self.done("tokenizer", "decode", "-m", made, "--special", stdin=ids.encode()).out, text + "\n")
        self.assertEqual(json.loads(self.done("tokenizer", "encode", "-m", made, text, "--json").out)["ids"],
                         [int(word) for word in ids.split()])
        self.refused(1, "not UTF-8", "tokenizer", "encode", "-m", made, stdin=b"\xff")
        self.refused(1, "no token id", "tokenizer", "decode", "-m", made, "x")
        self.refused(1, "999999", "tokenizer", "decode", "-m", made, "999999")
        lists = f"[{', '.join(ids.split())}]\n"
        self.assertEqual(self.done("tokenizer", "decode", "-m", made, "--special", stdin=lists.encode()).out, text + "\n")

    def test_a_path_is_not_taken_for_text(self):
        path = STORIES / "tokenizer.json"
        for text in (path, STORIES):
            self.refused(2, [f"`-m '{text}'`", f"`-f '{text}'`", "standard input"], "tokenizer", "encode", text,
                         stdin=b"Once upon a time")
        self.refused(1, ["no token id", "-m gives the model"], "tokenizer", "decode", path)
        self.assertEqual(self.done("tokenizer", "encode", stdin=str(path).encode()).code, 0)

    def test_standard_input_has_a_limit(self):
        for action, what in (("encode", "text"), ("decode", "ids")):
            source = open("/dev/zero", "rb") if action == "encode" else subprocess.Popen(["yes", "1"], stdout=subprocess.PIPE)
            stream = source if action == "encode" else source.stdout
            process = subprocess.run([PROGRAM, "tokenizer", action], stdin=stream, capture_output=True, timeout=120)
            stream.close()
            if action == "decode":
                source.wait()
            self.assertEqual(process.returncode, 1)
            self.assertIn(f"standard input: more than 268435456 bytes of {what}".encode(), process.stderr)

    def test_encoding_stops_when_asked(self):
        path = self.folder / "text.txt"
        path.write_bytes(b"Once upon a time there was a unique word " * 5_000_000)
        process = subprocess.Popen([PROGRAM, "tokenizer", "encode", "-f", path], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (130, b""), err)
        self.assertIn(b"interrupted", err)

    def test_bad_training(self):
        (self.folder / "bad.txt").write_bytes(b"\xff")
        self.refused(1, ["bad.txt", "not UTF-8"], "tokenizer", "train", self.folder / "bad.txt", "--vocab-size", "300",
                     "-o", self.folder / "out")
        self.assertFalse((self.folder / "out").exists())


if __name__ == "__main__":
    main()
