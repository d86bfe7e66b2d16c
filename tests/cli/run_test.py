#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""eadem run, as a user meets it.

    run_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json
import os
import shutil
import signal
import subprocess
import time

from program import DATA, GOLDEN, PROGRAM, STORIES, ProgramTest, main


class Run(ProgramTest):
    def test_streams(self):
        result = self.done("run", "-p", "Once upon a time", "-n", "20", "--temperature", "0")
        self.assertTrue(result.out.startswith("Once upon a time"))
        self.assertTrue(result.out.endswith("\n"))
        self.assertNotIn("tokens/s", result.out)
        for words in ["greedy, max_tokens 20", "tokens/s", "first token after", "memory", "limit", "\x1b"]:
            (self.assertNotIn if words == "\x1b" else self.assertIn)(words, result.err)

    def test_prompt_sources_agree(self):
        (self.folder / "prompt.txt").write_text("Once upon a time")
        sampling = ["-n", "10", "--temperature", "0", "--quiet"]
        texts = {
            self.done("run", "-p", "Once upon a time", *sampling).out,
            self.done("run", "-f", self.folder / "prompt.txt", *sampling).out,
            self.done("run", "-f", "-", *sampling, stdin=b"Once upon a time").out,
            self.done("run", *sampling, stdin=b"Once upon a time").out,
        }
        self.assertEqual(len(texts), 1)

    def test_json_and_seed(self):
        runs = [json.loads(self.done("run", "-p", "Once", "-n", "12", "--seed", "7", "--json").out) for _ in range(2)]
        self.assertEqual(runs[0]["text"], runs[1]["text"])
        self.assertEqual(runs[0]["sampling"]["seed"], 7)
        self.assertGreater(runs[0]["decode_tokens_per_second"], 0)
        self.assertEqual(runs[0]["finish_reason"], "length")

    def test_penalties(self):
        sampling = ["run", "-p", "Once upon a time", "-n", "60", "--temperature", "0", "--ignore-eos", "--quiet"]
        penalties = [[], ["--repetition-penalty", "1.3"], ["--presence-penalty", "2"], ["--frequency-penalty", "1"]]
        texts = [self.done(*sampling, *penalty).out for penalty in penalties]
        self.assertEqual(len(set(texts)), 4, texts)
        result = json.loads(self.done(*sampling, "--json", "--repetition-penalty", "1.3").out)
        self.assertEqual(result["sampling"]["repetition_penalty"], 1.3)
        self.assertEqual(result["sampling"]["presence_penalty"], 0)

    def test_special_tokens_in_a_prompt(self):
        special = json.loads((STORIES / "tokenizer.json").read_text())["added_tokens"][0]["content"]
        run = ["run", "-p", f"Once{special} upon", "-n", "1", "--json"]
        as_text, parsed = (json.loads(self.done(*run, *option).out)["prompt_tokens"] for option in ([], ["--parse-special"]))
        self.assertLess(parsed, as_text)

    def test_counts_tokens_of_the_prompt_and_the_cache(self):
        result = json.loads(self.done("run", "-p", "Once upon a time", "-n", "1", "--json").out)
        self.assertGreater(result["prompt_tokens"], 1)
        self.assertEqual(result["cached_tokens"], 0)

    def test_biases(self):
        def tokens(*options):
            return json.loads(self.done("run", "-p", "Once upon a time", "-n", "6", "--temperature", "0", "--json",
                                        *options).out)["token_ids"]

        plain = tokens()
        for bias in ["514=100", "514+100"]:
            self.assertEqual(tokens("--logit-bias", bias), [514] * 6)
        self.assertNotIn(plain[0], tokens("--logit-bias", f"{plain[0]}-100"))
        self.assertEqual(tokens("--logit-bias", "514=100", "--logit-bias", "514=0"), plain)
        # The end of the text is as likely as can be, and comes when it may.
        ends = ["--logit-bias", "1=100"]
        self.assertEqual(len(tokens(*ends, "--min-tokens", "3")), len(tokens(*ends)) + 3)
        self.refused(2, "--min-tokens is 9", "run", "-p", "Once", "-n", "4", "--min-tokens", "9")

    def test_which_tokens_are_drawn(self):
        def result(*options):
            return json.loads(self.done("run", "-p", "Once upon a time", "-n", "8", "--temperature", "0", "--json",
                                        *options).out)

        plain = result()
        word = plain["text"].split()[1]
        self.assertNotIn(word, result("--bad-words", word)["text"].split())
        self.assertEqual(result("--allowed-token-ids", "514")["token_ids"], [514] * 8)
        self.assertLessEqual(set(result("--allowed-token-ids", "514,515", "--allowed-token-ids", "516", "--temperature",
                                        "9")["token_ids"]), {514, 515, 516})
        ends = plain["token_ids"][3]
        stopped = result("--stop-token-ids", f"{ends},3", "--stop-token-ids", "5")
        self.assertEqual(stopped["token_ids"][:3], plain["token_ids"][:3])
        self.assertNotIn(ends, stopped["token_ids"][:-1])
        self.assertLessEqual(len(stopped["token_ids"]), 4)
        listed = result("--logprobs", "2")
        self.assertEqual(listed["token_ids"], plain["token_ids"])
        self.assertEqual([top[0] for top in listed["top_logprobs"]],
                         [{"token_id": token, "logprob": logprob}
                          for token, logprob in zip(listed["token_ids"], listed["logprobs"])])
        self.assertNotIn("logprobs", plain)
        beams = result("--num-beams", "4", "--logprobs", "1", "--ignore-eos")
        greedy = result("--logprobs", "1", "--ignore-eos")
        self.assertGreaterEqual(sum(beams["logprobs"]), sum(greedy["logprobs"]) - 1e-6)

    def test_several_answers(self):
        run = ["run", "-p", "Once upon a time", "-n", "12", "--temperature", "1.5", "--ignore-eos"]
        result = json.loads(self.done(*run, "--seed", "5", "--n", "3", "--json", "--logprobs", "2").out)
        self.assertEqual([answer["seed"] for answer in result["answers"]], [5, 6, 7])
        self.assertEqual((result["sampling"]["n"], result["sampling"]["seed"]), (3, 5))
        for key in ("text", "token_ids", "finish_reason", "cached_tokens"):
            self.assertNotIn(key, result)
        self.assertGreater(result["decode_tokens"], 12)
        # Each has the text and the log-probabilities of a run of its own.
        alone = [json.loads(self.done(*run, "--seed", seed, "--json", "--logprobs", "2").out) for seed in (5, 6, 7)]
        for answer, own in zip(result["answers"], alone):
            for key in ("text", "token_ids", "logprobs", "top_logprobs", "finish_reason"):
                self.assertEqual(answer[key], own[key], key)
        self.assertEqual((alone[0]["sampling"]["n"], len({each["text"] for each in alone})), (1, 3))
        shown = self.done(*run, "--seed", "5", "--n", "3")
        self.assertEqual(shown.out, "\n".join(f"Once upon a time{each['text']}\n" for each in alone))
        self.assertIn("3 answers, max_tokens 12", shown.err)
        self.assertIn("ended by: --max-tokens 12 (3)", shown.err)
        self.assertEqual(self.done(*run, "--seed", "5", "--n", "1", "--quiet").out, f"Once upon a time{alone[0]['text']}\n")
        # A session, two ranks, more answers than run side by side.
        session = self.done("run", "-i", "-n", "3", "--seed", "5", "--n", "2", "--quiet", stdin=b"Once\nThe\n").out
        self.assertEqual((session.count("Once"), session.count("The")), (2, 2))
        many = [json.loads(self.done(*run, "--seed", "5", "--n", "20", "--json", *ranks).out)["answers"]
                for ranks in ([], ["--tp", "2"])]
        self.assertEqual([answer["seed"] for answer in many[0]], list(range(5, 25)))
        self.assertEqual([answer["token_ids"] for answer in many[0][:3]], [each["token_ids"] for each in alone])
        self.assertEqual(len(many[1]), 20)
        proposed = json.loads(self.done(*run, "--seed", "5", "--n", "3", "--json", "--speculate", "lookup").out)
        self.assertEqual([answer["token_ids"] for answer in proposed["answers"]], [each["token_ids"] for each in alone])
        beams = json.loads(self.done("run", "-p", "Once", "-n", "8", "--temperature", "0", "--num-beams", "4", "--n", "3",
                                     "--json").out)["answers"]
        scores = [answer["score"] for answer in beams]
        self.assertEqual(scores, sorted(scores, reverse=True))
        self.assertEqual(len({tuple(answer["token_ids"]) for answer in beams}), 3)

    def test_as_many_answers_as_the_authors_recommend(self):
        shutil.copytree(STORIES, self.folder / "model")
        (self.folder / "model/generation_config.json").write_text('{"num_return_sequences": 2}')
        run = ["run", self.folder / "model", "-p", "Once upon a time", "-n", "6", "--seed", "3", "--quiet"]
        first, second = self.done(*run).out.removesuffix("\n").split("\n\n")
        self.assertTrue(first.startswith("Once upon a time") and second.startswith("Once upon a time"))
        self.assertNotEqual(first, second)
        self.assertEqual(self.done(*run, "--n", "1").out, first + "\n")
        # They run side by side, in a cache of as many sequences as --n makes.
        caches = [json.loads(self.done(*run, "--json", *options).out)["kv_cache_bytes"] for options in
                  ([], ["--n", "2"], ["--n", "1"])]
        self.assertEqual(caches[0], caches[1])
        self.assertGreater(caches[0], caches[2])

    def test_log_probabilities_of_the_prompt(self):
        run = ["run", "-p", "Once upon a time, there was a little girl", "-n", "4", "--temperature", "0", "--json"]
        plain, scored, listed = (json.loads(self.done(*run, *options).out) for options in
                                 ([], ["--prompt-logprobs", "0"], ["--prompt-logprobs", "3"]))
        self.assertNotIn("prompt_logprobs", plain)
        self.assertNotIn("prompt_top_logprobs", scored)
        self.assertEqual(plain["token_ids"], scored["token_ids"])
        self.assertEqual(listed["prompt_logprobs"], scored["prompt_logprobs"])
        tokens = scored["prompt_tokens"]
        self.assertEqual((len(scored["prompt_logprobs"]), len(listed["prompt_top_logprobs"])), (tokens, tokens))
        self.assertIsNone(scored["prompt_logprobs"][0])
        self.assertEqual([len(place) for place in listed["prompt_top_logprobs"]], [0] + [3] * (tokens - 1))
        for logprob, place in zip(listed["prompt_logprobs"][1:], listed["prompt_top_logprobs"][1:]):
            self.assertLess(logprob, 0)
            self.assertLessEqual(logprob, place[0]["logprob"])
        # A text that was drawn has as a prompt the log-probabilities that it had.
        drawn = json.loads(self.done(*run, "--logprobs", "1").out)
        again = json.loads(self.done("run", "-p", run[2] + drawn["text"], *run[3:], "--prompt-logprobs", "0").out)
        for a, b in zip(drawn["logprobs"], again["prompt_logprobs"][tokens:]):
            self.assertAlmostEqual(a, b, delta=1e-4)
        several = json.loads(self.done(*run, "--n", "2", "--prompt-logprobs", "0").out)
        self.assertEqual(several["prompt_logprobs"], scored["prompt_logprobs"])

    def test_speculation_changes_no_token(self):
        prompt = "The cat sat on the mat. The dog sat on the mat. The cat sat on the"
        for sampling in (["--temperature", "0"], ["--temperature", "0.8", "--seed", "5"]):
            run = ["run", "-p", prompt, "-n", "60", "--ignore-eos", "--json", *sampling]
            plain = json.loads(self.done(*run).out)
            self.assertEqual((plain["proposed_tokens"], plain["accepted_tokens"]), (0, 0))
            self.assertEqual(plain["tokens_per_step"], 1)
            # Two ranks add in another order than one.
            ranks = ["--tp", "2"]
            on_ranks = json.loads(self.done(*run, *ranks).out)
            for speculate in (["lookup"], ["stories"], ["lookup", "--draft-tokens", "3"], ["lookup", *ranks], ["stories", *ranks]):
                result = json.loads(self.done(*run, "--speculate", *speculate).out)
                expected = on_ranks if ranks[0] in speculate else plain
                self.assertEqual(result["token_ids"], expected["token_ids"], speculate)
                self.assertLessEqual(result["accepted_tokens"], result["proposed_tokens"])
                self.assertGreaterEqual(result["tokens_per_step"], 1)

    def test_a_models_own_head(self):
        for path in [*(GOLDEN / "glm4_moe_mtp").iterdir(), *(DATA / "chat/small").glob("*.json")]:
            shutil.copy(path, self.folder)
        self.assertTrue(json.loads(self.done("inspect", self.folder, "--json").out)["mtp"])
        self.assertFalse(json.loads(self.done("inspect", STORIES, "--json").out)["mtp"])
        self.assertIn("model.layers.2: --speculate mtp", self.done("inspect", self.folder).out)
        recurrent = json.loads(self.done("inspect", GOLDEN / "qwen3_next_mtp", "--json").out)
        self.assertEqual((recurrent["mtp"], recurrent["mtp_head"]), (True, "mtp"))
        self.assertIn("mtp: --speculate mtp", self.done("inspect", GOLDEN / "qwen3_next_mtp").out)
        for sampling in (["--temperature", "0"], ["--temperature", "0.8", "--seed", "5"]):
            run = ["run", self.folder, "-p", "Hello there", "-n", "60", "--ignore-eos", "--json", *sampling]
            plain, result = (json.loads(self.done(*run, *more).out) for more in ([], ["--speculate", "mtp"]))
            self.assertEqual(result["token_ids"], plain["token_ids"])
            self.assertLessEqual(result["accepted_tokens"], result["proposed_tokens"])
            for ranks in (["--tp", "3"], ["--ep", "2"]):
                plain, result = (json.loads(self.done(*run, *ranks, *more).out) for more in ([], ["--speculate", "mtp"]))
                self.assertEqual(result["token_ids"], plain["token_ids"])
                self.assertLessEqual(result["accepted_tokens"], result["proposed_tokens"])

    def test_speculation_that_cannot_be(self):
        self.refused(1, "llama has no head for multi-token prediction", "run", "-p", "Once", "--speculate", "mtp")
        self.refused(1, "llama has no head for multi-token prediction", "bench", "--speculate", "mtp")
        self.refused(1, "llama has no head for multi-token prediction", "run", "-p", "Once", "--speculate", "mtp",
                     "--tp", "2")
        self.refused(2, "--draft-tokens is for --speculate", "run", "-p", "Once", "--draft-tokens", "3")
        self.refused(2, "draft_tokens is 99; expected 1 to 15", "run", "-p", "Once", "--speculate", "lookup",
                     "--draft-tokens", "99")
        self.refused(1, "they must be the same", "run", "-p", "Once", "--speculate", "chat")
        self.refused(1, "no-such-model", "run", "-p", "Once", "--speculate", "no-such-model")
        self.refused(1, "they must be the same", "run", "-p", "Once", "--speculate", "chat", "--tp", "2")
        self.refused(2, "--speculate lookup", "run", "-p", "Once", "--speculative-config", "{}")

    def test_stop_text(self):
        result = json.loads(self.done("run", "-p", "Once upon a time", "--temperature", "0", "--stop", " there",
                                      "--json").out)
        self.assertNotIn(" there", result["text"])

    def test_threads_and_fusions_do_not_change_the_text(self):
        sampling = ["run", "-p", "The cat", "-n", "30", "--temperature", "0", "--quiet"]
        first = self.done(*sampling, "--threads", "1").out
        self.assertEqual(first, self.done(*sampling, "--threads", "2").out)
        for options in (["-t", "1", "--prefill-threads", "2"], ["-t", "2", "--prefill-threads", "1", "--no-pin"]):
            self.assertEqual(first, self.done(*sampling, *options).out)
        self.refused(1, "no_such_fusion", *sampling, "--disable-fusion", "no_such_fusion")

    def test_bad_prompts(self):
        for name, content, words in [("empty.txt", b"", "is empty"), ("latin.txt", b"caf\xe9", "not UTF-8"),
                                     ("long.txt", b"a b " * 20000, "the context holds")]:
            (self.folder / name).write_bytes(content)
            self.refused(1, words, "run", "-f", self.folder / name)
        self.refused(1, "is empty", "run")
        self.refused(1, "directory", "run", "-f", self.folder)
        self.refused(1, "No such file", "run", "-f", self.folder / "nope.txt")
        self.refused(1, "no chat template", "run", "stories", "-p", "a", "--chat")

    def test_empty_prompt_starts_from_bos(self):
        self.assertGreater(len(self.done("run", "-p", "", "-n", "5").out), 1)

    def test_huge_max_tokens_ends_with_the_context(self):
        result = self.done("run", "-p", "Once", "-n", "1M", "--ignore-eos")
        self.assertIn("the context of 512 tokens is full", result.err)

    def test_full_disk(self):
        with open("/dev/full", "wb") as full:
            process = subprocess.run([PROGRAM, "run", "-p", "a", "-n", "2"], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(process.returncode, 1)
        self.assertIn(b"cannot write to standard output", process.stderr)

    def test_stops_when_asked(self):
        for request in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(request=request):
                process = subprocess.Popen([PROGRAM, "bench", "--repeat", "10000"], stdout=subprocess.PIPE,
                                           stderr=subprocess.PIPE)
                time.sleep(2)
                process.send_signal(request)
                out, err = process.communicate(timeout=30)
                self.assertEqual(process.returncode, 130, err)
                self.assertIn(b"stopped", err)

    def test_ctrl_c_while_reading_a_prompt(self):
        process = subprocess.Popen([PROGRAM, "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        process.communicate()
        self.assertEqual(process.returncode, 130)

    def test_terminal(self):
        """On a terminal: asks for texts, Ctrl-D ends."""
        controller, terminal = os.openpty()
        process = subprocess.Popen([PROGRAM, "run", "-n", "3", "--temperature", "0"], stdin=terminal,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        os.close(terminal)
        os.write(controller, b"Once upon\n\n\x04")
        out, err = process.communicate(timeout=30)
        os.close(controller)
        self.assertEqual(process.returncode, 0, err)
        self.assertTrue(out.startswith(b"Once upon"))
        self.assertIn(b"> ", err)


if __name__ == "__main__":
    main()
