#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/cpu_bench.sh [CONFIG ...]: benchmarks the program on this machine's CPU and writes the record
# benchmarks/results/<processor>/<commit>.json. Without arguments: the bundled model and every config in benchmarks/models.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh run
scripts/build.sh release eadem
eadem=build/release/bin/eadem
commit=$(git rev-parse HEAD)
processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
slug=$(tr '[:upper:] ' '[:lower:]-' <<< "$processor" | tr -cd 'a-z0-9-')
[[ $# -gt 0 ]] || set -- bundled benchmarks/models/*.json

entries=$(mktemp)
trap 'rm -f "$entries"' EXIT
for config in "$@"; do
  arguments=(bench --json)
  [[ $config == bundled ]] || arguments+=(--random "$config" --prompt 256 --gen 32 --repeat 3)
  echo "=== eadem ${arguments[*]}" >&2
  printf 'eadem %s\n' "${arguments[*]}" >> "$entries"
  "$eadem" "${arguments[@]}" | python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)))' >> "$entries"
done

mkdir -p "benchmarks/results/$slug"
python3 - "$entries" "benchmarks/results/$slug/$commit.json" "$commit" "$processor" << 'PYTHON'
import json
import sys
from pathlib import Path

entries, target, commit, processor = sys.argv[1:]
lines = Path(entries).read_text().splitlines()
benchmarks = [{"command": command, "result": "passed", "output": json.loads(output)}
              for command, output in zip(lines[::2], lines[1::2])]
device = f"{processor}, {benchmarks[0]['output']['device']}"
Path(target).write_text(json.dumps({"commit": commit, "device": device, "benchmarks": benchmarks}, indent=1) + "\n")
print(target)
PYTHON
