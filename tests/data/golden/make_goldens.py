#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the golden ring: tiny random models and what transformers + PyTorch compute with them.

    python make_goldens.py [--out DIR] [--fixtures DIR] [--only NAME ...]

README.md beside this file describes every file written. All random numbers come from NumPy's
PCG64, one stream per purpose, so that weights, prompts and batches do not depend on the machine.
"""

import argparse
import contextlib
import copy
import importlib
import json
import math
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from golden_models import COMMON, FAMILIES, MODELS, ROPE_TABLES, SMALL, rope  # noqa: F401  (rope: for scripts beside)

GREEDY_TOKENS = 24
TRAIN_STEPS, TRAIN_BATCH, TRAIN_TOKENS = 10, 2, 32
PACKED_LENGTHS = (20, 44)
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0

FIXTURES = {"tiny_llama3": 11, "tiny_llama3_tied": 0, "tiny_mistral": 11, "tiny_qwen3": 11, "tiny_qwen3_tied": 0,
            "tiny_qwen3_sharded": 8}  # and the salt of the prompt
TRAINED = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v2",
           "deepseek_v3")
PACKED = "llama"
BALANCED, BALANCED_COEF = "qwen3_moe", 0.5
NO_ROTATION = {"gpt2", "kimi_linear"}
CALIBRATED = ("llama", "llama31")  # with a head of its own, and tied


# ------------------------------------------------------------------ random numbers

def stream(*key):
    """An independent generator per purpose, so that adding one changes no other."""
    return np.random.Generator(np.random.PCG64([b for part in key for b in str(part).encode() + b"\0"]))


def random_parameter(model_name, name, shape):
    rng = stream("weights", model_name, name)
    if name.endswith("norm.weight") or ".ln_" in name and name.endswith(".weight"):
        value = rng.uniform(0.5, 1.5, shape)
        if model_name.startswith(("gemma2", "gemma3")):  # norms multiply by 1 + w
            value -= 1
    elif name.endswith("e_score_correction_bias"):
        value = 0.1 * rng.standard_normal(shape)
    elif name.endswith(".bias"):
        value = 0.3 * rng.standard_normal(shape)
    elif name.endswith(("embed_tokens.weight", "embed_in.weight", "wte.weight", "wpe.weight")):
        value = 0.2 * rng.standard_normal(shape)
    else:  # [out, in], of experts [experts, out, in]: outputs near unit variance, so that attention and logits are far from uniform
        inputs = shape[0] if model_name == "gpt2" else shape[-1]  # [in, out] there
        value = 1.2 / math.sqrt(inputs) * rng.standard_normal(shape)
    return torch.from_numpy(value.astype(np.float32))


def random_tokens(key, shape, vocab):
    """Skewed towards small ids, as real tokens are; 0, 1 and 2 stay unused."""
    return np.floor(3 + (vocab - 3) * stream(*key).random(shape) ** 2).astype(np.int32)


# ------------------------------------------------------------------ float64

class _TorchInDouble:
    """The `torch` module as transformers sees it, with every request for float32 answered in float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


class _NoFloat32(TorchDispatchMode):
    """Fails on any operation that returns float32, so that a pass called float64 is float64 throughout."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                raise AssertionError(f"{func} returned float32 in a float64 pass")
        return out


@contextlib.contextmanager
def precision(dtype):
    """transformers computes norms, softmax and rotary tables in float32 whatever the model's dtype. Within
    precision(torch.float64) it computes them in float64."""
    if dtype == torch.float32:
        yield
        return
    modules = [transformers.modeling_rope_utils] + [
        importlib.import_module(f"transformers.models.{t}.modeling_{t}")
        for t in sorted({row["type"].removesuffix("_text") for row in (MODELS | FAMILIES).values()})]
    to_float = torch.Tensor.float
    for module in modules:
        module.torch = _TorchInDouble()
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        with _NoFloat32():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.Tensor.float = to_float
        for module in modules:
            module.torch = torch


def build(config, weights, dtype):
    """A fresh eager-attention model in `dtype` with the given f32 weights. Call within precision(dtype)."""
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"  # the grouped product has no float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    frequencies = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert (frequencies or config.model_type in NO_ROTATION) and all(buffer.dtype == dtype for buffer in frequencies)
    missing = model.load_state_dict({k: v.to(dtype) for k, v in weights.items()}, strict=False)
    assert not missing.unexpected_keys, missing
    assert missing.missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else []), missing
    if config.tie_word_embeddings:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert all(p.dtype == dtype for p in model.parameters())
    return model.eval()


# ------------------------------------------------------------------ logits

def run_logits(model, ids):
    return model(input_ids=torch.from_numpy(np.asarray(ids, np.int64))[None], use_cache=False).logits[0]


@torch.no_grad()
def forward_and_greedy(config, weights, dtype, prompt):
    """Logits of the prompt, the greedy continuation (whole sequence recomputed each step, no eos stop) and the
    smallest distance between best and second best logit on the way."""
    with precision(dtype):
        model = build(config, weights, dtype)
        ids, margin = list(prompt), math.inf
        for step in range(GREEDY_TOKENS):
            logits = run_logits(model, ids)
            if step == 0:
                prompt_logits = logits.numpy()
            best = torch.topk(logits[-1], 2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            ids.append(best.indices[0].item())
    return prompt_logits, np.array(ids[len(prompt):], np.int32), margin


def write_logits(folder, stem, config, weights, prompt, keep_f64=True):
    f32, greedy, _ = forward_and_greedy(config, weights, torch.float32, prompt)
    f64, greedy64, margin = forward_and_greedy(config, weights, torch.float64, prompt)
    error = float(np.abs(f32.astype(np.float64) - f64).max())
    # The greedy text is a golden only where no rounding of ours or theirs can change it.
    assert (greedy == greedy64).all() and margin > 1000 * error, (folder, margin, error)
    exact = {"logits_f64": f64.astype(np.float32)} if keep_f64 else {}
    save_file({"prompt": prompt, "logits": f32, "greedy": greedy} | exact, folder / f"{stem}.safetensors")
    facts = {"tokens": len(prompt), "vocab": f32.shape[1], "max_abs_diff_f32_f64": error,
             "max_abs_logit": float(np.abs(f64).max()), "logit_std": float(f64.std()), "min_greedy_margin": margin}
    write_json(folder / f"{stem}.json", facts)
    print(f"{folder.name}/{stem}: |f32-f64| {error:.2e}  std {facts['logit_std']:.2f}  margin {margin:.3f}  "
          f"distinct greedy {len(set(greedy.tolist()))}")


@torch.no_grad()
def input_mean_squares(config, weights, dtype, prompt):
    """Of each linear layer, by its weight's name: the mean over the prompt's positions of the square of each input."""
    with precision(dtype):
        model = build(config, weights, dtype)
        result = {}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                parameter = "model.embed_tokens.weight" if name == "lm_head" and config.tie_word_embeddings else f"{name}.weight"
                module.register_forward_pre_hook(
                    lambda _, args, parameter=parameter:
                        result.update({parameter: (args[0][0].double() ** 2).mean(0).numpy()}))
        run_logits(model, prompt)
    return result


def write_inputs(folder, config, weights, prompt):
    f32, f64 = (input_mean_squares(config, weights, dtype, prompt) for dtype in (torch.float32, torch.float64))
    save_file(f64 | {f"f32.{name}": value for name, value in f32.items()}, folder / "inputs.safetensors")


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


# ------------------------------------------------------------------ models

def classic_config(path, extra):
    """The same configuration in the keys used before transformers v5: rope_theta and rope_scaling."""
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    for key in ("dtype", "transformers_version") if "full_attention" in parameters else (
            "layer_types", "dtype", "transformers_version"):
        config.pop(key, None)
    config["torch_dtype"] = "float32"
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    if "full_attention" in parameters:  # the thetas were keys of their own, in `extra`
        if "sliding_window_pattern" in extra:
            config.pop("layer_types")
        parameters = parameters["full_attention"]
    config["rope_theta"] = parameters.pop("rope_theta")
    # The key's first name, still found in many checkpoints; transformers does not read it beside the thetas of two kinds.
    if parameters["rope_type"] in ("linear", "yarn") and "rope_local_base_freq" not in extra:
        parameters["type"] = parameters.pop("rope_type")
    config["rope_scaling"] = None if parameters.get("rope_type") == "default" else parameters
    config.update(extra)
    return dict(sorted(config.items()))


def write_gguf(folder, config, weights, prompt):
    """model-q8_0.gguf as llama.cpp's converter lays it out, by the gguf package, and the logits of its values."""
    arch = {"qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE}[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(folder / "model-q8_0.gguf", gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    stored = {}
    q8_0 = gguf.GGMLQuantizationType.Q8_0

    def write(name, value):
        plain = value.ndim < 2 or name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        data = value if plain else gguf.quants.quantize(value, q8_0)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data.squeeze() if plain else data,
                          raw_dtype=None if plain else q8_0)
        return value if plain else gguf.quants.dequantize(data, q8_0)

    for name, value in weights.items():
        parts = [write(part, half.numpy().copy()) for part, half in matrices([(name, value)])]
        stored[name] = torch.from_numpy(np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_logits(folder, "expected.q8_0", config, stored, prompt)


def find_salt(name, row, config, weights):
    """The salt whose greedy continuation varies, and is never close to a tie."""
    best = (0, None)
    for salt in range(40):
        prompt = random_tokens(("prompt", name, salt), row["prompt"], config.vocab_size)
        _, greedy, margin = forward_and_greedy(config, weights, torch.float32, prompt)
        if margin > 0.01:
            best = max(best, (len(set(greedy.tolist())), -salt))
        if best[0] >= 8:
            break
    assert best[1] is not None, f"{name}: no salt"
    return -best[1]


def write_model(out, name, row):
    folder = out / name
    common = COMMON
    if name in FAMILIES:  # of the keys that its class has
        known = AutoConfig.for_model(row["type"])
        common = {key: value for key, value in (COMMON | SMALL).items() if hasattr(known, key)}
        common = {key: value for key, value in common.items() if known.attribute_map.get(key, key) not in row["config"]}
    config = AutoConfig.for_model(row["type"], **(common | row["config"]))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        random_buffers = ("e_score_correction_bias", "layer_scalar", "tid2eid")
        buffers = [(k, b) for k, b in model.named_buffers() if k.endswith(random_buffers)]
        for key, parameter in [*model.named_parameters(), *buffers]:
            parameter.copy_(random_parameter(name, key, tuple(parameter.shape)))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    model.to(row.get("store", torch.float32)).save_pretrained(folder, max_shard_size=row.get("shard", "5GB"))

    # From here on everything is read back from the files, as a user of them would.
    config = AutoConfig.from_pretrained(folder)
    weights = {k: v.to(torch.float32) for k, v in
               AutoModelForCausalLM.from_pretrained(folder, dtype=row.get("store", torch.float32)).state_dict().items()
               if not (config.tie_word_embeddings and k == "lm_head.weight")}
    salt = row["salt"] if "salt" in row else find_salt(name, row, config, weights)
    prompt = random_tokens(("prompt", name, salt), row["prompt"], config.vocab_size)
    write_logits(folder, "expected", config, weights, prompt)
    if "long" in row:  # than the original context
        beyond = f"{name}.long"
        salt = find_salt(beyond, row | {"prompt": row["long"]}, config, weights)
        prompt_beyond = random_tokens(("prompt", beyond, salt), row["long"], config.vocab_size)
        write_logits(folder, "long", config, weights, prompt_beyond)
    if row.get("gguf"):
        write_gguf(folder, config, weights, prompt)

    if "store" not in row and row.get("classic", {}) is not None:
        write_json(folder / "config.classic.json", classic_config(folder / "config.json", row.get("classic", {})))
        classic = AutoConfig.from_pretrained(folder / "config.classic.json")
        with torch.no_grad():
            same = [run_logits(build(c, weights, torch.float32), prompt) for c in (config, classic)]
        assert torch.equal(*same), f"{name}: config.classic.json means something else"
    return config, weights


# ------------------------------------------------------------------ training

def mean_cross_entropy(logits, labels):
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def adamw(model):
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([dict(params=decayed, weight_decay=WEIGHT_DECAY), dict(params=plain, weight_decay=0.0)],
                             foreach=False, fused=False, **ADAMW)


def matrices(named, config=None):
    """Gate and up of experts, which transformers keeps in one tensor, apart, under the names of an expert's layers; and,
    with `config`, what makes keys and values of latents."""
    for name, tensor in named:
        if config is not None and name.endswith(".kv_b_proj.weight"):
            heads = tensor.reshape(config.num_attention_heads, -1, tensor.shape[-1])
            for part, half in zip("kv", heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)):
                yield name.replace("kv_b_proj", f"{part}_b_proj"), half
            continue
        if name.endswith(".experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1)):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
        else:
            yield name + ".weight" if name.endswith(".experts.down_proj") else name, tensor


def train(config, weights, dtype, losses):
    """Runs one optimizer step per function of `losses` (model -> loss) and reports each step."""
    with precision(dtype):
        model = build(config, weights, dtype)
        optimizer = adamw(model)
        result = {"loss": [], "grad_norm": []}
        for step, loss_of in enumerate(losses):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            if step == 0:
                result["first_grad_l2"] = {k: g.double().norm().item() for k, g in
                                           matrices(((k, p.grad) for k, p in model.named_parameters()), config)}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM, foreach=False)
            optimizer.step()
            result["loss"].append(loss.item())
            result["grad_norm"].append(norm.item())
        result["final"] = {k: {"sum": p.double().sum().item(), "l2": p.double().norm().item()}
                           for k, p in matrices(model.named_parameters(), config)}
        return result


def write_training(folder, stem, tensors, config, weights, losses):
    runs = {key: train(config, weights, dtype, losses)
            for key, dtype in (("f32", torch.float32), ("f64", torch.float64))}
    difference = {
        series: max(abs(a - b) for a, b in zip(runs["f32"][series], runs["f64"][series]))
        for series in ("loss", "grad_norm")}
    save_file(tensors, folder / f"{stem}.safetensors")
    write_json(folder / f"{stem}.json", {
        "optimizer": {"name": "adamw", "lr": ADAMW["lr"], "beta1": ADAMW["betas"][0], "beta2": ADAMW["betas"][1],
                      "eps": ADAMW["eps"], "weight_decay_2d": WEIGHT_DECAY, "weight_decay_1d": 0.0,
                      "max_grad_norm": MAX_GRAD_NORM},
        "max_abs_diff_f32_f64": difference, **runs})
    print(f"{folder.name}/{stem}: loss {runs['f64']['loss'][0]:.4f} -> {runs['f64']['loss'][-1]:.4f}, "
          f"norm {runs['f64']['grad_norm'][0]:.3f}, |f32-f64| {difference}")
    return runs


def write_ten_steps(out, name, config, weights):
    tokens = random_tokens(("train", name), (TRAIN_STEPS, TRAIN_BATCH, TRAIN_TOKENS + 1), config.vocab_size)
    batches = torch.from_numpy(tokens.astype(np.int64))
    losses = [lambda model, b=b: mean_cross_entropy(model(input_ids=b[:, :-1], use_cache=False).logits, b[:, 1:])
              for b in batches]
    write_training(out / name, "train", {"tokens": tokens}, config, weights, losses)


def write_balanced(out, name, config, weights):
    """The first of write_ten_steps' steps by transformers' own loss, which the load-balancing loss is a part of."""
    batch = torch.from_numpy(load_file(out / name / "train.safetensors")["tokens"][0].astype(np.int64))
    config = copy.deepcopy(config)
    config.output_router_logits, config.router_aux_loss_coef = True, BALANCED_COEF
    result = {"router_aux_loss_coef": BALANCED_COEF}
    for key, dtype in (("f32", torch.float32), ("f64", torch.float64)):
        balancing = []

        def loss_of(model):
            labels = batch[:, 1:].contiguous()
            output = model(input_ids=batch[:, :-1], labels=labels, shift_labels=labels, use_cache=False)
            balancing.append(output.aux_loss.item())
            return output.loss

        run = train(config, weights, dtype, [loss_of])
        result[key] = {"load_balancing_loss": balancing} | {k: v for k, v in run.items() if k != "final"}
    write_json(out / name / "balanced.json", result)


def gguf_names(config, names):
    """The tensors of a GGUF file, by the gguf package's own table; none for what has no architecture of its own."""
    archs = {gguf.MODEL_ARCH_NAMES[arch].replace("-", "_"): arch for arch in gguf.MODEL_ARCH}
    arch = archs.get({"gpt_neox": "gptneox", "hunyuan_v1_dense": "hunyuan_dense"}.get(config.model_type, config.model_type))
    if arch is None:
        return []
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    return sorted({table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names})


def write_one_step(out, name, config, weights):
    """The loss of one document and the norms of its gradients, each under the name of its tensor in the file."""
    tokens = random_tokens(("step", name), (1, 1, 25), config.vocab_size)
    ids = torch.from_numpy(tokens[0].astype(np.int64))
    result = {}
    renamed = {"lm_head.weight": "embed_out.weight"} if config.model_type == "gpt_neox" else {}
    for key, dtype in (("f32", torch.float32), ("f64", torch.float64)):
        with precision(dtype):
            model = build(config, weights, dtype)
            loss = mean_cross_entropy(model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:])
            loss.backward()
            result[key] = {"loss": loss.item(), "gradients": {
                renamed.get(name, name): parameter.grad.double().norm().item() for name, parameter in model.named_parameters()}}
    result["gguf_names"] = gguf_names(config, result["f32"]["gradients"])
    save_file({"tokens": tokens}, out / name / "step.safetensors")
    write_json(out / name / "step.json", result)


def write_packed(out, name, config, weights):
    """One step on two documents packed into one row of 64 tokens. The golden runs each document on its own;
    the packed form, with a block-diagonal mask and restarting positions, must agree in float64."""
    documents = [random_tokens(("packed", name, n), n + 1, config.vocab_size) for n in PACKED_LENGTHS]
    ids = np.concatenate([d[:-1] for d in documents])
    labels = np.concatenate([d[1:] for d in documents])
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in PACKED_LENGTHS])
    offsets = np.cumsum([0, *PACKED_LENGTHS]).astype(np.int32)
    label_tensor = torch.from_numpy(labels.astype(np.int64))

    def separately(model):
        return mean_cross_entropy(torch.cat([run_logits(model, d[:-1]) for d in documents]), label_tensor)

    def packed(model):
        row = torch.from_numpy(np.searchsorted(offsets, np.arange(len(ids)), side="right"))
        visible = (row[:, None] == row[None, :]).tril()
        dtype = model.lm_head.weight.dtype
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None],
                       position_ids=torch.from_numpy(positions.astype(np.int64))[None],
                       attention_mask=mask[None, None], use_cache=False).logits
        return mean_cross_entropy(logits, label_tensor)

    runs = write_training(out / name, "packed", {"ids": ids, "labels": labels, "positions": positions,
                                                 "offsets": offsets}, config, weights, [separately])
    check = train(config, weights, torch.float64, [packed])
    for series in ("loss", "grad_norm"):
        assert abs(check[series][0] / runs["f64"][series][0] - 1) < 1e-12, series


# ------------------------------------------------------------------ rotary tables

def write_rope(out):
    def table(head_dim, max_positions, parameters):
        config = AutoConfig.for_model("llama", **(COMMON | dict(
            head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=dict(parameters))))
        with precision(torch.float64):
            rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
            return {"head_dim": head_dim, "max_position_embeddings": max_positions, "rope_parameters": parameters,
                    "attention_factor": float(rotary.attention_scaling), "inv_freq": rotary.inv_freq.tolist()}

    write_json(out / "rope.json", {name: table(*row) for name, row in ROPE_TABLES.items()})


# ------------------------------------------------------------------ checkpoints made elsewhere

def dequantize_4bit(tensors, group):
    """MLX affine: eight values per u32, lowest bits first; value = scale * q + bias for each group of a row."""
    result = {}
    for key, value in tensors.items():
        if key.endswith((".scales", ".biases")):
            continue
        if value.dtype == torch.uint32:
            base = key.removesuffix(".weight")
            packed = value.numpy()
            q = ((packed[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15).reshape(packed.shape[0], -1)
            scales, biases = (np.repeat(tensors[f"{base}.{p}"].float().numpy(), group, axis=1)
                              for p in ("scales", "biases"))
            value = torch.from_numpy(q.astype(np.float32) * scales + biases)
        result[key] = value.float()
    return result


def write_fixtures(out, source):
    from safetensors.torch import load_file as load_torch
    folder = out / "fixtures"
    folder.mkdir()
    for name, salt in FIXTURES.items():
        raw = json.loads((source / name / "config.json").read_text())
        quantization = raw.pop("quantization", None)
        config = AutoConfig.for_model(raw.pop("model_type"), **raw)
        tensors = {}
        for shard in sorted((source / name).glob("*.safetensors")):
            tensors |= load_torch(shard)
        if quantization:
            assert quantization == {"bits": 4, "group_size": 32, "mode": "affine"}, quantization
            tensors = dequantize_4bit(tensors, quantization["group_size"])
        prompt = random_tokens(("prompt", name, salt), 24, config.vocab_size)
        write_logits(folder, name, config, {k: v.float() for k, v in tensors.items()}, prompt, keep_f64=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--fixtures", type=Path,
                        help="folder with tiny_llama3/ and its kin; without it fixtures/ is kept as it is")
    parser.add_argument("--only", nargs="*", help="models to write; the rest is kept as it is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()

    args.out.mkdir(parents=True, exist_ok=True)
    for name, row in (MODELS | FAMILIES).items():
        if args.only is not None and name not in args.only:
            continue
        shutil.rmtree(args.out / name, ignore_errors=True)
        config, weights = write_model(args.out, name, row)
        if name in CALIBRATED:
            prompt = load_file(args.out / name / "expected.safetensors")["prompt"]
            write_inputs(args.out / name, config, weights, prompt)
        if name in FAMILIES:
            write_one_step(args.out, name, config, weights)
        if name in TRAINED:
            write_ten_steps(args.out, name, config, weights)
        if name == BALANCED:
            write_balanced(args.out, name, config, weights)
        if name == PACKED:
            write_packed(args.out, name, config, weights)
    if args.only is None:
        write_rope(args.out)
    if args.fixtures:
        shutil.rmtree(args.out / "fixtures", ignore_errors=True)
        write_fixtures(args.out, args.fixtures)


if __name__ == "__main__":
    main()
