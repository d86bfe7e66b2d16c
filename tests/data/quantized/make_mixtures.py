# SPDX-License-Identifier: Apache-2.0
"""Makes mixtures.json for tests/cli: which type each matrix of a model gets in the files that people know by their names
(Q4_K_M …), as llama.cpp's quantizer chooses them for Llama models of zeros in several shapes.

    pip install llama-cpp-python==0.3.36 gguf==0.19.0 numpy
    python tests/data/quantized/make_mixtures.py     writes mixtures.json beside this script
"""
import json
import pathlib
import tempfile

import gguf
import llama_cpp
import numpy

HERE = pathlib.Path(__file__).parent
# Our name, and llama.cpp's. q2_k is a type; the mixture around it is called Q2_K elsewhere.
MIXTURES = {"q2_k_m": "Q2_K", "q3_k_s": "Q3_K_S", "q3_k_m": "Q3_K_M", "q3_k_l": "Q3_K_L", "q4_k_s": "Q4_K_S",
            "q4_k_m": "Q4_K_M", "q5_k_s": "Q5_K_S", "q5_k_m": "Q5_K_M"}
HEAD_DIM, VOCAB = 32, 32
MODELS = {
    "grouped": dict(layers=33, hidden=256, ffn=256, heads=8, kv_heads=2, tied=False),
    "ungrouped": dict(layers=9, hidden=256, ffn=256, heads=8, kv_heads=8, tied=True),
    "short_rows": dict(layers=2, hidden=96, ffn=256, heads=4, kv_heads=2, tied=False),
}


def write_model(path, layers, hidden, ffn, heads, kv_heads, tied):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    shapes = {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, hidden)
    for layer in range(layers):
        for name, shape in {"attn_norm": (hidden,), "attn_q": (heads * HEAD_DIM, hidden),
                            "attn_k": (kv_heads * HEAD_DIM, hidden), "attn_v": (kv_heads * HEAD_DIM, hidden),
                            "attn_output": (hidden, heads * HEAD_DIM), "ffn_norm": (hidden,), "ffn_gate": (ffn, hidden),
                            "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)}.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    for name, shape in shapes.items():
        writer.add_tensor(name, numpy.zeros(shape, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized_types(source, target, name):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) == 0, name
    reader = gguf.GGUFReader(target)
    return {"file_type": int(reader.fields["general.file_type"].contents()),
            "types": {tensor.name: tensor.tensor_type.name.lower() for tensor in reader.tensors
                      if len(tensor.shape) > 1}}


def main():
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        source, target = (pathlib.Path(folder) / name for name in ("source.gguf", "target.gguf"))
        for model, shape in MODELS.items():
            write_model(source, **shape)
            result[model] = {"shape": shape | {"head_dim": HEAD_DIM, "vocab": VOCAB},
                             "mixtures": {ours: quantized_types(source, target, theirs)
                                          for ours, theirs in MIXTURES.items()}}
    # One line a mixture.
    lines = []
    for model, facts in result.items():
        rows = ",\n".join(f'   {json.dumps(name)}: {json.dumps(row)}' for name, row in facts["mixtures"].items())
        lines.append(f' {json.dumps(model)}: {{"shape": {json.dumps(facts["shape"])},\n  "mixtures": {{\n{rows}}}}}')
    (HERE / "mixtures.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
