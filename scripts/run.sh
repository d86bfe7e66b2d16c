#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/run.sh [ARGUMENTS OF eadem run]: installs what is missing, builds Release, and runs `eadem run` with the
# bundled model. Without arguments it continues a default prompt. Everything but the program's text goes to stderr.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)

"$root/scripts/install.sh" run
"$root/scripts/build.sh" release eadem

[[ $# -gt 0 ]] || set -- -p "Once upon a time"
exec "$root/build/release/bin/eadem" run "$@"
