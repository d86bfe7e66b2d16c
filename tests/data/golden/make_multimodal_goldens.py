#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes multimodal checkpoints of the golden ring: whole models with an encoder of images, and what transformers +
PyTorch compute with them from text alone.

    python make_multimodal_goldens.py [--out DIR] [--only NAME ...]

Random numbers and files are those of make_goldens.py. There is no config.classic.json and no step of training: the
text models have goldens of their own.
"""

import argparse
import contextlib
import json
import shutil
from pathlib import Path

import make_goldens as goldens
import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

TEXT = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=96, max_position_embeddings=128, head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=0)
IMAGES = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8,
              patch_size=4)
MODELS = {
    "gemma3_multimodal": dict(
        type="gemma3", config=dict(
            text_config=TEXT | dict(model_type="gemma3_text", sliding_window=8, query_pre_attn_scalar=16,
                                    layer_types=["sliding_attention", "full_attention"],
                                    rope_parameters=dict(
                                        full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                                        sliding_attention=dict(rope_type="default", rope_theta=1e4))),
            vision_config=IMAGES | dict(model_type="siglip_vision_model"), mm_tokens_per_image=4,
            image_token_index=90, boi_token_index=91, eoi_token_index=92)),
    "gemma4_multimodal": dict(
        type="gemma4", config=dict(
            text_config=TEXT | dict(model_type="gemma4_text", hidden_size=16, intermediate_size=24, num_hidden_layers=3,
                                    head_dim=10, global_head_dim=14, vocab_size_per_layer_input=96,
                                    hidden_size_per_layer_input=4, sliding_window=8, num_kv_shared_layers=1,
                                    layer_types=["sliding_attention", "full_attention", "full_attention"],
                                    rope_parameters=dict(
                                        full_attention=dict(rope_type="proportional", rope_theta=1e3,
                                                            partial_rotary_factor=0.5),
                                        sliding_attention=dict(rope_type="default", rope_theta=1e2))),
            vision_config=dict(model_type="gemma4_vision", hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                               num_attention_heads=1, num_key_value_heads=1, head_dim=8, patch_size=4,
                               position_embedding_size=8, pooling_kernel_size=1),
            audio_config=None, image_token_id=90, boi_token_id=91, eoi_token_id=92, video_token_id=93,
            audio_token_id=94)),
    "mistral3_multimodal": dict(
        type="mistral3", config=dict(
            tie_word_embeddings=False,
            text_config=TEXT | dict(model_type="mistral", num_hidden_layers=1, rms_norm_eps=1e-5,
                                    rope_parameters=dict(rope_type="default", rope_theta=1e4)),
            vision_config=IMAGES | dict(model_type="siglip_vision_model"), image_token_index=90)),
    # The file states no rope_parameters.
    "mistral4_multimodal": dict(
        type="mistral3", unstated="rope_parameters", config=dict(
            tie_word_embeddings=False,
            text_config=dict(model_type="mistral4", hidden_size=24, intermediate_size=20, num_hidden_layers=2,
                             num_attention_heads=2, num_key_value_heads=2, q_lora_rank=20, kv_lora_rank=16,
                             qk_nope_head_dim=8, qk_rope_head_dim=12, v_head_dim=9, vocab_size=96,
                             max_position_embeddings=128, first_k_dense_replace=1, n_routed_experts=5,
                             num_experts_per_tok=2, moe_intermediate_size=8, bos_token_id=1, eos_token_id=2,
                             pad_token_id=0),
            vision_config=IMAGES | dict(model_type="siglip_vision_model"), image_token_index=90)),
    "qwen3_vl_multimodal": dict(
        type="qwen3_vl", config=dict(
            tie_word_embeddings=True,
            text_config=TEXT | dict(model_type="qwen3_vl_text",
                                    rope_parameters=dict(rope_type="default", rope_theta=5e6, mrope_interleaved=True,
                                                         mrope_section=[4, 2, 2])),
            vision_config=dict(model_type="qwen3_vl_vision", depth=1, hidden_size=8, intermediate_size=8, num_heads=1,
                               patch_size=4, out_hidden_size=32, num_position_embeddings=4, spatial_merge_size=1,
                               temporal_patch_size=1, deepstack_visual_indexes=[0]),
            image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)),
    "lfm2_vl_multimodal": dict(
        type="lfm2_vl", config=dict(
            text_config=dict(model_type="lfm2", hidden_size=24, intermediate_size=40, num_hidden_layers=3,
                             num_attention_heads=3, num_key_value_heads=1, vocab_size=96, max_position_embeddings=128,
                             block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention", "conv"],
                             rope_parameters=dict(rope_type="default", rope_theta=1e6), bos_token_id=1,
                             eos_token_id=2, pad_token_id=0),
            vision_config=dict(model_type="siglip2_vision_model", hidden_size=8, intermediate_size=8,
                               num_hidden_layers=1, num_attention_heads=1, patch_size=4, num_patches=4),
            projector_hidden_size=8, image_token_id=90)),
    # The text_config says that its head is not tied; that of the whole model is.
    "deepseek_vl_multimodal": dict(
        type="deepseek_vl", config=dict(
            tie_word_embeddings=True,
            text_config=TEXT | dict(model_type="llama", tie_word_embeddings=False,
                                    rope_parameters=dict(rope_type="default", rope_theta=1e4)),
            vision_config=IMAGES | dict(model_type="siglip_vision_model"), image_token_id=90)),
    "llama4_multimodal": dict(
        type="llama4", config=dict(
            tie_word_embeddings=False,
            text_config=TEXT | dict(model_type="llama4_text", hidden_size=20, intermediate_size=8,
                                    intermediate_size_mlp=16, head_dim=8, num_local_experts=3,
                                    interleave_moe_layer_step=2, no_rope_layers=[1, 0], attention_chunk_size=9,
                                    floor_scale=10, attention_bias=True,
                                    rope_parameters=dict(rope_type="default", rope_theta=5e5)),
            vision_config=dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=32,
                               vision_output_dim=8, image_size=8, patch_size=4, projector_input_dim=8,
                               projector_output_dim=8),
            image_token_index=90, boi_token_index=91, eoi_token_index=92)),
}


@contextlib.contextmanager
def precision(dtype, model_type):
    """goldens.precision() for the modules of a multimodal model and of its text."""
    rows = {"gemma3": {"gemma3"}, "mistral3": {"mistral3", "mistral", "mistral4"}, "qwen3_vl": {"qwen3_vl"},
            "llama4": {"llama4"}, "gemma4": {"gemma4"}, "lfm2_vl": {"lfm2_vl", "lfm2"},
            "deepseek_vl": {"deepseek_vl", "llama"}}[model_type]
    types = {name: dict(type=name) for name in rows}
    saved, goldens.MODELS, families, goldens.FAMILIES = goldens.MODELS, types, goldens.FAMILIES, {}
    try:
        with goldens.precision(dtype):
            yield
    finally:
        goldens.MODELS, goldens.FAMILIES = saved, families


@torch.no_grad()
def forward_and_greedy(folder, dtype, prompt):
    """Logits of the prompt, the greedy continuation and its smallest margin, of the whole model read from `folder`."""
    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"  # the grouped product has no float64
    weights = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
    with precision(dtype, config.model_type):
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=dtype).eval()
        model.load_state_dict({name: value.to(dtype) for name, value in weights.items()})
        ids, margin = list(prompt), np.inf
        for step in range(goldens.GREEDY_TOKENS):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            if step == 0:
                prompt_logits = logits.numpy()
            best = torch.topk(logits[-1], 2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            ids.append(best.indices[0].item())
    return prompt_logits, np.array(ids[len(prompt):], np.int32), margin


def write(out, name, row):
    folder = out / name
    config = AutoConfig.for_model(row["type"], **row["config"])
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(goldens.random_parameter(name, key, tuple(parameter.shape)))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    model.save_pretrained(folder)
    if "unstated" in row:
        stated = json.loads((folder / "config.json").read_text())
        del stated["text_config"][row["unstated"]]
        goldens.write_json(folder / "config.json", stated)
    best = (0, None)
    for salt in range(40):
        prompt = goldens.random_tokens(("prompt", name, salt), 40, 90)
        f32, greedy, margin = forward_and_greedy(folder, torch.float32, prompt)
        if margin > 0.01 and margin > 1000 * np.abs(f32 - forward_and_greedy(folder, torch.float64, prompt)[0]).max():
            best = max(best, (len(set(greedy.tolist())), -salt))
        if best[0] >= 8:
            break
    prompt = goldens.random_tokens(("prompt", name, -best[1]), 40, 90)
    f32, greedy, _ = forward_and_greedy(folder, torch.float32, prompt)
    f64, greedy64, margin = forward_and_greedy(folder, torch.float64, prompt)
    error = float(np.abs(f32.astype(np.float64) - f64).max())
    assert (greedy == greedy64).all() and margin > 1000 * error, (name, margin, error)
    save_file({"prompt": prompt, "logits": f32, "greedy": greedy, "logits_f64": f64.astype(np.float32)},
              folder / "expected.safetensors")
    print(f"{name}: |f32-f64| {error:.2e}  margin {margin:.3f}  distinct greedy {len(set(greedy.tolist()))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--only", nargs="*", help="models to write; the rest is kept as it is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name, row in MODELS.items():
        if args.only is None or name in args.only:
            shutil.rmtree(args.out / name, ignore_errors=True)
            write(args.out, name, row)


if __name__ == "__main__":
    main()
