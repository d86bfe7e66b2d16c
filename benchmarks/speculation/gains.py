#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What speculation gains: the speed of decoding with and without it, on prompts of benchmarks.

    gains.py --eadem build/release/bin/eadem [--model MODEL] [--prompts DIRECTORY] [--speculate lookup,MODEL]
             [--count 10] [--repeat 3] [--max-tokens 128] [--temperature 0] [--output FILE]

DIRECTORY has any of HumanEval.jsonl.gz, gsm8k_test.jsonl.zst (which takes the program `zstd`) and
mt_bench_question.jsonl; the default is ../shared/data/prompts. Of each file, --count prompts from its beginning are
continued, each in a process of its own, with and without speculation in turn, so that both see the same machine, --repeat
times; the median speed counts. Texts must be equal: the script ends with 1 where they are not. Prompts that are longer
than the model's context are left out. The table has medians over the prompts:

    gain        tokens a second with speculation, against those without
    worst       the least gain of any prompt
    accepted    share of the proposed tokens
    a step      tokens that a decode step brings

Without any of the files it ends with 77.
"""

import argparse
import gzip
import json
import statistics
import subprocess
import sys
from pathlib import Path

FILES = {"HumanEval.jsonl.gz": "prompt", "gsm8k_test.jsonl.zst": "question", "mt_bench_question.jsonl": "turns"}


def lines_of(path):
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode().splitlines()
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dc", path], check=True, capture_output=True).stdout.decode().splitlines()
    return path.read_text().splitlines()


def prompts_of(path, field, count):
    """The first prompts of a file; of several turns, the first one."""
    values = [json.loads(line)[field] for line in lines_of(path) if line.strip()][:count]
    return [value[0] if isinstance(value, list) else value for value in values]


def run(arguments, prompt, speculate):
    """The record of a run, or None where the prompt is longer than the model's context."""
    command = [arguments.eadem, "run", arguments.model, "-f", "-", "--json", "--max-tokens", str(arguments.max_tokens),
               "--temperature", str(arguments.temperature), "--seed", "1", "--ignore-eos", "--speculate", speculate]
    result = subprocess.run(command, input=prompt, capture_output=True, text=True, check=False)
    if result.returncode != 0 and "the context holds" in result.stderr:
        return None
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {result.stderr}")
    return json.loads(result.stdout)


def summary(pairs):
    """What pairs of records, of runs without and with speculation, say together."""
    gains = [with_it["decode_tokens_per_second"] / without["decode_tokens_per_second"] for without, with_it in pairs]
    proposed = sum(with_it["proposed_tokens"] for _, with_it in pairs)
    accepted = sum(with_it["accepted_tokens"] for _, with_it in pairs)
    return {"prompts": len(pairs), "gain": statistics.median(gains), "worst": min(gains),
            "accepted": accepted / proposed if proposed else None,
            "tokens_per_step": statistics.median(with_it["tokens_per_step"] for _, with_it in pairs),
            "tokens_per_second": statistics.median(without["decode_tokens_per_second"] for without, _ in pairs)}


def middle(records):
    """The record of median speed."""
    return sorted(records, key=lambda record: record["decode_tokens_per_second"])[len(records) // 2]


def measure(arguments, prompts, speculate):
    pairs = []
    for index, prompt in enumerate(prompts):
        if run(arguments, prompt, "none") is None:
            continue
        runs = [(run(arguments, prompt, "none"), run(arguments, prompt, speculate)) for _ in range(arguments.repeat)]
        if any(without["token_ids"] != with_it["token_ids"] for without, with_it in runs):
            raise SystemExit(f"prompt {index}: the text with --speculate {speculate} is another one")
        pairs.append((middle([without for without, _ in runs]), middle([with_it for _, with_it in runs])))
    return summary(pairs) if pairs else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--eadem", required=True)
    parser.add_argument("--model", default=str(root / "assets/stories"))
    parser.add_argument("--prompts", type=Path, default=root.parent / "shared/data/prompts")
    parser.add_argument("--speculate", default="lookup")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    files = {arguments.prompts / name: field for name, field in FILES.items() if (arguments.prompts / name).exists()}
    if not files:
        print(f"skipped: {arguments.prompts} has none of {', '.join(FILES)}")
        return 77
    rows = []
    print(f"{'prompts':<28} {'speculate':<20} {'plain tok/s':>12} {'gain':>6} {'worst':>6} {'accepted':>9} {'a step':>7}")
    for path, field in files.items():
        prompts = prompts_of(path, field, arguments.count)
        for speculate in arguments.speculate.split(","):
            measured = measure(arguments, prompts, speculate)
            if measured is None:
                print(f"{path.name:<28} {speculate:<20} no prompt fits the model's context")
                continue
            row = {"file": path.name, "speculate": speculate, **measured}
            rows.append(row)
            share = "-" if row["accepted"] is None else f"{100 * row['accepted']:.0f} %"
            print(f"{row['file']:<28} {speculate:<20} {row['tokens_per_second']:>12.1f} {row['gain']:>6.2f} "
                  f"{row['worst']:>6.2f} {share:>9} {row['tokens_per_step']:>7.2f}", flush=True)
    if arguments.output:
        record = {"schema": "eadem_speculation_gains/1", "model": arguments.model, "max_tokens": arguments.max_tokens,
                  "temperature": arguments.temperature, "results": rows}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
