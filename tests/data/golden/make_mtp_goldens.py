#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the goldens of models with a head for multi-token prediction (MTP), beside those of make_goldens.py.

    python make_mtp_goldens.py [--only NAME ...]

transformers leaves these tensors out. The module is built of its parts here, as DeepSeek-V3's report (section 2.2) says:

    x_i = eh_proj [enorm(embedding of token i + 1), hnorm(the model's hidden state of token i, after its last norm)]
    h   = shared_head.norm(decoder layer(x))        logits of token i + 2 = lm_head(h_i)

The decoder layer is the last one of a transformers model that has a layer more, whose own code runs it: masks, rotation,
experts and all. Of models with linear attention that layer has attention, and of Nemotron-H there are two, attention and
experts. Of LongCat-Flash that layer has one attention and one MLP, and is made of transformers' own here. Each folder is a
checkpoint as published, with the module's tensors below "model.layers.N." of N layers, or, of Qwen and Nemotron-H, below
"mtp.", or, of LongCat-Flash, below "model.mtp.". With DeepSeek-V4's streams s, of which the module reads those before they
are merged, all under published names, the module's below "mtp.0.":

    x_s = e_proj(enorm(embedding of token i + 1)) + h_proj(hnorm(stream s of token i, after the last layer))
    h   = streams after decoder layer(x)            logits of token i + 2 = lm_head(norm(hc_head(h)))

mtp.safetensors:  prompt i32 [T];  hidden f32 [T, hidden], or [T, streams, hidden]: the model's own;  mtp_logits, mtp_hidden f32 [T - 1, ...] and
mtp_logits_f64: of the pairs 0 ... T - 2;  drafts i32 [4]: tokens that the module proposes behind the prompt, one after the other,
each from the module's hidden state of the pair before.
"""

import argparse
import copy
import json
import shutil
from pathlib import Path

import make_expert_goldens as experts
import make_goldens as goldens
import make_hybrid_goldens as hybrid
import make_linear_goldens as linear
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.longcat_flash import modeling_longcat_flash as longcat

DRAFTS = 4
# A layer of each kind.
V4 = experts.FAMILIES["deepseek_v4"] | {"config": experts.FAMILIES["deepseek_v4"]["config"] | dict(
    num_hidden_layers=3, layer_types=experts.FAMILIES["deepseek_v4"]["config"]["layer_types"][:3],
    mlp_layer_types=["hash_moe", "moe", "moe"])}
# Of rows of other scripts, and what is changed of them. Vocabularies have room for the tokenizer of tests/data/chat/small.
ROWS = {
    "deepseek_v3_mtp": (goldens.MODELS["deepseek_v3"], dict(vocab_size=384)),
    "deepseek_v32_mtp": (experts.FAMILIES["deepseek_v32"], dict()),
    "glm4_moe_mtp": (experts.FAMILIES["glm4_moe_ungrouped"], dict(vocab_size=384)),
    "qwen3_next_mtp": (linear.MODELS["qwen3_next_all"], dict()),
    "qwen3_5_mtp": (linear.MODELS["qwen3_5"], dict()),
    "qwen3_5_moe_mtp": (linear.MODELS["qwen3_5_moe"], dict()),
    "longcat_flash_mtp": (experts.FAMILIES["longcat_flash"], dict(vocab_size=384, zero_expert_num=0)),
    "deepseek_v4_mtp": (V4, dict(vocab_size=384)),
    "nemotron_h_mtp": (hybrid.HYBRIDS["nemotron_h_moe"], dict()),
}
NEMOTRON_LAYERS = ["full_attention", "moe"]  # of its module
OWN_MODULE = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
LONGCAT_MODULE = {"enorm.": "layers.0.enorm.m.", "hnorm.": "layers.0.hnorm.m.", "shared_head.norm.": "norm.",
                  "mlp.": "layers.0.transformer_layer.mlp.", "": "layers.0."}


class LongcatLayer(torch.nn.Module):
    """The layer of LongCat-Flash's module, of the parts of its layers."""

    def __init__(self, config):
        super().__init__()
        norm = lambda: longcat.LongcatFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # noqa: E731
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn, self.mlp = longcat.LongcatFlashMLA(config, 0), longcat.LongcatFlashMLP(config)

    def forward(self, hidden_states, **kwargs):
        x = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def longcat_tensors(name, config):
    prefix = f"model.layers.{config.num_layers}."
    return {prefix + key: goldens.random_parameter(name, prefix + key, tuple(value.shape))
            for key, value in LongcatLayer(config).state_dict().items()}


def longcat_name(tensor, layer):
    """The name of a tensor of layer `layer`, which is the module, as LongCat publishes it; other names stay."""
    prefix = f"model.layers.{layer}."
    if not tensor.startswith(prefix):
        return tensor
    part = tensor.removeprefix(prefix)
    usual = next(key for key in LONGCAT_MODULE if part.startswith(key))
    return f"model.mtp.{LONGCAT_MODULE[usual]}{part.removeprefix(usual)}"


def v4_name(tensor, layer):
    """The published name of a tensor, also of layer `layer`, which is the module."""
    name = tensor.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    name = name.replace(".attn.norm.", ".attn.kv_norm.").replace(f"layers.{layer}.", "mtp.0.")
    return name.replace(".shared_head.norm.", ".norm.")


def module_tensors(name, layer, config):
    prefix, hidden = f"model.layers.{layer}.", config.hidden_size
    shapes = {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "shared_head.norm.weight": (hidden,)}
    if config.model_type == "deepseek_v4":
        streams = config.hc_mult
        shapes |= {"e_proj.weight": (hidden, hidden), "h_proj.weight": (hidden, hidden), "hc_head_scale": (1,),
                   "hc_head_fn": (streams, streams * hidden), "hc_head_base": (streams,)}
    else:
        shapes |= {"eh_proj.weight": (hidden, 2 * hidden)}
    return {prefix + key: goldens.random_parameter(name, prefix + key, shape) for key, shape in shapes.items()}


def own_module_name(tensor, layer):
    """The name of a tensor of layer `layer`, which is the module, as Qwen publishes it; other names stay."""
    prefix = f"model.layers.{layer}."
    if not tensor.startswith(prefix):
        return tensor
    part = tensor.removeprefix(prefix)
    own = OWN_MODULE.get(part.removesuffix(".weight"))
    return f"mtp.{own}.weight" if own else f"mtp.layers.0.{part}"


def nemotron_name(tensor, layer):
    """The same of Nemotron-H, whose module is of layers `layer` and on: the first has what makes its input, and the last
    the norm of its output."""
    last = len(NEMOTRON_LAYERS) - 1
    if tensor == f"model.layers.{layer}.shared_head.norm.weight":
        return f"mtp.layers.{last}.final_layernorm.weight"
    parts = tensor.split(".")
    own = parts[1] == "layers" and int(parts[2]) >= layer
    return ".".join(["mtp.layers", str(int(parts[2]) - layer), *parts[3:]]) if own else tensor


def parts(config, weights, extra, dtype):
    """The model without its last layers, and a function of embeddings of pairs that is the module."""
    whole = goldens.build(config, weights, dtype)
    nemotron, is_longcat = config.model_type == "nemotron_h", config.model_type == "longcat_flash"
    layer = (config.num_layers if is_longcat else
             config.num_hidden_layers - (len(NEMOTRON_LAYERS) if nemotron else 1))
    last = whole.model.layers[layer:]
    whole.model.layers = whole.model.layers[:layer]
    module = goldens.build(config, weights, dtype)
    module.model.layers = last
    own = {key.removeprefix(f"model.layers.{layer}."): value.to(dtype) for key, value in extra.items()}
    if is_longcat:
        made = LongcatLayer(module.model.config).to(dtype).eval()
        made.load_state_dict({key: own[key] for key in made.state_dict()})
        module.model.layers = torch.nn.ModuleList([made])
    last_norm = "norm_f" if nemotron else "norm"
    # By which the model chooses the mask of its only layer; blocks of Nemotron-H know what they are.
    if len(set(getattr(config, "layer_types", None) or [])) > 1 and not nemotron:
        module.model.config = copy.copy(module.model.config)  # a deep copy forgets how attention is computed
        module.model.config.layer_types = [config.layer_types[-1]]

    def norm(key):
        eps = config.layer_norm_epsilon if nemotron else config.rms_norm_eps
        made = type(getattr(module.model, last_norm))(config.hidden_size, eps=eps).to(dtype)
        made.weight.copy_(own[key])
        return made

    if config.model_type == "deepseek_v4":
        return whole, v4_run(whole, module, own, norm)

    enorm, hnorm = norm("enorm.weight"), norm("hnorm.weight")
    setattr(module.model, last_norm, norm("shared_head.norm.weight"))

    def run(tokens, hidden):
        """Hidden states and logits of pairs (token i + 1, hidden state i)."""
        embeddings = whole.get_input_embeddings()(torch.from_numpy(np.asarray(tokens, np.int64)))
        x = torch.cat([enorm(embeddings), hnorm(hidden)], dim=-1) @ own["eh_proj.weight"].T
        h = module.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return h, module.lm_head(h)

    return whole, run


def v4_streams(model, **inputs):
    """The streams of a model of deepseek_v4 after its last layer, before they are merged, and the hidden states."""
    seen = []
    hook = model.model.hc_head.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    hidden = model.model(use_cache=False, **inputs).last_hidden_state[0]
    hook.remove()
    return seen[0], hidden


def v4_run(whole, module, own, norm):
    enorm, hnorm = norm("enorm.weight"), norm("hnorm.weight")
    module.model.norm = norm("shared_head.norm.weight")
    for part in ("fn", "base", "scale"):
        getattr(module.model.hc_head, f"hc_{part}").copy_(own[f"hc_head_{part}"])

    def run(tokens, streams):
        """Streams and logits of pairs (token i + 1, streams of position i)."""
        embeddings = whole.get_input_embeddings()(torch.from_numpy(np.asarray(tokens, np.int64)))
        e = enorm(embeddings) @ own["e_proj.weight"].T
        x = hnorm(streams) @ own["h_proj.weight"].T + e[:, None]
        # The model begins with equal streams; its only layer gets these.
        hook = module.model.layers[0].register_forward_pre_hook(lambda layer, args: (x[None], *args[1:]))
        h, hidden = v4_streams(module, inputs_embeds=e[None])
        hook.remove()
        return h, module.lm_head(hidden)

    return run


@torch.no_grad()
def compute(config, weights, extra, dtype, prompt):
    with goldens.precision(dtype):
        model, run = parts(config, weights, extra, dtype)
        ids = torch.from_numpy(np.asarray(prompt, np.int64))[None]
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        first = model.lm_head(hidden[-1]).argmax().item()
        if config.model_type == "deepseek_v4":
            hidden = v4_streams(model, input_ids=ids)[0]
        h, logits = run(prompt[1:], hidden[:-1])
        half = len(prompt) // 2
        assert (run(prompt[1:half], hidden[:half - 1])[0] - h[:half - 1]).abs().max() < 1e-4, "a pair sees later ones"
        result = {"hidden": hidden.numpy(), "mtp_hidden": h.numpy(), "mtp_logits": logits.numpy()}
        # The model's own next token is known when the module proposes.
        tokens, states, margin = [*prompt[1:], first], hidden, np.inf
        drafts = []
        for _ in range(DRAFTS):
            h, logits = run(tokens, states)
            best = torch.topk(logits[-1], 2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            drafts.append(best.indices[0].item())
            tokens.append(drafts[-1])
            states = torch.cat([states, h[-1:]])
        return result | {"first": np.array([first], np.int32), "drafts": np.array(drafts, np.int32)}, margin


def write(out, name):
    row, changes = ROWS[name]
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    known = AutoConfig.for_model(row["type"])
    common = goldens.COMMON | (goldens.SMALL if row not in goldens.MODELS.values() else {})
    common = {key: value for key, value in common.items() if hasattr(known, key)}
    nemotron, is_longcat = row["type"] == "nemotron_h", row["type"] == "longcat_flash"
    if nemotron:
        kinds = row["config"]["layers_block_type"]
        layers = len(kinds)
        common = hybrid.COMMON
        changes = changes | {"layers_block_type": [*kinds, *NEMOTRON_LAYERS]}
    elif is_longcat:
        layers = row["config"]["num_layers"]
    else:
        layers = row["config"].get("num_hidden_layers", common["num_hidden_layers"])
        changes = changes | {"num_hidden_layers": layers + 1}
    is_v4 = row["type"] == "deepseek_v4"
    if is_v4:
        changes = changes | {"layer_types": [*row["config"]["layer_types"], "sliding_attention"],
                             "mlp_layer_types": [*row["config"]["mlp_layer_types"], "moe"]}
    own_module = row in linear.MODELS.values()
    if own_module:
        changes = changes | {"layer_types": [*row["config"]["layer_types"], "full_attention"]}
    config = AutoConfig.for_model(row["type"], **(common | row["config"] | changes))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        buffers = [(k, b) for k, b in model.named_buffers() if k.endswith("e_score_correction_bias")]
        for key, parameter in [*model.named_parameters(), *buffers]:
            parameter.copy_(goldens.random_parameter(name, key, tuple(parameter.shape)))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    model.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    extra = module_tensors(name, layers, config)
    if is_longcat:
        extra |= longcat_tensors(name, config)

    for salt in range(40):
        prompt = goldens.random_tokens(("prompt", name, salt), 24, config.vocab_size)
        f32, margin = compute(config, weights, extra, torch.float32, prompt)
        f64, _ = compute(config, weights, extra, torch.float64, prompt)
        error = float(np.abs(f32["mtp_logits"] - f64["mtp_logits"]).max())
        if margin > 1000 * error and len(set(f32["drafts"])) > 2:
            break
    else:
        raise SystemExit(f"{name}: no salt")
    assert (f32["drafts"] == f64["drafts"]).all() and (f32["first"] == f64["first"]).all()
    save_file({"prompt": prompt} | f32 | {"mtp_logits_f64": f64["mtp_logits"].astype(np.float32)},
              folder / "mtp.safetensors")
    print(f"{name}: |f32-f64| {error:.2e}  margin {margin:.3f}  drafts {f32['drafts'].tolist()}")

    # As published: a layer less, and the module's tensors beside the layer's, with a copy of the head.
    tensors = load_file(folder / "model.safetensors") | {key: value.numpy() for key, value in extra.items()}
    if own_module:
        tensors = {own_module_name(key, layers): value for key, value in tensors.items()}
    elif nemotron:
        tensors = {nemotron_name(key, layers): value for key, value in tensors.items()}
    elif is_v4:
        tensors = {v4_name(key, layers): value for key, value in tensors.items()}
    elif is_longcat:
        tensors = {longcat_name(key, layers): value for key, value in tensors.items()}
        tensors["model.mtp.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    else:
        tensors[f"model.layers.{layers}.shared_head.head.weight"] = tensors["lm_head.weight"]
        tensors[f"model.layers.{layers}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    stated.pop("num_mtp_layers", None)
    if nemotron:
        stated["layers_block_type"] = kinds
    elif not is_longcat:
        stated |= {"num_hidden_layers": layers}
    if not own_module:
        stated["num_nextn_predict_layers"] = 1
    elif row["type"] != "qwen3_next":
        stated |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    for key in ("layer_types", "mlp_layer_types"):
        if key in stated:
            stated[key] = stated[key][:layers]
    goldens.write_json(folder / "config.json", dict(sorted(stated.items())))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--only", nargs="*", help="models to write; the rest is kept as it is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    goldens.random_parameter = lambda name, *args: (hybrid if name.startswith("nemotron") else linear).random_parameter(
        name, *args)
    goldens.FAMILIES |= linear.MODELS | hybrid.HYBRIDS  # whose code is to compute in float64, too
    goldens.NO_ROTATION |= {"nemotron_h"}
    for name in ROWS:
        if args.only is None or name in args.only:
            write(args.out, name)


if __name__ == "__main__":
    main()
