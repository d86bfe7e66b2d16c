#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
#
# A program that is not compiled for Hopper links only if hopper_left_out.cc has the functions of the Hopper sources that
# others call. Checks that on any machine: hopper_sources_test.py SOURCE_DIR. Exits 1 and names what is wrong.
import re
import sys
from pathlib import Path

cuda = Path(sys.argv[1]) / "eadem" / "kernels" / "cuda"
listed = re.search(r"set\(hopper_sources\s+(.*?)\)", (cuda / "backend.cmake").read_text(), re.S).group(1).split()
hopper = {cuda / name for name in listed}
left_out = cuda / "hopper_left_out.cc"
others = [path for path in cuda.rglob("*.c[cu]") if path not in hopper and path != left_out]


def defined(path):
    """The functions that a source defines."""
    return set(re.findall(r"^(?:cudaError_t|bool) (\w+)\([^;]*?\) \{", path.read_text(), re.M))


declared = {name for header in cuda.rglob("*.h") for name in re.findall(r"\b(launch_\w+|has_\w+|takes_\w+)\(", header.read_text())}
wanted = set().union(*(defined(path) for path in hopper)) & declared
called = {name for path in others for name in wanted if re.search(rf"\b{name}\b", path.read_text())}
there = defined(left_out)
for name in sorted(called - there):
    print(f"hopper_left_out.cc lacks {name}, which other sources call")
for name in sorted(there - wanted):
    print(f"hopper_left_out.cc has {name}, which no Hopper source defines")
if not called:
    print("no source calls a function of the Hopper sources: is the pattern of this test wrong?")
sys.exit(bool(called - there or there - wanted or not called))
