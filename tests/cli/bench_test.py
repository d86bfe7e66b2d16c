#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""eadem bench, as a user meets it.

    bench_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json

from program import DATA, GOLDEN, STORIES, ProgramTest, Terminal, main


class Bench(ProgramTest):
    def test_bench(self):
        config = GOLDEN / "llama/config.json"
        result = json.loads(self.done("bench", "--random", config, "--type", "bf16", "--prompt", "16", "--gen",
                                      "4", "--depth", "0,8", "--batch", "1,2", "--repeat", "2", "--json").out)
        self.assertEqual(len(result["results"]), 8)
        for row in result["results"]:
            self.assertLessEqual(row["lowest"], row["tokens_per_second"])
            self.assertLessEqual(row["tokens_per_second"], row["highest"])
        weights, cache = result["weight_bytes"], result["kv_cache_bytes"]
        # Two tensors a layer of [2 sequences, 24 tokens in whole blocks of 16, kv heads, head_dim] in f32 or 16 bits.
        shape = json.loads(config.read_text())
        values = 2 * 2 * 32 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        self.assertIn(cache, (2 * values, 4 * values))
        self.assertGreater(result["peak_memory_bytes"], weights + cache)
        self.assertAlmostEqual(result["peak_memory_ratio"],
                               result["peak_memory_bytes"] / (weights + cache + result["activation_bytes"]))
        self.refused(1, "tokens of context", "bench", "--random", config, "--depth", "1M")
        threads = ["-t", "1", "--prefill-threads", "2", "--prompt", "16", "--gen", "2", "--repeat", "1"]
        result = json.loads(self.done("bench", "--random", config, *threads, "--json").out)
        self.assertEqual((result["threads"], result["prefill_threads"]), (1, 2))
        self.assertIn("1 thread, 2 for prefill)", self.done("bench", "--random", config, *threads).out)
        self.refused(2, "give one", "bench", GOLDEN / "llama", "--random", config)

    def test_bench_of_decoding_alone(self):
        result = json.loads(self.done("bench", "stories", "--prompt", "0", "--gen", "4", "--repeat", "1", "--speculate",
                                      "lookup", "--json").out)
        self.assertEqual([row["test"] for row in result["results"]], ["decode"])
        self.assertEqual(result["end_to_end"]["drawn_tokens"], 4)

    def test_bench_takes_every_type_that_convert_writes(self):
        config = STORIES / "config.json"
        listed = self.done("convert", "--help").out
        parameters = None
        for name in ("f16", "q4_k_m", "q8_0", "int8", "int4_g32", "int4_g64", "int4_g128", "fp8", "fp8_block128"):
            with self.subTest(name):
                self.assertIn(name, listed)
                result = json.loads(self.done("bench", "--random", config, "--type", name, "--prompt", "3", "--gen", "2",
                                              "--repeat", "1", "--json").out)
                self.assertEqual(len(result["results"]), 2)
                # The embedding of directories' types stays in 16 bits; nothing takes more than that.
                parameters = parameters or result["parameters"]
                self.assertLess(result["weight_bytes_per_step"], 2.1 * parameters)
        self.refused(2, "int5", "bench", "--random", config, "--type", "int5")

    def test_trace(self):
        azure, mooncake = DATA / "traces/azure.csv", DATA / "traces/mooncake.jsonl"
        result = json.loads(self.done("bench", "stories", "--trace", azure, "--trace-divide", "4", "--json").out)
        self.assertEqual(result["trace"], {"file": str(azure), "requests": 5, "replayed": 4, "left_out": 1, "rate": 1.0,
                                           "divide": 4, "has_prefixes": False})
        self.assertEqual((result["arrived"], result["finished"], result["failed"], result["stopped"]), (4, 4, 0, False))
        self.assertEqual(result["prompt_tokens"], 94 + 99 + 220 + 23)
        self.assertEqual(result["generated_tokens"], 11 + 28 + 14 + 4)
        self.assertEqual(result["cached_tokens"], 0)
        self.assertGreaterEqual(result["seconds"], result["last_arrival_seconds"])
        self.assertAlmostEqual(result["last_arrival_seconds"], 0.710427)
        for key, count in (("time_to_first_token", 4), ("time_per_token", 4), ("gap_between_tokens", 53), ("latency", 4)):
            row = result[f"{key}_seconds"]
            self.assertEqual(row["count"], count)
            self.assertTrue(0 < row["p50"] <= row["p90"] <= row["p99"], row)
        self.assertEqual(result["settings"], {"running": 16, "step_tokens": 512, "cache_tokens": 16 * 240,
                                              "block_size": 16, "prefix_caching": True, "speculate": "none",
                                              "draft_tokens": 0})
        # Every switch, at once: requests come together, in chunks, without prefixes, in a small cache.
        switches = ["--trace", mooncake, "--trace-divide", "8", "--trace-rate", "1e6", "--trace-requests", "5", "--json"]
        with_them = ["--running", "4", "--step-tokens", "32", "--cache-tokens", "304", "--no-prefix-caching",
                     "--speculate", "lookup", "--draft-tokens", "3"]
        result = json.loads(self.done("bench", "stories", *switches, *with_them).out)
        self.assertEqual(result["settings"], {"running": 4, "step_tokens": 32, "cache_tokens": 304, "block_size": 16,
                                              "prefix_caching": False, "speculate": "lookup", "draft_tokens": 3})
        self.assertEqual((result["finished"], result["cached_tokens"], result["trace"]["requests"]), (5, 0, 6))
        self.assertLessEqual(result["most_running"], 4)
        # The prompts have blocks of 64 tokens: 0 1 2 3, 0 1 2 4, 0 1, 5 6, 0 1 2 3. The first has 250 tokens, and of a
        # prompt the last token is always computed.
        result = json.loads(self.done("bench", "stories", *switches).out)
        self.assertEqual(result["cached_tokens"], 192 + 112 + 240)
        self.assertAlmostEqual(result["cached_share"], (192 + 112 + 240) / result["prompt_tokens"])

    def test_trace_as_text(self):
        out = self.done("bench", "--random", STORIES / "config.json", "--type", "q8_0", "--trace", DATA / "traces/azure.csv",
                        "--trace-divide", "4", "--trace-rate", "10").out
        for words in ("azure.csv: 4 of 5 requests, times divided by 10, lengths divided by 4; 1 left out, longer than the model's "
                      "context of 512 tokens", "at most 16 running, steps of 512 tokens, a cache of 3840 tokens, prefixes "
                      "reused, no speculation", "4 requests finished in ", "time to first token ", "time per token ",
                      "gap between tokens ", "whole request ", "0 preemptions", "memory: "):
            self.assertIn(words, out)

    def test_trace_on_a_model_with_windows(self):
        result = json.loads(self.done("bench", "--random", GOLDEN / "gemma3/config.json", "--trace",
                                      DATA / "traces/mooncake.jsonl", "--trace-divide", "16", "--json").out)
        self.assertEqual((result["finished"], result["trace"]["left_out"], result["settings"]["prefix_caching"]), (4, 2, False))

    def test_trace_on_two_ranks(self):
        result = json.loads(self.done("bench", "stories", "--tp", "2", "--trace", DATA / "traces/mooncake.jsonl",
                                      "--trace-divide", "8", "--trace-rate", "1e6", "--json").out)
        self.assertEqual((result["finished"], result["ranks"]), (6, 2))

    def test_trace_that_is_stopped_says_what_was_done(self):
        trace = self.folder / "trace.csv"
        trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,8,4\n2023-11-16 18:15:47,8,4\n"
                         "2023-11-16 19:15:46,8,4\n")
        terminal = Terminal("bench", "stories", "--trace", trace, "--trace-rate", "100", "--json")
        terminal.read_until(" 67 % 0 run, 0 wait")  # the third one comes after 36 s
        terminal.type(b"\x03")
        code, rest = terminal.end()
        self.assertEqual(code, 130, rest)
        result = json.loads(rest[rest.index(b"{"):rest.rindex(b"}") + 1])
        self.assertEqual((result["stopped"], result["finished"], result["arrived"]), (True, 2, 2))
        self.assertEqual(result["generated_tokens"], 8)
        self.assertIn(b"stopped; 2 of 3 requests had ended", rest)

    def test_traces_that_are_refused(self):
        azure = DATA / "traces/azure.csv"
        for option in (["--prompt", "5"], ["--gen", "5"], ["--depth", "5"], ["--batch", "5"], ["--repeat", "5"]):
            self.refused(2, f"{option[0]} and --trace both say what to measure", "bench", "stories", "--trace", azure, *option)
        for option in (["--trace-requests", "5"], ["--trace-rate", "2"], ["--trace-divide", "2"], ["--running", "5"],
                       ["--step-tokens", "5"], ["--cache-tokens", "5"], ["--no-prefix-caching"]):
            self.refused(2, f"{option[0]} is for --trace", "bench", "stories", *option)
        for option, value in (("--trace-requests", "0"), ("--trace-divide", "0"), ("--running", "-1"), ("--running", "1M"),
                              ("--step-tokens", "15"), ("--cache-tokens", "0"), ("--trace-rate", "0"),
                              ("--trace-rate", "-1"), ("--trace-rate", "nan"), ("--trace-rate", "x")):
            self.refused(2, f"{option} is ", "bench", "stories", "--trace", azure, option, value)
        self.refused(1, ["No such file", "/nowhere/t.csv"], "bench", "stories", "--trace", "/nowhere/t.csv")
        self.refused(1, "it is a directory", "bench", "stories", "--trace", self.folder)
        self.refused(1, "--cache-tokens is 32; the longest request has 234 tokens", "bench", "stories", "--trace", azure,
                     "--trace-divide", "4", "--cache-tokens", "32")
        self.refused(1, "the shortest of 5 requests has 107 tokens; the model's context is 64", "bench", "--random",
                     self.config_with_context(64), "--trace", azure)
        wrong = self.folder / "wrong.csv"
        wrong.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,8,-4\n")
        self.refused(1, f"{wrong}:2: GeneratedTokens is '-4'", "bench", "stories", "--trace", wrong)
        self.refused(1, "config.json:1: byte 1", "bench", "stories", "--trace", STORIES / "config.json")

    def config_with_context(self, tokens):
        config = json.loads((STORIES / "config.json").read_text())
        path = self.folder / "config.json"
        path.write_text(json.dumps(config | {"max_position_embeddings": tokens}))
        return path


if __name__ == "__main__":
    main()
