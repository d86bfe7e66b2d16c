#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""eadem explain, as a user meets it.

    explain_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json

from program import GOLDEN, ProgramTest, main


class Explain(ProgramTest):
    def test_explain(self):
        self.assertIn("state_space_scan (cached)", self.done("explain", GOLDEN / "granitemoehybrid").out)
        text = self.done("explain", GOLDEN / "llama", "--decode").out
        for words in ["hardware configuration", "factories", "decode:", "fusions", "memory plan", "the same)"]:
            self.assertIn(words, text)
        self.assertNotIn("prefill:", text)
        self.assertRegex(text, r"linear_qkv .*not applied: no kernel on cpu  \(\d+x\)\n")  # layers are counted, not listed
        self.assertNotIn("the same)", self.done("explain", GOLDEN / "llama", "--all").out)
        result = json.loads(self.done("explain", GOLDEN / "llama", "--json").out)
        self.assertTrue(result["decode"]["complete"] and result["prefill"]["complete"])
        self.assertTrue(all(step["kernel"] for step in result["decode"]["steps"]))
        self.assertEqual(result["prefix_caching"], "yes")
        self.assertIn("no: the model has layers with a window", self.done("explain", GOLDEN / "gemma3").out)
        off = json.loads(self.done("explain", GOLDEN / "llama", "--json", "--disable-fusion", "all").out)
        self.assertFalse(any(fusion["applied"] for fusion in off["decode"]["fusions"]))

    def test_explain_shows_layers_in_one_op(self):
        llama = GOLDEN / "llama"
        layers = json.loads((llama / "config.json").read_text())["num_hidden_layers"]
        text = self.done("explain", llama, "--device", "reference", "--decode").out
        self.assertIn(f"layers 0–{layers - 1} (one op)\n", text)
        self.assertRegex(text, rf"model\.layers\.0 - model\.layers\.{layers - 1} +decoder_layers \(layers={layers} ")
        self.assertRegex(text, rf", {2 * layers} x f32 \[64\], ")  # ports by type: two norms in a layer
        self.assertRegex(text, rf"decoder_layer +model\.layers\.N +applied  \({layers}x\)\n")
        self.assertRegex(text, rf"decoder_layers +model\.layers\.0 - model\.layers\.{layers - 1} +applied\n")

        def decode(*arguments):
            return json.loads(self.done("explain", llama, "--device", "reference", "--json", *arguments).out)["decode"]
        joined = next(step for step in decode()["steps"] if step["op"].startswith("decoder_layers"))
        self.assertEqual((joined["first_layer"], joined["layer"]), (0, layers - 1))
        apart = decode("--disable-fusion", "decoder_layers")
        alone = [step for step in apart["steps"] if step["op"].startswith("decoder_layer ")]
        self.assertEqual([step["layer"] for step in alone], list(range(layers)))
        self.assertEqual(sum(step["flops"] for step in alone), joined["flops"])
        self.assertGreater(sum(step["bytes"] for step in alone), joined["bytes"])
        self.assertIn("switched off", {fusion["reason"] for fusion in apart["fusions"]})

    def test_explain_shows_what_each_rank_would_hold(self):
        olmoe = GOLDEN / "olmoe"
        whole = json.loads(self.done("explain", olmoe, "--threads", "1", "--json").out)
        experts = json.loads((olmoe / "config.json").read_text())["num_experts"]
        self.assertNotIn("ranks", whole)

        ranks = {rank: json.loads(self.done("explain", olmoe, "--ep", "2", "--threads", "2", "--rank", str(rank),
                                            "--json").out) for rank in (0, 1)}
        plan = ranks[0]["ranks"]
        self.assertEqual(plan, ranks[1]["ranks"])
        self.assertEqual((plan["axis"], len(plan["shares"])), ("ep", 2))
        held = [share["experts"] for share in plan["shares"]]
        self.assertEqual(held[0]["begin"], 0)
        self.assertEqual(held[1]["begin"], held[0]["size"])
        self.assertEqual(held[0]["size"] + held[1]["size"], experts)
        self.assertEqual(set(plan["exchanges"]), {"expert_dispatch", "expert_combine"})
        for rank, result in ranks.items():
            self.assertTrue(result["decode"]["complete"] and result["prefill"]["complete"])
            decision = next(each for each in result["factories"] if each["subject"].startswith("experts "))
            self.assertEqual(decision["chosen"], "gathered")
            refusals = {each["candidate"]: each.get("reason") for each in decision["answers"]}
            self.assertIn("2 ranks divide the experts", refusals["grouped"])
            self.assertIn("every rank has all tokens", refusals["all_to_all"])
            stacks = [step for step in result["decode"]["steps"] if "grouped_linear" in step["op"]]
            self.assertTrue(all(f"[{held[rank]['size']}, " in step["types"] for step in stacks) and stacks)
        # Each rank holds what is no expert.
        one = json.loads(self.done("explain", olmoe, "--ep", "2", "--threads", "2", "--json").out)["ranks"]["shares"]
        self.assertTrue(all(share["weight_bytes"] > 0 and share["cache_bytes"] > 0 for share in one))

        text = self.done("explain", olmoe, "--ep", "2", "--threads", "2").out
        self.assertIn("ranks: 2 of ep", text)
        self.assertIn(f"experts 0–{held[0]['size'] - 1} of {experts}", text)
        tensors = json.loads(self.done("explain", GOLDEN / "llama", "--tp", "2", "--threads", "2", "--json").out)["ranks"]
        self.assertEqual(tensors["axis"], "tp")
        heads = [share["heads"] for share in tensors["shares"]]
        self.assertEqual(heads[1], {"begin": heads[0]["size"], "size": heads[0]["size"]})
        self.assertIn("all_reduce", tensors["exchanges"])

    def test_ranks_that_cannot_be(self):
        self.refused(2, "--rank is for --tp or --ep", "explain", GOLDEN / "olmoe", "--rank", "0")
        self.refused(2, "--rank is 2; expected 0 to 1", "explain", GOLDEN / "olmoe", "--ep", "2", "--rank", "2",
                     "--threads", "2")
        self.refused(1, "the model has 0 experts", "explain", GOLDEN / "llama", "--ep", "2", "--threads", "2")
        self.refused(2, "the processes divide either", "explain", GOLDEN / "olmoe", "--ep", "2", "--tp", "2")

    def test_explain_names_what_a_device_lacks(self):
        text = self.done("explain", GOLDEN / "llama", "--activations", "bf16").out
        self.assertIn("NO KERNEL", text)
        self.assertIn("this device cannot run the model", text)


if __name__ == "__main__":
    main()
