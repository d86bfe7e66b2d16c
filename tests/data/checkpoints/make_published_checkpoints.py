# SPDX-License-Identifier: Apache-2.0
"""Writes tiny random checkpoints in the encodings in which DeepSeek publishes its models, and the logits that
transformers + PyTorch compute with the weights that they mean.

    pip install torch transformers safetensors numpy gguf
    python tests/data/checkpoints/make_published_checkpoints.py [NAME ...]

The files are as make_checkpoints.py says. `deepseek_v4_fp4` is laid out as
DeepSeek-V4-Flash is: published names and keys, experts in 4-bit floats of E2M1, two in an I8 byte, with an F8_E8M0 scale
for each 32, other matrices in e4m3 with F8_E8M0 scales of blocks of 128 x 128. `deepseek_v4_fp8` is laid out as
DeepSeek-V4-Flash-Base: all in e4m3, with scales in f32. `deepseek_v32_ue8m0` has the names of DeepSeek-V3.2 and
F8_E8M0 scales. Codes and scales are made by PyTorch's conversions to its float8 types, and E2M1 by its table.
"""
import json
import re
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "golden"))
import make_goldens  # noqa: E402  (the same random weights, prompts and passes in f32 and f64)

LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

V4 = dict(hidden_size=160, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, head_dim=32,
          num_key_value_heads=1, vocab_size=64, q_lora_rank=24, n_routed_experts=4, num_experts_per_tok=2,
          sliding_window=6, o_groups=2, index_n_heads=16, index_head_dim=16, index_topk=5, hc_mult=2,
          hc_sinkhorn_iters=6, swiglu_limit=1.0, rms_norm_eps=1e-6, partial_rotary_factor=0.25,
          max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=None, tie_word_embeddings=False,
          layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
          compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
          mlp_layer_types=["hash_moe", "moe", "moe"], compress_rope_theta=500.0,
          rope_parameters=dict(rope_type="yarn", factor=4.0, beta_fast=4.0, beta_slow=1.0,
                               original_max_position_embeddings=16))
V32 = dict(hidden_size=136, intermediate_size=48, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
           q_lora_rank=20, vocab_size=64, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=9,
           first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
           n_shared_experts=1, n_group=2, topk_group=1, rms_norm_eps=1e-6, index_n_heads=16, index_head_dim=10,
           index_topk=64, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None,
           tie_word_embeddings=False, rope_parameters=make_goldens.rope(10000.0))
# name: type of model, sizes, type of scales, whether experts are in 4 bits
CHECKPOINTS = {
    "deepseek_v4_fp4": ("deepseek_v4", V4 | dict(o_lora_rank=128), torch.float8_e8m0fnu, True),
    "deepseek_v4_fp8": ("deepseek_v4", V4 | dict(o_lora_rank=24, num_hidden_layers=2, layer_types=V4["layer_types"][:2],
                                                 mlp_layer_types=["hash_moe", "moe"]), torch.float32, False),
    "deepseek_v32_ue8m0": ("deepseek_v32", V32, torch.float8_e8m0fnu, False),
}
make_goldens.FAMILIES = {name: {"type": row[0]} for name, row in CHECKPOINTS.items()}  # whose passes are in f64
ENCODED = re.compile(r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|indexer\.wq_b|experts\.\d+\.w[123]|shared_experts\.w[123]"
                     r"|self_attn\.\w+_proj\w*|indexer\.(wq_b|wk)|mlp\.\w*_proj|experts\.\d+\.\w+_proj"
                     r"|shared_experts\.\w+_proj)\.weight$")


def scale_of(largest, top, dtype):
    """A scale with which nothing is larger than `top`; a power of two where its type has no other."""
    wanted = largest / top
    if dtype == torch.float8_e8m0fnu:
        wanted = torch.exp2(torch.ceil(torch.log2(wanted)))
    return wanted.float().to(dtype)


def blocks_of_e4m3(weight, dtype):
    out, columns = weight.shape
    scales = torch.empty(-(-out // 128), -(-columns // 128), dtype=dtype)
    spread = torch.empty(out, columns, dtype=torch.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            scales[i, j] = scale_of(weight[place].abs().max(), 448, dtype)
            spread[place] = scales[i, j].float().double()
    codes = (weight / spread).float().to(torch.float8_e4m3fn)
    return codes, scales, codes.double() * spread


def groups_of_e2m1(weight):
    out, columns = weight.shape
    groups = weight.double().reshape(out, -1, 32)
    scales = scale_of(groups.abs().amax(-1), 6, torch.float8_e8m0fnu)
    wide = scales.float().double()[..., None]
    codes = (groups.abs()[..., None] / wide[..., None] - LEVELS).abs().argmin(-1)
    means = LEVELS[codes] * torch.where(groups < 0, -wide, wide)
    codes = (codes + 8 * (groups < 0)).reshape(out, columns).to(torch.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8), scales, means.reshape(out, columns)


def published(name):
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("lm_head.", "head.")
    name = name.replace("hc_head.hc_", "hc_head_")
    return re.sub(r"\.attn\.norm\.", ".attn.kv_norm.", name)


def published_config(config, sizes, four_bits):
    """The keys of a published config.json; transformers wrote `config`."""
    for key in ("layer_types", "compress_rates", "mlp_layer_types", "rope_parameters", "partial_rotary_factor"):
        config.pop(key)
    rope = dict(sizes["rope_parameters"])
    ratios = [{"s": 0, "c": 4, "h": 128}[kind[0]] for kind in sizes["layer_types"]]
    return config | dict(
        compress_ratios=ratios + [0], num_hash_layers=1, num_nextn_predict_layers=1, topk_method="noaux_tc",
        rope_scaling=dict(type=rope.pop("rope_type"), **rope), qk_rope_head_dim=8, rope_theta=10000.0,
        expert_dtype="fp4" if four_bits else "fp8")


def to_8_bits(x, size):
    """x as 8-bit integers times a scale for each `size` values of a row."""
    steps = x.reshape(*x.shape[:-1], -1, size)
    largest = steps.abs().amax(-1, keepdim=True)
    return ((steps * (127 / largest)).round() * (largest / 127)).reshape(x.shape)


def round_inputs_of_experts(model):
    """Products with experts in 4 bits take x in 8 bits, by 32 columns."""
    def forward(self, hidden_states, top_k_index, top_k_weights):
        final = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            x = to_8_bits(hidden_states[token], 32)
            inner = self._apply_gate(x @ self.gate_up_proj[expert].T)
            y = to_8_bits(inner, 32) @ self.down_proj[expert].T
            final.index_add_(0, token, y * top_k_weights[token, place, None])
        return final

    for module in model.modules():
        if type(module).__name__ == "DeepseekV4Experts":
            module.forward = forward.__get__(module)


def write_checkpoint(name, model_type, sizes, scale_dtype, four_bits):
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    is_v4 = model_type == "deepseek_v4"
    config = AutoConfig.for_model(model_type, **sizes)
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        buffers = [(k, b) for k, b in model.named_buffers() if k.endswith(("e_score_correction_bias", "tid2eid"))]
        for key, parameter in [*model.named_parameters(), *buffers]:
            parameter.copy_(make_goldens.random_parameter(name, key, tuple(parameter.shape)))
        for key, buffer in buffers:
            if key.endswith("tid2eid"):
                buffer.copy_(torch.from_numpy(make_goldens.stream("table", name, key).integers(
                    0, config.num_local_experts, tuple(buffer.shape))))
        model.save_pretrained(place)
        tensors, decoded = {}, {}
        for key, value in load_file(Path(place) / "model.safetensors").items():
            own = published(key) if is_v4 else key
            if ENCODED.search(key):
                is_expert = re.search(r"\.experts\.\d+\.", key)
                codes, scales, means = (groups_of_e2m1(value) if four_bits and is_expert else
                                        blocks_of_e4m3(value.double(), scale_dtype))
                tensors[own] = codes
                tensors[own.removesuffix("weight") + ("scale" if is_v4 else "weight_scale_inv")] = scales
                decoded[key] = means.float()
                # A product of two of few bits: f32 holds it where a scale is a power of two.
                assert torch.equal(decoded[key].double(), means) or scale_dtype == torch.float32
            else:
                tensors[own] = value
                decoded[key] = value
        save_file(decoded, Path(place) / "model.safetensors", metadata={"format": "pt"})
        config = AutoConfig.from_pretrained(place)
        weights = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).state_dict()
        text = json.loads((Path(place) / "config.json").read_text())
    if is_v4:
        text = published_config(text, sizes, four_bits)
        tensors["mtp.0.enorm.weight"] = torch.ones(4)  # of a layer that is not computed
    quantization = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128])
    if scale_dtype == torch.float8_e8m0fnu:
        quantization["scale_fmt"] = "ue8m0"
    text["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(text, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    prompt = make_goldens.random_tokens(("prompt", name), 40, config.vocab_size)
    logits = {}
    for key, precision in (("logits", torch.float32), ("logits_f64", torch.float64), ("logits_kept", torch.float64)):
        with torch.no_grad(), make_goldens.precision(precision):
            model = make_goldens.build(config, weights, precision)
            if key == "logits_kept" and four_bits:
                round_inputs_of_experts(model)
            logits[key] = make_goldens.run_logits(model, prompt)
    error = (logits["logits"] - logits["logits_f64"]).abs().max()
    cost = ((logits["logits_kept"] - logits["logits_f64"]).norm() / logits["logits_f64"].norm()).item()
    save_file({"prompt": torch.from_numpy(prompt), **{k: v.float().contiguous() for k, v in logits.items()}},
              folder / "expected.safetensors")
    print(f"{name}: |f32 - f64| {error:.1e}, kept {cost:.2%} off, largest logit {logits['logits'].abs().max():.2f}")


if __name__ == "__main__":
    for row in sys.argv[1:] or CHECKPOINTS:
        write_checkpoint(row, *CHECKPOINTS[row])
