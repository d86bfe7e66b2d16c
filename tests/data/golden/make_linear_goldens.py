#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the goldens of models with linear attention: as those of make_goldens.py, with one training step.

    python make_linear_goldens.py [--out DIR] [--only NAME ...]

The layers of linear attention are computed by the code that transformers has without further packages. Gradients are
those of the tensors of the files: parameters that transformers keeps in one tensor are taken apart as it saves them.
"""

import argparse
import re
import shutil
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import make_goldens as goldens
from make_goldens import build, mean_cross_entropy, precision, random_tokens, rope, write_json

# Sizes that divide nothing: heads of 5 by 7, convolutions over 3 and 4 tokens, three value heads to a key head.
MODELS = {
    # Attention before linear attention, whose layer is dense; half of each head rotates.
    "qwen3_next": dict(
        type="qwen3_next", prompt=40, classic=None,
        config=dict(hidden_size=28, intermediate_size=24, num_hidden_layers=2, num_attention_heads=3,
                    num_key_value_heads=1, head_dim=12, vocab_size=64, rms_norm_eps=1e-6, num_experts=5,
                    num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=10,
                    mlp_only_layers=[1], linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=5,
                    linear_value_head_dim=7, linear_conv_kernel_dim=4,
                    layer_types=["full_attention", "linear_attention"],
                    rope_parameters=rope(10000.0, partial_rotary_factor=0.5))),
    # What a GGUF file can state: one width of heads, experts everywhere, attention in every second layer.
    "qwen3_next_all": dict(
        type="qwen3_next", prompt=40, classic=None,
        config=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2, head_dim=16, vocab_size=64, rms_norm_eps=1e-6, num_experts=4,
                    num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=16,
                    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
                    linear_conv_kernel_dim=3, layer_types=["linear_attention", "full_attention"],
                    rope_parameters=rope(10000.0, partial_rotary_factor=0.25))),
    # A dense MLP, a head that is the embedding.
    "qwen3_5": dict(
        type="qwen3_5_text", prompt=40, classic=None,
        config=dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=12, vocab_size=64, rms_norm_eps=1e-6, tie_word_embeddings=True,
                    linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=7, linear_value_head_dim=7,
                    linear_conv_kernel_dim=4, layer_types=["linear_attention", "full_attention"],
                    rope_parameters=rope(10000.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 1],
                                         mrope_interleaved=True))),
    "qwen3_5_moe": dict(
        type="qwen3_5_moe_text", prompt=40, classic=None,
        config=dict(hidden_size=28, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
                    vocab_size=64, rms_norm_eps=1e-6, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
                    shared_expert_intermediate_size=10, linear_num_key_heads=1, linear_num_value_heads=3,
                    linear_key_head_dim=5, linear_value_head_dim=9, linear_conv_kernel_dim=2,
                    layer_types=["full_attention", "linear_attention"],
                    rope_parameters=rope(10000.0, partial_rotary_factor=0.25, mrope_section=[1, 1, 0],
                                         mrope_interleaved=True))),
    # What a GGUF file can state: one width of heads, attention in every second layer. Its value heads are in another
    # order there: three to each of two key heads.
    "qwen3_5_moe_usual": dict(
        type="qwen3_5_moe_text", prompt=40, classic=None,
        config=dict(hidden_size=26, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=12,
                    vocab_size=64, rms_norm_eps=1e-6, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=10,
                    shared_expert_intermediate_size=14, linear_num_key_heads=2, linear_num_value_heads=6,
                    linear_key_head_dim=9, linear_value_head_dim=9, linear_conv_kernel_dim=4,
                    layer_types=["linear_attention", "full_attention", "linear_attention"],
                    rope_parameters=rope(10000.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 1],
                                         mrope_interleaved=True))),
    # A decay for each channel; latent attention that rotates nothing; a dense layer, then experts of the best of two
    # groups. The files have experts as w1, w2 and w3, and 1-based numbers of layers.
    "kimi_linear": dict(
        type="kimi_linear", prompt=40, classic=None,
        config=dict(hidden_size=28, intermediate_size=28, num_hidden_layers=2, num_attention_heads=3,
                    num_key_value_heads=3, vocab_size=64, rms_norm_eps=1e-5, q_lora_rank=None, kv_lora_rank=12,
                    qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=7, num_experts=6, num_experts_per_token=2,
                    moe_intermediate_size=8, num_shared_experts=2, num_expert_group=2, topk_group=1,
                    routed_scaling_factor=1.5, model_max_length=128,
                    linear_attn_config=dict(head_dim=7, num_heads=3, short_conv_kernel_size=4, full_attn_layers=[2],
                                            kda_layers=[1]))),
}

# Names that llama.cpp's converter does not take from the gguf package's table.
GGUF_NAMES = {
    r"linear_attn\.in_proj_qkvz\.weight": ["attn_qkv.weight", "attn_gate.weight"],
    r"linear_attn\.in_proj_qkv\.weight": ["attn_qkv.weight"],
    r"linear_attn\.in_proj_z\.weight": ["attn_gate.weight"],
    r"linear_attn\.dt_bias": ["ssm_dt.bias"],
    r"self_attn\.dt_bias": ["ssm_dt.bias"],
    r"block_sparse_moe\.gate\.e_score_correction_bias": ["exp_probs_b.bias"],
    r"(?:mlp|block_sparse_moe)\.experts\.\d+\.(?:gate_proj|w1)\.weight": ["ffn_gate_exps.weight"],
    r"(?:mlp|block_sparse_moe)\.experts\.\d+\.(?:up_proj|w3)\.weight": ["ffn_up_exps.weight"],
    r"(?:mlp|block_sparse_moe)\.experts\.\d+\.(?:down_proj|w2)\.weight": ["ffn_down_exps.weight"],
    r"self_attn\.kv_b_proj\.weight": ["attn_k_b.weight", "attn_v_b.weight"],
}
ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
                 "kimi_linear": "kimi-linear"}


def find_salt(name, row, config, weights):
    """The first whose greedy continuation varies, and is far enough from ties for what f32 makes of these layers."""
    for salt in range(200):
        prompt = random_tokens(("prompt", name, salt), row["prompt"], config.vocab_size)
        _, greedy, margin = goldens.forward_and_greedy(config, weights, torch.float32, prompt)
        if margin > 0.03 and len(set(greedy.tolist())) >= 8:
            return salt
    raise AssertionError(f"{name}: no salt")


def random_parameter(model_name, name, shape, usual=goldens.random_parameter):
    """Norms multiply by 1 + w, but for those of linear attention."""
    value = usual(model_name, name, shape)
    sums = model_name.startswith("qwen3") and name.endswith("norm.weight") and "linear_attn" not in name
    return value - 1 if sums else value


def gguf_names(config, names):
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[config.model_type])
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    result = set()
    for name in names:
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        own = [f"blk.{layer[1]}.{part}" for pattern, parts in GGUF_NAMES.items() for part in parts
               if re.fullmatch(pattern, layer[2])] if layer else []
        result |= set(own or [table.get_name(name, try_suffixes=(".weight", ".bias"))])
    return sorted(result) if None not in result else []  # llama.cpp has no such layers


def published_name(name):
    """transformers 5.23 saves Kimi's dense layers under the module of the others, where published files have "mlp"."""
    return re.sub(r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1", name)


def gradients_of_files(model):
    """Norms of gradients under the names that transformers saves parameters with."""
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()
        model.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
        return {published_name(name): tensor.double().norm().item() for name, tensor in sorted(stored.items())
                if not name.endswith("e_score_correction_bias")}


def write_one_step(out, name, config, weights):
    tokens = random_tokens(("step", name), (1, 1, 25), config.vocab_size)
    ids = torch.from_numpy(tokens[0].astype(np.int64))
    result = {}
    for key, dtype in (("f32", torch.float32), ("f64", torch.float64)):
        with precision(dtype):
            model = build(config, weights, dtype)
            loss = mean_cross_entropy(model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:])
            loss.backward()
            result[key] = {"loss": loss.item(), "gradients": gradients_of_files(model)}
    stored = {published_name(n): tensor for n, tensor in load_file(out / name / "model.safetensors").items()}
    save_file(stored, out / name / "model.safetensors", metadata={"format": "pt"})
    result["gguf_names"] = gguf_names(config, stored)
    save_file({"tokens": torch.from_numpy(tokens)}, out / name / "step.safetensors")
    write_json(out / name / "step.json", result)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--only", nargs="*", help="models to write; the rest is kept as it is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    goldens.random_parameter, goldens.find_salt = random_parameter, find_salt
    goldens.FAMILIES.update(MODELS)  # whose code is to compute in float64, too
    for name, row in MODELS.items():
        if args.only is not None and name not in args.only:
            continue
        shutil.rmtree(args.out / name, ignore_errors=True)
        config, weights = goldens.write_model(args.out, name, row)
        write_one_step(args.out, name, config, weights)


if __name__ == "__main__":
    main()
