#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes spellings.json: other spellings of the golden checkpoints, and what transformers makes of each.

    pip install torch==2.15.0 transformers==5.23.0 safetensors==0.8.0 numpy==2.4.6
    python make_spellings.py

A row changes one golden of tests/data/golden: keys of its config.json that are set or removed, and tensors that are
renamed, copied, changed or dropped. `transformers` is "same" when transformers loads the result and computes the logits
of the unchanged golden bit for bit, "other" when it computes other logits, and "refused" when it cannot load it.
`max_position_embeddings` is what transformers understood.

tests/models/spellings_test.cc loads every row. What is the same for transformers must give the bits of the unchanged
golden in Eadem as well, unless the row's `eadem` says what is wanted there and `why`.
"""
import argparse
import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE.parent / "golden"
sys.path.insert(0, str(GOLDEN))
import make_goldens  # noqa: E402
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# The defaults that save_pretrained of transformers 4 and earlier wrote beside a model's own keys.
OLD_DEFAULTS = {
    "_name_or_path": "/home/me/out", "_commit_hash": None, "_attn_implementation_autoset": True, "return_dict": True,
    "output_hidden_states": False, "output_attentions": False, "torchscript": False, "use_bfloat16": False,
    "tf_legacy_loss": False, "pruned_heads": {}, "tie_encoder_decoder": False, "is_encoder_decoder": False,
    "is_decoder": False, "cross_attention_hidden_size": None, "add_cross_attention": False,
    "chunk_size_feed_forward": 0, "max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False,
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    "typical_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "num_return_sequences": 1, "output_scores": False,
    "return_dict_in_generate": False, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "remove_invalid_values": False, "exponential_decay_length_penalty": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "architectures": ["LlamaForCausalLM"], "finetuning_task": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "tokenizer_class": None,
    "prefix": None, "pad_token_id": None, "sep_token_id": None, "decoder_start_token_id": None,
    "task_specific_params": None, "problem_type": None, "transformers_version": "4.31.0"}


def rows():
    def row(name, base, **changes):
        return {"name": name, "base": base} | changes

    for base in FAMILIES:
        yield row("null ids", base, set={"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
        yield row("no ids", base, remove=["bos_token_id", "eos_token_id", "pad_token_id"])
        yield row("lists of ids", base, set={"eos_token_id": [2, 3], "bos_token_id": 1})
        yield row("everything that transformers 4 wrote", base, set=OLD_DEFAULTS)
        yield row("keys of other programs", base, set={
            "unsloth_version": "2025.3.14", "unsloth_fixed": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}, "use_external_data_format": True},
            "_attn_implementation_autoset": True})
        yield row("training leftovers", base, set={
            "use_cache": False, "initializer_range": 0.1, "_flash_attn_2_enabled": True,
            "gradient_checkpointing": False, "model_max_length": 4096, "attention_dropout": 0.0, "pad_token_id": -1})
        yield row("dtype of transformers 5", base, remove=["torch_dtype"], set={"dtype": "float32"})
        yield row("no dtype", base, remove=["torch_dtype", "dtype"])
        yield row("null dtype", base, remove=["dtype"], set={"torch_dtype": None})
        yield row("swish", base, set={"hidden_act": "swish"})
        yield row("no hidden_act", base, remove=["hidden_act"])
        yield row("no head_dim", base, remove=["head_dim"])
        yield row("null head_dim", base, set={"head_dim": None})
        yield row("no max_position_embeddings", base, remove=["max_position_embeddings"])
        yield row("no num_key_value_heads", base, remove=["num_key_value_heads"])
        yield row("null quantization_config", base, set={"quantization_config": None})
        yield row("eps as an integer", base, set={"rms_norm_eps": 0})
        for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings", "vocab_size"):
            yield row(f"{key} as a float", base, float=[key])
        yield row("eos_token_id as a float", base, set={"eos_token_id": 2.0})
        theta = make_goldens.MODELS[base]["config"]["rope_parameters"]["rope_theta"]
        yield row("theta as an integer", base, remove=["rope_parameters"], set={"rope_theta": int(theta)})
        yield row("null rope_scaling", base, remove=["rope_parameters"], set={"rope_theta": theta, "rope_scaling": None})
        yield row("default rope_scaling with a factor", base, remove=["rope_parameters"],
                  set={"rope_theta": theta, "rope_scaling": {"type": "default", "factor": 1.0}})
        yield row("partial factor within rope_parameters", base, rope={"partial_rotary_factor": 1.0})
        yield row("partial factor of a half within rope_parameters", base, rope={"partial_rotary_factor": 0.5})
        yield row("partial factor of a half beside", base, set={"partial_rotary_factor": 0.5})
        yield row("attention_dropout", base, set={"attention_dropout": 0.1}, eadem="refused",
                  why="training with it is not implemented, and a config is read before one knows what for")
        yield row("no tie_word_embeddings", base, remove=["tie_word_embeddings"])
    yield row("pretraining_tp of 2", "llama", set={"pretraining_tp": 2})
    yield row("rope_interleaved and is_llama_config", "smollm2", set={"rope_interleaved": False, "is_llama_config": True})
    yield row("rope_interleaved", "smollm2", set={"rope_interleaved": True}, eadem="refused",
              why="transformers does not read it, but who writes true means it")
    yield row("use_mrope", "qwen2", set={"use_mrope": False})
    yield row("use_mrope true", "qwen2", set={"use_mrope": True}, eadem="refused",
              why="transformers does not read it, but who writes true means it")
    for base in ("qwen2", "qwen3"):
        yield row("a window that is switched off", base,
                  set={"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1}, remove=["layer_types"])
    yield row("experts by their older name", "qwen3_moe", remove=["num_local_experts"], set={"num_experts": 8})
    yield row("no decoder_sparse_step, no norm_topk_prob", "qwen3_moe", remove=["decoder_sparse_step", "norm_topk_prob"])
    yield row("a window that is switched off", "qwen3_moe", set={"sliding_window": 4, "max_window_layers": 1})
    yield row("a window of the default length", "qwen3_moe", remove=["sliding_window"], set={"use_sliding_window": True})
    yield row("router keys for training", "qwen3_moe", set={"router_aux_loss_coef": 0.1, "output_router_logits": False})
    yield row("yarn that says it was fine-tuned", "yarn", rope={"finetuned": True})
    yield row("yarn factor as an integer", "yarn", rope={"factor": 4})
    yield row("yarn original length as a float", "yarn", rope={"original_max_position_embeddings": 32.0})
    yield row("linear with an original length", "linear", rope={"original_max_position_embeddings": 64})
    for base in ("llama31", "qwen2", "qwen3", "smollm2"):
        yield row("tied, under the head's name", base, rename={EMBEDDING: HEAD})
        yield row("tied, under both names", base, copy={EMBEDDING: HEAD})
        yield row("tied, under both names with other values", base, copy={EMBEDDING: HEAD}, add_one=[HEAD],
                  eadem="refused", why="transformers 4 uses the embedding for both, transformers 5 each for its own")
    yield row("not tied, head missing", "llama", drop=[HEAD])
    yield row("not tied, embedding missing", "llama", drop=[EMBEDDING])


def change(base, change_row, folder):
    config = json.loads((GOLDEN / base / "config.json").read_text())
    for key in change_row.get("remove", []):
        config.pop(key, None)
    config |= change_row.get("set", {})
    for key in change_row.get("float", []):
        config[key] = float(config[key])
    config.get("rope_parameters", {}).update(change_row.get("rope", {}))
    tensors = load_file(GOLDEN / base / "model.safetensors")
    for before, after in change_row.get("rename", {}).items():
        tensors[after] = tensors.pop(before)
    for before, after in change_row.get("copy", {}).items():
        tensors[after] = tensors[before].copy()
    for name in change_row.get("add_one", []):
        tensors[name] = tensors[name] + np.float32(1)
    for name in change_row.get("drop", []):
        del tensors[name]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def logits(folder, prompt):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"] or info.get("mismatched_keys"):
        raise ValueError(f"loading: {info}")
    return model.config, model(input_ids=torch.from_numpy(prompt.astype(np.int64))[None], use_cache=False).logits[0]


def main():
    result = []
    for row in rows():
        prompt = load_file(GOLDEN / row["base"] / "expected.safetensors")["prompt"]
        _, wanted = logits(GOLDEN / row["base"], prompt)
        folder = pathlib.Path(tempfile.mkdtemp())
        change(row["base"], row, folder)
        try:
            config, found = logits(folder, prompt)
            row["transformers"] = "same" if torch.equal(found, wanted) else "other"
            row["max_position_embeddings"] = config.max_position_embeddings
        except Exception as error:  # noqa: BLE001  (whatever transformers raises is a refusal)
            row["transformers"] = "refused"
            print(f"{row['base']}: {row['name']}: {str(error).splitlines()[-1][:200] if str(error) else type(error)}")
        print(f"{row['base']}: {row['name']}: {row['transformers']}")
        shutil.rmtree(folder)
        result.append(row)
    (HERE / "spellings.json").write_text("[\n" + ",\n".join(json.dumps(r) for r in result) + "\n]\n")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
