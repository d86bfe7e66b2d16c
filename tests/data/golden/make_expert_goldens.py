#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the goldens of families with mixtures of experts that have one training step, beside those of make_goldens.py.

    python make_expert_goldens.py [--only NAME ...]

A folder has what one of make_goldens.py's FAMILIES has. In each model there is an expert that no token chooses where
the family has a bias by which that can be made so.
"""

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path

import gguf
import make_goldens as goldens
import make_latent_gguf
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

rope = goldens.rope
GPT_OSS_ROPE = rope(150.0, rope_type="yarn", factor=4.0, beta_fast=8.0, beta_slow=1.0, truncate=False,
                    original_max_position_embeddings=32)
FAMILIES = {
    # The first layer has a window, the ramp of yarn ends between dimensions; SwiGLU meets its limits.
    "gpt_oss": dict(
        type="gpt_oss", prompt=40, classic=None,
        config=dict(hidden_size=24, intermediate_size=20, num_attention_heads=3, num_key_value_heads=1, head_dim=12,
                    num_local_experts=5, num_experts_per_tok=2, sliding_window=8, swiglu_limit=1.5,
                    rope_parameters=GPT_OSS_ROPE)),
    # What a GGUF file can state, with experts in MXFP4 as published.
    "gpt_oss_mxfp4": dict(
        type="gpt_oss", prompt=40, classic=None, mxfp4=True,
        config=dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                    num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
                    rope_parameters=GPT_OSS_ROPE | dict(beta_fast=32.0))),
    "olmoe": dict(
        type="olmoe", prompt=40,
        config=dict(hidden_size=24, intermediate_size=12, num_experts=6, num_experts_per_tok=3,
                    num_key_value_heads=2, rope_parameters=rope(10000.0))),
    # A limit that queries, keys and values meet.
    "olmoe_clip": dict(
        type="olmoe", prompt=40, classic=None,
        config=dict(hidden_size=24, intermediate_size=10, num_attention_heads=3, num_key_value_heads=1, num_experts=5,
                    num_experts_per_tok=2, clip_qkv=0.9, norm_topk_prob=True, rope_parameters=rope(10000.0))),
    # A window in the first of three layers, the second of which has an MLP; no biases of q, k and v.
    "qwen2_moe_window": dict(
        type="qwen2_moe", prompt=40, classic=None,
        config=dict(hidden_size=30, intermediate_size=22, num_hidden_layers=3, num_attention_heads=3,
                    num_key_value_heads=1, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7,
                    shared_expert_intermediate_size=9, norm_topk_prob=True, qkv_bias=False, mlp_only_layers=[1],
                    use_sliding_window=True, sliding_window=5, max_window_layers=2, rope_parameters=rope(10000.0))),
    # Half of each head rotates.
    "minimax_m2": dict(
        type="minimax_m2", prompt=40, classic=None,
        config=dict(hidden_size=24, intermediate_size=12, num_attention_heads=3, num_key_value_heads=1, head_dim=12,
                    num_local_experts=7, num_experts_per_tok=2,
                    rope_parameters=rope(5000000.0, partial_rotary_factor=0.5))),
    # What GGUF files can state of these: one group, and experts in all layers but the first.
    "glm4_moe_ungrouped": dict(
        type="glm4_moe", prompt=40, classic=None,
        config=dict(hidden_size=24, intermediate_size=28, num_attention_heads=3, num_key_value_heads=1, head_dim=12,
                    attention_bias=True, use_qk_norm=True, first_k_dense_replace=1, n_routed_experts=5,
                    num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=1, routed_scaling_factor=1.5,
                    num_mtp_layers=0, rope_parameters=rope(10000.0, partial_rotary_factor=0.5))),
    "ernie4_5_moe_leading": dict(
        type="ernie4_5_moe", prompt=40, classic=None,
        config=dict(hidden_size=24, intermediate_size=28, num_attention_heads=4, num_key_value_heads=2,
                    moe_num_experts=5, moe_k=2, moe_intermediate_size=8, moe_num_shared_experts=2,
                    moe_layer_start_index=1, tie_word_embeddings=True, rope_parameters=rope(500000.0))),
    # Experts in every second layer, of which the last is none.
    "ernie4_5_moe_interval": dict(
        type="ernie4_5_moe", prompt=40, classic=None,
        config=dict(hidden_size=18, intermediate_size=20, num_hidden_layers=3, num_attention_heads=3,
                    num_key_value_heads=1, moe_num_experts=5, moe_k=2, moe_intermediate_size=7,
                    moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_interval=2,
                    tie_word_embeddings=True, rope_parameters=rope(500000.0))),
    # Biases of attention, of MLPs, of what computes every token, and of the head, whose matrix is the embeddings'.
    "ernie4_5_moe_bias": dict(
        type="ernie4_5_moe", prompt=40, classic=None,
        config=dict(hidden_size=24, intermediate_size=28, num_attention_heads=3, num_key_value_heads=1,
                    moe_num_experts=5, moe_k=2, moe_intermediate_size=8, moe_num_shared_experts=1, use_bias=True,
                    moe_layer_start_index=1, tie_word_embeddings=True, rope_parameters=rope(500000.0))),
    "mixtral_window": dict(
        type="mixtral", prompt=40, classic=None,
        config=dict(hidden_size=24, intermediate_size=12, num_local_experts=5, num_experts_per_tok=2,
                    sliding_window=9, rope_parameters=rope(1000000.0))),
    # Biases of the MLP and of the expert for all tokens; the best two of six experts; no scaling.
    "deepseek_v2_bias": dict(
        type="deepseek_v2", prompt=40, classic=None,
        config=dict(hidden_size=28, intermediate_size=22, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=18,
                    kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=9, vocab_size=72,
                    first_k_dense_replace=1, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=9,
                    n_shared_experts=2, topk_method="greedy", routed_scaling_factor=1.5, rms_norm_eps=1e-6,
                    mlp_bias=True, rope_parameters=rope(10000.0))),
    # Scaling of Llama 3.1, which a GGUF file states by divisors of the frequencies.
    "deepseek_v3_llama3": dict(
        type="deepseek_v3", prompt=42, classic=None,
        config=dict(hidden_size=20, intermediate_size=24, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=14,
                    kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=7, first_k_dense_replace=1,
                    n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=1, n_group=1,
                    topk_group=1, rms_norm_eps=1e-6, num_mtp_layers=0, rope_parameters=rope(
                        500.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                        original_max_position_embeddings=32))),
    # An indexer that selects 13 tokens, of many heads lest scores of 0 are equal; it rotates a part of each head.
    "deepseek_v32": dict(
        type="deepseek_v32", prompt=42, classic=None,
        config=dict(hidden_size=24, intermediate_size=28, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=20,
                    vocab_size=64, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=9, first_k_dense_replace=1,
                    n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=1, n_group=2,
                    topk_group=1, rms_norm_eps=1e-6, index_n_heads=16, index_head_dim=10, index_topk=13,
                    rope_parameters=rope(10000.0))),
    # Three streams; a window of 6 alone, rows of 4 tokens of which 5 are chosen, all rows of 12 tokens. Yarn with a
    # blend in layers with rows; experts by token in the first layers; SwiGLU meets its limits.
    "deepseek_v4": dict(
        type="deepseek_v4", prompt=61, classic=None,
        config=dict(hidden_size=24, moe_intermediate_size=10, num_hidden_layers=5, num_attention_heads=4, head_dim=16,
                    num_key_value_heads=1, vocab_size=64, q_lora_rank=20, n_routed_experts=6, num_experts_per_tok=2,
                    sliding_window=6, o_groups=2, o_lora_rank=6, index_n_heads=16, index_head_dim=12, index_topk=5,
                    hc_mult=3, hc_sinkhorn_iters=6, swiglu_limit=1.0, rms_norm_eps=1e-6, partial_rotary_factor=0.5,
                    layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                                 "compressed_sparse_attention", "heavily_compressed_attention"],
                    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
                    mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe", "moe"], compress_rope_theta=500.0,
                    rope_parameters=dict(rope_type="yarn", factor=4.0, beta_fast=4.0, beta_slow=1.0,
                                         original_max_position_embeddings=16))),
    # What a GGUF file can state: rows of 4 and of 128 tokens, of which the prompt fills one, and experts by token in the
    # first layers. All rows of matrices are whole blocks of 32.
    "deepseek_v4_usual": dict(
        type="deepseek_v4", prompt=150, classic=None,
        config=dict(hidden_size=32, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, head_dim=16,
                    num_key_value_heads=1, vocab_size=64, q_lora_rank=32, n_routed_experts=6, num_experts_per_tok=2,
                    sliding_window=6, o_groups=2, o_lora_rank=16, index_n_heads=16, index_head_dim=12, index_topk=5,
                    hc_mult=4, hc_sinkhorn_iters=6, swiglu_limit=1.0, rms_norm_eps=1e-6, partial_rotary_factor=0.5,
                    max_position_embeddings=256,
                    layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
                    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
                    mlp_layer_types=["hash_moe", "moe", "moe"], compress_rope_theta=500.0,
                    rope_parameters=dict(rope_type="yarn", factor=4.0, beta_fast=4.0, beta_slow=1.0,
                                         original_max_position_embeddings=16))),
    # Yarn with a blend, and queries that grow every five positions; a first layer without experts, groups worth their
    # best two, experts in stacked tensors.
    "mistral4": dict(
        type="mistral4", prompt=42,
        config=dict(hidden_size=24, intermediate_size=28, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=20,
                    vocab_size=64, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=9,
                    first_k_dense_replace=1, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=8,
                    n_shared_experts=1, n_group=2, topk_group=1, routed_scaling_factor=1.5, rms_norm_eps=1e-6,
                    rope_parameters=rope(10000.0, rope_type="yarn", factor=4.0, beta_fast=4.0, beta_slow=1.0,
                                         mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=5,
                                         llama_4_scaling_beta=0.4))),
    # What a GGUF file can state: yarn's usual betas. Of four frequencies the first is kept, the second is blended and the
    # others are divided; queries grow every 21 positions.
    "mistral4_usual": dict(
        type="mistral4", prompt=42,
        config=dict(hidden_size=24, intermediate_size=28, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=20,
                    vocab_size=64, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=9,
                    first_k_dense_replace=1, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=8,
                    n_shared_experts=1, n_group=2, topk_group=1, routed_scaling_factor=1.5, rms_norm_eps=1e-6,
                    rope_parameters=rope(100.0, rope_type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0,
                                         mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=21,
                                         llama_4_scaling_beta=0.4))),
    # Two latent attentions and two MLPs a layer, and beside them four of eight choices: five experts, of which nobody
    # chooses the second, and three identities, of which nobody chooses the last. The second latent is wider than hidden.
    "longcat_flash": dict(
        type="longcat_flash", prompt=42, classic=None,
        config=dict(hidden_size=20, ffn_hidden_size=28, num_layers=2, num_hidden_layers=4, num_attention_heads=12,
                    num_key_value_heads=12, q_lora_rank=14, kv_lora_rank=24, qk_nope_head_dim=5, qk_rope_head_dim=6,
                    head_dim=6, v_head_dim=3, n_routed_experts=5, zero_expert_num=3, moe_topk=4,
                    expert_ffn_hidden_size=9, routed_scaling_factor=1.5, rope_parameters=rope(10000000.0))),
    # No identities; yarn with a blend, biases of attention, one matrix for embeddings and logits.
    "longcat_flash_yarn": dict(
        type="longcat_flash", prompt=42, classic=None,
        config=dict(hidden_size=24, ffn_hidden_size=20, num_layers=1, num_hidden_layers=2, num_attention_heads=3,
                    num_key_value_heads=3, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
                    head_dim=8, v_head_dim=9, n_routed_experts=4, zero_expert_num=0, moe_topk=2,
                    expert_ffn_hidden_size=8, routed_scaling_factor=2.5, attention_bias=True, tie_word_embeddings=True,
                    rope_parameters=rope(10000.0, rope_type="yarn", factor=4.0, beta_fast=4.0, beta_slow=1.0,
                                         mscale=0.707, mscale_all_dim=1.0, original_max_position_embeddings=20))),
    # Chunks of 7; the third layer sees everything and does not rotate, and its queries grow every five positions;
    # experts in every second layer, of which nobody chooses the last. Frequencies are kept or divided, none is blended.
    "llama4": dict(
        type="llama4_text", prompt=40, classic=None,
        config=dict(hidden_size=20, intermediate_size=9, intermediate_size_mlp=18, num_hidden_layers=4,
                    num_attention_heads=3, num_key_value_heads=1, head_dim=8, num_local_experts=5,
                    num_experts_per_tok=1, interleave_moe_layer_step=2, no_rope_layers=[1, 1, 0, 1],
                    attention_chunk_size=7, floor_scale=5, attn_scale=0.4, use_qk_norm=True,
                    rope_parameters=rope(500.0, rope_type="llama3", factor=16.0, low_freq_factor=1.0,
                                         high_freq_factor=1.0, original_max_position_embeddings=32))),
    # As in the model of 128 experts, no norms of q and k; two experts for each token, in layers of a list; chunks of
    # 16, and queries that do not grow in the layer that does not rotate, which is the first.
    "llama4_plain": dict(
        type="llama4_text", prompt=40, classic=None,
        config=dict(hidden_size=24, intermediate_size=10, intermediate_size_mlp=14, num_hidden_layers=3,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=6, num_local_experts=4,
                    num_experts_per_tok=2, moe_layers=[1, 2], no_rope_layers=[0, 1, 1], attention_chunk_size=16,
                    use_qk_norm=False, attn_temperature_tuning=False, rope_parameters=rope(10000.0))),
    # What a GGUF file can state: chunks of 8192, and every fourth layer without rotation.
    "llama4_usual": dict(
        type="llama4_text", prompt=40, classic=None,
        config=dict(hidden_size=20, intermediate_size=8, intermediate_size_mlp=16, num_hidden_layers=4,
                    num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_local_experts=3,
                    num_experts_per_tok=1, interleave_moe_layer_step=2, rope_parameters=rope(500000.0))),
}
goldens.FAMILIES |= FAMILIES
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["mistral4"] = "Mistral4ForCausalLM"  # which transformers has within mistral3 alone
ARCHITECTURES = {"mixtral": "llama", "glm4_moe": "glm4moe", "ernie4_5_moe": "ernie4_5-moe", "gpt_oss": "gpt-oss",
                 "minimax_m2": "minimax-m2", "olmoe": "olmoe", "llama4_text": "llama4",
                 "mistral4": "mistral4", "deepseek_v3": "deepseek2", "deepseek_v32": "glm-dsa"}  # whose tensors have the same names
plain_parameter, plain_greedy = goldens.random_parameter, goldens.forward_and_greedy


def random_parameter(model_name, name, shape):
    rng = goldens.stream("weights", model_name, name)
    if name.endswith(("sinks", "_bias")) and "correction" not in name or name.endswith("router.bias"):
        value = 0.7 * rng.standard_normal(shape)
        if name.endswith("router.bias"):
            value[-1] = -30
        return torch.from_numpy(value.astype(np.float32))
    if "layernorm." in name:  # of a layer that has two
        return torch.from_numpy(rng.uniform(0.5, 1.5, shape).astype(np.float32))
    if name.endswith("tid2eid"):  # of all experts but the last
        return torch.from_numpy(rng.permuted(np.tile(np.arange(5), (shape[0], 1)), axis=1)[:, :shape[1]])
    if model_name == "llama4" and name.endswith("router.weight"):
        # The larger of two opposite logits is above a quarter of one of them: no token chooses the last expert.
        value = 1.2 / np.sqrt(shape[1]) * rng.standard_normal(shape)
        value[1], value[-1] = -value[0], value[0] / 4
        return torch.from_numpy(value.astype(np.float32))
    if model_name.startswith(("gpt_oss", "llama4")) and ".experts." in name:  # [experts, in, out]
        return torch.from_numpy((1.2 / np.sqrt(shape[1]) * rng.standard_normal(shape)).astype(np.float32))
    value = plain_parameter(model_name, name, shape)
    if name.endswith("e_score_correction_bias"):
        value[-1] = -9
        if model_name == "longcat_flash":
            value[1] = -9
    return value


goldens.random_parameter = random_parameter


def matrices(names, fused):
    """The parameters' names with gate and up of experts apart, unless they are `fused` in GGUF files as well."""
    for name in names:
        if fused and name.endswith(".experts.gate_up_proj"):
            yield name + ".weight"
        elif ".experts.gate_up_proj" in name:
            end = name.split(".experts.gate_up_proj")[1].replace("_", ".") or ".weight"
            for part in ("gate", "up"):
                yield name.split(".experts.")[0] + f".experts.{part}_proj{end}"
        elif name.endswith(".kv_b_proj.weight"):
            yield from (name.replace("kv_b_proj", f"{part}_b_proj") for part in "kv")
        elif name.endswith(".experts.down_proj"):
            yield name + ".weight"
        elif name.endswith(".experts.down_proj_bias"):
            yield name.replace("_bias", ".bias")
        else:
            yield name


def gguf_names(config, model, saved):
    """The names of a GGUF file of the model, whose tensors in the directory are `saved`; none where there are no such
    files."""
    if config.model_type == "deepseek_v4":
        return sorted({make_latent_gguf.deepseek4_name(name) for name in saved})
    if config.model_type not in ARCHITECTURES:
        return []
    archs = {gguf.MODEL_ARCH_NAMES[arch]: arch for arch in gguf.MODEL_ARCH}
    table = gguf.get_tensor_name_map(archs[ARCHITECTURES[config.model_type]], config.num_hidden_layers)
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias")]

    def own(name):
        if name.endswith("e_score_correction_bias"):
            return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
        if name.endswith("sinks"):
            name += ".weight"
        return table.get_name(name, try_suffixes=(".weight", ".bias"))

    return sorted({own(name) for name in matrices(names, config.model_type == "mistral4")})


def is_trained(config, name):
    """Corrections, tables of experts and indexers are not, and the files of transformers have matrices of identities,
    which it never reads."""
    identity = re.search(r"\.experts\.(\d+)\.", name) if config.model_type == "longcat_flash" else None
    return not name.endswith(("e_score_correction_bias", "ffn.gate.bias", "tid2eid")) and ".indexer." not in name and (
        identity is None or int(identity.group(1)) < config.n_routed_experts)


def write_one_step(out, name, config, weights):
    """The loss of one document and the norms of its gradients, each under the name of its tensor in the file: the
    gradients are saved as the parameters of a model are."""
    tokens = goldens.random_tokens(("step", name), (1, 1, 25), config.vocab_size)
    ids = torch.from_numpy(tokens[0].astype(np.int64))
    result = {}
    for key, dtype in (("f32", torch.float32), ("f64", torch.float64)):
        with goldens.precision(dtype):
            model = goldens.build(config, weights, dtype)
            loss = goldens.mean_cross_entropy(model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:])
            loss.backward()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            for parameter in model.parameters():  # that have a part in the loss, as indexers have none
                parameter.zero_() if parameter.grad is None else parameter.copy_(parameter.grad)
            model.save_pretrained(folder)
            saved = load_file(Path(folder) / "model.safetensors")
        result[key] = {"loss": loss.item(), "gradients": {
            name: float(np.linalg.norm(value.astype(np.float64))) for name, value in saved.items()
            if is_trained(config, name)}}
    result["gguf_names"] = gguf_names(config, model, saved)
    save_file({"tokens": tokens}, out / name / "step.safetensors")
    goldens.write_json(out / name / "step.json", result)


def quantize_experts(folder):
    """Rewrites a folder's experts as GPT-OSS is published, and returns the weights that transformers makes of them."""
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for name, value in list(tensors.items()):
        weights[name] = torch.from_numpy(value)
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            continue
        rows = np.ascontiguousarray(value.transpose(0, 2, 1))
        packed = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.MXFP4).reshape(*rows.shape[:2], -1, 17)
        codes = np.concatenate([packed[..., 1:] & 15, packed[..., 1:] >> 4], axis=-1)  # of 32 values, in order
        del tensors[name]
        tensors[name + "_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[name + "_scales"] = np.ascontiguousarray(packed[..., 0])
        blocks, scales = (torch.from_numpy(tensors[name + part]) for part in ("_blocks", "_scales"))
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        exact = gguf.quants.dequantize(packed.reshape(*rows.shape[:2], -1), gguf.GGMLQuantizationType.MXFP4)
        assert np.array_equal(weights[name].numpy(), exact.transpose(0, 2, 1)), name
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    goldens.write_json(folder / "config.json", config)
    return weights


def write_quantized(out, name, row):
    goldens.write_model(out, name, row)
    weights = quantize_experts(out / name)
    config = AutoConfig.from_pretrained(out / name)
    del config.quantization_config
    salt = goldens.find_salt(name, row, config, weights)
    prompt = goldens.random_tokens(("prompt", name, salt), row["prompt"], config.vocab_size)
    goldens.write_logits(out / name, "expected", config, weights, prompt)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--only", nargs="*", help="models to write; the rest is kept as it is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    for name, row in FAMILIES.items():
        if args.only is not None and name not in args.only:
            continue
        shutil.rmtree(args.out / name, ignore_errors=True)
        if row.get("mxfp4"):
            write_quantized(args.out, name, row)
            continue
        config, weights = goldens.write_model(args.out, name, row)
        write_one_step(args.out, name, config, weights)


if __name__ == "__main__":
    main()
