#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""eadem doctor, as a user meets it.

    doctor_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json

from program import ProgramTest, main


class Doctor(ProgramTest):
    def test_doctor(self):
        result = json.loads(self.done("doctor", "--json", "--threads", "1").out)
        self.assertEqual((result["threads"], result["prefill_threads"]), (1, 1))
        self.assertGreaterEqual(result["processors"], result["cores"])
        self.assertGreaterEqual(result["cores"], 1)
        self.assertGreaterEqual(result["memory_nodes"], 1)
        self.assertIsInstance(result["topology_notes"], list)
        self.assertGreater(result["read_bytes_per_second"], 0)
        self.assertIn("scalar", result["f32_flops_per_second"])
        self.assertEqual("avx512_bf16" in result["bf16_flops_per_second"], "avx512_bf16" in result["f32_flops_per_second"])


if __name__ == "__main__":
    main()
