# SPDX-License-Identifier: Apache-2.0
"""Writes llama/fp8.json, fp8_tensor.json, fp8_delayed.json, fp8_head.json and files of tensors beside them: steps on
llama's train.safetensors with the linear layers multiplying 8-bit floats, as PyTorch computes them. The LM head
multiplies as it is, except in fp8_head.

fp8, blocks. A row r of x becomes s e4m3(r / s) with s = max |r| / 448, where below 2^-6 there is only 0 (up to 2^-7) and 2^-6; so do
rows of dy, for dx. A block of 128 x 128 of a weight becomes s e4m3(block / s) with its own s, subnormals included. The
gradient of a weight is dy^T x of what was not rounded.

fp8_tensor. A tensor t becomes s f(t / s) with s = max |t| / the largest of the format, subnormals included: x and
weights in e4m3, dy in e5m2. All three products multiply such values.

fp8_delayed. Likewise, but s is that of the largest max |t| of the last HISTORY steps, and what is larger becomes the
largest. Without earlier steps s is that of t. Parameters stay as they are; every step has another batch.

fp8_head. As fp8_tensor, and the LM head, too. The gradient of its logits, (p - onehot) / tokens, has
s = 1 / tokens / 57344.

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
E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
HISTORY, STEPS = 2, 4
WATCHED = "model.layers.1.mlp.up_proj"
SAVED = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight",
         "model.layers.1.mlp.gate_proj.weight")
HEAD = ("lm_head.weight", "model.norm.weight")


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


class TensorProduct(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, round_x, round_weight, round_dy):
        context.round_dy = round_dy
        rounded_x, rounded = round_x(x), round_weight(weight)
        context.save_for_backward(rounded_x, rounded)
        return rounded_x @ rounded.T

    @staticmethod
    def backward(context, dy):
        x, weight = context.saved_tensors
        dy = context.round_dy(dy)
        return dy @ weight, dy.flatten(0, -2).T @ x.flatten(0, -2), None, None, None


class Rounding:
    """Rounds a tensor in every step."""

    def __init__(self, format, delayed, limit=None):
        self.dtype, self.largest = format
        self.delayed, self.earlier, self.seen, self.limit = delayed, [], [], limit

    def __call__(self, tensor):
        values = tensor.detach().to(torch.float32)
        own = values.abs().max()
        most = max(self.earlier[-HISTORY:], default=torch.zeros(()))
        scale = (torch.tensor(self.limit) if self.limit else most if self.delayed and most > 0 else own) / self.largest
        self.seen.append(own)
        quotient = (values / scale).clamp(-self.largest, self.largest)
        return (scale * quotient.to(self.dtype).to(torch.float32)).to(tensor.dtype)

    def end_step(self):
        self.earlier.append(max(self.seen))
        self.seen = []


def load(dtype, head=False):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype, attn_implementation="eager")
    layers = {name: module for name, module in model.named_modules()
              if isinstance(module, torch.nn.Linear) and (head or name != "lm_head")}
    return model, layers


def tokens_of(step):
    return load_file(FOLDER / "train.safetensors")["tokens"][step].long()


def run(model, step):
    tokens = tokens_of(step)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    model.zero_grad()
    loss.backward()
    return loss.item()


def save(name, numbers, model, saved=SAVED):
    (FOLDER / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    parameters = dict(model.named_parameters())
    save_file({of: parameters[of].grad.to(torch.float32).contiguous() for of in saved},
              FOLDER / f"{name}.safetensors")
    print(name, numbers)


def in_blocks():
    losses = {}
    for key, dtype in (("loss_f32", torch.float32), ("loss_f64", torch.float64)):
        model, layers = load(dtype)
        for module in layers.values():
            module.forward = lambda x, module=module: Product.apply(x, module.weight)
        losses[key] = run(model, 0)
    save("fp8", losses, model)


def in_tensors(name, delayed, steps, head=False):
    numbers = {}
    for key, dtype in (("losses_f32", torch.float32), ("losses_f64", torch.float64)):
        model, layers = load(dtype, head)
        roundings = {of: [Rounding(format, delayed) for format in (E4M3, E4M3, E5M2)] for of in layers}
        if head:
            roundings["lm_head"][2].limit = 1 / tokens_of(0)[:, 1:].numel()
        for of, module in layers.items():
            module.forward = lambda x, module=module, of=of: TensorProduct.apply(x, module.weight, *roundings[of])
        numbers[key] = []
        for step in range(steps):
            numbers[key].append(run(model, step))
            for rounding in sum(roundings.values(), []):
                rounding.end_step()
    if delayed:
        for port, rounding in zip(("x", "weight", "dy"), roundings[WATCHED]):
            numbers[f"{WATCHED}.{port}"] = [most.item() for most in rounding.earlier]
    save(name, numbers, model, SAVED + HEAD if head else SAVED)


in_blocks()
in_tensors("fp8_tensor", False, 1)
in_tensors("fp8_delayed", True, STEPS)
in_tensors("fp8_head", False, 1, head=True)
