#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes random weights in a model's shape as a GGUF file that every engine loads.

    random_gguf.py CONFIG.json OUT.gguf [--type f16|bf16|f32] [--quantize TYPE ...]

CONFIG.json is a config.json of model_type llama, qwen2, qwen3_moe, deepseek_v2 or gpt_oss. Matrices are N(0, 0.02), norms 1, biases small. The
tokenizer knows the 256 bytes and one merge; the other tokens are unused. --quantize q4_k_m also writes OUT's stem + -q4_k_m.gguf for
each TYPE with llama.cpp's quantizer (which mixes types as its names say), so that all engines read what llama.cpp's users have.
A file of gpt_oss has the types of published ones: experts in MXFP4, whose codes are drawn at random, and other matrices in Q8_0.
--type and --quantize are refused for it.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np


def byte_tokens():
    """The 256 bytes as byte-level vocabularies spell them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in printable}
    for index, byte in enumerate(b for b in range(256) if b not in spelled):
        spelled[byte] = chr(256 + index)
    return [spelled[byte] for byte in range(256)]


ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2",
                 "gpt_oss": "gpt-oss"}
MXFP4_BLOCK = 32  # values; one byte of exponent and 16 of codes
MXFP4_EXPONENT = 127 - 7  # codes have deviation 2.8, so values 0.02


def mxfp4_blocks(random, *shape):
    """Random MXFP4 of a matrix or of stacked ones."""
    *rows, columns = shape
    blocks = random.integers(0, 256, (*rows, columns // MXFP4_BLOCK, 1 + MXFP4_BLOCK // 2), dtype=np.uint8)
    blocks[..., 0] = MXFP4_EXPONENT
    return blocks.reshape(*rows, -1)


def write_model(config, target, type_name):
    family = config["model_type"]
    if family not in ARCHITECTURES:
        raise SystemExit(f"random_gguf.py: model_type is {family!r}; expected one of {', '.join(ARCHITECTURES)}")
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", hidden // heads)

    writer = gguf.GGUFWriter(str(target), ARCHITECTURES[family], use_temp_file=True)  # large models need not fit in memory twice
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    latent = config.get("kv_lora_rank", 0)
    writer.add_head_count_kv(1 if latent else kv_heads)
    writer.add_rope_dimension_count(config["qk_rope_head_dim"] if latent else head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(vocab)
    if latent:
        add_latent_attention(writer, config)
    elif head_dim * heads != hidden:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts", 0)
    width = config.get("moe_intermediate_size", ffn)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(width)
    dense_layers, shared = config.get("first_k_dense_replace", 0), config.get("n_shared_experts", 0)
    if family == "deepseek_v2":
        writer.add_leading_dense_block_count(dense_layers)
        writer.add_expert_shared_count(shared)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    scaling = config.get("rope_scaling")
    if family == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])

    tokens = byte_tokens() + ["he"] + [f"<|unused_{i}|>" for i in range(257, vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.UNUSED] * (vocab - 257))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(vocab - 1)
    writer.add_bos_token_id(vocab - 2)
    writer.add_add_bos_token(False)

    random = np.random.default_rng(1)

    def matrix(name, *shape, keeps_f32=False):
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        if type_name == "f32" or keeps_f32:
            writer.add_tensor(name, values)
        elif family == "gpt_oss":
            encoded = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, encoded, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        elif type_name == "f16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            encoded = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(name, encoded, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def vector(name, values):
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))

    def bias(name, *shape):
        vector(name, random.standard_normal(shape) * 0.02)

    matrix("token_embd.weight", vocab, hidden)
    vector("output_norm.weight", np.ones(hidden))
    if not config.get("tie_word_embeddings", False):
        matrix("output.weight", vocab, hidden)
    if scaling and scaling.get("rope_type") == "llama3":
        vector("rope_freqs.weight", llama3_factors(config["rope_theta"], head_dim, scaling))
    for layer in range(layers):
        prefix = f"blk.{layer}."
        vector(prefix + "attn_norm.weight", np.ones(hidden))
        vector(prefix + ("post_attention_norm" if family == "gpt_oss" else "ffn_norm") + ".weight", np.ones(hidden))
        if latent:
            rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
            matrix(prefix + "attn_q.weight", heads * (nope + rope), hidden)
            matrix(prefix + "attn_kv_a_mqa.weight", latent + rope, hidden)
            vector(prefix + "attn_kv_a_norm.weight", np.ones(latent))
            matrix(prefix + "attn_k_b.weight", heads, latent, nope)
            matrix(prefix + "attn_v_b.weight", heads, value, latent)
            matrix(prefix + "attn_output.weight", hidden, heads * value)
        else:
            for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                matrix(prefix + f"attn_{part}.weight", rows * head_dim, hidden)
                if family in ("qwen2", "gpt_oss"):
                    bias(prefix + f"attn_{part}.bias", rows * head_dim)
            matrix(prefix + "attn_output.weight", hidden, heads * head_dim)
        if family == "qwen3_moe":
            for part in ("q", "k"):
                vector(prefix + f"attn_{part}_norm.weight", np.ones(head_dim))
        if not experts or layer < dense_layers:
            matrix(prefix + "ffn_gate.weight", ffn, hidden)
            matrix(prefix + "ffn_up.weight", ffn, hidden)
            matrix(prefix + "ffn_down.weight", hidden, ffn)
            continue
        matrix(prefix + "ffn_gate_inp.weight", experts, hidden, keeps_f32=True)
        if family == "gpt_oss":
            bias(prefix + "attn_output.bias", hidden)
            bias(prefix + "attn_sinks.weight", heads)
            bias(prefix + "ffn_gate_inp.bias", experts)
            for part, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
                writer.add_tensor(prefix + f"ffn_{part}_exps.weight", mxfp4_blocks(random, experts, rows, columns),
                                  raw_dtype=gguf.GGMLQuantizationType.MXFP4)
                bias(prefix + f"ffn_{part}_exps.bias", experts, rows)
            continue
        matrix(prefix + "ffn_gate_exps.weight", experts, width, hidden)
        matrix(prefix + "ffn_up_exps.weight", experts, width, hidden)
        matrix(prefix + "ffn_down_exps.weight", experts, hidden, width)
        if shared:
            matrix(prefix + "ffn_gate_shexp.weight", shared * width, hidden)
            matrix(prefix + "ffn_up_shexp.weight", shared * width, hidden)
            matrix(prefix + "ffn_down_shexp.weight", hidden, shared * width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_latent_attention(writer, config):
    """Keys and values are those of one head over latents; the widths of heads have keys of their own."""
    if config["q_lora_rank"] is not None or config.get("rope_scaling") is not None:
        raise SystemExit("random_gguf.py: of deepseek_v2 only q_lora_rank null and no rope_scaling are written")
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_q_lora_rank(0)  # llama.cpp wants it in files that have not the 27 layers of V2-Lite
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])


def llama3_factors(theta, head_dim, scaling):
    """What each rotary frequency is divided by: 1 for short waves, `factor` for long ones, a blend between."""
    frequency = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    wavelength = 2 * np.pi / frequency
    old = scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((old / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def quantize(source, target, type_name):
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    name = "LLAMA_FTYPE_MOSTLY_" + type_name.upper()
    if not hasattr(llama_cpp, name):
        raise SystemExit(f"random_gguf.py: llama.cpp knows no type {type_name!r}")
    params.ftype = getattr(llama_cpp, name)
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise SystemExit(f"random_gguf.py: llama.cpp could not write {target}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=["f16", "bf16", "f32"], help="f16 when not given")
    parser.add_argument("--quantize", nargs="*", default=[], metavar="TYPE")
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text())
    if config["model_type"] == "gpt_oss" and (arguments.quantize or arguments.type):
        raise SystemExit("random_gguf.py: files of gpt_oss have the types of published ones; leave out --type and --quantize")
    if not arguments.target.exists():
        partial = arguments.target.with_suffix(".partial")
        write_model(config, partial, arguments.type or "f16")
        partial.rename(arguments.target)
    for type_name in arguments.quantize:
        target = arguments.target.with_name(f"{arguments.target.stem}-{type_name}.gguf")
        if not target.exists():
            quantize(arguments.target, target, type_name)


if __name__ == "__main__":
    main()
