#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts the outputs of the benchmark programs together as one record.

    compose_record.py PARTS RESULTS [COMMIT]

PARTS holds what scripts/cpu_bench.sh's sections wrote; RESULTS/<processor>/<commit>.json becomes
  {commit, dirty, date, device, ceilings, ops: [...], benchmarks: [{command, result, output}], peers: [...]}
with what is there. COMMIT is what the programs were built from (default: the checkout as it is). A record of that commit
that exists keeps the parts that are not replaced.
"""

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path


def git(*arguments):
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def compose(parts):
    record = {}
    if (parts / "ceilings.json").exists():
        record["ceilings"] = json.loads((parts / "ceilings.json").read_text())
    ops = [json.loads(path.read_text()) for path in sorted(parts.glob("ops-*.json"))]
    if ops:
        record["ops"] = ops
    if (parts / "models.txt").exists():
        lines = (parts / "models.txt").read_text().splitlines()
        record["benchmarks"] = [{"command": command, "result": "passed", "output": json.loads(output)}
                                for command, output in zip(lines[::2], lines[1::2])]
    peers = [json.loads(path.read_text()) for path in sorted(parts.glob("peers-*.json"))]
    if peers:
        record["peers"] = peers
    return record


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown processor"


def kind_of_processor():
    """Family and model tell apart what virtual machines call by one name."""
    found = dict(re.findall(r"^(cpu family|model|cpu cores)\s*: (\d+)$", Path("/proc/cpuinfo").read_text(), re.M))
    return f"family {found.get('cpu family')} model {found.get('model')}, {found.get('cpu cores')} cores"


def main():
    parts, results = map(Path, sys.argv[1:3])
    commit = git("rev-parse", sys.argv[3] if len(sys.argv) > 3 else "HEAD")
    dirty = len(sys.argv) == 3 and bool(git("status", "--porcelain", "--untracked-files=no"))
    name = f"{processor()} ({kind_of_processor()})"
    folder = results / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    target = folder / f"{commit}.json"
    record = json.loads(target.read_text()) if target.exists() else {}
    record |= {"commit": commit, "dirty": dirty,
               "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"), "device": name}
    record |= compose(parts)
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(target)


if __name__ == "__main__":
    main()
