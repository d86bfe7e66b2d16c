#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Smoke tests of the benchmark programs: they run, their records have the stated form, and --compare judges as stated.

    benchmarks_test.py EADEM_CEILINGS EADEM_OP_BENCH EADEM_TRAINING_BENCH EADEM_SCHEDULING_BENCH EADEM_HOOKS_BENCH
                       EADEM_SOAK EADEM_PREFIX_BENCH

No timing decides here: comparisons are of records that this test writes.
"""

import copy
import gzip
import importlib.util
import json
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
CEILINGS, OP_BENCH, TRAINING_BENCH, SCHEDULING_BENCH, HOOKS_BENCH, SOAK, PREFIX_BENCH = sys.argv[1:8]


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def load(path):
    sys.path.insert(0, str(path.parent))  # a script may import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TrainingBench(unittest.TestCase):
    def test_record(self):
        config = HERE.parent / "tests/data/golden/llama/config.json"
        result = run(TRAINING_BENCH, config, "--batch", "2", "--sequence", "8", "--steps", "1", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        record = json.loads(result.stdout)
        self.assertEqual(record["schema"], "eadem_training_bench/1")
        row = record["results"][0]
        self.assertEqual((row["test"], row["batch"], row["tokens"]), ("training", 2, 8))
        self.assertGreater(row["tokens_per_second"], 0)
        self.assertGreater(record["loss"], 0)

    def test_experts_count_where_a_token_chooses_them(self):
        config = HERE.parent / "tests/data/golden/olmoe/config.json"
        stated = json.loads(config.read_text())
        result = run(TRAINING_BENCH, config, "--batch", "2", "--sequence", "8", "--steps", "1", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        record = json.loads(result.stdout)
        hidden, layers = stated["hidden_size"], stated["num_hidden_layers"]
        unchosen = stated["num_experts"] - stated["num_experts_per_tok"]
        multiplied = (record["parameters"] - stated["vocab_size"] * hidden
                      - layers * unchosen * 3 * hidden * stated["intermediate_size"])
        expected = 6 * multiplied + 6 * layers * hidden * 8  # heads x head_dim is hidden
        actual = record["flops_per_second"] / record["results"][0]["tokens_per_second"]
        self.assertAlmostEqual(actual / expected, 1, delta=1e-3)

    def test_a_missing_config_is_named(self):
        result = run(TRAINING_BENCH, "/nowhere/config.json")
        self.assertEqual(result.returncode, 1)
        self.assertIn("/nowhere/config.json", result.stderr)


class SpeculationGains(unittest.TestCase):
    def setUp(self):
        self.gains = load(HERE / "speculation" / "gains.py")

    def test_prompts_are_the_first_of_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "questions.jsonl"
            path.write_text('{"turns": ["a", "b"]}\n{"turns": ["c"]}\n\n{"turns": ["d"]}\n')
            self.assertEqual(self.gains.prompts_of(path, "turns", 2), ["a", "c"])
            packed = Path(folder) / "questions.jsonl.gz"
            packed.write_bytes(gzip.compress(b'{"prompt": "x"}\n'))
            self.assertEqual(self.gains.prompts_of(packed, "prompt", 5), ["x"])

    def test_summary(self):
        def record(speed, proposed=0, accepted=0, per_step=1.0):
            return {"decode_tokens_per_second": speed, "proposed_tokens": proposed, "accepted_tokens": accepted,
                    "tokens_per_step": per_step}
        row = self.gains.summary([(record(10), record(20, 8, 6, 2.0)), (record(10), record(9, 2, 0)),
                                  (record(20), record(30, 0, 0, 1.5))])
        self.assertEqual((row["prompts"], row["gain"], row["worst"]), (3, 1.5, 0.9))
        self.assertEqual((row["accepted"], row["tokens_per_step"], row["tokens_per_second"]), (0.6, 1.5, 10))
        self.assertIsNone(self.gains.summary([(record(1), record(1))])["accepted"])
        self.assertEqual(self.gains.middle([record(5), record(1), record(3)]), record(3))


class SpeculationCost(unittest.TestCase):
    def test_medians_of_answers_and_of_prompts(self):
        cost = load(HERE / "speculation" / "cost.py")
        row = lambda *times: {"plain": [1, 1, 9], "speculating": list(times), "control": [1, 1, 1]}
        summary = cost.summary([row(1.5, 1.5, 4), row(0.5, 1, 1), row(1.25, 1.25, 8)])
        self.assertEqual(summary, {"prompts": 3, "cost": {"median": 0.25, "highest": 0.5},
                                   "control": {"median": 0, "highest": 0}, "milliseconds": 1000})

    def test_times_are_of_every_engine_in_turn(self):
        cost = load(HERE / "speculation" / "cost.py")
        order = []

        class Engine:
            def __init__(self, name, tokens=(1, 2)):
                self.name, self.tokens = name, tokens

            def generate(self, prompt, params):
                order.append(self.name)
                return [types.SimpleNamespace(error="", token_ids=list(self.tokens))]

        times = cost.times_of({"plain": Engine("a"), "control": Engine("b")}, "x", None, 2)
        self.assertEqual(order, list("abbaab"))
        self.assertEqual({name: len(each) for name, each in times.items()}, {"plain": 2, "control": 2})
        with self.assertRaises(SystemExit):
            cost.times_of({"plain": Engine("a"), "control": Engine("b", (1, 3))}, "x", None, 1)


class DecodeOfRanks(unittest.TestCase):
    def test_ratios_are_of_neighbours(self):
        decode = load(HERE / "ranks" / "decode.py")
        order = []

        def answer(name, speeds):
            left = iter(speeds)
            def speed():
                order.append(name)
                return next(left)
            return speed

        pairs = decode.pairs_of(answer("one", [9, 10, 10, 5, 15]), answer("several", [9, 11, 9, 5, 5]), 2)
        self.assertEqual(order, ["one", "several"] + ["one", "several", "several", "one"] * 2)
        self.assertEqual(pairs, [(10, 10), (10, 5)])
        self.assertEqual(decode.summary(pairs + [(10, 12), (10, 11)]),
                         {"one": 10, "several": 10.5, "ratio": 1.05, "quartiles": (0.875, 1.125)})


class TraceReplays(unittest.TestCase):
    def setUp(self):
        self.trace = load(HERE / "scheduling" / "trace.py")

    def test_options(self):
        self.assertEqual(self.trace.command_of("azure", "steps of 128 tokens"),
                         ["--trace-requests", "150", "--trace-rate", "4", "--trace-divide", "4", "--step-tokens", "128"])
        self.assertEqual(self.trace.command_of("mooncake", "without prefix reuse", 0.01)[:2], ["--trace-requests", "6"])

    def test_rounds_of_two_sittings(self):
        def record(rounds, options="--x"):
            return {"commit": "a", "date": str(rounds), "traces": [
                {"trace": "azure", "file": "f", "variants": [{"variant": "v", "options": options, "rounds": rounds}]}]}
        both = self.trace.merged(record([{"steps": 1}, {"steps": 5}]), record([{"steps": 3}]))
        row = both["traces"][0]["variants"][0]
        self.assertEqual(row["rounds"], [{"steps": 1}, {"steps": 5}, {"steps": 3}])
        self.assertEqual(self.trace.median(row, "steps"), 3)
        with self.assertRaises(SystemExit):
            self.trace.merged(record([]), record([], "--y"))

    def test_the_context_is_that_of_a_copy(self):
        source = HERE.parent / "tests/data/golden/llama"
        with tempfile.TemporaryDirectory() as folder:
            copy = self.trace.with_context(source, Path(folder))
            before, after = (json.loads((path / "config.json").read_text()) for path in (source, copy))
            self.assertEqual(after, before | {"max_position_embeddings": 4096})
            self.assertEqual({path.name for path in copy.iterdir()}, {path.name for path in source.iterdir() if path.is_file()})

    def test_the_page_is_what_the_records_say(self):
        root = HERE.parent
        page = (root / "docs/scheduler.md").read_text()
        records = list((HERE / "results/traces").glob("*.json"))
        self.assertTrue(records)
        for path in records:
            for trace in json.loads(path.read_text())["traces"]:
                self.assertIn("\n".join(self.trace.table(trace)), page)
                self.assertEqual((root / f"docs/scheduler/{trace['trace']}.svg").read_text(), self.trace.plot(trace))


class Soak(unittest.TestCase):
    def test_nothing_accumulates(self):
        result = run(SOAK, "--seconds", "2", "--json")  # the test benchmarks/soak runs for a minute
        self.assertEqual(result.returncode, 0, result.stderr)
        record = json.loads(result.stdout)
        self.assertEqual((record["name"], record["wrong"]), ("soak", 0))
        self.assertGreater(record["tokens"], 0)

    def test_a_run_without_variety_is_no_success(self):
        result = run(SOAK, "--seconds", "0.1", "--cache-tokens", "65536", "--json")
        self.assertEqual(result.returncode, 1)
        self.assertIn("nothing was preempted", result.stderr)


class HooksBench(unittest.TestCase):
    def test_record(self):
        result = run(HOOKS_BENCH, HERE.parent / "tests/data/golden/llama", "--steps", "5", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual([row["name"] for row in rows],
                         [f"hooks/{name}" for name in ("none", "again", "one", "all")])
        for row in rows:
            self.assertEqual(row["steps"], 5)
            self.assertGreater(row["median_us"], 0)


class PrefixBench(unittest.TestCase):
    def test_record(self):
        result = run(PREFIX_BENCH, HERE.parent / "tests/data/golden/qwen3_5/config.json", "--prefix", "40", "--own", "9",
                     "--answer", "4", "--rounds", "1", "--threads", "1", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}
        self.assertEqual(list(rows), [f"prefixes/{kind}/{reuse}" for kind in ("first", "second", "turn")
                                      for reuse in ("without", "with")])
        for name, row in rows.items():
            self.assertEqual(row["rounds"], 1)
            self.assertGreater(row["first_token_ms"], 0)
            self.assertTrue(row["cached_tokens"] == 0 or name == "prefixes/turn/with", name)


class SchedulingBench(unittest.TestCase):
    def test_record(self):
        result = run(SCHEDULING_BENCH, "--steps", "20", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual({row["running"] for row in rows}, {8, 64, 256, 1024})
        self.assertEqual({row["name"] for row in rows}, {f"scheduling/{name}" for name in ("decode", "serving", "pressure")})
        for row in rows:
            self.assertGreater(row["median_us"], 0)
            self.assertLessEqual(row["median_us"], row["p99_us"])


class Ceilings(unittest.TestCase):
    def test_record(self):
        result = run(CEILINGS, "--json", "--seconds", "0.001", "--threads", "1", "--groups", "compute,kernel")
        self.assertEqual(result.returncode, 0, result.stderr)
        record = json.loads(result.stdout)
        self.assertEqual(record["schema"], "eadem_ceilings/1")
        self.assertEqual(set(record), {"schema", "cpu", "isas", "caches", "rows"})
        names = {row["name"] for row in record["rows"]}
        self.assertLessEqual({"f32", "parallel region"}, names)
        for row in record["rows"]:
            self.assertEqual(set(row), {"name", "variant", "threads", "working_set_bytes", "value", "unit"})
            self.assertGreater(row["value"], 0)

    def test_unknown_group_is_refused(self):
        self.assertNotEqual(run(CEILINGS, "--groups", "weather").returncode, 0)


class OpBench(unittest.TestCase):
    def test_rows_of_every_op_run_and_are_checked(self):
        """The tiny rows: each kernel agrees with its reference, or the program fails."""
        result = run(OP_BENCH, "--filter", "tiny decode-1", "--seconds", "0", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        record = json.loads(result.stdout)
        self.assertEqual(record["schema"], "eadem_op_bench/1")
        ops = {row["row"].split("/")[0] for row in record["rows"]}
        self.assertLessEqual({"linear", "attention", "rms_norm", "rope", "sample", "kv_append", "embedding"}, ops)
        forms = {row["row"].rsplit("/", 1)[1] for row in record["rows"] if row["row"].startswith("linear/")}
        self.assertLessEqual({"f32", "f16", "bf16", "q4_0", "q8_0"}, forms)
        for row in record["rows"]:
            self.assertGreater(row["median_seconds"], 0)
            self.assertLessEqual(row["low_seconds"], row["median_seconds"])
            self.assertGreaterEqual(row["high_seconds"], row["median_seconds"])

    def test_every_op_has_rows(self):
        result = run(OP_BENCH, "--list")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "", "ops whose rows no kernel takes")
        self.assertIn("grouped_linear/qwen3-30b-a3b decode-1 experts up_proj/q4_k", result.stdout.splitlines())

    def test_no_row_is_an_error(self):
        self.assertEqual(run(OP_BENCH, "--filter", "no such row").returncode, 2)

    @staticmethod
    def record(medians, spread=0.02):
        rows = [{"row": f"op/row {i}", "kernel": "k", "pass": "inference", "median_seconds": median,
                 "low_seconds": median * (1 - spread), "high_seconds": median * (1 + spread), "samples": 9, "bytes": 1.0,
                 "flops": 1.0, "share": 0.5, "limit": "memory", "cold": True, "copies": 1, "error": 0.0}
                for i, median in enumerate(medians)]
        return {"schema": "eadem_op_bench/1", "cpu": "c", "device": "d", "threads": 1, "rows": rows}

    def compare(self, before, after):
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, name) for name in ("before.json", "after.json")]
            for path, record in zip(paths, (before, after)):
                path.write_text(json.dumps(record))
            return run(OP_BENCH, "--compare", *map(str, paths))

    def test_compare(self):
        base = [1e-3] * 10
        before = self.record(base)
        self.assertEqual(self.compare(before, before).returncode, 0)
        # A twentieth is noise; a third is not, and is named; faster is fine.
        self.assertEqual(self.compare(before, self.record([1.05e-3] + base[1:])).returncode, 0)
        slower = self.compare(before, self.record([1.33e-3] + base[1:]))
        self.assertEqual(slower.returncode, 1)
        self.assertIn("op/row 0", slower.stdout)
        self.assertNotIn("op/row 1 ", slower.stdout)
        self.assertEqual(self.compare(before, self.record([0.5e-3] + base[1:])).returncode, 0)
        # A spread as wide as the difference hides it.
        self.assertEqual(self.compare(self.record(base, 0.4), self.record([1.33e-3] + base[1:], 0.4)).returncode, 0)
        # A machine that is slower as a whole is no regression, but one row beyond it is; few rows show no drift.
        drifted = [1.3e-3] * 10
        self.assertEqual(self.compare(before, self.record(drifted)).returncode, 0)
        self.assertEqual(self.compare(before, self.record([2e-3] + drifted[1:])).returncode, 1)
        self.assertEqual(self.compare(self.record(base[:3]), self.record(drifted[:3])).returncode, 1)

    def test_compare_refuses(self):
        before = self.record([1e-3])
        other = copy.deepcopy(before)
        other["device"] = "another"
        self.assertEqual(self.compare(before, other).returncode, 2)
        other = copy.deepcopy(before)
        other["schema"] = "something/1"
        self.assertEqual(self.compare(before, other).returncode, 2)
        other = copy.deepcopy(before)
        other["rows"][0]["row"] = "op/other"
        self.assertEqual(self.compare(before, other).returncode, 2)


class Batches(unittest.TestCase):
    def test_the_table_has_medians_of_rounds(self):
        table = load(HERE / "peers" / "batches.py").table
        rounds = [{1: {"eadem": 10, "llama.cpp": 8}, 8: {"eadem": 40, "llama.cpp": 20}},
                  {1: {"eadem": 12, "llama.cpp": 8}, 8: {"eadem": 60, "llama.cpp": 40}},
                  {1: {"eadem": 20, "llama.cpp": 10}, 8: {"eadem": 80, "llama.cpp": 20}}]
        self.assertEqual(table([1, 8], rounds)[2:], [
            "| 1 | 12.0 | 1.00 | 8.0 | 1.00 | **1.50** (1.25 – 2.00) |",
            "| 8 | 60.0 | 4.00 | 20.0 | 2.50 | **2.00** (1.50 – 4.00) |"])


class Peers(unittest.TestCase):
    FACTS = {"weight_bytes": 1000, "matrix_elements": 600, "head_elements": 300, "layers": 2, "heads": 4, "kv_heads": 2,
             "head_dim": 8, "bytes_by_type": {"Q4_K": 900, "F32": 100}}

    def setUp(self):
        self.peers = load(HERE / "peers" / "peers.py")

    def test_costs(self):
        # 2 * 2 layers * 2 heads * 8 values of 2 bytes = 128 bytes a cached token; 64 tokens see 32.5 on average.
        self.assertEqual(self.peers.decode_bytes_per_token(self.FACTS, 0, 64, 1, 2), 1000 + 128 * 32.5)
        self.assertEqual(self.peers.decode_bytes_per_token(self.FACTS, 100, 64, 4, 2), 250 + 128 * 132.5)
        experts = self.FACTS | {"expert_bytes": 800, "experts": 16, "chosen_experts": 2}
        self.assertEqual(self.peers.decode_bytes_per_token(experts, 0, 64, 1, 2), 200 + 100 + 128 * 32.5)
        self.assertEqual(self.peers.decode_bytes_per_token(experts, 0, 64, 4, 2), (200 + 400) / 4 + 128 * 32.5)
        self.assertEqual(self.peers.decode_bytes_per_token(experts, 0, 64, 32, 2), 1000 / 32 + 128 * 32.5)
        # Of a latent of 6 values, one for keys and values, and heads of 3 and 2: 2 layers * 6 values of 2 bytes a token.
        latent = self.FACTS | {"latent_values": 6, "head_widths": 5}
        self.assertEqual(self.peers.decode_bytes_per_token(latent, 0, 64, 1, 2), 1000 + 24 * 32.5)
        self.assertEqual(self.peers.prefill_operations_per_token(latent, 0, 512),
                         1200 + 2 * 2 * 4 * 5 * 256.5 + 600 / 512)
        attention = 4 * 2 * 4 * 8 * 256.5
        self.assertEqual(self.peers.prefill_operations_per_token(self.FACTS, 0, 512), 1200 + attention + 600 / 512)
        self.assertTrue(self.peers.is_quantized(self.FACTS))

    def test_prefill_is_measured_against_what_multiplies_it(self):
        tiles = self.CEILINGS | {"amx_bf16": 16e6, "amx_int8": 32e6}
        for types, ceilings, peak in (({"Q4_K": 900, "F32": 100}, tiles, "int8"), ({"BF16": 900, "F32": 10}, tiles, "amx_bf16"),
                                      ({"BF16": 900, "F32": 10}, self.CEILINGS, "f32"), ({"F32": 900}, tiles, "f32"),
                                      ({"BF16": 900, "F32": 10}, self.CEILINGS | {"bf16": 2e6}, "bf16"),
                                      ({"F16": 900, "F32": 10}, tiles, "f32"), ({"I8": 900, "BF16": 400}, tiles, "amx_int8"),
                                      ({"I8": 900, "BF16": 400}, self.CEILINGS, "int8"),
                                      ({"I8": 400, "BF16": 600}, tiles, "amx_int8"), ({"Q4_K": 400, "BF16": 600}, tiles, "int8"),
                                      ({"Q8_0": 900, "F32": 9}, tiles, "int8")):
            self.assertEqual(self.peers.prefill_peak({"bytes_by_type": types}, ceilings), peak, types)
        rounds = [round_ | {"ceilings": tiles} for round_ in self.rounds({})]
        summary = self.peers.summarize(self.FACTS | {"bytes_by_type": {"BF16": 1000}}, rounds, self.SETTINGS)
        self.assertEqual(summary["prefill_peak"], "amx_bf16")
        operations = self.peers.prefill_operations_per_token(self.FACTS, 0, 512)
        self.assertAlmostEqual(summary["prefill"]["eadem"]["share"], 250 * operations / 16e6)

    CEILINGS = {"read_bytes_per_second": 1e6, "f32": 1e6, "int8": 4e6}
    SETTINGS = {"rounds": 3, "prompt": 512, "gen": 64, "depth": 0, "batch": 1, "threads": 2}

    def rounds(self, others):
        return [{"ceilings": self.CEILINGS, "load_average": 0.5,
                 "eadem": {"prefill": p, "decode": d, "first_token_seconds": 1.0, "peak_memory_bytes": 1200}} | others
                for p, d in ((200.0, 60.0), (300.0, 70.0), (250.0, 65.0))]

    def test_summary(self):
        rounds = self.rounds({"llama.cpp": {"prefill": 100.0, "decode": 50.0, "first_token_seconds": 2.0}})
        summary = self.peers.summarize(self.FACTS, rounds, self.SETTINGS)
        self.assertEqual(summary["prefill"]["eadem"]["median"], 250)
        self.assertEqual(summary["prefill"]["ratios"], {"llama.cpp": {"median": 2.5, "lowest": 2.0, "highest": 3.0}})
        self.assertEqual(summary["prefill_peak"], "int8")
        self.assertEqual(summary["first_token_seconds"]["llama.cpp"]["median"], 2.0)
        self.assertNotIn("first_token_from_pack_seconds", summary)
        for round_, seconds in zip(rounds, (0.5, 0.3, 0.4)):
            round_["eadem"]["first_token_from_pack_seconds"] = seconds
        summary = self.peers.summarize(self.FACTS, rounds, self.SETTINGS)
        self.assertEqual(summary["first_token_from_pack_seconds"], {"median": 0.4, "lowest": 0.3, "highest": 0.5})
        self.assertAlmostEqual(summary["decode"]["eadem"]["share"], 65 * (1000 + 128 * 32.5) / 1e6)
        self.assertEqual(summary["failed"], {})
        self.assertEqual(set(summary["peak_memory_bytes"]), {"eadem"})

    def directory_record(self):
        """With an engine that has fewer bytes of weights, and one that cannot run in the second round."""
        rounds = self.rounds({"openvino": {"prefill": 50.0, "decode": 20.0, "first_token_seconds": 2.0,
                                           "weight_bytes": 500, "peak_memory_bytes": 3000, "versions": {"openvino": "9"}},
                              "torch": {"prefill": 10.0, "decode": 5.0, "versions": {"torch": "8"}}})
        rounds[1]["torch"] = {"error": "torch_worker.py: exit status 1: no such operator"}
        model = {"file": "tiny int8", "type": "int8", "facts": self.FACTS, "rounds": rounds,
                 "summary": self.peers.summarize(self.FACTS, rounds, self.SETTINGS)}
        return {"commit": "0" * 40, "dirty": False, "settings": self.SETTINGS, "models": [model],
                "versions": self.peers.versions_in([model])}

    def test_engines_that_fail_are_recorded(self):
        record = self.directory_record()
        self.assertEqual(record["versions"], {"openvino": "9", "torch": "8"})
        summary = record["models"][0]["summary"]
        self.assertEqual(summary["failed"], {"torch": "torch_worker.py: exit status 1: no such operator"})
        self.assertEqual(set(summary["decode"]), {"eadem", "openvino", "ratios"})
        self.assertAlmostEqual(summary["decode"]["openvino"]["share"], 20 * (500 + 128 * 32.5) / 1e6)
        self.assertIn("no such operator", self.peers.table(record["models"]))
        page = load(HERE.parent / "scripts" / "performance_page.py")
        text = "\n".join(page.peers_section("tiny", {"peers": [record]}))
        self.assertIn("The same directory", text)
        self.assertNotIn("The same GGUF file", text)
        self.assertIn("| tiny int8 | decode | openvino | 20.0 | 20.0 – 20.0 | 9% | **3.25** (3.00 – 3.50) | 0 MB |", text)
        self.assertIn("- tiny int8, torch: torch_worker.py: exit status 1", text)
        self.assertIn("openvino 9, torch 8", text)

    def test_engines_by_kind(self):
        self.assertEqual(self.peers.engines_for("gguf", []), ["eadem", "llama.cpp"])
        self.assertEqual(self.peers.engines_for("bf16", ["openvino", "eadem", "llama.cpp"]), ["eadem", "openvino"])
        self.assertIn("torch dynamic", self.peers.engines_for("int8", []))

    def test_directory_facts(self):
        with tempfile.TemporaryDirectory() as folder:
            shapes = {"model.embed_tokens.weight": ("BF16", [10, 8], 160), "model.norm.weight": ("F32", [8], 32),
                      "model.layers.0.mlp.up_proj.weight_packed": ("I32", [6, 2], 48),
                      "model.layers.0.mlp.up_proj.weight_scale": ("BF16", [6, 1], 12)}
            header, end = {"__metadata__": {"format": "pt"}}, 0
            for name, (dtype, shape, size) in shapes.items():
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
                end += size
            text = json.dumps(header).encode()
            Path(folder, "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
            config = {"num_attention_heads": 4, "hidden_size": 8, "num_hidden_layers": 1, "num_key_value_heads": 2,
                      "quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}}
            Path(folder, "config.json").write_text(json.dumps(config))
            facts = self.peers.count(Path(folder))
        self.assertEqual(facts, {"weight_bytes": 252, "matrix_elements": 48, "head_elements": 80, "layers": 1, "heads": 4,
                                 "kv_heads": 2, "head_dim": 2, "bytes_by_type": {"BF16": 172, "F32": 32, "I8": 48}})

    def test_arguments_are_refused(self):
        script = HERE / "peers" / "peers.py"
        for words, message in ((["nope.gguf"], "no file or directory nope.gguf"),
                               ([script, "--types", "bf16,int3"], "--types: 'int3'; expected some of bf16, f32, int8"),
                               ([script, "--engines", "torch"], "eadem, which is missing"),
                               ([script, "--engines", "abacus,eadem"], "--engines: 'abacus'"),
                               ([script, "--rounds", "0"], "--rounds is 0; expected at least 1"),
                               ([script, "--gen", "-1"], "--gen is -1; expected at least 0"),
                               ([HERE, "--batch", "2"], "--batch is for GGUF files")):
            result = run(sys.executable, script, *map(str, words))
            self.assertEqual(result.returncode, 2, words)
            self.assertIn(message, result.stderr)

    def test_errors_are_told_by_their_end(self):
        self.assertEqual(self.peers.last_words("way\nTraceback\n\n  here\nValueError: no\n"), "here | ValueError: no")
        self.assertEqual(self.peers.last_words(""), "no message")
        with self.assertRaisesRegex(self.peers.EngineError, "exit status 3: bad luck"):
            self.peers.run([sys.executable, "-c", "import sys; sys.exit(print('bad luck', file=sys.stderr) or 3)"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
