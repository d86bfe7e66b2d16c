#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What speculation costs where it gains nothing: the time of answers with it, against the same answers without.

    cost.py [--model MODEL] [--prompts DIRECTORY] [--speculate lookup] [--count 6] [--repeat 15] [--max-tokens 128]
            [--threads N] [--output FILE]

Needs the package eadem. Three engines are in one process: one with speculation, and two without, of which the second is
the control: what differs between these is the machine. Each prompt is answered by each of them in turn, --repeat times, in
an order that rotates, so that all see the same machine; then the medians count. gains.py has the same prompts, in a process
each. Tokens must be equal: the script ends with 1 where they are not. The table has, over the prompts of a file,

    cost      median of the answers' times with speculation over those without it, less one
    highest   that of the prompt with which it was highest
    control   the same two of the control
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import gains


def times_of(engines, prompt, params, repeat):
    """Seconds of each answer by engine."""
    times = {name: [] for name in engines}
    names = list(engines)
    expected = None
    for index in range(repeat + 1):  # the first round warms up
        for name in names[index % len(names):] + names[:index % len(names)]:
            start = time.perf_counter()
            [completion] = engines[name].generate(prompt, params)
            seconds = time.perf_counter() - start
            if completion.error:
                return None
            if expected is None:
                expected = completion.token_ids
            if completion.token_ids != expected:
                raise SystemExit(f"cost.py: {name} has other tokens")
            if index > 0:
                times[name].append(seconds)
    return times


def summary(rows):
    """Of the times by engine of each prompt."""
    def cost(name):
        each = [statistics.median(row[name]) / statistics.median(row["plain"]) - 1 for row in rows]
        return {"median": statistics.median(each), "highest": max(each)}
    return {"prompts": len(rows), "cost": cost("speculating"), "control": cost("control"),
            "milliseconds": 1e3 * statistics.median(statistics.median(row["plain"]) for row in rows)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--model", default=str(root / "assets/stories"))
    parser.add_argument("--prompts", type=Path, default=root.parent / "shared/data/prompts")
    parser.add_argument("--speculate", default="lookup")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    import eadem

    make = lambda **options: eadem.LLM(arguments.model, threads=arguments.threads, **options,
                                       kv_cache=eadem.PagedKVCacheConfig(prefix_caching=False, max_batch_size=1))
    engines = {"plain": make(), "speculating": make(speculate=arguments.speculate), "control": make()}
    params = eadem.SamplingParams(temperature=0, max_tokens=arguments.max_tokens, ignore_eos=True)
    results = []
    print("| Prompts | Answer | Cost, median | highest | Control, median | highest |\n|---|---|---|---|---|---|")
    for name, field in gains.FILES.items():
        path = arguments.prompts / name
        if not path.exists():
            continue
        all_times = [times_of(engines, prompt, params, arguments.repeat)
                     for prompt in gains.prompts_of(path, field, arguments.count)]
        row = summary([times for times in all_times if times])
        results.append({"file": name, **row})
        cells = [f"{100 * row[kind][which]:+.1f} %" for kind in ("cost", "control") for which in ("median", "highest")]
        print(f"| {name.split('.')[0]} | {row['milliseconds']:.0f} ms | {' | '.join(cells)} |", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps({"schema": "eadem_speculation_cost/1", "model": Path(arguments.model).name,
                                                "speculate": arguments.speculate, "results": results}, indent=1) + "\n")
    return 0 if results else 77


if __name__ == "__main__":
    sys.exit(main())
