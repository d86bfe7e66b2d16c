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
        self.assertNotIn("the same)", self.done("explain", GOLDEN / "llama", "--all").out)
        result = json.loads(self.done("explain", GOLDEN / "llama", "--json").out)
        self.assertTrue(result["decode"]["complete"] and result["prefill"]["complete"])
        self.assertTrue(all(step["kernel"] for step in result["decode"]["steps"]))
        self.assertEqual(result["prefix_caching"], "yes")
        self.assertIn("no: the model has layers with a window", self.done("explain", GOLDEN / "gemma3").out)
        off = json.loads(self.done("explain", GOLDEN / "llama", "--json", "--disable-fusion", "all").out)
        self.assertFalse(any(fusion["applied"] for fusion in off["decode"]["fusions"]))

    def test_explain_names_what_a_device_lacks(self):
        text = self.done("explain", GOLDEN / "llama", "--activations", "bf16").out
        self.assertIn("NO KERNEL", text)
        self.assertIn("this device cannot run the model", text)


if __name__ == "__main__":
    main()
