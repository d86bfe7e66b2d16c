#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the same GGUF files through Eadem and llama.cpp, turn by turn, and writes what came out.

    peers.py MODEL.gguf [MODEL.gguf ...] --eadem build/release/bin/eadem --ceilings build/release/bin/eadem_ceilings
             [--rounds 3] [--prompt 512] [--gen 64] [--depth 0] [--batch 1] [--threads N] [--out RECORD.json]

Runs in an environment with requirements.txt installed. A round is: the machine's ceilings, then one process of each
engine (in alternating order); each process loads the file, warms up, and is timed once. Medians over rounds, the lowest
and highest, the ratio of the two round by round, and the share of the ceiling: bytes of weights and of the cached
keys and values per token over the read bandwidth for decode; 2 operations per matrix element and token, attention, and
the head for one token over the 8-bit peak (quantized) or the f32 peak for prefill. Losses are published as they are.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMA = "eadem_peers/1"


# --- What a step must do, counted from the file


def count(path):
    """Facts of a GGUF file: bytes and elements that each token reads, the shape of its attention, its types."""
    import gguf

    reader = gguf.GGUFReader(path)

    def number(key, default=None):
        field = reader.fields.get(f"{family}.{key}")
        return default if field is None else int(field.parts[field.data[0]][0])

    field = reader.fields["general.architecture"]
    family = bytes(field.parts[field.data[0]]).decode()
    heads, hidden = number("attention.head_count"), number("embedding_length")
    names = {tensor.name for tensor in reader.tensors}
    head = "output.weight" if "output.weight" in names else "token_embd.weight"
    weight_bytes, matrix_elements, types = 0, 0, {}
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] = types.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
        if tensor.name == "token_embd.weight" and head != tensor.name:
            continue
        weight_bytes += int(tensor.n_bytes)
        if len(tensor.shape) == 2 and tensor.name != head:
            matrix_elements += int(tensor.n_elements)
    head_elements = next(int(tensor.n_elements) for tensor in reader.tensors if tensor.name == head)
    return {"weight_bytes": weight_bytes, "matrix_elements": matrix_elements, "head_elements": head_elements,
            "layers": number("block_count"), "heads": heads, "kv_heads": number("attention.head_count_kv", heads),
            "head_dim": number("attention.key_length", hidden // heads), "bytes_by_type": types}


def is_quantized(facts):
    types = facts["bytes_by_type"]
    return sum(size for name, size in types.items() if name not in ("F32", "F16", "BF16")) > sum(types.values()) / 2


def decode_bytes_per_token(facts, depth, gen, batch, kv_value_bytes):
    mean_length = depth + (gen + 1) / 2
    kv = 2 * facts["layers"] * facts["kv_heads"] * facts["head_dim"] * kv_value_bytes * mean_length
    return facts["weight_bytes"] / batch + kv


def prefill_operations_per_token(facts, depth, prompt):
    attention = 4 * facts["layers"] * facts["heads"] * facts["head_dim"] * (depth + (prompt + 1) / 2)
    return 2 * facts["matrix_elements"] + attention + 2 * facts["head_elements"] / prompt


# --- Running


def run(command, **environment):
    """What a command prints, and its wall time."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=os.environ | environment)
    out, err = process.communicate()
    seconds = time.perf_counter() - start
    if process.returncode != 0:
        sys.exit(f"peers.py: {' '.join(command)} failed:\n{err[-2000:]}")
    return out, seconds


def seconds_to_first_output(command):
    """From the start of a process to the first byte that it prints."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = process.stdout.read(1)
    seconds = time.perf_counter() - start
    _, err = process.communicate()
    if process.returncode != 0 or not first:
        sys.exit(f"peers.py: {' '.join(command)} failed:\n{err.decode(errors='replace')[-2000:]}")
    return seconds


def shown(command):
    """A command for the record: without the folders of this machine."""
    return " ".join(Path(word).name if "/" in word else word for word in command)


def eadem_run(arguments, model):
    command = [arguments.eadem, "bench", model, "--json", "--threads", str(arguments.threads), "--prompt",
               str(arguments.prompt), "--gen", str(arguments.gen), "--depth", str(arguments.depth), "--batch",
               str(arguments.batch), "--repeat", "1"]
    output = json.loads(run(command)[0])
    result = {"command": shown(command), "read_bytes_per_second": output["read_bytes_per_second"]}
    for row in output["results"]:
        result[row["test"]] = row["tokens_per_second"]
    # From the start of the process, after a prompt of 32 bytes, which is printed with the first token.
    command = [arguments.eadem, "run", model, "--threads", str(arguments.threads), "-q", "-n", "1", "-p",
               "a prompt of just thirty-two bytes"[:32]]
    result["first_token_seconds"] = seconds_to_first_output(command)
    if arguments.pack_cache:
        command += ["--pack-cache", arguments.pack_cache]
        for _ in range(2):  # writes the pack where there is none, and compares what is new
            run(command)
        result["first_token_from_pack_seconds"] = seconds_to_first_output(command)
    return result


def llama_cpp_run(arguments, model):
    """The better, test by test, of OpenMP's two ways to wait: spinning is faster on a quiet machine, and slower by any
    factor on one whose processors others use as well."""
    command = [sys.executable, str(Path(__file__).with_name("llama_cpp_worker.py")), model, "--threads",
               str(arguments.threads), "--prompt", str(arguments.prompt), "--gen", str(arguments.gen), "--depth",
               str(arguments.depth), "--batch", str(arguments.batch)]
    results = {policy: json.loads(run(command, OMP_WAIT_POLICY=policy)[0].splitlines()[-1])
               for policy in ("active", "passive")}
    best = dict(results["active"])
    for test in ("prefill", "decode"):
        if test in best:
            best[test] = max(result[test] for result in results.values())
            best[test + "_by_wait_policy"] = {policy: result[test] for policy, result in results.items()}
    best["first_token_seconds"] = min(result["first_token_seconds"] for result in results.values())
    best["command"] = shown(command)
    return best


def ceilings_run(arguments):
    """The best figure of each kind: other users of the machine can only lower it."""
    command = [arguments.ceilings, "--json", "--threads", str(arguments.threads), "--seconds", "0.1", "--groups",
               "compute,tensor_core,bandwidth"]
    best = {}
    for row in json.loads(run(command)[0])["rows"]:
        best[row["name"]] = max(best.get(row["name"], 0), row["value"])
    return {"read_bytes_per_second": max(best["read"], best["read_streams"]), "f32": best["f32"], "int8": best["int8"],
            **{name: best[name] for name in ("bf16", "amx_int8", "amx_bf16") if name in best}}


# --- Summaries


def spread(values):
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def summarize(facts, rounds, settings):
    """Of each test: both engines' speeds and shares, and their ratio."""
    quantized = is_quantized(facts)
    ceiling = {name: statistics.median(r["ceilings"][name] for r in rounds)
               for name in rounds[0]["ceilings"] if all(name in r["ceilings"] for r in rounds)}
    peak = "int8" if quantized else "f32"
    cost = {"prefill": prefill_operations_per_token(facts, settings["depth"], max(settings["prompt"], 1)) / ceiling[peak],
            "decode": decode_bytes_per_token(facts, settings["depth"], settings["gen"], settings["batch"],
                                             2) / ceiling["read_bytes_per_second"]}
    summary = {"ceilings": ceiling, "prefill_peak": peak}
    for test in ("prefill", "decode"):
        if test not in rounds[0]["eadem"]:
            continue
        row = {}
        for engine in ("eadem", "llama.cpp"):
            row[engine] = spread([r[engine][test] for r in rounds])
            row[engine]["share"] = row[engine]["median"] * cost[test]
        row["ratio"] = spread([r["eadem"][test] / r["llama.cpp"][test] for r in rounds])
        summary[test] = row
    summary["first_token_seconds"] = {engine: spread([r[engine]["first_token_seconds"] for r in rounds])
                                      for engine in ("eadem", "llama.cpp")}
    if all("first_token_from_pack_seconds" in r["eadem"] for r in rounds):
        summary["first_token_from_pack_seconds"] = spread([r["eadem"]["first_token_from_pack_seconds"] for r in rounds])
    return summary


def table(models):
    lines = [f"{'file':<34} {'test':<8} {'eadem t/s':>10} {'share':>6} {'llama.cpp':>10} {'share':>6} {'ratio':>6}"]
    for model in models:
        for test in ("prefill", "decode"):
            row = model["summary"].get(test)
            if row is None:
                continue
            lines.append(f"{Path(model['file']).name:<34} {test:<8} {row['eadem']['median']:>10.1f} "
                         f"{row['eadem']['share']:>6.0%} {row['llama.cpp']['median']:>10.1f} "
                         f"{row['llama.cpp']['share']:>6.0%} {row['ratio']['median']:>6.2f}")
    return "\n".join(lines)


def cpu_name():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def git(*arguments):
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--eadem", default=str(ROOT / "build/release/bin/eadem"))
    parser.add_argument("--ceilings", default=str(ROOT / "build/release/bin/eadem_ceilings"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--pack-cache", help="a folder: eadem's first token also with `eadem run --pack-cache` there")
    parser.add_argument("--commit", help="what --eadem was built from (default: the checkout as it is)")
    parser.add_argument("--out", type=Path, help="the record; its folder is made")
    arguments = parser.parse_args()

    settings = {name: getattr(arguments, name) for name in ("rounds", "prompt", "gen", "depth", "batch", "threads")}
    models = []
    for model in arguments.models:
        facts, rounds = count(model), []
        for index in range(arguments.rounds):
            record = {"ceilings": ceilings_run(arguments), "load_average": os.getloadavg()[0]}
            engines = [("eadem", eadem_run), ("llama.cpp", llama_cpp_run)]
            for name, engine in engines if index % 2 == 0 else reversed(engines):
                record[name] = engine(arguments, model)
            record["ceilings"]["read_bytes_per_second"] = max(record["ceilings"]["read_bytes_per_second"],
                                                              record["eadem"]["read_bytes_per_second"])
            rounds.append(record)
        models.append({"file": Path(model).name, "facts": facts, "rounds": rounds,
                       "summary": summarize(facts, rounds, settings)})
        print(table(models[-1:]), flush=True)
        if arguments.out:  # after each model, so that an interrupted run keeps what it has
            write_record(arguments, settings, models)
    print("\n" + table(models))


def write_record(arguments, settings, models):
    llama_cpp = models[0]["rounds"][0]["llama.cpp"]
    record = {"schema": SCHEMA, "commit": arguments.commit or git("rev-parse", "HEAD"),
              "dirty": not arguments.commit and bool(git("status", "--porcelain", "--untracked-files=no")),
              "cpu": cpu_name(), "settings": settings,
              "versions": {"llama-cpp-python": llama_cpp["version"], "llama.cpp system": llama_cpp["system"],
                           "eadem": run([arguments.eadem, "--version"])[0].strip()},
              "command": shown(sys.argv), "models": models}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
