#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes model-f32.gguf into the folders of models with latent attention whose GGUF files have tensors of other shapes
and values than their directories: what llama.cpp's converter makes of the directory, in f32, by the gguf package. Names
come from the package's own tables. README.md says what is where.

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


def add_keys(writer, config):
    """What both architectures have."""
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


if __name__ == "__main__":
    main()
