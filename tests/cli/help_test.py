#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Help pages, the version, and answers to bad usage of any command, as a user meets it.

    help_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

from program import GOLDEN, ProgramTest, eadem, main

COMMANDS = ["run", "perplexity", "inspect", "explain", "bench", "train", "tokenizer", "convert", "doctor"]


class Help(ProgramTest):
    def test_overview_fits_a_screen_and_lists_every_command(self):
        result = self.done("--help")
        self.assertLessEqual(len(result.out.splitlines()), 40)
        self.assertEqual(result.err, "")
        for command in COMMANDS:
            self.assertRegex(result.out, rf"(?m)^  {command} ")

    def test_every_command_has_examples(self):
        for command in COMMANDS:
            for way in [(command, "--help"), (command, "-h"), ("help", command)]:
                result = self.done(*way)
                self.assertIn("Examples:\n  eadem " + command if command not in ("run", "tokenizer") else "Examples:\n",
                              result.out, way)
                self.assertTrue(result.out.startswith(f"Usage: eadem {command}"))
                self.assertLessEqual(max(map(len, result.out.splitlines())), 150)

    def test_version(self):
        self.assertRegex(self.done("--version").out, r"^eadem \d+\.\d+\.\d+\n$")

    def test_nothing_given_is_bad_usage(self):
        result = eadem()
        self.assertEqual((result.code, result.out), (2, ""))
        self.assertIn("Usage:", result.err)


class Usage(ProgramTest):
    def test_did_you_mean(self):
        self.refused(2, "did you mean 'run'?", "rnu")
        self.refused(2, "did you mean '--temperature'?", "run", "--temprature", "1")
        self.refused(2, "did you mean '--temperature'?", "run", "--temprature=1")
        self.refused(2, "did you mean 'encode'?", "tokenizer", "encdoe")
        self.refused(2, "did you mean 'accuracy'?", "explain", "--mode", "acuracy")
        self.assertNotIn("did you mean", self.refused(2, "unknown command 'xyzzyplugh'", "xyzzyplugh").err)

    def test_values(self):
        self.refused(2, "--temperature is 'warm'", "run", "--temperature", "warm")
        self.refused(2, "--seed needs a value", "run", "--seed")
        self.refused(2, "--max-tokens is '5x'", "run", "-n", "5x")
        self.refused(2, "too large", "run", "-n", "9999999999999999999999")
        self.refused(2, "below 2^31", "run", "-p", "a", "-n", "4G")
        self.refused(2, "--top-p is 2", "run", "-p", "a", "--top-p", "2")
        self.refused(2, "--min-p is -1", "run", "-p", "a", "--min-p", "-1")
        self.refused(2, "--repetition-penalty is 0", "run", "-p", "a", "--repetition-penalty", "0")
        self.refused(2, "--presence-penalty is 3", "run", "-p", "a", "--presence-penalty", "3")
        self.refused(2, "--frequency-penalty is -2.5", "run", "-p", "a", "--frequency-penalty", "-2.5")
        self.refused(2, "--max-tokens is 0", "run", "-p", "a", "-n", "0")
        self.refused(2, "--min-tokens is -1", "run", "-p", "a", "--min-tokens", "-1")
        self.refused(2, "--logit-bias is 'x=1'", "run", "-p", "a", "--logit-bias", "x=1")
        self.refused(2, "--logit-bias is '5'", "run", "-p", "a", "--logit-bias", "5")
        self.refused(2, "--logit-bias is '5=1x'", "run", "-p", "a", "--logit-bias", "5=1x")
        self.refused(2, "--logit-bias", "run", "-p", "a", "--logit-bias", "5=1000")
        self.refused(2, "--typical-p is 0", "run", "-p", "a", "--typical-p", "0")
        self.refused(2, "--bad-words is empty", "run", "-p", "a", "--bad-words", "")
        self.refused(2, "--allowed-token-ids is '5,'", "run", "-p", "a", "--allowed-token-ids", "5,")
        self.refused(2, "--stop-token-ids is '5,x'", "run", "-p", "a", "--stop-token-ids", "5,x")
        self.refused(2, "--stop-token-ids is for token -5", "run", "-p", "a", "--stop-token-ids", "-5")
        self.refused(1, "stop_token_ids is for token 99999; the vocabulary has", "run", "-p", "a", "--stop-token-ids",
                     "99999")
        self.refused(2, "--num-beams is 17", "run", "-p", "a", "--num-beams", "17", "--temperature", "0")
        self.refused(2, "--length-penalty is for beam search", "run", "-p", "a", "--length-penalty", "2")
        self.refused(2, "--logprobs is for --json", "run", "-p", "a", "--logprobs", "3")
        self.refused(2, "--logprobs is 21; expected 0 to 20", "run", "-p", "a", "--json", "--logprobs", "21")
        self.refused(2, "--prompt-logprobs is for --json", "run", "-p", "a", "--prompt-logprobs", "0")
        self.refused(2, "--prompt-logprobs is -1; expected 0 to 20", "run", "-p", "a", "--json", "--prompt-logprobs", "-1")
        self.refused(2, "--prompt-logprobs is 21; expected 0 to 20", "run", "-p", "a", "--json", "--prompt-logprobs", "21")
        for count in ("0", "1025"):
            self.refused(2, f"--n is {count}; expected 1 to 1024", "run", "-p", "a", "--n", count)
        self.refused(2, "--n is 3; expected at most num_beams, 2", "run", "-p", "a", "--temperature", "0", "--num-beams",
                     "2", "--n", "3")
        self.refused(2, "--n is 2 and --chat is given, which gives 1 answer", "run", "-p", "a", "--chat", "--n", "2")
        for option in (["--n", "2"], ["--logprobs", "2"], ["--prompt-logprobs", "2"]):
            self.refused(2, f"{option[0]}: `eadem run", "chat", *option)
        self.refused(2, "'nan'", "run", "-p", "a", "--temperature", "nan")
        self.refused(2, "--context is 0", "run", "-p", "a", "--context", "0")
        self.refused(2, "unexpected argument 'c'", "convert", "a", "b", "c")
        self.refused(2, "OUT is missing", "convert", "a")
        self.refused(2, "give one", "run", "-p", "a", "-f", "b")
        self.refused(2, "--vocab-size is missing", "tokenizer", "train", "a.txt", "-o", "b")

    def test_devices(self):
        self.refused(1, "unknown device", "run", "-p", "a", "--device", "tpu")
        for option in (["--threads", "2"], ["--prefill-threads", "2"], ["--no-pin"]):
            self.refused(2, option[0], "explain", GOLDEN / "llama", "--device", "cuda", *option)
        self.refused(2, "--prefill-threads is 5000; expected 0 to 4096", "explain", GOLDEN / "llama",
                     "--prefill-threads", "5000")


if __name__ == "__main__":
    main()
