#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/gpu_deps.sh: unpacks into .deps/ the libraries that a GPU machine without a package mirror usually lacks
# (Highway, toml++, PCRE2, utf8proc, xxHash, libedit, Google Benchmark), from Debian 12's packages, without installing them.
# scripts/gpu_check.sh uses .deps/ when it is there. Debian's libraries run on any x86-64 Linux with glibc 2.36 or newer;
# fmt and spdlog are not among them, because two versions in one program conflict: those of the machine serve.
# A second call does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(
  libhwy-dev libtomlplusplus-dev libtomlplusplus3 libpcre2-dev libpcre2-8-0 libutf8proc-dev
  libutf8proc2 libxxhash-dev libxxhash0 libedit-dev libedit2 libbsd0 libmd0 libbenchmark-dev libbenchmark1debian
)

[[ "$(cat .deps/packages 2> /dev/null)" != "${packages[*]}" ]] || exit 0
distribution=$(. /etc/os-release 2> /dev/null && echo "${ID:-unknown} ${VERSION_ID:-}" || echo unknown)
if [[ "$distribution" != "debian 12" ]]; then
  echo "gpu_deps.sh: this is $distribution; the packages are Debian 12's" >&2
  exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/debs" "$work/root/usr"
chmod 755 "$work"
chmod 777 "$work/debs"  # apt downloads as another user
(cd "$work/debs" && apt-get download "${packages[@]}" >&2)
for package in "$work"/debs/*.deb; do
  dpkg-deb -x "$package" "$work/root"
done
# Older packages put libraries below /lib.
[[ ! -d "$work/root/lib" ]] || cp -a "$work/root/lib/." "$work/root/usr/lib/"

find "$work/root" -xtype l -delete  # to packages that are not among these

rm -rf .deps
mkdir -p .deps/usr/lib
# Copies instead of links, so that the folder can be carried by tools that do not take links.
cp -rL "$work/root/usr/include" .deps/usr/include
cp -rL "$work/root/usr/lib/x86_64-linux-gnu" .deps/usr/lib/x86_64-linux-gnu
libraries=.deps/usr/lib/x86_64-linux-gnu
# Nothing here uses these files.
rm -rf "$libraries"/libpcre2-{16,32,posix}* .deps/usr/include/pcre2posix.h
# pkg-config answers with this tree wherever it is.
sed -i 's|^prefix=.*|prefix=${pcfiledir}/../../..|' "$libraries"/pkgconfig/*.pc
echo "${packages[*]}" > .deps/packages
du -sh .deps >&2
