#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/run.sh [ARGUMENTS OF eadem run]: installs what is missing, builds Release, and runs `eadem run` with the
# bundled model. Without a prompt among the arguments it continues a default one; -i asks for texts instead. Everything
# but the program's text goes to stderr.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)

"$root/scripts/install.sh" run
# The tests need more packages, so that they are left out, unless scripts/test.sh configured the build with them.
tests=OFF
if grep -qs '^EADEM_TESTS:BOOL=ON' "$root/build/release/CMakeCache.txt"; then tests=ON; fi
"$root/scripts/build.sh" release eadem -DEADEM_TESTS=$tests

exec "$root/build/release/bin/eadem" run --default-prompt "Once upon a time" "$@"
