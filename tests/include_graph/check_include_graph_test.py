#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants one violation of every rule in a small tree and expects check_include_graph.py to name it."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_include_graph as graph  # noqa: E402

# A tree that keeps every rule; `planted` adds to it.
CLEAN = {
    "eadem/core/tensor.h": "#include <vector>\nstruct Row final {};\nusing Column = int;\n",
    "eadem/core/row.cc": '#include "eadem/core/tensor.h"\nRow row;\n',
    "eadem/core/log.cc": "#include <cstdlib>\nauto level = std::getenv(\"EADEM_LOG\");\n",
    "eadem/core/device/context.h": "#include <cuda_runtime.h>\n",
    "eadem/core/device/cuda_device.h": "#include <memory>\n",
    "eadem/kernels/linear.h": '#include "eadem/core/tensor.h"\n',
    "eadem/kernels/cpu/simd-inl.h": '#include "hwy/highway.h"\n#include <immintrin.h>\n',
    "eadem/kernels/cpu/linear/linear.cc": '#include "eadem/kernels/cpu/simd-inl.h"\n#include "eadem/kernels/linear.h"\n',
    "eadem/kernels/cuda/linear/linear.cu": "#include <cublasLt.h>\n#include <cuda_runtime.h>\n"
                                    '#include "eadem/core/device/context.h"\n',
    "eadem/ops/linear.h": '#include "eadem/core/tensor.h"\n#include "eadem/kernels/linear.h"\n',
    "eadem/fusions/add_rms_norm.cc": '#include "eadem/kernels/linear.h"\n#include "eadem/ops/linear.h"\n',
    "eadem/fusions/list.h": '#include "eadem/core/tensor.h"\n',
    "eadem/pipeline/graph.h": '#include "eadem/fusions/list.h"\n#include "eadem/ops/linear.h"\n',
    "eadem/modules/module.h": '#include "eadem/pipeline/graph.h"\n',
    "eadem/modules/base.h": '#include "eadem/modules/base/rope.h"\n',
    "eadem/modules/base/rope.h": '#include "eadem/modules/module.h"\n',
    "eadem/modules/factory/linear.h": '#include "eadem/modules/base/rope.h"\n',
    "eadem/modules/hybrid/mlp.h": '#include "eadem/modules/factory/linear.h"\n',
    "eadem/modules/modules.h": '#include "eadem/modules/base.h"\n#include "eadem/modules/hybrid/mlp.h"\n',
    "eadem/modules/auto_hardware_config.cc": '#include "eadem/modules/hybrid/mlp.h"\n',
    "eadem/io/gguf.h": '#include "eadem/core/tensor.h"\n',
    "eadem/models/llama.cc": '#include "eadem/io/gguf.h"\n#include "eadem/modules/modules.h"\n',
    "eadem/distributed/nccl.cc": "#include <mpi.h>\n#include <nccl.h>\n",
    "eadem/engine/infer_engine.h": '#include "eadem/ops/linear.h"\n#include "eadem/pipeline/graph.h"\n',
    "eadem/train/trainer.h": '#include "eadem/pipeline/graph.h"\n',
    "eadem/cli/run.cc": '#include "eadem/core/device/cuda_device.h"\n#include "eadem/engine/infer_engine.h"\n'
                        '#include "eadem/train/trainer.h"\n',
    "eadem/python/module.cc": "#include <nanobind/nanobind.h>\n" '#include "eadem/engine/infer_engine.h"\n',
    "eadem/experimental/idea.cc": '#include "eadem/kernels/linear.h"\n#include "eadem/models/llama.h"\n',
    "eadem/ops/CMakeLists.txt": "eadem_layer(ops LINK eadem::core eadem::kernels)  # Not eadem::engine.\n",
    "tests/experimental/idea_test.cc": '#include "eadem/experimental/idea.h"\n',
    "tests/kernels/linear_test.cc": '#include "eadem/kernels/linear.h"\n#include <cuda_runtime.h>\n',
    "python/eadem/__init__.py": "import os  # os.environ is not read\n",
}

# (rule, file, its text, the line, what the message must contain)
FORBIDDEN = [
    ("core -> anything", "eadem/core/x.cc", '\n#include "eadem/io/gguf.h"\n', 2, "core -> io is forbidden"),
    ("kernels -> ops", "eadem/kernels/x.cc", '#include "eadem/ops/linear.h"\n', 1, "kernels -> ops is forbidden"),
    ("ops -> fusions", "eadem/ops/x.cc", '#include "eadem/fusions/list.h"\n', 1,
     "fusions may be used by experimental, pipeline only"),
    ("fusions -> pipeline", "eadem/fusions/x.cc", '#include "eadem/pipeline/graph.h"\n', 1, "fusions -> pipeline"),
    ("pipeline -> kernels", "eadem/pipeline/x.cc", '#include "eadem/kernels/linear.h"\n', 1,
     "kernels may be used by experimental, fusions, ops only"),
    ("modules -> models", "eadem/modules/x.cc", '#include "eadem/models/llama.h"\n', 1, "modules -> models"),
    ("modules -> io", "eadem/modules/x.cc", '#include "eadem/io/gguf.h"\n', 1, "modules -> io"),
    ("models -> kernels", "eadem/models/x.h", "\n" * 11 + '#include "eadem/kernels/linear.h"\n', 12,
     "models -> kernels is forbidden"),
    ("models -> pipeline", "eadem/models/x.h", '#include "eadem/pipeline/graph.h"\n', 1, "models -> pipeline"),
    ("io -> modules", "eadem/io/x.h", '#include "eadem/modules/modules.h"\n', 1, "io -> modules"),
    ("distributed -> io", "eadem/distributed/x.h", '#include "eadem/io/gguf.h"\n', 1, "distributed -> io"),
    ("engine -> train", "eadem/engine/x.cc", '#include "eadem/train/trainer.h"\n', 1, "engine -> train"),
    ("engine -> kernels", "eadem/engine/x.cc", '#include "eadem/kernels/linear.h"\n', 1, "engine -> kernels"),
    ("engine -> fusions", "eadem/engine/x.cc", '#include "eadem/fusions/list.h"\n', 1, "engine -> fusions"),
    ("train -> engine", "eadem/train/x.cc", '#include "eadem/engine/infer_engine.h"\n', 1, "train -> engine"),
    ("cli -> kernels", "eadem/cli/x.cc", '#include "eadem/kernels/linear.h"\n', 1, "cli -> kernels"),
    ("cli -> python", "eadem/cli/x.cc", '#include "eadem/python/x.h"\n', 1, "cli -> python"),
    ("server -> cli", "eadem/server/x.cc", '#include "eadem/cli/x.h"\n', 1, "server -> cli"),
    ("python -> fusions", "python/src/x.cc", '#include "eadem/fusions/list.h"\n', 1, "python -> fusions"),
    ("engine -> experimental", "eadem/engine/x.cc", '#include "eadem/experimental/idea.h"\n', 1,
     "nothing may use experimental"),
    ("tests -> experimental", "tests/ops/x.cc", '#include "eadem/experimental/idea.h"\n', 1,
     "tests -> experimental is forbidden"),
    ("experimental -> engine", "eadem/experimental/x.cc", '#include "eadem/engine/infer_engine.h"\n', 1,
     "experimental -> engine"),
    ("eadem -> tests", "eadem/ops/x.cc", '#include "tests/workloads/rows.h"\n', 1, "ops -> tests is forbidden"),
    ("an unknown layer", "eadem/misc/x.cc", "int x;\n", 1, "layer 'misc' is not in the rule table"),
    ("a file of no layer", "eadem/x.h", "int x;\n", 1, "is not in the rule table"),
    ("an include of an unknown layer", "eadem/ops/x.cc", '#include "eadem/misc/x.h"\n', 1, "'misc' is not a layer"),
    ("a path relative to the file", "eadem/models/x.h", '#include "../kernels/linear.h"\n', 1, "models -> kernels"),
    ("angle brackets", "eadem/models/x.h", "#include <eadem/kernels/linear.h>\n", 1, "models -> kernels"),
    ("spaces", "eadem/models/x.h", ' # include\t"eadem/kernels/linear.h" // why\n', 1, "models -> kernels"),
    ("a .cu file", "eadem/core/x.cu", '#include "eadem/io/gguf.h"\n', 1, "core -> io"),
    ("a .cuh file", "eadem/core/x.cuh", '#include "eadem/io/gguf.h"\n', 1, "core -> io"),
    ("an -inl.h file", "eadem/core/x-inl.h", '#include "eadem/io/gguf.h"\n', 1, "core -> io"),
    ("base -> factory", "eadem/modules/base/x.h", '#include "eadem/modules/factory/linear.h"\n', 1,
     "modules/base -> modules/factory is forbidden"),
    ("base -> hybrid", "eadem/modules/base/x.h", '#include "eadem/modules/hybrid/mlp.h"\n', 1,
     "modules/base -> modules/hybrid is forbidden"),
    ("factory -> hybrid", "eadem/modules/factory/x.cc", '#include "eadem/modules/hybrid/mlp.h"\n', 1,
     "modules/factory -> modules/hybrid is forbidden"),
    ("the header of a tier", "eadem/modules/base/x.h", '#include "eadem/modules/factory.h"\n', 1,
     "modules/base -> modules/factory is forbidden"),
    ("a tier -> modules.h", "eadem/modules/hybrid/x.h", '#include "eadem/modules/modules.h"\n', 1,
     "modules/hybrid -> modules/whole is forbidden"),
    ("shared -> base", "eadem/modules/x.h", '#include "eadem/modules/base/rope.h"\n', 1,
     "modules/shared -> modules/base is forbidden"),
    ("Highway in ops", "eadem/ops/x.cc", '#include "hwy/highway.h"\n', 1, "SIMD header"),
    ("intrinsics in core", "eadem/core/x.cc", "#include <immintrin.h>\n", 1, "SIMD header <immintrin.h> in core"),
    ("NEON in io", "eadem/io/x.cc", "#include <arm_neon.h>\n", 1, "SIMD header"),
    ("CUDA in the engine", "eadem/engine/x.cc", "#include <cuda_runtime_api.h>\n", 1, "CUDA header"),
    ("cuBLAS in ops", "eadem/ops/x.cc", '#include "cublasLt.h"\n', 1, "CUDA header"),
    ("CUB in fusions", "eadem/fusions/x.cu", "#include <cub/cub.cuh>\n", 1, "CUDA header"),
    ("MPI in the engine", "eadem/engine/x.cc", "#include <mpi.h>\n", 1, "MPI header"),
    ("NCCL in core", "eadem/core/x.cc", "#include <nccl.h>\n", 1, "NCCL header"),
    ("nanobind in the engine", "eadem/engine/x.cc", "#include <nanobind/nanobind.h>\n", 1, "Python header"),
    ("Python.h in core", "eadem/core/x.cc", "#include <Python.h>\n", 1, "Python header"),
    ("a header that brings SIMD", "eadem/ops/x.cc", '#include "eadem/kernels/cpu/simd-inl.h"\n', 1,
     "brings the SIMD header <"),
    ("a header that brings CUDA", "eadem/engine/x.cc", '#include "eadem/core/device/context.h"\n', 1,
     "brings the CUDA header <cuda_runtime.h> into engine"),
    ("getenv", "eadem/engine/x.cc", '\nauto* x = std::getenv("X");\n', 2, "getenv"),
    ("setenv", "eadem/cli/x.cc", 'int x = setenv("X", "1", 1);\n', 1, "setenv"),
    ("os.environ", "python/eadem/x.py", 'import os\nx = os.environ["X"]\n', 2, "os.environ"),
    ("a type that is not included", "eadem/models/x.h", "\nvoid take(const Row& row);\n", 2,
     "Row is defined in eadem/core/tensor.h, which this file does not include"),
    ("an alias that is not included", "eadem/core/x.cc", "Column column;\n", 1, "Column is defined in eadem/core/tensor.h"),
    ("a computed include", "eadem/ops/x.cc", "#include HEADER\n", 1, "computed include HEADER"),
    ("a link", "eadem/models/CMakeLists.txt", "# A comment.\neadem_layer(models LINK eadem::core eadem::kernels)\n", 2,
     "link: models -> kernels is forbidden"),
    ("a link in a .cmake file", "eadem/kernels/cuda/backend.cmake", "target_link_libraries(eadem_kernels eadem_ops)\n",
     1, "link: kernels -> ops is forbidden"),
]

# Texts that break no rule although they look like it.
ALLOWED = [
    ("a comment", '// #include "eadem/engine/infer_engine.h"\n/*\n#include "eadem/engine/infer_engine.h"\n*/\n'),
    ("a raw string", 'const char* x = R"x(\n#include "eadem/engine/infer_engine.h"\n)" getenv )x";\n'),
    ("a string", 'const char* x = "a // getenv";\n'),
    ("a quote in a character", "char x = '\"'; // getenv\nchar y = '\"';\n"),
    ("digit separators", "int x = 1'000'000; // it's getenv\n"),
    ("a longer name", "int my_getenv_count = 0;\n"),
    ("a type that is announced", "struct Row;\nvoid take(const Row& row);\n"),
    ("a type of its own", "struct Table {\n  enum class Column { first };\n  Column column;\n};\n"),
    ("a member with a type's name", "int x = table.Row + table->Column;\n"),
    ("a word in an own header's name", '#include "cuda_table.h"\n'),
]


def write(root, files):
    for file, text in files.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


class IncludeGraphTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = Path(folder.name)
        write(cls.root, CLEAN)

    def violations(self, planted):
        """Of the clean tree with `planted` files, which are taken away again."""
        self.assertFalse(set(planted) & set(CLEAN))
        write(self.root, planted)
        try:
            return graph.Checker(self.root).run()
        finally:
            for file in planted:
                (self.root / file).unlink()

    def test_clean_tree_has_no_violation(self):
        self.assertEqual(self.violations({}), [])

    def test_each_rule_is_enforced_with_file_line_and_edge(self):
        for name, file, text, line, expected in FORBIDDEN:
            with self.subTest(name):
                found = self.violations({file: text})
                self.assertTrue(found, "nothing was found")
                for violation in found:
                    self.assertTrue(violation.startswith(f"{file}:{line}: "), violation)
                self.assertTrue(any(expected in violation for violation in found), found)

    def test_comments_and_literals_are_not_code(self):
        for name, text in ALLOWED:
            with self.subTest(name):
                self.assertEqual(self.violations({"eadem/core/x.cc": text, "eadem/core/cuda_table.h": ""}), [])

    def test_every_pair_of_layers_is_decided_by_the_table(self):
        pairs = [(source, target) for source in graph.RULES for target in graph.RULES]
        found = self.violations({f"eadem/{source}/to_{target}.cc": f'#include "eadem/{target}/planted.h"\n'
                                 for source, target in pairs})
        expected = sorted(f"eadem/{source}/to_{target}.cc:1: {source} -> {target} is forbidden"
                          for source, target in pairs if target != source and target not in graph.RULES[source])
        self.assertEqual(sorted(": ".join(violation.split(": ")[:2]) for violation in found), expected)

    def test_cycles_are_named(self):
        for length in (1, 2, 3):
            with self.subTest(length):
                planted = {f"eadem/core/c{i}.h": f'#include <map>\n#include "eadem/core/c{(i + 1) % length}.h"\n'
                           for i in range(length)}
                found = self.violations(planted)
                chain = " -> ".join(f"eadem/core/c{i % length}.h" for i in range(length + 1))
                self.assertEqual(found, [f"eadem/core/c{length - 1}.h:2: include cycle: {chain}"])

    def test_program_prints_violations_and_fails(self):
        with tempfile.TemporaryDirectory() as folder:
            program = [sys.executable, graph.__file__, folder]
            write(Path(folder), CLEAN)
            clean = subprocess.run(program, capture_output=True, text=True)
            write(Path(folder), {"eadem/models/x.h": '#include "eadem/kernels/linear.h"\n'})
            broken = subprocess.run(program, capture_output=True, text=True)
        self.assertEqual((clean.returncode, clean.stdout), (0, ""))
        self.assertEqual(broken.returncode, 1)
        self.assertIn("eadem/models/x.h:1: models -> kernels is forbidden", broken.stdout)

    def test_wrong_root_is_an_error(self):
        with tempfile.TemporaryDirectory() as empty:
            result = subprocess.run([sys.executable, graph.__file__, empty], capture_output=True, text=True)
        self.assertEqual(result.returncode, 2)


if __name__ == "__main__":
    unittest.main()
