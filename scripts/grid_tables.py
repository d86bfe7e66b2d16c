# SPDX-License-Identifier: Apache-2.0
"""Writes eadem/core/encodings/grid_tables.cc, the lattices of GGUF's IQ1 to IQ3 types, from the `gguf` package.

    pip install gguf==0.19.0 numpy
    python scripts/grid_tables.py
"""
import pathlib

import gguf.quants
import numpy

TARGET = pathlib.Path(__file__).parent.parent / "eadem/core/encodings/grid_tables.cc"
GRIDS = [("kIq1Grid", "IQ1_S"), ("kIq2XxsGrid", "IQ2_XXS"), ("kIq2XsGrid", "IQ2_XS"), ("kIq2SGrid", "IQ2_S"),
         ("kIq3XxsGrid", "IQ3_XXS"), ("kIq3SGrid", "IQ3_S")]


def main():
    text = """// SPDX-License-Identifier: Apache-2.0
//
// Made by scripts/grid_tables.py. grid_tables.h says what the words hold.
#include "eadem/core/encodings/grid_tables.h"

namespace eadem::block_types {

// clang-format off
"""
    for name, class_name in GRIDS:
        kind = getattr(gguf.quants, class_name)
        kind.init_grid()
        points = kind.grid.reshape(kind.grid_shape)
        codes = numpy.searchsorted(kind.grid_map, points)
        assert (numpy.asarray(kind.grid_map)[codes] == points).all()
        width = 16 // points.shape[1]
        words = (codes.astype(int) << (width * numpy.arange(points.shape[1]))).sum(axis=1)
        text += f"const uint16_t {name}[{len(words)}] = {{\n"
        for begin in range(0, len(words), 16):
            text += "    " + ", ".join(f"{word}" for word in words[begin:begin + 16]) + ",\n"
        text += "};\n"
    TARGET.write_text(text + "// clang-format on\n\n}  // namespace eadem::block_types\n")


if __name__ == "__main__":
    main()
