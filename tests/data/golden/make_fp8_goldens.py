# SPDX-License-Identifier: Apache-2.0
"""Writes llama/fp8.json and llama/fp8.safetensors: the first step of llama's train.safetensors with the linear layers
multiplying 8-bit floats, as PyTorch computes it.

A row r of x becomes s e4m3(r / s) with s = max |r| / 448, where below 2^-6 there is only 0 (up to 2^-7) and 2^-6; so do
rows of dy, for dx. A block of 128 x 128 of a weight becomes s e4m3(block / s) with its own s, subnormals included. The
gradient of a weight is dy^T x of what was not rounded. The LM head multiplies as it is.

    python make_fp8_goldens.py

needs torch, transformers and safetensors.
"""
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).parent / "llama"
LARGEST, BLOCK = 448.0, 128
SAVED = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight",
         "model.layers.1.mlp.gate_proj.weight")


def levels(quotient):
    return quotient.to(torch.float8_e4m3fn).to(torch.float32)


def scale_of(values, dims):
    scale = values.abs().amax(dim=dims, keepdim=True) / LARGEST
    return scale, torch.where(scale > 0, scale, torch.ones_like(scale))


def rounded_rows(x):
    values = x.to(torch.float32)
    scale, divisor = scale_of(values, -1)
    quotient = values / divisor
    small = torch.sign(quotient) * torch.where(quotient.abs() > 2.0**-7, 2.0**-6, 0.0)
    return (scale * torch.where(quotient.abs() < 2.0**-6, small, levels(quotient))).to(x.dtype)


def rounded_blocks(weight):
    values = weight.to(torch.float32)
    result = torch.empty_like(values)
    for row in range(0, values.shape[0], BLOCK):
        for column in range(0, values.shape[1], BLOCK):
            block = values[row:row + BLOCK, column:column + BLOCK]
            scale, divisor = scale_of(block, (0, 1))
            result[row:row + BLOCK, column:column + BLOCK] = scale * levels(block / divisor)
    return result.to(weight.dtype)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        rounded = rounded_blocks(weight)
        context.save_for_backward(x, rounded)
        return rounded_rows(x) @ rounded.T

    @staticmethod
    def backward(context, dy):
        x, rounded = context.saved_tensors
        return rounded_rows(dy) @ rounded, dy.flatten(0, -2).T @ x.flatten(0, -2)


def first_step(dtype):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype, attn_implementation="eager")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.forward = lambda x, module=module: Product.apply(x, module.weight)
    tokens = load_file(FOLDER / "train.safetensors")["tokens"][0].long()
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item(), dict(model.named_parameters())


loss32, _ = first_step(torch.float32)
loss64, parameters = first_step(torch.float64)
(FOLDER / "fp8.json").write_text(json.dumps({"loss_f32": loss32, "loss_f64": loss64}, indent=1) + "\n")
save_file({name: parameters[name].grad.to(torch.float32).contiguous() for name in SAVED}, FOLDER / "fp8.safetensors")
print(f"loss {loss32} in f32, {loss64} in f64")
