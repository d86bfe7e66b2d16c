#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/install.sh run|bench|test: installs the Debian packages that building and running (run), also benchmarking
# (bench), or also testing (test), needs. Asks dpkg first and calls apt only for what is missing. Output goes to stderr.
set -euo pipefail

run_packages=(
  cmake ninja-build g++ ccache pkg-config libhwy-dev libspdlog-dev libfmt-dev
  libtomlplusplus-dev libpcre2-dev libutf8proc-dev libxxhash-dev libedit-dev
)
bench_packages=(libcli11-dev python3)
test_packages=(
  libgtest-dev libgmock-dev libbenchmark-dev mold clang-14 libclang-rt-14-dev clang-format-14 python3-dev python3-venv zstd
  openmpi-bin
)
# For the kernels of 64-bit ARM, which are cross-compiled and run under emulation.
if [[ "$(uname -m)" == x86_64 ]]; then
  test_packages+=(g++-aarch64-linux-gnu qemu-user libhwy-dev:arm64 libfmt-dev:arm64 libspdlog-dev:arm64
    libgtest-dev:arm64)
fi

fail() {
  echo "install.sh: $*" >&2
  exit 1
}

case "${1:-}" in
  bench) wanted=("${run_packages[@]}" "${bench_packages[@]}") ;;
  run) wanted=("${run_packages[@]}") ;;
  test) wanted=("${run_packages[@]}" "${bench_packages[@]}" "${test_packages[@]}") ;;
  *)
    echo "usage: scripts/install.sh run|bench|test" >&2
    exit 2
    ;;
esac

command -v dpkg-query > /dev/null || fail "this is not Debian (no dpkg-query). Install the equivalents of" \
  "${wanted[*]}, then build with: cmake --preset release && cmake --build --preset release"

# "name:architecture:status"; a package of architecture "all" serves as the native one.
installed=" $(dpkg-query -W -f='${Package}:${Architecture}:${db:Status-Status} ' "${wanted[@]}" 2> /dev/null || true)"
native=$(dpkg --print-architecture)
missing=()
for package in "${wanted[@]}"; do
  if [[ "$package" == *:* ]]; then
    [[ "$installed" == *" $package:installed "* ]] || missing+=("$package")
  else
    [[ "$installed" == *" $package:$native:installed "* || "$installed" == *" $package:all:installed "* ]] ||
      missing+=("$package")
  fi
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

distribution=$(. /etc/os-release 2> /dev/null && echo "${ID:-unknown} ${VERSION_ID:-}" || echo unknown)
[[ "$distribution" == "debian 12" ]] || fail "missing: ${missing[*]}. Packages are installed on Debian 12 only and" \
  "this is '$distribution'; install them, or what they are called there, and call this again."

as_root=()
if [[ $EUID -ne 0 ]]; then
  command -v sudo > /dev/null || fail "missing: ${missing[*]}. Installing needs root or sudo; run as root:" \
    "apt-get install --no-install-recommends ${missing[*]}"
  as_root=(sudo)
fi

echo "install.sh: installing ${missing[*]}" >&2
apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o Dpkg::Use-Pty=0 "$@" > "$log" 2>&1 < /dev/null || {
    tail -n 30 "$log" >&2
    fail "'apt-get $*' failed (its last lines are above). Missing: ${missing[*]}"
  }
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for package in "${missing[@]}"; do
  [[ "$package" != *:* ]] || "${as_root[@]}" dpkg --add-architecture "${package#*:}"
done
apt update
apt install -y --no-install-recommends "${missing[@]}"
