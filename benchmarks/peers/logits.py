#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether others read our files as we do: logits of llama.cpp and of Eadem on GGUF files that `eadem convert` wrote, in
every type, against a computation in float64 on the weights that the `gguf` package decodes from the same file.

    logits.py --eadem build/release/bin/eadem --model assets/stories [--tokens 128] [--types q4_0,q8_0] [--output FILE]

Both engines round what quantized weights are multiplied by to 8 bits (llama.cpp in blocks as long as those of the
weights, Eadem in blocks of 32) and, of 16-bit weights, to 16 bits. The float64 computation with that rounding put in
says how far logits move by it: the rounding errors of an engine differ from these one by one, but not in size. So the
root mean square deviation of each engine from the exact logits may be 1.5 times the simulated one; where a file is read
otherwise than it was written, deviations are those of a broken model, a hundred times more. Exits with 1 beyond that,
and with 77 where the packages `eadem`, `llama_cpp` (requirements.txt) or `gguf` are missing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SLACK = 1.5
TYPES = ("f32 f16 bf16 q8_0 q6_k q5_1 q5_0 q5_k q4_1 q4_0 q4_k iq4_nl iq4_xs mxfp4 q3_k q2_k q5_k_s q5_k_m q4_k_s "
         "q4_k_m q3_k_s q3_k_m q3_k_l q2_k_m").split()


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(77)


try:
    import gguf
    import llama_cpp
    import numpy as np
except ImportError as error:
    skip(f"{error}; see requirements.txt")
try:
    import eadem
except ImportError as error:
    skip(f"{error}; `pip install .` in the repository gives it")


# ------------------------------------------------------------------ the computation in float64

def to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)


def rounded(x, file_type, by):
    """What a kernel makes of `x` [tokens, in] before it multiplies by weights of `file_type`."""
    name = file_type.name.lower()
    if by == "exact" or name == "f32":
        return x
    if name == "bf16":
        return to_bf16(x)
    if name == "f16":
        return x.astype(np.float16).astype(np.float64)
    step = gguf.constants.GGML_QUANT_SIZES[file_type][0] if by == "llama.cpp" else 32
    blocks = x.reshape(-1, step)
    scale = np.abs(blocks).max(1, keepdims=True) / 127
    return (np.rint(blocks / np.where(scale == 0, 1, scale)) * scale).reshape(x.shape)


class Reference:
    """A Llama model of a GGUF file: tensors as the gguf package decodes them."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        field = lambda key, *default: (reader.fields[f"llama.{key}"].contents()
                                       if f"llama.{key}" in reader.fields or not default else default[0])
        self.layers, self.heads, self.kv_heads = (
            field(key) for key in ("block_count", "attention.head_count", "attention.head_count_kv"))
        self.eps, self.theta = field("attention.layer_norm_rms_epsilon"), field("rope.freq_base", 10000.0)
        self.weights = {t.name: (gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64).reshape(t.shape[::-1]),
                                 t.tensor_type) for t in reader.tensors}

    def linear(self, x, name, by):
        weight, file_type = self.weights[name]
        return rounded(x, file_type, by) @ weight.T

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.weights[name][0]

    def rotate(self, x):
        """Pairs (2i, 2i + 1) of [tokens, heads, head_dim], as Llama's GGUF files order them."""
        tokens, _, head_dim = x.shape
        angles = np.arange(tokens)[:, None, None] * self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        a, b = x[..., ::2], x[..., 1::2]
        result = np.empty_like(x)
        result[..., ::2] = a * np.cos(angles) - b * np.sin(angles)
        result[..., 1::2] = a * np.sin(angles) + b * np.cos(angles)
        return result

    def logits(self, ids, by):
        x = self.weights["token_embd.weight"][0][ids]
        hidden = np.triu(np.ones((len(ids), len(ids)), bool), 1)
        for layer in range(self.layers):
            at = f"blk.{layer}."
            h = self.norm(x, at + "attn_norm.weight")
            q, k, v = (self.linear(h, f"{at}attn_{name}.weight", by).reshape(len(ids), count, -1)
                       for name, count in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)))
            q, k = self.rotate(q), self.rotate(k)
            k, v = (np.repeat(kv, self.heads // self.kv_heads, 1) for kv in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
            scores = np.exp(np.where(hidden, -np.inf, scores) - np.where(hidden, -np.inf, scores).max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            attended = np.einsum("hqk,khd->qhd", scores, v).reshape(len(ids), -1)
            x = x + self.linear(attended, at + "attn_output.weight", by)
            h = self.norm(x, at + "ffn_norm.weight")
            gate, up = (self.linear(h, f"{at}ffn_{name}.weight", by) for name in ("gate", "up"))
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, at + "ffn_down.weight", by)
        head = "output.weight" if "output.weight" in self.weights else "token_embd.weight"
        return self.linear(self.norm(x, "output_norm.weight"), head, by)


# ------------------------------------------------------------------ the engines, in f32 beside their weights

def eadem_logits(path, ids):
    engine = eadem.InferEngine.from_pretrained(path, activations="f32", kv_dtype="f32", max_num_batched_tokens=len(ids),
                                               max_logit_rows=len(ids))
    step = eadem.InferEngine.Input(np.array([ids]), temperature=0, all_logits=True)
    return engine.forward(step, return_logits=True).logits.astype(np.float64)


def llama_cpp_logits(path, ids):
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = len(ids)
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, params)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    if llama_cpp.llama_decode(context, batch) != 0:
        sys.exit(f"llama.cpp cannot run {path}")
    result = np.stack([np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocab,)).astype(np.float64)
                       for i in range(len(ids))])
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return result


# ------------------------------------------------------------------

def rms(x):
    return float(np.sqrt((x * x).mean()))


def agreement(a, b):
    return float((a.argmax(1) == b.argmax(1)).mean())


def compare(path, ids):
    reference = Reference(path)
    exact = reference.logits(ids, "exact")
    ours, theirs = eadem_logits(path, ids), llama_cpp_logits(path, ids)
    row = {"logit_rms": rms(exact), "max_difference": float(np.abs(ours - theirs).max()), "top1": agreement(ours, theirs)}
    for name, logits in (("eadem", ours), ("llama.cpp", theirs)):
        off = logits - exact
        row[name] = {"max": float(np.abs(off).max()), "rms": rms(off), "top1": agreement(logits, exact),
                     "simulated_rms": rms(reference.logits(ids, name) - exact)}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eadem", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    silent = llama_cpp.llama_log_callback(lambda *_: None)  # must outlive the calls
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()

    rows, bad = [], []
    print(f"{'':<8} {'eadem - llama.cpp':^17}  {'eadem - exact':^27}  {'llama.cpp - exact':^27}")
    print(f"{'type':<8} {'largest':>9} {'top-1':>7}  " +
          "  ".join(f"{'rms':>8} {'simulated':>9} {'top-1':>7}" for _ in range(2)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for name in arguments.types.split(","):
            made = subprocess.run([arguments.eadem, "convert", arguments.model, path, "--type", name, "--force"],
                                  capture_output=True, text=True)
            if made.returncode != 0:
                sys.exit(made.stderr)
            tokens = len(gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].data)
            row = {"type": name} | compare(path, [(i * 193 + 7) % tokens for i in range(arguments.tokens)])
            rows.append(row)
            print(f"{name:<8} {row['max_difference']:>9.2g} {row['top1']:>7.1%}  " +
                  "  ".join(f"{row[who]['rms']:>8.2g} {row[who]['simulated_rms']:>9.2g} {row[who]['top1']:>7.1%}"
                            for who in ("eadem", "llama.cpp")), flush=True)
            for who in ("eadem", "llama.cpp"):
                # f32 weights round nothing but sums: 2^-24 of each of a few thousand terms, with room.
                allowed = SLACK * row[who]["simulated_rms"] + 1e-5 * row["logit_rms"]
                if not row[who]["rms"] <= allowed:
                    bad.append(f"{name}: {who} is {row[who]['rms']:.3g} from exact; expected at most {allowed:.3g}")
    if arguments.output:
        arguments.output.write_text(json.dumps({
            "model": arguments.model.name, "tokens": arguments.tokens, "llama_cpp_python": llama_cpp.__version__,
            "rows": rows}, indent=1) + "\n")
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
