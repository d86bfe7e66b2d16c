#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/format.sh [--check]: formats every C++ and CUDA file that scripts/sources.sh names with clang-format 14, or says
# which would change and fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
  "") mode=(-i) ;;
  --check) mode=(--dry-run -Werror --ferror-limit=3) ;;
  *)
    echo "usage: scripts/format.sh [--check]" >&2
    exit 2
    ;;
esac
# Another version formats differently.
if command -v clang-format-14 > /dev/null; then
  tool=clang-format-14
elif clang-format --version 2> /dev/null | grep -q 'version 14\.'; then
  tool=clang-format
else
  echo "format.sh: needs clang-format 14 (Debian: clang-format-14)" >&2
  exit 1
fi
scripts/sources.sh | xargs -0 -r -n 16 -P "$(nproc)" "$tool" "${mode[@]}"
