#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the goldens of Gemma 4's text models, which have one training step, beside those of make_goldens.py.

    python make_gemma4_goldens.py [--only NAME ...]

A folder has what one of make_goldens.py's FAMILIES has. layer_scalar is a buffer in transformers: it is random too, and
has no gradient. config.classic.json has the keys of the published files, which transformers saves as per_layer_config.
"""

import argparse
import json
import shutil
from pathlib import Path

import gguf
import make_goldens as goldens
import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

rope = goldens.rope
COMMON = dict(hidden_size=18, intermediate_size=14, num_attention_heads=2, num_key_value_heads=1, head_dim=10,
              global_head_dim=14, vocab_size=64, vocab_size_per_layer_input=64, hidden_size_per_layer_input=0,
              sliding_window=8, rms_norm_eps=1e-6, tie_word_embeddings=True)
SLIDING, FULL = "sliding_attention", "full_attention"


def ropes(share, full=1000.0, sliding=100.0):
    return {SLIDING: rope(sliding), FULL: rope(full, rope_type="proportional", partial_rotary_factor=share)}


FAMILIES = {
    # Inputs of each layer, windows shorter than the prompt, and keys and values of other layers in the last two, whose
    # MLPs are twice as wide: layer 4 reads those of layer 3, layer 5 those of layer 2.
    "gemma4": dict(
        type="gemma4_text", prompt=40,
        config=COMMON | dict(hidden_size=16, intermediate_size=12, num_hidden_layers=6,
                             layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
                             hidden_size_per_layer_input=5, num_kv_shared_layers=2, use_double_wide_mlp=True,
                             final_logit_softcapping=6.0, rope_parameters=ropes(0.3))),
    # Keys that are values in full layers, which have one head of them and rotate three pairs of eight; no inputs of
    # layers.
    "gemma4_equal": dict(
        type="gemma4_text", prompt=40,
        config=COMMON | dict(hidden_size=22, num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL],
                             num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, head_dim=6,
                             global_head_dim=16, attention_k_eq_v=True, rope_parameters=ropes(0.375))),
    # Frequencies of layers with a window are divided by 2, those of the others by 4.
    "gemma4_scaled": dict(
        type="gemma4_text", prompt=40,
        config=COMMON | dict(num_hidden_layers=3, layer_types=[SLIDING, SLIDING, FULL], rope_parameters={
            SLIDING: rope(100.0, rope_type="linear", factor=2.0),
            FULL: rope(1000.0, rope_type="proportional", partial_rotary_factor=0.5, factor=4.0)})),
    # Experts beside the MLP, and a head of its own.
    "gemma4_experts": dict(
        type="gemma4_text", prompt=40,
        config=COMMON | dict(num_hidden_layers=2, layer_types=[SLIDING, FULL], enable_moe_block=True, num_experts=5,
                             top_k_experts=2, moe_intermediate_size=7, tie_word_embeddings=False,
                             attention_k_eq_v=True, num_global_key_value_heads=1, rope_parameters=ropes(0.5))),
}
goldens.FAMILIES |= FAMILIES
plain_parameter = goldens.random_parameter


def random_parameter(model_name, name, shape):
    rng = goldens.stream("weights", model_name, name)
    if name.endswith(("q_norm.weight", "k_norm.weight")):  # nothing else divides the scores
        value = rng.uniform(0.2, 0.8, shape)
    elif "norm" in name.split(".")[-2] or name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        value = rng.uniform(0.5, 1.5, shape)
    elif name.endswith("embed_tokens_per_layer.weight"):
        value = 0.4 * rng.standard_normal(shape)
    else:
        return plain_parameter(model_name, name, shape)
    return torch.from_numpy(value.astype(np.float32))


goldens.random_parameter = random_parameter


def find_salt(name, row, config, weights):
    """A salt whose greedy continuation varies, and is further from a tie than the error of these many norms."""
    best = (0, None)
    for salt in range(100):
        prompt = goldens.random_tokens(("prompt", name, salt), row["prompt"], config.vocab_size)
        f32, greedy, margin = goldens.forward_and_greedy(config, weights, torch.float32, prompt)
        if margin < 0.01:
            continue
        f64, _, _ = goldens.forward_and_greedy(config, weights, torch.float64, prompt)
        if margin > 1100 * np.abs(f32.astype(np.float64) - f64).max():
            best = max(best, (len(set(greedy.tolist())), -salt))
        if best[0] >= 8:
            break
    assert best[1] is not None, f"{name}: no salt"
    return -best[1]


goldens.find_salt = find_salt


def gguf_names(model, config):
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)

    def own(name):
        # llama.cpp's converter names these so; the package's table does not have the last two.
        if name.endswith("layer_scalar"):
            name += ".weight"
        if name.endswith("router.scale"):
            return f"blk.{name.split('.')[2]}.ffn_gate_inp.scale"
        if name.endswith("per_expert_scale"):
            return f"blk.{name.split('.')[2]}.ffn_down_exps.scale"
        if ".experts." in name:
            name += ".weight"
        return table.get_name(name, try_suffixes=(".weight", ".bias"))

    names = [name for name, _ in model.named_parameters()]
    names += [name for name, _ in model.named_buffers() if name.endswith("layer_scalar")]
    return sorted(own(name) for name in names if not (config.tie_word_embeddings and name == "lm_head.weight"))


def write_one_step(out, name, config, weights):
    """The loss of one document and the norms of its gradients, each under the name of its tensor in the file."""
    tokens = goldens.random_tokens(("step", name), (1, 1, 25), config.vocab_size)
    ids = torch.from_numpy(tokens[0].astype(np.int64))
    result = {}
    for key, dtype in (("f32", torch.float32), ("f64", torch.float64)):
        with goldens.precision(dtype):
            model = goldens.build(config, weights, dtype)
            loss = goldens.mean_cross_entropy(model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:])
            loss.backward()
            result[key] = {"loss": loss.item(), "gradients": {
                name: parameter.grad.double().norm().item() for name, parameter in model.named_parameters()}}
    result["gguf_names"] = gguf_names(model, config)
    save_file({"tokens": tokens}, out / name / "step.safetensors")
    goldens.write_json(out / name / "step.json", result)


def classic_config(path, extra):
    """The configuration in the keys of published files."""
    config = json.loads(path.read_text())
    full = next(iter(config.pop("per_layer_config").values()))
    config["global_head_dim"] = full["head_dim"]
    config["num_global_key_value_heads"] = full.get("num_key_value_heads")
    config.pop("transformers_version")
    config["torch_dtype"] = config.pop("dtype")
    return dict(sorted((config | extra).items()))


goldens.classic_config = classic_config


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
        config, weights = goldens.write_model(args.out, name, row)
        write_one_step(args.out, name, config, weights)


if __name__ == "__main__":
    main()
