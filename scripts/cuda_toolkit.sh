#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/cuda_toolkit.sh: prints the root of a CUDA toolkit, 12 or newer (the directory of bin/nvcc): the one of the nvcc
# on PATH, else /usr/local/cuda, else one made in build/cuda_toolkit from NVIDIA's wheels on PyPI (about 0.9 GB; it
# compiles and links; running needs a driver as always). Use it as
#   cmake --preset cuda -DCMAKE_CUDA_COMPILER=ROOT/bin/nvcc -DCUDAToolkit_ROOT=ROOT
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The root of the toolkit that the compiler $1 belongs to, if it is of CUDA 12 or newer (C++20 in device code). Asks the
# compiler, since what lies on PATH may be a link or a wrapper script.
toolkit_of() {
  "$1" --version 2> /dev/null | grep -Eq 'release (1[2-9]|[2-9][0-9])\.' || return 1
  local home
  home=$("$1" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ _HERE_=//p')
  [[ -x "$home/nvcc" ]] && (cd "$home/.." && pwd -P)
}
for nvcc in nvcc /usr/local/cuda/bin/nvcc; do
  toolkit_of "$nvcc" && exit 0
done

venv="$root/build/cuda_toolkit"
ready="$venv/ready"
if [[ ! -f "$ready" ]]; then
  echo "cuda_toolkit.sh: no nvcc here; installing NVIDIA's wheels into $venv" >&2
  rm -rf "$venv"
  /usr/bin/python3 -m venv "$venv" >&2
  # The parts of CUDA 13.0. The wheels share one tree, laid out like a toolkit.
  "$venv/bin/python" -m pip install -q --disable-pip-version-check \
    'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*' \
    'nvidia-cuda-cccl==13.0.*' 'nvidia-cublas==13.1.0.*' >&2
  toolkit=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/nvidia/cu13
  # Linkers look for lib64 and for names without a version, which wheels leave out.
  ln -sfn lib "$toolkit/lib64"
  for library in "$toolkit"/lib/*.so.*; do
    ln -sf "$(basename "$library")" "${library%%.so.*}.so"
  done
  echo "$toolkit" > "$ready"
fi
cat "$ready"
