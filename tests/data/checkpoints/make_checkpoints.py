# SPDX-License-Identifier: Apache-2.0
"""Writes tiny random checkpoints, each quantized in another way, and the logits that transformers + PyTorch compute
with the weights that they mean.

    pip install torch transformers safetensors numpy compressed-tensors==0.20.0
    python tests/data/checkpoints/make_checkpoints.py     writes a folder per checkpoint beside this script

targets.json                                   which target of several the package takes for a layer
FOLDER/config.json, FOLDER/model.safetensors   the checkpoint, as its format's own tools lay it out
FOLDER/expected.safetensors                    `prompt`; `logits` (f32) and `logits_f64` with the decoded weights;
                                               `logits_kept` (f64) as `run_kept` says

What GPTQ and AWQ store is packed here by the definitions of their formats (`pack_gptq`, `pack_awq`); what
compressed-tensors stores is packed, and decoded for the expected logits, by that package. Decoded weights are exact:
a scale times an integer or an 8-bit float, in f64, which f32 holds but for the last bit of a few.
"""
import json
import pathlib
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.utils.match import match_targets

HERE = pathlib.Path(__file__).parent
MARGIN = 127 * 2**-19  # of an integer: f32 passes are some 2^-21 of a value off
sys.path.insert(0, str(HERE.parent / "golden"))
import make_goldens  # noqa: E402  (the same random weights, prompts and passes in f32 and f64)

TINY = dict(hidden_size=64, intermediate_size=64, num_attention_heads=1, num_key_value_heads=1, head_dim=32,
            num_hidden_layers=1, vocab_size=32, max_position_embeddings=64, rms_norm_eps=1e-5,
            tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, rope_parameters=make_goldens.rope(10000.0))


# ------------------------------------------------------------------ what an engine keeps of them

def to_8_bits(x, size):
    """x as 8-bit integers times a scale for each `size` values of a row, and how near a value lies to the middle between
    two integers."""
    steps = x.reshape(*x.shape[:-1], -1, size)
    largest = steps.abs().amax(-1, keepdim=True)
    steps = steps * (127 / largest)
    nearest = (0.5 - (steps - steps.round()).abs()).min().item()
    return (steps.round() * (largest / 127)).reshape(x.shape), nearest


def has_one_scale(quantization, name):
    """Whether every output of a layer has one scale."""
    if quantization["quant_method"] == "compressed-tensors":
        return group_of_layer(quantization, name)["weights"]["strategy"] == "channel"
    return quantization.get("group_size") == -1


def run_kept(config, quantization, weights, tensors, prompt):
    """The f64 pass where products with integers take x in 8 bits, by 32 columns in the order of their groups, or by 256
    where an output has one scale; and how near a value of x lies to the middle between two integers."""
    model = make_goldens.build(config, weights, torch.float64)
    distances = [0.5]
    for name, module in model.named_modules():
        group_of = tensors.get(f"{name}.g_idx", tensors.get(f"{name}.weight_g_idx"))
        if not name.endswith("_proj") or tensors.get(f"{name}.weight", torch.empty(0, dtype=torch.int8)).dtype not in (
                torch.int8, torch.int32):
            continue
        order = torch.arange(module.in_features) if group_of is None else torch.argsort(group_of, stable=True)

        def quantize_x(module, inputs, name=name, order=order):
            x = torch.empty_like(inputs[0])
            size = min(256, module.in_features) if has_one_scale(quantization, name) else 32
            x[..., order], nearest = to_8_bits(inputs[0][..., order], size)
            distances.append(nearest)
            return (x,)

        module.register_forward_pre_hook(quantize_x)
    return make_goldens.run_logits(model, prompt), min(distances)


# ------------------------------------------------------------------ integers by the definition

def quantize(weight, bits, group, symmetric, scale_dtype, order=None):
    """codes [out, in] (unsigned), scales and zeros [out, groups], and the weights that they mean. `order` lists the
    columns by group. Codes need not be the best ones: any are a checkpoint."""
    out, columns = weight.shape
    group = columns if group == -1 else group
    order = torch.arange(columns) if order is None else order
    values = weight[:, order].reshape(out, -1, group)
    top = 2**bits - 1
    if symmetric:
        scales = values.abs().amax(-1) / (top / 2)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round()
    scales = scales.to(scale_dtype)
    wide = scales.double()
    codes = ((values.double() / wide[..., None]).round() + zeros[..., None]).clamp(0, top)
    means = torch.empty(out, columns, dtype=torch.float64)
    means[:, order] = ((codes - zeros[..., None]) * wide[..., None]).reshape(out, columns)
    stored = torch.empty(out, columns, dtype=torch.int64)
    stored[:, order] = codes.reshape(out, columns).long()
    return stored, scales, zeros.long(), means


def pack(codes, bits, axis, order=range(8)):
    """Words of 32 bits along `axis`; the i-th lowest bits of a word hold its order[i]-th code."""
    codes = codes.movedim(axis, -1)
    per_word = 32 // bits
    assert codes.shape[-1] % per_word == 0
    codes = codes.reshape(*codes.shape[:-1], -1, per_word)
    words = sum(codes[..., list(order)[i] if bits == 4 else i] << (i * bits) for i in range(per_word))
    return torch.from_numpy((words.numpy() & 0xffffffff).astype(np.uint32).view(np.int32)).movedim(-1, axis).contiguous()


def pack_gptq(name, codes, scales, zeros, bits, group, version, order):
    """AutoGPTQ: qweight along in, zeros less one (in version 1), everything [.., out]."""
    columns = codes.shape[1]
    size = columns if group == -1 else group
    g_idx = torch.empty(columns, dtype=torch.int32)
    g_idx[torch.arange(columns) if order is None else order] = torch.arange(columns, dtype=torch.int32) // size
    stored = zeros if version == 2 else (zeros - 1) & (2**bits - 1)
    return {f"{name}.qweight": pack(codes.T, bits, 0), f"{name}.scales": scales.T.contiguous(),
            f"{name}.qzeros": pack(stored.T, bits, 1), f"{name}.g_idx": g_idx}


def pack_awq(name, codes, scales, zeros):
    """AutoAWQ, version gemm: qweight [in, out / 8]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {f"{name}.qweight": pack(codes.T, 4, 1, order), f"{name}.scales": scales.T.contiguous(),
            f"{name}.qzeros": pack(zeros.T, 4, 1, order)}


def gptq(bits=4, group=32, symmetric=True, desc_act=False, version=1, biases=False, write_middle=None):
    config = dict(quant_method="gptq", bits=bits, group_size=group, sym=symmetric, desc_act=desc_act,
                  damp_percent=0.01, true_sequential=True, static_groups=False,
                  checkpoint_format="gptq" if version == 1 else "gptq_v2")

    def layer(name, weight):
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3)) if desc_act else None
        codes, scales, zeros, means = quantize(weight, bits, group, symmetric, torch.float16, order)
        tensors = pack_gptq(name, codes, scales, zeros, bits, group, write_middle or version, order)
        if biases:  # AutoGPTQ writes some to layers that have none
            tensors[f"{name}.bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)
        return tensors, means

    return config, layer


def awq(group=32):
    config = dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm",
                  modules_to_not_convert=["lm_head"])

    def layer(name, weight):
        codes, scales, zeros, means = quantize(weight, 4, group, False, torch.float16)
        return pack_awq(name, codes, scales, zeros), means

    return config, layer


# ------------------------------------------------------------------ compressed-tensors

def compressed(format, activations=None, ignore=("lm_head",), scale_dtype=torch.bfloat16, permute=False, **weights):
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    group = dict(targets=["Linear"], weights=json.loads(args.model_dump_json()), input_activations=activations,
                 output_activations=None)
    config = dict(quant_method="compressed-tensors", format=format, quantization_status="compressed",
                  global_compression_ratio=None, ignore=list(ignore), kv_cache_scheme=None,
                  config_groups={"group_0": group}, sparsity_config={}, transform_config={}, version="0.20.0")
    if permute:
        group["weights"]["actorder"] = "group"
    compressor = BaseCompressor.get_value_from_registry(format)

    def scales_of(weight):
        """Scale and zero point as the package's own observers shape them."""
        out, columns = weight.shape
        if weights["strategy"] == "block":
            rows, across = weights["block_structure"]
            padded = torch.zeros(-(-out // rows) * rows, -(-columns // across) * across)
            padded[:out, :columns] = weight
            values = padded.reshape(padded.shape[0] // rows, rows, -1, across)
            low, high = values.amin((1, 3)), values.amax((1, 3))
        else:
            size = {"tensor": None, "channel": columns, "group": weights.get("group_size")}[weights["strategy"]]
            values = weight.reshape(1, -1) if size is None else weight.reshape(out, -1, size)
            low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
            if size is None:
                low, high = low[:1], high[:1]
        if weights["type"] == "float":
            return (torch.maximum(-low, high) / 448).to(scale_dtype), None
        if weights["symmetric"]:
            scale = torch.maximum(-low, high) / ((2 ** weights["num_bits"] - 1) / 2)
            return scale.to(scale_dtype), torch.zeros_like(scale, dtype=torch.int8)
        scale = ((high - low) / (2 ** weights["num_bits"] - 1)).to(scale_dtype)
        bottom = -(2 ** (weights["num_bits"] - 1))
        return scale, (bottom - low / scale.float()).round().clamp(bottom, -bottom - 1).to(torch.int8)

    def layer(name, weight):
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5)) if permute else None
        columns = weight if order is None else weight[:, order]
        scale, zero = scales_of(columns)
        state = {"weight": columns.to(torch.float32), "weight_scale": scale.float()}
        if zero is not None:
            state["weight_zero_point"] = zero
        state = compressor.compress(state, scheme)
        # With f32 scales, so that the package decodes exactly; what is stored are the scales' own dtype.
        means = compressor.decompress(dict(state), scheme)["weight"].double()
        state["weight_scale"] = scale
        if order is not None:  # The file holds columns where they belong, and the group of each.
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
            codes = unpack_from_int32(state["weight_packed"], weights["num_bits"], weight.shape)
            there, back = torch.empty_like(codes), torch.empty_like(means)
            there[:, order], back[:, order] = codes, means
            state["weight_packed"], means = pack_to_int32(there, weights["num_bits"]), back
            g_idx = torch.empty(weight.shape[1], dtype=torch.int32)
            g_idx[order] = torch.arange(weight.shape[1], dtype=torch.int32) // weights["group_size"]
            state["weight_g_idx"] = g_idx
        return {f"{name}.{part}": value.contiguous() for part, value in state.items()}, means

    return config, layer


def group_of_layer(quantization, name):
    """The group whose scheme the package gives a layer of torch.nn.Linear."""
    groups = quantization["config_groups"].values()
    target = match_targets(name, torch.nn.Linear(1, 1), [target for group in groups for target in group["targets"]])[0]
    return next(group for group in reversed(groups) if target in group["targets"])


def mixed(format, *groups):
    """A scheme for each group: targets, format of its own (or None), and weights as compressed() takes them."""
    config, layers = None, []
    for i, (targets, own, weights) in enumerate(groups):
        one, layer = compressed(own or format, **weights)
        one["config_groups"]["group_0"] |= dict(targets=targets) | (dict(format=own) if own else {})
        config = config or one | dict(format=format, config_groups={})
        config["config_groups"][f"group_{i}"] = one["config_groups"]["group_0"]
        layers.append(layer)

    def layer(name, weight):
        return layers[list(config["config_groups"].values()).index(group_of_layer(config, name))](name, weight)

    return config, layer


# ------------------------------------------------------------------ fp8 as DeepSeek and Qwen publish it

def fp8(kind="e4m3", block=(128, 128), scale_dtype=torch.float32):
    dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
    config = dict(quant_method="fp8", fmt=kind, activation_scheme="dynamic", modules_to_not_convert=["lm_head"],
                  weight_block_size=list(block) if block else None)

    def layer(name, weight):
        out, columns = weight.shape
        rows, across = block or weight.shape
        scales = torch.empty(-(-out // rows), -(-columns // across))
        spread = torch.empty(out, columns, dtype=torch.float64)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = slice(i * rows, (i + 1) * rows), slice(j * across, (j + 1) * across)
                scales[i, j] = (weight[place].abs().max() / torch.finfo(dtype).max).to(scale_dtype)
                spread[place] = scales[i, j].double()
        codes = (weight / spread).float().clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
        stored = scales.to(scale_dtype) if block else scales.to(scale_dtype).reshape(())
        return {f"{name}.weight": codes, f"{name}.weight_scale_inv": stored}, codes.double() * spread

    return config, layer


DYNAMIC = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
# name: type of model, dtype of what stays plain, sizes, and how it is quantized
CHECKPOINTS = {
    "gptq": ("llama", torch.float16, {}, gptq(biases=True)),
    "gptq_zeros": ("llama", torch.float16, dict(head_dim=64), gptq(group=64, symmetric=False)),
    "gptq_mislabelled": ("llama", torch.float16, {}, gptq(write_middle=2)),
    "gptq_desc_act": ("llama", torch.float16, {}, gptq(symmetric=False, desc_act=True)),
    "gptq_v2_int8": ("llama", torch.float16, {}, gptq(bits=8, group=-1, symmetric=False, version=2)),
    "gptq_qwen2": ("qwen2", torch.float16, dict(hidden_size=128, intermediate_size=128, head_dim=128),
                   gptq(group=128)),
    "awq": ("llama", torch.float16, {}, awq()),
    "packed_zeros": ("llama", torch.bfloat16, {}, compressed(
        "pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=32)),
    "packed_row": ("llama", torch.bfloat16, {}, compressed(
        "pack-quantized", num_bits=4, type="int", symmetric=True, strategy="channel")),
    "packed_order": ("llama", torch.bfloat16, {}, compressed(
        "pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32, permute=True)),
    "packed_int8": ("llama", torch.float32, dict(head_dim=64), compressed(
        "pack-quantized", num_bits=8, type="int", symmetric=True, strategy="group", group_size=64,
        scale_dtype=torch.float32)),
    "int8_row": ("llama", torch.bfloat16, {}, compressed(
        "int-quantized", activations=DYNAMIC, num_bits=8, type="int", symmetric=True, strategy="channel")),
    "int8_zeros": ("llama", torch.float32, {}, compressed(
        "int-quantized", num_bits=8, type="int", symmetric=False, strategy="group", group_size=32,
        scale_dtype=torch.float32)),
    "float8_tensor": ("llama", torch.bfloat16, {}, compressed(
        "float-quantized", activations=DYNAMIC | dict(type="float"), num_bits=8, type="float", symmetric=True,
        strategy="tensor")),
    "float8_row": ("llama", torch.bfloat16, {}, compressed(
        "float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")),
    # Llama 4's experts, in one tensor where they are plain, are published as a matrix each.
    "float8_experts": ("llama4_text", torch.bfloat16, dict(num_local_experts=3, interleave_moe_layer_step=1), compressed(
        "float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")),
    "float8_block": ("llama", torch.bfloat16, dict(intermediate_size=136), compressed(
        "float-quantized", num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[128, 128])),
    # A name before a pattern, the first pattern in the order of their texts, and a class after both.
    "mixed_formats": ("llama", torch.bfloat16, {}, mixed(
        "mixed-precision",
        (["Linear"], "int-quantized", dict(num_bits=8, type="int", symmetric=True, strategy="channel")),
        (["re:.*self_attn\\.(q|k|v)_proj$", "re:.*down_proj"], "pack-quantized",
         dict(num_bits=4, type="int", symmetric=False, strategy="group", group_size=32)),
        (["model.layers.0.mlp.down_proj", "re:.*(gate|v)_proj"], "float-quantized",
         dict(num_bits=8, type="float", symmetric=True, strategy="channel")))),
    "mixed_bits": ("llama", torch.bfloat16, {}, mixed(
        "pack-quantized",
        (["re:model\\.layers\\.\\d+\\.mlp"], None,
         dict(num_bits=8, type="int", symmetric=True, strategy="group", group_size=64)),
        (["Linear"], None, dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)))),
    "fp8_block": ("qwen3", torch.bfloat16, dict(hidden_size=136), fp8()),
    "fp8_e5m2": ("llama", torch.bfloat16, {}, fp8(kind="e5m2", block=None, scale_dtype=torch.bfloat16)),
}


make_goldens.FAMILIES = {name: {"type": row[0]} for name, row in CHECKPOINTS.items()}  # whose passes are in f64


def layers_of_experts(layer, name, values):
    """The layers that columns of [experts, in, out] are: of gate and up, or of down."""
    tensors, means = {}, torch.empty(values.shape, dtype=torch.float64)
    module, matrices = name.rsplit(".", 1)
    halves = ["gate_proj", "up_proj"] if matrices == "gate_up_proj" else [matrices]
    for expert, value in enumerate(values):
        decoded = []
        for half, matrix in zip(halves, value.T.chunk(len(halves))):
            parts, mean = layer(f"{module}.{expert}.{half}", matrix.contiguous())
            tensors |= parts
            decoded.append(mean)
        means[expert] = torch.cat(decoded).T
    return tensors, means


def write_checkpoint(name, model_type, dtype, sizes, config_and_layer):
    quantization, layer = config_and_layer
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    config = AutoConfig.for_model(model_type, **(TINY | sizes))
    with torch.no_grad(), make_goldens.precision(torch.float32):
        shapes = shapes_of(config)
        tensors, weights = {}, {}
        for key, shape in shapes.items():
            value = make_goldens.random_parameter(name, key, shape)
            base = key.removesuffix(".weight")
            if key.endswith("_proj.weight"):
                parts, means = layer(base, value)
                tensors |= {k: v for k, v in parts.items() if k not in shapes or k == key}
                weights[key] = means
            elif ".experts." in key:
                parts, weights[key] = layers_of_experts(layer, key, value)
                tensors |= parts
            else:
                tensors[key] = value.to(dtype)
                weights[key] = tensors[key].double()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())
    text |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(text, indent=2) + "\n")

    # A value of x that an f32 rounding moves over a middle changes others, which change more: the prompt has none.
    for attempt in range(100):
        seed = ("prompt", name, attempt) if attempt > 0 else ("prompt", name)
        prompt = make_goldens.random_tokens(seed, 10, config.vocab_size)
        with torch.no_grad(), make_goldens.precision(torch.float64):
            kept, nearest = run_kept(config, quantization, weights, tensors, prompt)
        if nearest > MARGIN:
            break
    else:
        sys.exit(f"{name}: every prompt has a value within {MARGIN} of a middle")
    logits = {"logits_kept": kept}
    for key, precision in (("logits", torch.float32), ("logits_f64", torch.float64)):
        with torch.no_grad(), make_goldens.precision(precision):
            logits[key] = make_goldens.run_logits(make_goldens.build(config, weights, precision), prompt)
    error = (logits["logits"] - logits["logits_f64"]).abs().max()
    cost = ((logits["logits_kept"] - logits["logits_f64"]).norm() / logits["logits_f64"].norm()).item()
    save_file({"prompt": torch.from_numpy(prompt), **{k: v.float().contiguous() for k, v in logits.items()}},
              folder / "expected.safetensors")
    print(f"{name}: |f32 - f64| {error:.1e}, kept {cost:.2%} off, largest logit {logits['logits'].abs().max():.2f}, "
          f"{nearest:.1e} from a middle, prompt {attempt}")


# Groups of targets, and layers that they are asked about.
TARGETS = [
    [["Linear"], ["re:.*mlp.*", "model.layers.1.mlp.up_proj"], ["re:.*up_proj$"]],
    [["re:.*up_proj", "re:.*down_proj$"], ["re:.*mlp"], ["Embedding", "lm_head"]],
    [["re:model.layers.[0-4].*"], ["re:model\\.layers\\.(1|11)\\."], ["Linear", "Embedding"]],
    [["re:layers.*"], ["re:^model.*q_proj$"], ["re:.*[qk]_proj"], ["mlp", "Linear"]],
    [["re:^(?!.*mlp).*q_proj"], ["re:.*\\d{2}\\."], ["Module"], ["LlamaMLP"]],
    [["Linear", "model.layers.1.mlp.up_proj"], ["Linear"], ["model.layers.1.mlp.up_proj"]],
    [["re:.*proj"], ["re:.*proj$"], ["re:.*(up|down)_proj"], ["re:.*_proj"]],
    [["model.layers.11.self_attn.q_proj"], ["re:"], ["re:.*q_proj.*x"]],
    [["up_proj"], ["re:.*up_proj.weight"], ["Embedding"], ["model"]],
]
LAYERS = ["model.embed_tokens", "lm_head", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj",
          "model.layers.2.mlp.down_proj", "model.layers.11.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
          "layers.0.self_attn.o_proj", "model.layers.3.mlp.experts.17.gate_proj"]


def write_targets():
    """Rows of groups, layer, and the group whose scheme the package gives the layer (null for none)."""
    rows = []
    for groups in TARGETS:
        group_of = {target: i for i, targets in enumerate(groups) for target in targets}
        for name in LAYERS:
            module = torch.nn.Embedding(1, 1) if name.endswith("embed_tokens") else torch.nn.Linear(1, 1)
            found = match_targets(name, module, group_of)
            rows.append([groups, name, group_of[found[0]] if found else None])
    (HERE / "targets.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def shapes_of(config):
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {k: tuple(v.shape) for k, v in model.named_parameters()}


def main():
    for name, row in CHECKPOINTS.items():
        write_checkpoint(name, *row)
    write_targets()


if __name__ == "__main__":
    main()
