# SPDX-License-Identifier: Apache-2.0
"""Makes the goldens of tests/io with the `safetensors` and `gguf` packages, which know nothing of Eadem.

    pip install safetensors==0.8.0 gguf==0.19.0 numpy
    python tests/data/io/make_goldens.py SHARED_DATA_DIR     writes the files beside this script
    python tests/data/io/make_goldens.py --digest FILE       prints the digests of a file, to check what Eadem wrote

digests.json maps each file to "type shape sha256-of-the-bytes" of each of its tensors.
"""
import hashlib
import json
import pathlib
import sys

import gguf
import numpy
import safetensors

HERE = pathlib.Path(__file__).parent


def digest_safetensors(path):
    result = {}
    for name, entry in safetensors.deserialize(path.read_bytes()):
        digest = hashlib.sha256(bytes(entry["data"])).hexdigest()
        result[name] = f"{entry['dtype']} {list(entry['shape'])} {digest}"
    return dict(sorted(result.items()))


def digest_gguf(path):
    result = {}
    for tensor in gguf.GGUFReader(path).tensors:
        digest = hashlib.sha256(numpy.ascontiguousarray(tensor.data).tobytes()).hexdigest()
        shape = [int(n) for n in reversed(tensor.shape)]
        result[tensor.name] = f"{tensor.tensor_type.name} {shape} {digest}"
    return dict(sorted(result.items()))


def digest(path):
    return digest_gguf(path) if path.suffix == ".gguf" else digest_safetensors(path)


def make_safetensors(path):
    rng = numpy.random.default_rng(7)
    arrays = []  # keeps the memory that the specs point to
    tensors = {}

    def add(name, dtype, array):
        arrays.append(array)
        tensors[name] = safetensors.TensorSpec(
            dtype=dtype, shape=list(array.shape), data_ptr=array.ctypes.data, data_len=array.nbytes
        )

    add("f32", "float32", rng.standard_normal((3, 5), dtype=numpy.float32))
    add("f64", "float64", rng.standard_normal((2, 2)))
    add("f16", "float16", rng.standard_normal((2, 3)).astype(numpy.float16))
    add("i32", "int32", rng.integers(-9, 9, (4,), dtype=numpy.int32))
    add("i64", "int64", rng.integers(-9, 9, (1, 1, 2), dtype=numpy.int64))
    add("u8", "uint8", rng.integers(0, 255, (7,), dtype=numpy.uint8))
    add("scalar", "float32", numpy.array(2.5, dtype=numpy.float32))
    add("empty", "float32", numpy.zeros((0, 4), dtype=numpy.float32))
    add("bool", "bool", numpy.array([True, False, True]))
    add("bf16", "bfloat16", rng.integers(0, 0x7F00, (4, 2), dtype=numpy.uint16))
    path.write_bytes(safetensors.serialize(tensors, {"format": "pt", "note": 'a "quoted" grüße'}))


def make_gguf(path, tensors_of_a_part=0):
    """With a number of tensors, they are split into PATH-00001-of-0000N.gguf, the first of which has none."""
    rng = numpy.random.default_rng(8)
    writer = gguf.GGUFWriter(
        path, "llama", split_max_tensors=tensors_of_a_part, small_first_shard=tensors_of_a_part > 0
    )
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_uint32("t.u32", 4000000000)
    writer.add_int32("t.i32", -2000000000)
    writer.add_float32("t.f32", 1.5)
    writer.add_bool("t.true", True)
    writer.add_string("t.string", "grüße")
    writer.add_uint64("t.u64", 2**64 - 1)
    writer.add_int64("t.i64", -(2**63))
    writer.add_float64("t.f64", 0.1)
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.5, -0.25])
    writer.add_array("t.bools", [True, False])
    writer.add_array("t.strings", ["a", "", "bc"])
    writer.add_array("t.nested", [[1, 2], [3]])
    writer.add_tensor("f32", rng.standard_normal((3, 5), dtype=numpy.float32))
    writer.add_tensor("f16", rng.standard_normal((2, 3)).astype(numpy.float16))
    bf16 = rng.integers(0, 255, (4, 2 * 3), dtype=numpy.uint8)
    writer.add_tensor("bf16", bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
    q8_0 = gguf.quants.quantize(rng.standard_normal((2, 64), dtype=numpy.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q8_0", q8_0, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("vector", rng.standard_normal((6,), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_plain_gguf(path):
    """Only types that Eadem writes, to compare whole files."""
    rng = numpy.random.default_rng(9)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_token_list(["<s>", "a"])
    writer.add_token_scores([0.0, -1.5])
    writer.add_tensor("a.weight", rng.standard_normal((3, 5), dtype=numpy.float32))
    writer.add_tensor("b.weight", rng.standard_normal((2, 3)).astype(numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    if sys.argv[1] == "--digest":
        print(json.dumps(digest(pathlib.Path(sys.argv[2])), indent=1))
        return
    shared = pathlib.Path(sys.argv[1])
    make_safetensors(HERE / "from_python.safetensors")
    make_gguf(HERE / "from_python.gguf")
    make_gguf(HERE / "split_from_python.gguf", tensors_of_a_part=3)
    make_plain_gguf(HERE / "plain_from_python.gguf")
    digests = {"own": {}, "shared": {}}
    for name in ("from_python.safetensors", "from_python.gguf", "../stories260K/stories260K.gguf"):
        digests["own"][name] = digest(HERE / name)
    # The package reads GGUF from version 2 on, so the version 1 file has no oracle but its version 3 twin.
    names = ["models/random/llama-2-tiny-random.gguf"]
    names += sorted(str(p.relative_to(shared)) for p in shared.glob("models/random/mlxd-fixtures/tiny_*/*.safetensors"))
    for name in names:
        digests["shared"][name] = digest(shared / name)
    (HERE / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")


main()
