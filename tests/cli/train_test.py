#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""eadem train, as a user meets it.

    train_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json
import signal
import subprocess
import time
from pathlib import Path

from program import PROGRAM, ProgramTest, main


class Train(ProgramTest):
    RECIPE = """
[model]
config = "config.json"
[tokenizer]
path = "tokenizer"
[data]
train = ["text.txt"]
[training]
steps = {steps}
batch_tokens = 64
sequence_length = 32
warmup_steps = 1
[output]
directory = "out"
"""

    def recipe(self, steps):
        (self.folder / "text.txt").write_text("the cat and the dog and the cat<|endoftext|>" * 50)
        if not (self.folder / "tokenizer").exists():
            self.done("tokenizer", "train", self.folder / "text.txt", "--vocab-size", "270", "--special", "<|endoftext|>",
                      "--bos", "<|endoftext|>", "--eos", "<|endoftext|>", "-o", self.folder / "tokenizer")
        (self.folder / "config.json").write_text(json.dumps({
            "model_type": "llama", "vocab_size": 270, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}))
        path = self.folder / "recipe.toml"
        path.write_text(self.RECIPE.format(steps=steps))
        return path

    def test_trains(self):
        result = self.done("train", self.recipe(3))
        model = result.out.strip()
        self.assertTrue(Path(model, "model.safetensors").exists())
        self.done("run", model, "-p", "the", "-n", "3")
        self.refused(1, "--resume", "train", self.recipe(3))

    def test_ctrl_c_saves_a_checkpoint(self):
        path = self.recipe(1000000)
        process = subprocess.Popen([PROGRAM, "train", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (130, b""), err)
        self.assertIn(b"--resume` goes on", err)
        self.assertTrue(any((self.folder / "out/checkpoints").iterdir()))

    def test_refusals(self):
        self.refused(1, "nope.toml", "train", self.folder / "nope.toml")
        self.refused(2, "RECIPE.toml is missing", "train")


if __name__ == "__main__":
    main()
