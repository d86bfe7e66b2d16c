#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How decoding grows with the number of sequences, in Eadem and in llama.cpp, on one GGUF file in one run.

    batches.py MODEL.gguf --eadem build/release/bin/eadem [--batch 1,8,16] [--rounds 2] [--gen 32] [--depth 0]
               [--threads N] [--output RECORD.json]

What `llama-batched-bench` measures as text generation: each of B sequences gets a token in every step. Both engines
step through the same ids (llama_cpp_worker.py needs llama-cpp-python, requirements.txt). A round is, size by size, one
process of each, in alternating order; of llama.cpp the better of OpenMP's two ways to wait counts. The table has the
medians over the rounds, of the tokens a second of all sequences together and of their ratio to one sequence's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def output_of(command, **environment):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=os.environ | environment)
    if result.returncode != 0:
        raise SystemExit(f"batches.py: {' '.join(map(str, command))}: {result.stderr}")
    return result.stdout


def eadem_speed(arguments, batch):
    report = json.loads(output_of([arguments.eadem, "bench", arguments.model, "--json", "--prompt", 0, "--gen", arguments.gen,
                                   "--depth", arguments.depth, "--batch", batch, "--threads", arguments.threads,
                                   "--repeat", 1]))
    return next(row["tokens_per_second"] for row in report["results"] if row["test"] == "decode")


def llama_cpp_speed(arguments, batch):
    command = [sys.executable, HERE / "llama_cpp_worker.py", arguments.model, "--prompt", 0, "--gen", arguments.gen,
               "--depth", arguments.depth, "--batch", batch, "--threads", arguments.threads]
    return max(json.loads(output_of(command, OMP_WAIT_POLICY=policy).splitlines()[-1])["decode"]
               for policy in ("active", "passive"))


ENGINES = {"eadem": eadem_speed, "llama.cpp": llama_cpp_speed}


def table(sizes, rounds):
    """Lines of Markdown; `rounds` are {size: {engine: tokens a second}}."""
    median = lambda values: statistics.median(list(values))
    lines = ["| Sequences | Eadem, tokens/s | of one's | llama.cpp, tokens/s | of one's | Eadem / llama.cpp |",
             "|---|---|---|---|---|---|"]
    for size in sizes:
        cells = []
        for engine in ENGINES:
            speed = median(each[size][engine] for each in rounds)
            growth = median(each[size][engine] / each[sizes[0]][engine] for each in rounds)
            cells += [f"{speed:.1f}", f"{growth:.2f}"]
        ratios = [each[size]["eadem"] / each[size]["llama.cpp"] for each in rounds]
        lines.append(f"| {size} | {' | '.join(cells)} | **{median(ratios):.2f}** ({min(ratios):.2f} – {max(ratios):.2f}) |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--eadem", required=True)
    parser.add_argument("--batch", default="1,8,16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gen", type=int, default=32)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.batch.split(",")]
    rounds = []
    for index in range(arguments.rounds):
        names = list(ENGINES) if index % 2 == 0 else list(reversed(ENGINES))
        rounds.append({size: {name: ENGINES[name](arguments, size) for name in names} for size in sizes})
        if arguments.output:  # after each round, so that an interrupted run keeps what it has
            settings = {name: getattr(arguments, name) for name in ("gen", "depth", "threads")}
            arguments.output.write_text(json.dumps({"schema": "eadem_batches/1", "file": Path(arguments.model).name,
                                                    **settings, "rounds": rounds}, indent=1) + "\n")
    print("\n".join(table(sizes, rounds)))


if __name__ == "__main__":
    main()
