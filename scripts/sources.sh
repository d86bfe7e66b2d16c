#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/sources.sh: prints the C++ and CUDA files of this repository, each ended by a NUL: tracked ones and
# new ones that git does not ignore, or in a copy without git every one outside build directories.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if git rev-parse --git-dir > /dev/null 2>&1; then
  # A tracked file that was deleted in the work tree is left out.
  git ls-files -z --cached --others --exclude-standard -- '*.h' '*.cc' '*.cu' '*.cuh' | while IFS= read -r -d '' file; do
    if [[ -f "$file" ]]; then printf '%s\0' "$file"; fi
  done
else
  find . -type d -name 'build*' -prune -o -type f \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -print0
fi
