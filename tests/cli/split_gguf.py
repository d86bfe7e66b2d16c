# SPDX-License-Identifier: Apache-2.0
"""Splits a GGUF file of version 3 into parts, as llama.cpp's gguf-split does."""

import struct

SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY, U16, I32 = 8, 9, 2, 5
ALIGNMENT = 32


def aligned(content):
    return content + bytes(-len(content) % ALIGNMENT)


def string(text):
    return struct.pack("<Q", len(text)) + text


def split_gguf(whole, stem, count):
    """Writes STEM-00001-of-0000N.gguf and so on, with about as many tensors each; returns their paths."""
    data = whole.read_bytes()
    position = 24

    def take(form):
        nonlocal position
        values = struct.unpack_from("<" + form, data, position)
        position += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def take_string():
        nonlocal position
        length = take("Q")
        position += length
        return data[position - length:position]

    def skip_value(kind):
        nonlocal position
        if kind == STRING:
            take_string()
        elif kind == ARRAY:
            element, length = take("IQ")
            for _ in range(length):
                skip_value(element)
        else:
            position += SCALAR_BYTES[kind]

    version, num_tensors, num_pairs = struct.unpack_from("<IQQ", data, 4)
    assert data[:4] == b"GGUF" and version == 3
    for _ in range(num_pairs):
        take_string()
        skip_value(take("I"))
    pairs = data[24:position]
    tensors = []
    for _ in range(num_tensors):
        name = take_string()
        rank = take("I")
        dims = [take("Q") for _ in range(rank)]
        tensors.append((name, dims, *take("IQ")))
    begin = len(aligned(data[:position]))
    ends = sorted([offset for *_, offset in tensors] + [len(data) - begin])

    paths = []
    for part in range(count):
        chosen = tensors[num_tensors * part // count:num_tensors * (part + 1) // count]
        header = pairs if part == 0 else b""
        for key, kind, value in ((b"split.no", U16, struct.pack("<H", part)),
                                 (b"split.count", U16, struct.pack("<H", count)),
                                 (b"split.tensors.count", I32, struct.pack("<i", num_tensors))):
            header += string(key) + struct.pack("<I", kind) + value
        content = b""
        for name, dims, kind, offset in chosen:
            header += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(content))
            end = next(end for end in ends if end > offset)
            content = aligned(content + data[begin + offset:begin + end])
        start = b"GGUF" + struct.pack("<IQQ", 3, len(chosen), (num_pairs if part == 0 else 0) + 3)
        paths.append(stem.with_name(f"{stem.name}-{part + 1:05}-of-{count:05}.gguf"))
        paths[-1].write_bytes(aligned(start + header) + content)
    return paths
