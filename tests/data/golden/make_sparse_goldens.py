#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the golden of native sparse attention, as a module: weights, input, output and gradients.

    python make_sparse_goldens.py [--out DIR]

Yuan et al. 2025 (arXiv 2502.11089), section 3, written down with masks over all pairs of a query and a key, in PyTorch,
in float64 and again in float32. A compressed row is a weighted sum of a block with a position embedding, as in
eadem/kernels/compressed_attention.h. Gradients are those of sum(dy * y), by PyTorch's autograd. The choice of blocks is
made in float64, and no choice hangs on less than a thousandth of a weight.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = dict(hidden=24, heads=4, kv_heads=2, head_dim=8, value_dim=6, scale=0.37, length=8, stride=4, span=12, top_n=4,
              first_blocks=1, local_blocks=2, window=7, rope_theta=100.0, lengths=[70, 5, 33])
BRANCHES = ["compressed", "selected", "window"]
MARGIN = 1e-3


def make_weights(c):
    """Values of float32, which both runs share."""
    torch.manual_seed(2502)
    heads, kv, hidden = c["heads"], c["kv_heads"], c["hidden"]

    def uniform(*shape, size):
        return (torch.rand(*shape) * 2 - 1) * size

    weights = {"q_proj.weight": uniform(heads * c["head_dim"], hidden, size=0.5)}
    for branch in BRANCHES:
        weights[f"{branch}.k_proj.weight"] = uniform(kv * c["head_dim"], hidden, size=0.5)
        weights[f"{branch}.v_proj.weight"] = uniform(kv * c["value_dim"], hidden, size=0.5)
        weights[f"{branch}.g_proj.weight"] = uniform(heads, hidden, size=0.3)
    for name, width in (("k", c["head_dim"]), ("v", c["value_dim"])):
        weights[f"compressed.{name}_weight"] = uniform(kv, c["length"], size=0.6)
        weights[f"compressed.{name}_position"] = uniform(kv, c["length"], width, size=0.5)
    weights["o_proj.weight"] = uniform(hidden, heads * c["value_dim"], size=0.5)
    return weights


def rotate(x, theta):
    """x [tokens, heads, dim], by halves."""
    tokens, _, dim = x.shape
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64), frequencies)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attend(q, k, v, mask, scale):
    """q [tokens, heads, dim], k and v [keys, kv_heads, …], mask [tokens, kv_heads, keys]: results and weights."""
    group = q.shape[1] // k.shape[1]
    k, v, mask = (t.repeat_interleave(group, 1) for t in (k, v, mask))
    scores = torch.einsum("thd,jhd->thj", q, k) * scale
    scores = scores.masked_fill(~mask, -math.inf)
    # A token that sees nothing has no weights.
    seen = mask.any(-1, keepdim=True)
    weights = torch.softmax(torch.where(seen, scores, torch.zeros_like(scores)), -1) * seen
    return torch.einsum("thj,jhd->thd", weights, v), weights


def select(weights, c, positions):
    """weights [tokens, heads, rows] -> the choice [tokens, kv_heads, blocks], and its least margin."""
    length, stride, span, kv = c["length"], c["stride"], c["span"], c["kv_heads"]
    blocks, rows = (positions + span - 1) // span, weights.shape[-1]
    shared = torch.zeros(rows, blocks, dtype=weights.dtype)
    for row in range(rows):
        for position in range(row * stride, row * stride + length):
            shared[row, position // span] += 1 / stride
    importance = (weights @ shared).reshape(positions, kv, -1, blocks).sum(2)
    chosen, margin = torch.zeros(positions, kv, blocks, dtype=torch.bool), math.inf
    for t in range(positions):
        visible = t // span + 1
        forced = [j for j in range(visible) if j < c["first_blocks"] or j >= visible - c["local_blocks"]]
        others = [j for j in range(visible) if j not in forced]
        left = c["top_n"] - len(forced)
        for g in range(kv):
            order = sorted(others, key=lambda j: (-importance[t, g, j].item(), j))
            chosen[t, g, forced + order[:left]] = True
            if 0 < left < len(order):
                margin = min(margin, (importance[t, g, order[left - 1]] - importance[t, g, order[left]]).item())
    return chosen, margin


def run(weights, x, c, choices):
    """y of one sequence. `choices` is a choice, or None to make one."""
    tokens, kv = x.shape[0], c["kv_heads"]
    length, stride = c["length"], c["stride"]
    q = rotate((x @ weights["q_proj.weight"].T).reshape(tokens, c["heads"], -1), c["rope_theta"])
    at = torch.arange(tokens)
    total, margin = 0, math.inf
    for branch in BRANCHES:
        k = rotate((x @ weights[f"{branch}.k_proj.weight"].T).reshape(tokens, kv, -1), c["rope_theta"])
        v = (x @ weights[f"{branch}.v_proj.weight"].T).reshape(tokens, kv, -1)
        if branch == "compressed":
            starts = range(0, tokens - length + 1, stride)

            def rows(name, values):
                weight, position = weights[f"compressed.{name}_weight"], weights[f"compressed.{name}_position"]
                made = [torch.einsum("gi,igd->gd", weight, values[s:s + length] + position.transpose(0, 1))
                        for s in starts]
                return torch.stack(made) if made else values[:0]

            ends = torch.tensor([s + length - 1 for s in starts])
            mask = (ends[None] <= at[:, None])[:, None].expand(-1, kv, -1)
            y, probabilities = attend(q, rows("k", k), rows("v", v), mask, c["scale"])
            if choices is None:
                choices, margin = select(probabilities.detach(), c, tokens)
        else:
            causal = at[None] <= at[:, None]
            if branch == "window":
                mask = (causal & (at[None] > at[:, None] - c["window"]))[:, None].expand(-1, kv, -1)
            else:
                mask = choices.repeat_interleave(c["span"], -1)[..., :tokens] & causal[:, None]
            y, _ = attend(q, k, v, mask, c["scale"])
        gate = torch.sigmoid(x @ weights[f"{branch}.g_proj.weight"].T)
        total = total + (y * gate[..., None]).reshape(tokens, -1)
    return total @ weights["o_proj.weight"].T, choices, margin


def gradients(c, dtype, weights, x, dy, choices):
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in weights.items()}
    x = x.to(dtype).requires_grad_()
    parts, made, margin = [], [], math.inf
    for index, part in enumerate(x.split(c["lengths"])):
        y, choice, own = run(leaves, part, c, choices[index] if choices else None)
        parts.append(y)
        made.append(choice)
        margin = min(margin, own)
    y = torch.cat(parts)
    y.backward(dy.to(dtype))
    result = {"y": y.detach(), "dx": x.grad}
    result.update({f"grad.{name}": leaf.grad for name, leaf in leaves.items()})
    return result, made, margin


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    folder = parser.parse_args().out / "native_sparse_attention"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    weights = make_weights(CONFIG)
    tokens = sum(CONFIG["lengths"])
    x, dy = torch.randn(tokens, CONFIG["hidden"]), torch.randn(tokens, CONFIG["hidden"])
    exact, choices, margin = gradients(CONFIG, torch.float64, weights, x, dy, None)
    assert margin > MARGIN, margin
    rounded, _, _ = gradients(CONFIG, torch.float32, weights, x, dy, choices)
    save_file(weights, folder / "model.safetensors")
    tensors = {"x": x, "dy": dy}
    tensors.update({f"f64.{name}": tensor.contiguous() for name, tensor in exact.items()})
    tensors.update({f"f32.{name}": tensor.contiguous() for name, tensor in rounded.items()})
    save_file(tensors, folder / "expected.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    print(f"least margin of a choice {margin:.2e}; torch {torch.__version__}")


if __name__ == "__main__":
    main()
