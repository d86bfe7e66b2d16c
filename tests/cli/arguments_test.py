#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How the command line is split, other programs' spellings, and which prompt `run` takes.

    arguments_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json
import subprocess

from program import GOLDEN, PROGRAM, ROOT, STORIES, ProgramTest, main

GREEDY = ["--temperature", "0", "--quiet"]


class Splitting(ProgramTest):
    def text(self, *arguments, **options):
        return self.done("run", *GREEDY, *arguments, **options).out

    def test_ways_to_give_a_value(self):
        texts = {self.text(*way) for way in [("-p", "Once", "-n", "3"), ("-pOnce", "-n3"), ("--prompt=Once", "-n", "3"),
                                             ("--prompt", "Once", "--max-tokens=3"), ("--prompt", "Once", "--max_t", "3"),
                                             ("-n3", "-p", "Once"), ("stories", "-n", "3", "Once"),
                                             ("-n", "3", "--", "stories", "Once")]}
        self.assertEqual(len(texts), 1, texts)
        self.refused(2, "'--pro' may be --prompt, --prompt-logprobs", "run", "--pro", "Once")

    def test_values_that_look_like_options(self):
        self.assertTrue(self.text("-p", "--help", "-n", "1").startswith("--help"))
        self.assertTrue(self.text("-p", "-ngl", "-n", "1").startswith("-ngl"))
        self.assertTrue(self.text("-n", "1", "--", "stories", "--json").startswith("--json"))

    def test_empty_values(self):
        self.assertEqual(self.text("--prompt=", "-n", "2"), self.text("-p", "", "-n", "2"))
        for option in ["--stop", "--device", "--file", "--isa", "--seed", "--temperature", "--max-tokens", "--dtype",
                       "--pack-cache", "--disable-fusion", "--mode", "--context"]:
            with self.subTest(option):
                # The value of an option is never the option after it.
                result = self.refused(2, option + " is", "run", "-p", "a", option + "=", "-n", "2")
                self.assertRegex(result.err, f"{option} is (empty|'')")
                self.refused(2, option + " is", "run", "-p", "a", option, "")
        self.refused(2, "--type is ''", "convert", STORIES, self.folder / "out", "--type=")
        self.refused(2, "--depth is ''", "bench", "--depth=")

    def test_what_is_wrong(self):
        self.refused(2, "--quiet takes no value", "run", "--quiet=yes")
        self.refused(2, "--seed needs a value", "run", "-p", "a", "--seed")
        self.refused(2, "--max-tokens needs a value", "run", "-p", "a", "-n")
        self.refused(2, "unknown option '-z'", "run", "-qz")
        self.refused(2, ["'--de' may be", "--default-prompt", "--device"], "run", "--de", "cpu")
        self.refused(2, "unexpected argument 'third'", "run", "stories", "text", "third")


class Habits(ProgramTest):
    def test_spellings_of_other_programs_work(self):
        def result(*arguments):
            output = json.loads(self.done("run", *arguments, "--json").out)
            return output["text"], output["sampling"]

        ours = result("stories", "-p", "Once", "--max-tokens", "4", "--temperature", "0.5", "--seed", "3", "--context", "64")
        for options in ["--n-predict 4 --temp 0.5 -s 3 -c 64", "--max-new-tokens 4 --temp 0.5 -s 3 --ctx-size 64",
                        "--predict 4 --temp=0.5 --seed 3 --max-model-len 64", "--num-predict 4 --temp 0.5 -s3 --num_ctx 64",
                        "--max_tokens 4 --temperature 0.5 -s 3 -c64 --tensor-parallel-size 1"]:
            with self.subTest(options):
                self.assertEqual(result("-m", "stories", "-p", "Once", *options.split()), ours)
        self.assertEqual(result("--model", "stories", "Once", "-n4", "--temp", "0.5", "-s", "3", "--top_k", "40")[1]["top_k"],
                         40)

    def test_others_lead_to_the_right_option(self):
        for options, words in [("-ngl 99", "--device cuda"), ("--n-gpu-layers 99", "--device cuda"),
                               ("--split-mode row", "one device"), ("-fa", "attention"),
                               ("-hf a/b", "MODEL is a path"), ("--batch-size 512", "sizes its own steps")]:
            with self.subTest(options):
                self.refused(2, [options.split()[0] + ": ", words], "run", "-p", "a", *options.split())

    def test_until_the_text_ends(self):
        result = json.loads(self.done("run", "-p", "Once", "-n", "-1", "--ignore-eos", "--temp", "0", "--json").out)
        # 512 in the cache, and the last, which nothing is drawn after.
        self.assertEqual(len(result["token_ids"]) + result["prompt_tokens"], 513)
        self.assertEqual(result["finish_reason"], "length")
        self.refused(2, "--max-tokens is -2", "run", "-p", "Once", "-n", "-2")

    def test_type_names_in_any_case(self):
        made = json.loads(self.done("convert", STORIES, self.folder / "a.gguf", "--type", "Q4_K_M", "--json").out)
        self.assertIn("q4_k", {tensor["type"] for tensor in made["tensors"]})
        for dtype in ["BF16", "bfloat16"]:
            self.assertEqual(self.done("explain", GOLDEN / "llama", "--weights", dtype).out,
                             self.done("explain", GOLDEN / "llama", "--weights", "bf16").out)
        self.refused(2, "did you mean 'q4_k_s'?", "convert", STORIES, self.folder / "b.gguf", "--type", "Q4_K_N")


class Prompts(ProgramTest):
    def test_second_operand_is_the_prompt(self):
        self.assertEqual(self.done("run", STORIES, "Once upon", "-n", "5", *GREEDY).out,
                         self.done("run", STORIES, "-p", "Once upon", "-n", "5", *GREEDY).out)
        self.refused(2, "-p and PROMPT both give the prompt", "run", STORIES, "Once", "-p", "Once")
        self.refused(2, "PROMPT and -f both give the prompt", "run", STORIES, "Once", "-f", "a.txt")
        self.refused(2, "--interactive asks for texts", "run", STORIES, "Once", "-i")

    def test_a_missing_model_is_said_before_stdin_is_read(self):
        result = self.refused(1, ["llama3.2: no such file", "no bundled model"], "run", "llama3.2", stdin=b"")
        self.assertNotIn("standard input", result.err)
        self.refused(1, ["a text to continue is given with -p"], "run", "Once upon a time", stdin=b"")
        # Nobody will write to this pipe.
        process = subprocess.Popen([PROGRAM, "run", "llama3.2"], stdin=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        self.assertIn(b"llama3.2: no such file", process.stderr.read())
        process.communicate()

    def test_a_final_line_end_is_no_part_of_the_text(self):
        expected = self.done("run", "-p", "Once upon", "-n", "5", *GREEDY).out
        for end in [b"", b"\n", b"\r\n"]:
            self.assertEqual(self.done("run", "-n", "5", *GREEDY, stdin=b"Once upon" + end).out, expected)
            (self.folder / "prompt.txt").write_bytes(b"Once upon" + end)
            self.assertEqual(self.done("run", "-n", "5", *GREEDY, "-f", self.folder / "prompt.txt").out, expected)
        self.assertTrue(self.done("run", "-n", "1", *GREEDY, stdin=b"Once upon\n\n").out.startswith("Once upon\n"))
        self.refused(1, "is empty", "run", stdin=b"\n")

    def test_default_prompt(self):
        run = ["run", "--default-prompt", "The cat", "-n", "2", *GREEDY]
        self.assertTrue(self.done(*run, stdin=b"Once").out.startswith("The cat"))
        self.assertTrue(self.done(*run, "-p", "Once").out.startswith("Once"))
        self.assertTrue(self.done(*run, "stories", "Once").out.startswith("Once"))
        self.assertTrue(self.done(*run, "-f", "-", stdin=b"Once").out.startswith("Once"))
        self.assertTrue(self.done(*run, "-i", stdin=b"Once\n").out.startswith("Once"))

    def test_the_start_script_has_a_default_prompt_whatever_the_options(self):
        script = (ROOT / "scripts/run.sh").read_text()
        self.assertRegex(script, r'exec .*eadem" run --default-prompt "[^"]+" "\$@"')

    def test_texts_one_after_another_without_a_terminal(self):
        result = self.done("run", "-i", "-n", "3", "--temp", "0", stdin=b"Once upon\n\nThe cat\n/bye\nnever\n")
        self.assertIn("Once upon", result.out)
        self.assertIn("The cat", result.out)
        self.assertNotIn("never", result.out)
        self.assertEqual(result.err.count("tokens/s"), 2, result.err)  # once for prompts, once for texts, at the end
        self.assertIn("texts   2", result.err)
        verbose = self.done("run", "-iv", "-n", "3", "--temp", "0", stdin=b"Once upon\nThe cat\n")
        self.assertEqual(verbose.err.count("first token after"), 2, verbose.err)
        self.refused(2, "give one", "run", "-p", "a", "-qv")


if __name__ == "__main__":
    main()
