# SPDX-License-Identifier: Apache-2.0
"""Makes every_type.gguf for tests/models/quantized_files_test.cc with the `gguf` package, which knows nothing of Eadem.

    pip install gguf==0.19.0 numpy
    python tests/data/quantized/make_quantized.py     writes every_type.gguf beside this script

For each block type T the file holds `T`, [4, 512] ([1, 512] where gguf only reads) of random codes and scales, and `T.values`, the f32 values that gguf
reads from it.
"""
import pathlib

import gguf
import numpy

HERE = pathlib.Path(__file__).parent
Type = gguf.GGMLQuantizationType
# Where in a block its f16 numbers lie; MXFP4 has an exponent at 0 instead, and IQ1_M four bits in each of the words at
# 48.
F16_AT = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
    Type.IQ4_NL: [0], Type.IQ4_XS: [0], Type.MXFP4: [],
    Type.IQ2_XXS: [0], Type.IQ2_XS: [0], Type.IQ2_S: [0], Type.IQ3_XXS: [0], Type.IQ3_S: [0], Type.IQ1_S: [0],
    Type.IQ1_M: [], Type.TQ1_0: [52], Type.TQ2_0: [64],
}
READ_ONLY = list(F16_AT)[13:]
ROWS, COLUMNS = 4, 512


def main():
    random = numpy.random.default_rng(11)
    writer = gguf.GGUFWriter(HERE / "every_type.gguf", "eadem-test")
    for kind, places in F16_AT.items():
        size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows = 1 if kind in READ_ONLY else ROWS
        count = rows * COLUMNS // size
        blocks = random.integers(0, 256, (count, num_bytes), dtype=numpy.uint8)
        for place in places:
            scales = (random.standard_normal(count) * 0.01).astype("<f2")
            blocks[:, place:place + 2] = scales.view(numpy.uint8).reshape(count, 2)
        if kind == Type.MXFP4:
            blocks[:, 0] = random.integers(110, 130, count)
        if kind == Type.IQ1_M:
            for part in range(4):
                high = blocks[:, 48 + 2 * part + 1]
                high[:] = high & 15 | (0x2123 >> (4 * part) & 15) << 4
        rows = blocks.reshape(rows, -1)
        name = kind.name.lower()
        writer.add_tensor(name, rows, raw_dtype=kind)
        writer.add_tensor(f"{name}.values", gguf.quants.dequantize(rows, kind).astype("<f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
