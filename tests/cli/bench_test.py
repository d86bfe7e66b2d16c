#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""eadem bench, as a user meets it.

    bench_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json

from program import GOLDEN, STORIES, ProgramTest, main


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


if __name__ == "__main__":
    main()
