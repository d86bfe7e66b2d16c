#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the program says of wrong values and files: the option or the file that was given, both values, one line.

    messages_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json
import signal
import subprocess
import time

from program import GOLDEN, PROGRAM, STORIES, ProgramTest, main


class Options(ProgramTest):
    def test_the_option_that_was_given_is_named(self):
        for command in (["run", "-p", "a"], ["explain"]):
            result = self.refused(1, ["--context is 1048576", "the model's context is 512 tokens"], *command, "--context", "1M")
            self.assertNotIn("max_cache_len", result.err)
        for option in ["--batch", "--tokens", "--context"]:
            result = self.refused(2, f"{option} is 0; expected 1 to", "explain", option, "0")
            for other in {"--batch", "--tokens", "--context"} - {option}:
                self.assertNotIn(other, result.err)
            self.refused(2, f"{option} is 4294967296; expected 1 to 16777216", "explain", option, "4G")
            self.refused(2, f"{option} is 99999999999; expected 1 to 16777216", "explain", option, "99999999999")
        self.refused(1, ["--tokens is 8388608", "holds 512", "--batch 1"], "explain", "--tokens", "8M")
        self.assertIn("step of up to 1024 tokens", self.done("explain", "--prefill", "--tokens", "1k", "--batch", "2").out)

    def test_zero_means_what_the_help_says(self):
        self.assertIn("0 is one per core", " ".join(self.done("run", "--help").out.split()))
        self.done("run", "-p", "a", "-n", "1", "-t", "0")
        self.assertIn("0 is all", self.done("perplexity", "--help").out)
        text = STORIES / "greedy.txt"
        all_of_it = self.done("perplexity", text, "--context", "32").out
        self.assertEqual(self.done("perplexity", text, "--context", "32", "--chunks", "0").out, all_of_it)
        self.refused(2, "--chunks is -1; expected at least 0", "perplexity", text, "--chunks", "-1")


    def test_options_of_other_programs_chats(self):
        for option, words in [("--jinja", "always Jinja"), ("--think", "--template-arg enable_thinking=false"),
                              ("--reasoning-budget", "--template-arg"), ("--hidethinking", "2>"),
                              ("--single-turn", "eadem run --chat -p TEXT")]:
            self.refused(2, words, "chat", option)
        for options in (["--sys", "S"], ["--system-prompt", "S"]):
            self.refused(2, "--system is for chat templates", "run", "-p", "a", *options)
        self.refused(1, "no chat template", "run", "stories", "-p", "a", "--conversation", "--system-prompt", "S")


class Files(ProgramTest):
    def test_a_configuration_is_no_model(self):
        config = GOLDEN / "llama/config.json"
        for command in (["run", config, "-p", "a"], ["bench", config], ["perplexity", config, STORIES / "greedy.txt"],
                        ["convert", config, self.folder / "a.gguf"]):
            result = self.refused(1, [str(config), "configuration, without weights", "directory"], *command)
            self.assertNotIn("weight_map", result.err)

    def test_long_names(self):
        name = "a" * 300
        for command in (["run", name, "-p", "a"], ["convert", STORIES, name], ["convert", STORIES, name + ".gguf"],
                        ["train", name], ["bench", "--random", name], ["run", "-f", name], ["inspect", name],
                        ["run", "a/" * 3000, "-p", "a"]):
            with self.subTest(command[0]):
                result = self.refused(1, "ile name too long", *command)
                self.assertNotIn("unexpected", result.err)
                self.assertNotIn("filesystem error", result.err)

    def test_an_architecture_that_nothing_serves(self):
        path = self.folder / "config.json"
        path.write_text(json.dumps({"model_type": "bloom"}))
        result = self.refused(1, ["config.json", "model type 'bloom'", "llama, mistral, qwen2, qwen3"], "inspect", path)
        self.assertEqual(result.err.count("bloom"), 1)
        self.assertEqual(len(result.err.splitlines()), 1)


class Convert(ProgramTest):
    def test_quiet(self):
        result = self.done("convert", GOLDEN / "llama", self.folder / "a.gguf", "--quiet")
        self.assertEqual(result.out, "")
        self.assertIn("tensors", result.err)
        self.refused(2, "give one", "convert", GOLDEN / "llama", self.folder / "b.gguf", "--quiet", "--json")

    def test_an_empty_directory_is_taken(self):
        out = self.folder / "out"
        out.mkdir()
        self.done("convert", GOLDEN / "llama", out)
        self.assertTrue((out / "model.safetensors").exists())
        self.refused(1, ["exists and is not empty", "--force"], "convert", GOLDEN / "llama", out)
        linked = self.folder / "linked"
        (self.folder / "target").mkdir()
        linked.symlink_to(self.folder / "target")
        self.done("convert", GOLDEN / "llama", linked)
        self.assertTrue(linked.is_symlink())
        self.assertTrue((self.folder / "target/model.safetensors").exists())
        self.assertEqual({path.name for path in self.folder.iterdir()}, {"out", "linked", "target"})

    def test_files_that_are_not_written(self):
        for name in ["out.bin", "out.safetensors", "model.pt"]:
            self.refused(2, [name, "are not written", ".gguf file, or a directory"], "convert", GOLDEN / "llama",
                         self.folder / name)
        self.done("convert", GOLDEN / "llama", self.folder / "llama-3.2-1b")
        self.assertTrue((self.folder / "llama-3.2-1b/config.json").exists())


class Perplexity(ProgramTest):
    def test_sources_agree(self):
        text = STORIES / "greedy.txt"
        options = ["--context", "32"]
        expected = self.done("perplexity", text, *options).out
        for way in (["stories", text], ["-m", "stories", text], ["-m", "stories", "-f", text], ["-f", text, "stories"],
                    ["-f", text]):
            self.assertEqual(self.done("perplexity", *way, *options).out, expected)
        for way in (["-"], ["stories", "-"], ["-f", "-"]):
            self.assertEqual(self.done("perplexity", *way, *options, stdin=text.read_bytes()).out, expected)
        self.refused(1, "standard input is empty", "perplexity", "-")
        self.refused(2, "FILE is missing", "perplexity", "-m", "stories")
        self.refused(2, "unexpected argument 'c'", "perplexity", "a", "c", "-f", text)


class Interruption(ProgramTest):
    def test_doctor(self):
        process = subprocess.Popen([PROGRAM, "doctor", "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (130, b""), err)
        self.assertIn(b"interrupted", err)


if __name__ == "__main__":
    main()
