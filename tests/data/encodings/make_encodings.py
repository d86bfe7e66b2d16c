# SPDX-License-Identifier: Apache-2.0
"""Makes the block vectors of tests/core/encodings_test.cc with the `gguf` package, which knows nothing of Eadem.

    pip install gguf==0.19.0 numpy
    python tests/data/encodings/make_encodings.py     writes TYPE.blocks beside this script

TYPE.blocks holds the bytes of some blocks, then the f32 values that gguf reads from them. The bytes are random; the f16
scales among them are random finite ones and, in the first blocks, the extremes: zeros of both signs, the largest, the
smallest normal and subnormal.

values.f32 holds some values with heavier tails than a normal distribution, and gguf_errors.txt, for each type that gguf
quantizes to, the square root of the mean square error of what it makes of them.
"""
import pathlib

import gguf
import numpy

HERE = pathlib.Path(__file__).parent
Type = gguf.GGMLQuantizationType

# Where in a block its f16 numbers lie; MXFP4 has a byte that takes any value instead, at 0, and IQ1_M has four bits
# in each of the words at 48.
F16_AT = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
    Type.IQ4_NL: [0], Type.IQ4_XS: [0], Type.MXFP4: [],
    Type.IQ2_XXS: [0], Type.IQ2_XS: [0], Type.IQ2_S: [0], Type.IQ3_XXS: [0], Type.IQ3_S: [0], Type.IQ1_S: [0],
    Type.IQ1_M: [], Type.TQ1_0: [52], Type.TQ2_0: [64],
}
# Types that Eadem reads and does not write.
READ_ONLY = list(F16_AT)[13:]
EXTREMES = [0x0000, 0x8000, 0x7bff, 0xfbff, 0x0400, 0x0001, 0x8001]
EXTREME_EXPONENTS = [0, 1, 2, 3, 127, 253, 254, 255]


def set_iq1_m_scales(blocks, scales):
    """`scales` [blocks]: the bits of f16 numbers."""
    for part in range(4):
        high = blocks[:, 48 + 2 * part + 1]
        high[:] = high & 15 | (scales >> (4 * part) & 15) << 4


def gguf_error(kind, values):
    """["type error\\n"], or [] where gguf cannot quantize."""
    try:
        read_back = gguf.quants.dequantize(gguf.quants.quantize(values.reshape(-1, 256), kind), kind).ravel()
    except NotImplementedError:
        return []
    off = read_back.astype(numpy.float64) - values
    return [f"{kind.name.lower()} {numpy.sqrt(numpy.mean(off * off)):.9g}\n"]


def main():
    random = numpy.random.default_rng(3)
    random_values = (random.laplace(size=8192) * 0.02).astype("<f4")
    (HERE / "values.f32").write_bytes(random_values.tobytes())
    errors = []
    for kind, places in F16_AT.items():
        size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = 24 if size == 32 else 10
        blocks = random.integers(0, 256, (count, num_bytes), dtype=numpy.uint8)
        for place in places:
            scales = random.integers(0, 0x10000, count, dtype=numpy.uint16)
            scales = numpy.where((scales & 0x7c00) == 0x7c00, scales ^ 0x4000, scales)
            scales[:len(EXTREMES)] = random.permutation(EXTREMES)
            blocks[:, place:place + 2] = scales.astype("<u2").view(numpy.uint8).reshape(count, 2)
        if kind == Type.IQ1_M:
            set_iq1_m_scales(blocks, numpy.resize(EXTREMES + [0x1234, 0x9876, 0x3c00], count))
        if kind == Type.MXFP4:
            blocks[:len(EXTREME_EXPONENTS), 0] = EXTREME_EXPONENTS
        with numpy.errstate(over="ignore"):  # 2^126 times 12 is an infinity, in every reader
            values = gguf.quants.dequantize(blocks, kind)
        assert values.shape == (count, size) and values.dtype == numpy.float32
        (HERE / f"{kind.name.lower()}.blocks").write_bytes(blocks.tobytes() + values.astype("<f4").tobytes())
        if kind not in READ_ONLY:
            errors += gguf_error(kind, random_values)
    (HERE / "gguf_errors.txt").write_text("".join(errors))


if __name__ == "__main__":
    main()
