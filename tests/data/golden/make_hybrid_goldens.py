#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the goldens of families with state-space layers, in the form of make_goldens.py and with its help.

    python make_hybrid_goldens.py [--out DIR] [--only NAME ...]
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoConfig

import make_goldens as goldens
from make_goldens import rope

COMMON = dict(hidden_size=32, intermediate_size=24, vocab_size=64, num_attention_heads=4, num_key_value_heads=2)
GRANITE = dict(embedding_multiplier=2.5, residual_multiplier=0.7, attention_multiplier=0.5, logits_scaling=0.7)
FALCON = dict(embedding_multiplier=2.5, lm_head_multiplier=1.4, key_multiplier=0.6, attention_out_multiplier=0.8,
              ssm_in_multiplier=1.25, ssm_out_multiplier=0.7, mlp_multipliers=[1.3, 0.6],
              ssm_multipliers=[0.8, 1.2, 0.9, 1.1, 0.7])

# Widths are no multiples of a vector's; each model has every kind of layer that its type has.
HYBRIDS = {
    # State-space layers and one of attention, which rotates nothing and has biases; three groups of two heads.
    "granitemoehybrid": dict(
        type="granitemoehybrid", prompt=40, classic=None,
        config=GRANITE | dict(
            hidden_size=24, intermediate_size=10, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            num_local_experts=3, num_experts_per_tok=2, shared_intermediate_size=14, mamba_expand=3, mamba_n_heads=6,
            mamba_n_groups=3, mamba_d_state=10, mamba_chunk_size=16,
            attention_bias=True, layer_types=["linear_attention", "full_attention"])),
    # One expert for all tokens and no others; a rotation; steps within limits.
    "granitemoehybrid_dense": dict(
        type="granitemoehybrid", prompt=40, classic=None,
        config=GRANITE | dict(
            num_hidden_layers=2, num_local_experts=0, shared_intermediate_size=28, mamba_n_heads=8, mamba_n_groups=1,
            mamba_d_state=6, mamba_d_conv=3, mamba_chunk_size=16, position_embedding_type="rope",
            tie_word_embeddings=True, time_step_limit=[0.2, 0.9], rope_parameters=rope(1000.0),
            layer_types=["full_attention", "linear_attention"])),
    "granitemoe": dict(
        type="granitemoe", prompt=40, classic=None,
        config=GRANITE | dict(hidden_size=24, intermediate_size=12, num_hidden_layers=2, num_local_experts=5,
                              num_experts_per_tok=2, rope_parameters=rope(10000.0))),
    # An expert beside the others that computes every token, of another size.
    "granitemoeshared": dict(
        type="granitemoeshared", prompt=40, classic=None,
        config=GRANITE | dict(hidden_size=24, intermediate_size=10, num_hidden_layers=2, num_local_experts=5,
                              num_experts_per_tok=2, shared_intermediate_size=14, rope_parameters=rope(10000.0))),
    # Both mixers in every layer; five heads.
    "falcon_h1": dict(
        type="falcon_h1", prompt=40, classic=None,
        config=FALCON | dict(hidden_size=24, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2,
                             mamba_d_ssm=40, mamba_n_heads=5, mamba_n_groups=1, mamba_d_state=11, mamba_chunk_size=16,
                             rope_parameters=rope(100000.0))),
    # A norm of two groups before the gate; what attention reads is scaled.
    "falcon_h1_norm": dict(
        type="falcon_h1", prompt=40, classic=None,
        config=FALCON | dict(hidden_size=24, num_hidden_layers=2, mamba_d_ssm=40, mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=7,
                             mamba_chunk_size=16, mamba_rms_norm=True, mamba_norm_before_gate=True,
                             attention_in_multiplier=1.1, tie_word_embeddings=True, rope_parameters=rope(10000.0))),
    # Biases of all projections, beside multipliers of what they read and of what they make.
    "falcon_h1_bias": dict(
        type="falcon_h1", prompt=40, classic=None,
        config=FALCON | dict(hidden_size=24, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2,
                             mamba_d_ssm=24, mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=16,
                             attention_in_multiplier=1.1, mamba_proj_bias=True, projectors_bias=True,
                             attention_bias=True, mlp_bias=True, rope_parameters=rope(10000.0))),
    # One mixer or MLP in each layer.
    "nemotron_h": dict(
        type="nemotron_h", prompt=40, classic=None,
        config=dict(head_dim=10, ssm_state_size=10, mamba_num_heads=6, mamba_head_dim=6, n_groups=2, chunk_size=16,
                    time_step_min=0.2, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"])),
    # What a GGUF file can state: the usual limit of time steps. MLPs have biases; two layers of attention in a row.
    "nemotron_h_usual": dict(
        type="nemotron_h", prompt=40, classic=None,
        config=dict(head_dim=9, ssm_state_size=7, mamba_num_heads=3, mamba_head_dim=8, n_groups=1, chunk_size=16,
                    mlp_bias=True, layers_block_type=["full_attention", "full_attention", "mlp", "linear_attention"])),
    # Experts without gates, between projections to a narrower width.
    "nemotron_h_moe": dict(
        type="nemotron_h", prompt=40, classic=None,
        config=dict(head_dim=8, ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=9, n_groups=1, chunk_size=16,
                    n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=10, moe_latent_size=14,
                    moe_shared_expert_intermediate_size=12, routed_scaling_factor=1.5, norm_topk_prob=True,
                    layers_block_type=["linear_attention", "moe", "full_attention", "moe"])),
    # Biases of MLPs, of the expert that computes every token and of the projections around experts, which have none.
    "nemotron_h_bias": dict(
        type="nemotron_h", prompt=40, classic=None,
        config=dict(head_dim=8, ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=6, n_groups=2, chunk_size=16,
                    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=10, moe_latent_size=14,
                    moe_shared_expert_intermediate_size=12, mlp_bias=True,
                    layers_block_type=["linear_attention", "mlp", "full_attention", "moe"])),
    # Gated convolutions around a layer of attention; the width of MLPs as it is stated.
    "lfm2": dict(
        type="lfm2", prompt=40, classic=None,
        config=dict(hidden_size=30, num_attention_heads=3, num_key_value_heads=1, num_hidden_layers=3,
                    block_auto_adjust_ff_dim=False, tie_word_embeddings=True, rope_parameters=rope(1000000.0),
                    layer_types=["conv", "full_attention", "conv"])),
    # With biases and four taps; two thirds of a width times 1.3, rounded up to 10.
    "lfm2_bias": dict(
        type="lfm2", prompt=40, classic=None,
        config=dict(hidden_size=24, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2, conv_bias=True,
                    conv_L_cache=4, block_multiple_of=10, block_ffn_dim_multiplier=1.3, tie_word_embeddings=False,
                    rope_parameters=rope(10000.0), layer_types=["full_attention", "conv"])),
}


def random_parameter(model_name, name, shape, usual=goldens.random_parameter):
    rng = goldens.stream("weights", model_name, name)
    part = name.rsplit(".", 1)[-1]
    if part == "A_log":
        value = rng.uniform(math.log(0.3), math.log(4.0), shape)
    elif part == "dt_bias":
        value = rng.uniform(-3.0, 0.5, shape)
    elif part == "D" or name.endswith(("norm_f.weight", "layernorm.weight")):
        value = rng.uniform(0.5, 1.5, shape)
    elif name.endswith("embeddings.weight"):
        value = 0.2 * rng.standard_normal(shape)
    else:
        return usual(model_name, name, shape)
    return torch.from_numpy(value.astype(np.float32))


def tensors_of_file(config, named):
    """Tensors under their names in the file: transformers joins and renames some when it reads them."""
    for name, tensor in named:
        name = (name.replace("experts.gate_up_proj", "input_linear.weight").replace("router.weight", "router.layer.weight")
                if config.model_type.startswith("granite") else name)
        if config.model_type.startswith("granite"):
            name = name.replace("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight")
        if config.model_type == "nemotron_h":
            name = name.replace("model.", "backbone.", 1)
            if name.endswith((".experts.up_proj", ".experts.down_proj")):
                stem, part = name.rsplit(".", 1)
                yield from ((f"{stem}.{i}.{part}.weight", matrix) for i, matrix in enumerate(tensor))
                continue
        yield name, tensor


def gguf_names(config, names):
    """The tensors of a GGUF file: the gguf package's names of what llama.cpp's converter makes of the file's."""
    moe = config.model_type == "nemotron_h" and "moe" in config.layers_block_type
    arch = {"granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID, "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
            "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
            "falcon_h1": gguf.MODEL_ARCH.FALCON_H1, "lfm2": gguf.MODEL_ARCH.LFM2,
            "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE if moe else gguf.MODEL_ARCH.NEMOTRON_H}[config.model_type]
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    dense = getattr(config, "num_local_experts", None) == 0
    result = set()
    for name in names:
        layer = ".".join(name.split(".")[:3])
        block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if name.endswith("block_sparse_moe.input_linear.weight"):
            result |= {f"{block}.ffn_gate_exps.weight", f"{block}.ffn_up_exps.weight"}
        elif name.endswith("shared_mlp.input_linear.weight"):
            end = "" if dense else "_shexp"
            result |= {f"{block}.ffn_gate{end}.weight", f"{block}.ffn_up{end}.weight"}
        elif name.endswith("shared_mlp.output_linear.weight") and dense:
            result.add(f"{block}.ffn_down.weight")
        elif ".mixer.experts." in name:
            result.add(f"{block}.ffn_{name.split('.')[-2].removesuffix('_proj')}_exps.weight")
        else:
            if name.endswith(".dt_bias"):
                name = f"{layer}.{name.split('.')[3]}.dt_proj.bias" if not moe else name.replace("dt_bias", "dt.bias")
            if name.endswith("e_score_correction_bias"):
                name = name.replace("e_score_correction_bias", "e_score_correction.bias")
            mapped = table.get_name(name, try_suffixes=(".weight", ".bias"))
            assert mapped is not None, name
            result.add(mapped)
    return sorted(result)


def write_step(out, name, config, weights):
    """The loss of one document and the norms of its gradients, each under the name of its tensor in the file."""
    tokens = goldens.random_tokens(("step", name), (1, 1, 25), config.vocab_size)
    ids = torch.from_numpy(tokens[0].astype(np.int64))
    result = {}
    for key, dtype in (("f32", torch.float32), ("f64", torch.float64)):
        with goldens.precision(dtype):
            model = goldens.build(config, weights, dtype)
            loss = goldens.mean_cross_entropy(model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:])
            loss.backward()
            gradients = tensors_of_file(config, ((k, p.grad) for k, p in model.named_parameters()))
            result[key] = {"loss": loss.item(), "gradients": {k: g.double().norm().item() for k, g in gradients}}
    names = list(result["f32"]["gradients"])
    if config.model_type == "nemotron_h":
        names += [f"backbone.layers.{i}.mixer.gate.e_score_correction_bias"
                  for i, kind in enumerate(config.layers_block_type) if kind == "moe"]
    result["gguf_names"] = gguf_names(config, names)
    goldens.save_file({"tokens": tokens}, out / name / "step.safetensors")
    goldens.write_json(out / name / "step.json", result)


def classic_config(config):
    """The keys of files that transformers 4 wrote."""
    for key in ("dtype", "transformers_version"):
        config.pop(key)
    config["torch_dtype"] = "float32"
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    if config["model_type"] == "lfm2":
        types = config.pop("layer_types")
        config["full_attn_idxs"] = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
        config["block_ff_dim"] = config.pop("intermediate_size")
        config |= {"block_dim": config["hidden_size"], "block_use_swiglu": True, "use_pos_enc": True}  # of published ones
        config["tie_embedding"] = config.pop("tie_word_embeddings")
    if "layer_types" in config:
        config["layer_types"] = [kinds[kind] for kind in config["layer_types"]]
    if "layers_block_type" in config:
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
        config["num_hidden_layers"] = len(config["hybrid_override_pattern"])
        config.pop("mtp_layers_block_type")
        config["time_step_limit"] = [0.0, math.inf]  # Infinity, which is no JSON but what Python wrote
    if "rope_parameters" in config:
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = None
    return dict(sorted(config.items()))


def write_classic(folder, config, weights):
    path = folder / "config.classic.json"
    goldens.write_json(path, classic_config(json.loads((folder / "config.json").read_text())))
    prompt = goldens.load_file(folder / "expected.safetensors")["prompt"]
    with torch.no_grad():
        same = [goldens.run_logits(goldens.build(c, weights, torch.float32), prompt)
                for c in (config, AutoConfig.from_pretrained(path))]
    assert torch.equal(*same), f"{folder.name}: config.classic.json means something else"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--only", nargs="*", help="models to write; the rest is kept as it is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    goldens.random_parameter = random_parameter
    goldens.SMALL = COMMON
    goldens.FAMILIES = HYBRIDS
    goldens.NO_ROTATION |= {"granitemoehybrid", "nemotron_h"}
    for name, row in HYBRIDS.items():
        if args.only is not None and name not in args.only:
            continue
        shutil.rmtree(args.out / name, ignore_errors=True)
        config, weights = goldens.write_model(args.out, name, row)
        write_classic(args.out / name, config, weights)
        write_step(args.out, name, config, weights)


if __name__ == "__main__":
    main()
