#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes model-f32.gguf into the folders of models with latent attention whose GGUF files have tensors of other shapes
and values than their directories: what llama.cpp's converter makes of the directory, in f32, by the gguf package. Names
come from the package's own tables, and those of DeepSeek V4, which the package does not have yet, from those of
llama.cpp's conversion/deepseek.py and gguf-py/gguf/constants.py. README.md says what is where.

    make_latent_gguf.py [--out DIR] [--only NAME ...]
"""

import argparse
import json
import re
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

# Names that llama.cpp's converter changes before it looks them up.
RENAMED = [(r"\.dt_bias$", ".dt_proj.bias"),
           (r"e_score_correction_bias$", "e_score_correction.bias"),
           (r"\.mlp\.experts\.(gate_up_proj|down_proj)$", r".mlp.experts.\1.weight")]
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up"}
# DeepSeek V4: names of the file, without "model." and "layers.N.", and those of GGUF files without "blk.N.".
DEEPSEEK4 = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight",
             "head.weight": "output.weight", "hc_head.hc_fn": "output_hc_fn.weight",
             "hc_head.hc_base": "output_hc_base.weight", "hc_head.hc_scale": "output_hc_scale.weight",
             "attn_norm.weight": "attn_norm.weight", "ffn_norm.weight": "ffn_norm.weight",
             "attn.attn_sink": "attn_sinks.weight", "attn.wq_a.weight": "attn_q_a.weight",
             "attn.q_norm.weight": "attn_q_a_norm.weight", "attn.wq_b.weight": "attn_q_b.weight",
             "attn.wkv.weight": "attn_kv.weight", "attn.norm.weight": "attn_kv_a_norm.weight",
             "attn.wo_a.weight": "attn_output_a.weight", "attn.wo_b.weight": "attn_output_b.weight",
             "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
             "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
             "attn.compressor.ape": "attn_compressor_ape.weight",
             "attn.compressor.norm.weight": "attn_compressor_norm.weight",
             "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
             "attn.indexer.weights_proj.weight": "indexer.proj.weight",
             "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
             "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
             "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
             "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
             "ffn.gate.weight": "ffn_gate_inp.weight", "ffn.gate.bias": "exp_probs_b.bias",
             "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight", "ffn.experts.w1.weight": "ffn_gate_exps.weight",
             "ffn.experts.w2.weight": "ffn_down_exps.weight", "ffn.experts.w3.weight": "ffn_up_exps.weight",
             "ffn.shared_experts.w1.weight": "ffn_gate_shexp.weight",
             "ffn.shared_experts.w2.weight": "ffn_down_shexp.weight",
             "ffn.shared_experts.w3.weight": "ffn_up_shexp.weight"}
DEEPSEEK4 |= {f"hc_{of}_{part}": f"hc_{of}_{part}.weight" for of in ("attn", "ffn") for part in ("fn", "base", "scale")}
SQRT_SOFTPLUS = 4  # of llama.cpp's enum of gating functions


def split_latent(config, name, value):
    """kv_b_proj: rows of keys and then of values for each head. Those of keys are transposed."""
    heads, nope, own = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    rows = value.reshape(heads, nope + own, value.shape[1])
    yield name.replace("kv_b_proj", "k_b_proj"), rows[:, :nope].transpose(0, 2, 1)
    yield name.replace("kv_b_proj", "v_b_proj"), rows[:, nope:]


def converted(config, weights):
    """The directory's tensors as the converter passes them on, experts stacked."""
    stacks = {}
    for name, value in weights.items():
        expert = re.fullmatch(r"(.*\.block_sparse_moe\.experts)\.(\d+)\.(w\d)\.weight", name)
        if expert:
            stacks.setdefault(f"{expert[1]}.{EXPERTS[expert[3]]}", {})[int(expert[2])] = value
        elif name.endswith("kv_b_proj.weight"):
            yield from split_latent(config, name, value)
        elif name.endswith("_conv1d.weight"):
            yield name, value.reshape(1, value.shape[0], 1, value.shape[-1])
        elif name.endswith(".A_log"):
            yield name, -np.exp(value)
        else:
            yield name, value
    for name, parts in stacks.items():
        yield name, np.stack([parts[i] for i in range(len(parts))])


def gguf_name(table, name):
    stack = re.fullmatch(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(gate|down|up)", name)
    if stack:
        return f"blk.{stack[1]}.ffn_{stack[2]}_exps.weight"
    for pattern, other in RENAMED:
        name = re.sub(pattern, other, name)
    return table.get_name(name, try_suffixes=(".weight", ".bias"))


def deepseek4_name(name):
    """The name in GGUF files of a tensor of the directory; experts of a layer have one."""
    layer = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.(.*)", name)
    if layer is None:
        return DEEPSEEK4[name.removeprefix("model.")]
    return f"blk.{layer[1]}." + DEEPSEEK4[re.sub(r"\.experts\.\d+\.", ".experts.", layer[2])]


def deepseek4_tensors(weights):
    """All values as they are, experts stacked, the numbers of experts in 32 bits."""
    stacks = {}
    for name, value in weights.items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert:
            stacks.setdefault(deepseek4_name(name), {})[int(expert[1])] = value
        else:
            yield deepseek4_name(name), value.astype(np.int32) if name.endswith("tid2eid") else value
    for name, parts in stacks.items():
        yield name, np.stack([parts[i] for i in range(len(parts))])


def write_deepseek_v4(folder):
    """The keys are those that llama.cpp reads of the architecture, and those that it reads of all."""
    config = json.loads((folder / "config.json").read_text())
    rope, layers = config["rope_parameters"]["compress"], config["num_hidden_layers"]
    arch = "deepseek4"
    writer = gguf.GGUFWriter(folder / "model-f32.gguf", arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["main"]["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_uint32(f"{arch}.expert_gating_func", SQRT_SOFTPLUS)
    writer.add_uint32(f"{arch}.hash_layer_count", config["mlp_layer_types"].count("hash_moe"))
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        writer.add_array(f"{arch}.{key}", [config["swiglu_limit"]] * layers)
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    writer.add_uint32(f"{arch}.attention.output_group_count", config["o_groups"])
    writer.add_uint32(f"{arch}.attention.output_lora_rank", config["o_lora_rank"])
    writer.add_array(f"{arch}.attention.compress_ratios",
                     [config["compress_rates"].get(kind, 0) for kind in config["layer_types"]])
    writer.add_float32(f"{arch}.attention.compress_rope_freq_base", rope["rope_theta"])
    writer.add_uint32(f"{arch}.hyper_connection.count", config["hc_mult"])
    writer.add_uint32(f"{arch}.hyper_connection.sinkhorn_iterations", config["hc_sinkhorn_iters"])
    writer.add_float32(f"{arch}.hyper_connection.epsilon", config["hc_eps"])
    for name, value in deepseek4_tensors(load_file(folder / "model.safetensors")):
        writer.add_tensor(name, np.ascontiguousarray(value))
    finish(writer)


def add_keys(writer, config):
    """What the architectures of the package's tables have."""
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_used_count(config["topk_group"])


def add_kimi_linear(writer, config):
    linear = config["linear_attn_config"]
    writer.add_context_length(config["model_max_length"])
    writer.add_head_count_kv([int(layer + 1 in linear["full_attn_layers"])
                              for layer in range(config["num_hidden_layers"])])
    writer.add_ssm_conv_kernel(linear["short_conv_kernel_size"])
    writer.add_kda_head_dim(linear["head_dim"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_group_count(config["num_expert_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))


def add_mistral4(writer, config):
    rope = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    writer.add_attn_temperature_length(rope["original_max_position_embeddings"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])


MODELS = {"kimi_linear": (gguf.MODEL_ARCH.KIMI_LINEAR, add_kimi_linear),
          "mistral4_usual": (gguf.MODEL_ARCH.MISTRAL4, add_mistral4)}


def write(folder, arch, add_own_keys):
    config = json.loads((folder / "config.json").read_text())
    table = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(folder / "model-f32.gguf", gguf.MODEL_ARCH_NAMES[arch])
    add_keys(writer, config)
    add_own_keys(writer, config)
    for name, value in converted(config, load_file(folder / "model.safetensors")):
        own = gguf_name(table, name)
        assert own is not None, f"{name}: no such tensor in {gguf.MODEL_ARCH_NAMES[arch]}"
        writer.add_tensor(own, np.ascontiguousarray(value))
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--only", nargs="*", help="models to write; the rest is kept as it is")
    args = parser.parse_args()
    for name, row in MODELS.items():
        if args.only is None or name in args.only:
            write(args.out / name, *row)
    if args.only is None or "deepseek_v4_usual" in args.only:
        write_deepseek_v4(args.out / "deepseek_v4_usual")


if __name__ == "__main__":
    main()
