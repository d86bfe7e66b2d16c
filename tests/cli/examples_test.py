#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every example of every command's help, as it stands there, in a folder with the files that examples speak of.

    examples_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json
import os
import re
import shutil
import subprocess

from chat_model import write_chat_model
from program import DATA, GOLDEN, PROGRAM, STORIES, ProgramTest, main

COMMANDS = [["run"], ["chat"], ["perplexity"], ["inspect"], ["explain"], ["bench"], ["train"], ["tokenizer"], ["tokenizer", "train"],
            ["tokenizer", "encode"], ["tokenizer", "decode"], ["convert"], ["doctor"]]
# Examples that this test leaves out: they need a GPU, or train a model from beginning to end.
LEFT_OUT = ["--device cuda", "eadem train assets/stories/recipe.toml"]
TEXT = (STORIES / "greedy.txt").read_text()


def examples(help_text):
    """The lines of a help that begin a command, after `Examples:`."""
    after = help_text.split("\nExamples:\n", 1)[1]
    return re.findall(r"^  (\S.*?)(?: {2,}\S.*)?$", after, re.MULTILINE)


class Examples(ProgramTest):
    def setUp(self):
        super().setUp()
        (self.folder / "bin").mkdir()
        (self.folder / "bin/eadem").symlink_to(os.path.abspath(PROGRAM))
        model = self.folder / "path/to/model"
        shutil.copytree(STORIES, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
        write_chat_model(self.folder / "path/to/chat-model")
        self.done("convert", model, self.folder / "model.gguf")
        for name in ["model-bf16.gguf", "model-f32.gguf"]:
            shutil.copy(self.folder / "model.gguf", self.folder / name)
        shutil.copy(DATA / "traces/azure.csv", self.folder / "AzureLLMInferenceTrace_conv.csv")
        (self.folder / "my-1b").mkdir()
        shape = json.loads((GOLDEN / "llama/config.json").read_text())
        shape.update(hidden_size=256, intermediate_size=256, num_attention_heads=8, num_key_value_heads=8,
                     max_position_embeddings=1024)
        shape.pop("head_dim", None)
        (self.folder / "my-1b/config.json").write_text(json.dumps(shape))
        for name in ["a.txt", "b.txt", "book.txt", "text.txt", "prompt.txt", "wiki.test.raw"]:
            (self.folder / name).write_text("Once upon a time" if name == "prompt.txt" else TEXT * (1 if name == "a.txt" else 12))
        (self.folder / "config.json").write_text(json.dumps({
            "model_type": "llama", "vocab_size": config["vocab_size"], "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_position_embeddings": 64}))
        (self.folder / "recipe.toml").write_text(
            '[model]\nconfig = "config.json"\n[tokenizer]\npath = "path/to/model"\n[data]\ntrain = ["text.txt"]\n'
            '[training]\nsteps = 2\naccumulation = 2\nbatch_tokens = 64\nsequence_length = 32\nwarmup_steps = 1\n[output]\ndirectory = "out"\n')

    def run_example(self, command):
        """A session's example is given one text; the others read what they name."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        if shutil.which("jq") is None:
            command = command.split(" | jq")[0]
        for out in ["model.gguf", "path/to/model"]:  # examples of `convert` write over what others read
            command = re.sub(rf"(eadem convert \S+ ){re.escape(out)}(?=$| )", rf"\1{out.replace('model', 'made')}", command)
        return subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=self.folder, env={**os.environ, "PATH": path},
                              input=b"1 2 3", capture_output=True, timeout=120)

    def test_every_example_runs(self):
        count = 0
        for command in COMMANDS:
            for example in examples(self.done(*command, "--help").out):
                if any(words in example for words in LEFT_OUT):
                    continue
                with self.subTest(example):
                    shutil.rmtree(self.folder / "tokenizer", ignore_errors=True)
                    for made in ["path/to/made", "path/to/small"]:
                        shutil.rmtree(self.folder / made, ignore_errors=True)
                    (self.folder / "made.gguf").unlink(missing_ok=True)
                    result = self.run_example(example)
                    self.assertEqual(result.returncode, 0, (example, result.stderr))
                    count += 1
        self.assertGreater(count, 25)

    def test_the_examples_of_the_overview_run(self):
        found = examples(self.done("--help").out)
        self.assertGreaterEqual(len(found), 3)
        for example in found:
            with self.subTest(example):
                result = self.run_example(example)
                self.assertEqual(result.returncode, 0, (example, result.stderr))


if __name__ == "__main__":
    main()
