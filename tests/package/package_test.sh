#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# package_test.sh BUILD SOURCE: installs the build into an empty prefix, builds examples/use_eadem against it as another
# project would, and lets it continue a sentence with the bundled model.
set -euo pipefail
build=$1 source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/prefix" --component development > "$work/install.log"
cmake -S "$source/examples/use_eadem" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" > "$work/configure.log"
cmake --build "$work/build" > "$work/build.log" 2>&1 || {
  cat "$work/build.log"
  exit 1
}
text=$("$work/build/use_eadem" "$source/assets/stories" "Once upon a time")
echo "$text"
[[ "$(head -c ${#text} "$source/assets/stories/greedy.txt")" == "$text" && ${#text} -gt 60 ]]
if "$work/build/use_eadem" /nowhere "Once" 2> "$work/error"; then exit 1; fi
grep -q "/nowhere" "$work/error"
