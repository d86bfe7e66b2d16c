#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Replays traces of services with and without chunks of prompts, prefix reuse and speculation.

    trace.py --eadem build/release/bin/eadem [--model DIRECTORY] [--traces DIRECTORY] [--rounds 3] [--output RECORD]
    trace.py --page RECORD

Runs `eadem bench --trace` once for each variant of VARIANTS in each round, one after another, and writes the results as
one record; a RECORD that is there gets further rounds. --page writes the plots of a record, docs/scheduler/TRACE.svg, and prints its tables, which stand in
docs/scheduler.md: medians over the rounds.

DIRECTORY of --traces has AzureLLMInferenceTrace_conv.csv and mooncake_conversation_trace.jsonl, or either packed as .zst,
which takes the program `zstd`; the default is ../shared/data/traces. The model is a directory, by default the bundled one.
It is used with a context of 4,096 tokens, in a copy of its config.json: what it writes beyond its own context makes no
sense, and takes the time that any text takes. Without traces it ends with 77.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 4096
# Each trace has a file, a number of requests that are replayed, and a scale of times and lengths. Mooncake's conversations
# go on after minutes: only many requests of it have prefixes to reuse, and its cache has room for all prompts.
TRACES = {
    "azure": {"file": "AzureLLMInferenceTrace_conv.csv", "requests": 150, "rate": 4, "divide": 4, "options": []},
    "mooncake": {"file": "mooncake_conversation_trace.jsonl", "requests": 600, "rate": 10, "divide": 64,
                 "options": ["--cache-tokens", "200k"]},
}
CHUNKS, WHOLE = "steps of 128 tokens", "whole prompts"
VARIANTS = {
    "azure": {"as it is": [], CHUNKS: ["--step-tokens", "128"], WHOLE: ["--step-tokens", "16k"],
              "speculation by lookup": ["--speculate", "lookup"]},
    "mooncake": {"as it is": [], "without prefix reuse": ["--no-prefix-caching"], WHOLE: ["--step-tokens", "16k"]},
}
TIMES = {"time_to_first_token_seconds": "time to first token", "time_per_token_seconds": "time per token",
         "gap_between_tokens_seconds": "gap between tokens", "latency_seconds": "whole request"}
PARTS = ("p50", "p90", "p99")


# --- Measuring


def unpacked(folder, name, into):
    """The path of a trace, or None where there is none."""
    if (folder / name).exists():
        return folder / name
    if not (folder / f"{name}.zst").exists():
        return None
    subprocess.run(["zstd", "-dqo", into / name, folder / f"{name}.zst"], check=True)
    return into / name


def with_context(model, into):
    """A copy of a model's directory with another context."""
    copy = into / Path(model).name
    copy.mkdir()
    for path in Path(model).iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return copy


def command_of(trace, variant, share=1.0):
    """The options of a run."""
    settings = TRACES[trace]
    return ["--trace-requests", str(max(1, round(settings["requests"] * share))), "--trace-rate", str(settings["rate"]),
            "--trace-divide", str(settings["divide"]), *settings["options"], *VARIANTS[trace][variant]]


def run(eadem, model, path, options):
    command = [eadem, "bench", model, "--trace", path, *options, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: {result.stderr}")
    return json.loads(result.stdout)


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit():
    return subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def merged(old, new):
    """The rounds of two records, which must be of the same program, machine and options."""
    def settings(record):
        return {key: value for key, value in record.items() if key not in ("date", "traces")} | {
            "traces": [(each["trace"], [(row["variant"], row["options"]) for row in each["variants"]]) for each in record["traces"]]}
    if settings(old) != settings(new):
        raise SystemExit(f"the record is of other settings: {settings(old)}, and these are {settings(new)}")
    for before, after in zip(old["traces"], new["traces"]):
        for old_row, new_row in zip(before["variants"], after["variants"]):
            new_row["rounds"] = old_row["rounds"] + new_row["rounds"]
    return new


def measure(arguments):
    """The record, or None without traces."""
    record = {"schema": "eadem_trace/1", "commit": commit(), "processor": processor(), "context": CONTEXT,
              "model": Path(arguments.model).name, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
              "traces": []}
    with tempfile.TemporaryDirectory() as folder:
        model = with_context(arguments.model, Path(folder))
        paths = {trace: unpacked(arguments.traces, TRACES[trace]["file"], Path(folder)) for trace in TRACES}
        for trace in (trace for trace, path in paths.items() if path is not None):
            rows = [{"variant": variant, "options": " ".join(command_of(trace, variant, arguments.share)), "rounds": []}
                    for variant in VARIANTS[trace]]
            record["traces"].append({"trace": trace, "file": TRACES[trace]["file"], "variants": rows})
        for _ in range(arguments.rounds):
            for each in record["traces"]:
                for row in each["variants"]:
                    load = os.getloadavg()[0]
                    result = run(arguments.eadem, model, paths[each["trace"]], row["options"].split())
                    del result["model"], result["trace"]["file"]  # paths of this machine
                    row["rounds"].append(result | {"load_average": load})
                    first = result["time_to_first_token_seconds"]["p50"]
                    print(f"{each['trace']}, {row['variant']}: {result['finished']} requests in {result['seconds']:.1f} s, "
                          f"first token after {1000 * first:.1f} ms, load {load:.1f}", file=sys.stderr, flush=True)
    return record if record["traces"] else None


# --- The page


def milliseconds(seconds):
    return f"{1000 * seconds:,.2f}" if seconds < 0.01 else f"{1000 * seconds:,.1f}" if seconds < 0.1 else f"{1000 * seconds:,.0f}"


def median(row, *keys):
    """Over the rounds of a variant, of the value below these keys."""
    values = []
    for result in row["rounds"]:
        for key in keys:
            result = result[key]
        values.append(result)
    return statistics.median(values)


def table(trace):
    """Lines of a table with a row for each variant."""
    lines = ["| | tokens/s in | out | from the cache | tokens a step | " + " | ".join(TIMES.values()) + " |",
             "|---|" + "---|" * (4 + len(TIMES))]
    for row in trace["variants"]:
        cells = [row["variant"], f"{median(row, 'prompt_tokens_per_second'):,.0f}", f"{median(row, 'generated_tokens_per_second'):,.0f}",
                 f"{median(row, 'cached_share'):.0%}", f"{median(row, 'computed_tokens') / median(row, 'steps'):,.1f}"]
        cells += [" / ".join(milliseconds(median(row, key, part)) for part in PARTS) for key in TIMES]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot(trace):
    """Bars of the times of each variant, a panel for each time on a scale of its own."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from performance_summary import STYLE

    rows = trace["variants"]
    left, width, bar, gap, title = 150, 260, 11, 8, 26
    panel = title + len(rows) * (len(PARTS) * bar + gap) + 8
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (left + width + 60)}" height="{44 + 2 * panel}" font-size="11">',
             STYLE, '<rect class="back" width="100%" height="100%"/>',
             f'<text x="8" y="18" font-size="13">{trace["file"]}, milliseconds</text>']
    shades = {"p50": 1.0, "p90": 0.65, "p99": 0.35}
    for index, part in enumerate(PARTS):
        lines.append(f'<rect x="{left + 60 * index}" y="26" width="10" height="10" class="eadem" opacity="{shades[part]}"/>'
                     f'<text x="{left + 60 * index + 14}" y="35">{part}</text>')
    for index, (key, name) in enumerate(TIMES.items()):
        x, y = left + index % 2 * (left + width + 60), 44 + index // 2 * panel
        scale = max(median(row, key, part) for row in rows for part in PARTS)
        lines.append(f'<text x="{x}" y="{y + 16}" font-size="12">{name}</text>')
        y += title
        for row in rows:
            lines.append(f'<text x="{x - 6}" y="{y + bar * len(PARTS) / 2 + 4:.0f}" text-anchor="end">{row["variant"]}</text>')
            for part in PARTS:
                value = median(row, key, part)
                length = width * value / scale
                lines.append(f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{bar - 2}" class="eadem" opacity="{shades[part]}"/>'
                             f'<text x="{x + length + 4:.1f}" y="{y + bar - 3}" font-size="9">{milliseconds(value)}</text>')
                y += bar
            y += gap
    return "\n".join([*lines, "</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eadem")
    parser.add_argument("--model", default=str(ROOT / "assets/stories"))
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared/data/traces")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests, for a test")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    if arguments.page:
        for trace in json.loads(arguments.page.read_text())["traces"]:
            (ROOT / "docs/scheduler").mkdir(exist_ok=True)
            (ROOT / f"docs/scheduler/{trace['trace']}.svg").write_text(plot(trace))
            print("\n".join([trace["trace"], "", *table(trace), ""]))
        return 0
    if not arguments.eadem:
        parser.error("--eadem or --page is needed")
    record = measure(arguments)
    if record is None:
        print(f"skipped: {arguments.traces} has none of {', '.join(each['file'] for each in TRACES.values())}")
        return 77
    if arguments.output and arguments.output.exists():
        record = merged(json.loads(arguments.output.read_text()), record)
    text = json.dumps(record, indent=1) + "\n"
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
