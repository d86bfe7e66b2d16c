#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/build.sh PRESET TARGET [-DNAME=VALUE ...]: configures build/PRESET when that was not done or the presets, the
# definitions or the set of CMakeLists.txt changed, and builds TARGET. Progress and errors go to stderr, one line when there is no terminal; the
# full output of the last call is in build/PRESET/build.log then.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [[ $# -lt 2 ]]; then
  echo "usage: scripts/build.sh PRESET TARGET [-DNAME=VALUE ...]" >&2
  exit 2
fi
preset=$1 target=$2
shift 2
dir="$root/build/$preset" log="$root/build/$preset/build.log" stamp="$root/build/$preset/configured_with"
mkdir -p "$dir"

exec 9> "$dir/.lock"  # Two callers take turns.
flock 9

quietly() {  # Runs a command; without a terminal its output goes to the log and is shown when it fails.
  if [[ -t 2 ]]; then
    "$@" >&2 9>&-
  elif ! "$@" > "$log" 2>&1 9>&-; then
    tail -n 100 "$log" >&2
    echo "build.sh: '$*' failed; the whole output is in $log" >&2
    return 1
  fi
}

# Ninja sees a changed CMakeLists.txt by itself, but not a new one that its parent would add.
configuration="$*
$(cd "$root" && find . -path './build*' -prune -o -name CMakeLists.txt -print | LC_ALL=C sort)"
if [[ ! -f "$dir/build.ninja" || "$root/CMakePresets.json" -nt "$stamp" ||
  "$(cat "$stamp" 2> /dev/null)" != "$configuration" ]]; then
  echo "build.sh: configuring build/$preset" >&2
  (cd "$root" && quietly cmake --preset "$preset" "$@")
  echo "$configuration" > "$stamp"
fi

start=$SECONDS
if [[ ! -t 2 && ! -f "$dir/.ninja_log" ]]; then
  echo "build.sh: building '$target' in build/$preset (the first time takes minutes)" >&2
fi
quietly cmake --build "$dir" --target "$target"
if ((SECONDS - start >= 3)); then
  echo "build.sh: built '$target' in build/$preset in $((SECONDS - start)) s" >&2
fi
