#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""eadem perplexity, as a user meets it.

    perplexity_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json

from program import ProgramTest, main


class Perplexity(ProgramTest):
    def test_perplexity(self):
        text = self.folder / "text.txt"
        text.write_text("Once upon a time there was a little cat. She liked to play in the garden. " * 14)
        result = json.loads(self.done("perplexity", "stories", text, "--context", "64", "--chunks", "3", "--kl",
                                      "stories", "--json").out)
        self.assertEqual((result["chunks"], result["scored_tokens"]), (3, 3 * 31))
        self.assertEqual(result["kl_divergence"], 0)
        self.assertGreater(result["perplexity"], 1)
        (self.folder / "empty.txt").write_text("")
        self.refused(1, "is empty", "perplexity", self.folder / "empty.txt")
        self.refused(1, "less than one chunk", "perplexity", "stories", text, "--context", "512")


if __name__ == "__main__":
    main()
