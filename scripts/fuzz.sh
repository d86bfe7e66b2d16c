#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/fuzz.sh [SECONDS [TARGET ...]]: builds the libFuzzer targets of tests/fuzz and runs each (or those named) for
# SECONDS (60 when not given), one on each processor at a time, starting from its corpus. The corpus is copied and not
# changed. Prints how often each target was executed; a finding is left in build/fuzz/findings, and makes the script
# exit 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:-60}
if [[ ! "$seconds" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: scripts/fuzz.sh [SECONDS [TARGET ...]]" >&2
  exit 2
fi
shift || true
targets=("$@")
if [[ $# -eq 0 ]]; then
  for source in tests/fuzz/fuzz_*.cc; do targets+=("$(basename "$source" .cc)"); done
fi

scripts/build.sh fuzz eadem_fuzz
findings=build/fuzz/findings
mkdir -p "$findings"

fuzz() {  # Runs one target; prints what came of it.
  local target=$1 name=${1#fuzz_}
  local work=build/fuzz/corpus/$name log=$findings/$name.log
  rm -rf "$work"
  mkdir -p "$work"
  [[ ! -d tests/fuzz/corpus/$name ]] || cp -r "tests/fuzz/corpus/$name/." "$work"
  local options=(-max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1
    -artifact_prefix="$findings/$name-")
  [[ ! -f tests/fuzz/$name.dict ]] || options+=(-dict="tests/fuzz/$name.dict")
  if "build/fuzz/fuzz/$target" "${options[@]}" "$work" > "$log" 2>&1; then
    awk -v target="$target" -v seconds="$seconds" '/stat::number_of_executed_units/ {
      printf "%s: %d executions in %d s, no finding\n", target, $2, seconds }' "$log"
  else
    echo "$target: FOUND something; the log is $log"
    tail -n 40 "$log"
    return 1
  fi
}

# As many at once as there are processors.
status=0 running=0
for target in "${targets[@]}"; do
  if ((running == $(nproc))); then
    wait -n || status=1
    running=$((running - 1))
  fi
  fuzz "$target" &
  running=$((running + 1))
done
for ((; running > 0; --running)); do wait -n || status=1; done
exit "$status"
