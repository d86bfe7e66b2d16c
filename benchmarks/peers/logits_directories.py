#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether PyTorch, OpenVINO and Eadem compute the same model from a directory in Hugging Face layout, before their speeds
are compared: the logits of each, in every type, against transformers' own model in float64.

    logits_directories.py DIRECTORY [DIRECTORY ...] --eadem build/release/bin/eadem [--tokens 96] [--types f32,bf16,int8]
                          [--output FILE]

Directories of small models: the float64 model and every logit are held. How far logits may be, a simulation says: the
float64 model in which what each module gives is rounded to the type, sums are taken one product after another in f32 (n
roundings of partial sums whose squares grow evenly), and, for int8, the decoder's weights are rounded per row and their
inputs per token. Rounding errors are independent, so that an engine that rounds four times as often is off by twice as
much: the root mean square may be that. A model that is read otherwise is off by a hundred times as much. Exits with 1
beyond that, and with 77 where packages are missing (requirements-frameworks.txt; `pip install .` for `eadem`). What an
engine cannot run is printed and recorded as what it said.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SLACK = 2
TYPES = ("f32", "bf16", "int8")

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    import transformers
    import eadem
    import numpy as np
except ImportError as error:
    print(f"skipped: {error}; see requirements-frameworks.txt, and `pip install .` in the repository for eadem")
    sys.exit(77)


# ------------------------------------------------------------------ float64, exact and with rounding

class Rotary(torch.nn.Module):
    """cos and sin in float64; transformers' own are f32 in a model of any type. `as_f32`: angles as f32 has them."""

    def __init__(self, config):
        super().__init__()
        rope = config.rope_parameters
        if rope["rope_type"] != "default":
            sys.exit(f"logits_directories.py: rope_type is {rope['rope_type']!r}; expected 'default'")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.frequencies = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self.as_f32 = False

    def forward(self, x, position_ids):
        if self.as_f32:
            angles = position_ids[..., None].to(torch.float32) * self.frequencies.to(torch.float32)
        else:
            angles = position_ids[..., None].to(torch.float64) * self.frequencies
        angles = torch.cat((angles, angles), -1).to(torch.float64)
        return angles.cos(), angles.sin()


def exact_norm(module):
    return lambda x: module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def load(directory):
    """In float64 throughout: norms, angles and softmax, too, which transformers has in f32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="sdpa")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = exact_norm(module)
    model.model.rotary_emb = Rotary(model.config)
    return model.eval()


def rounded(x, type_name):
    return x.to(torch.float32 if type_name == "f32" else torch.bfloat16).to(torch.float64)


def to_8_bits(x):
    """Each row by its largest magnitude."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale.where(scale > 0, torch.ones_like(scale))) * scale


@contextlib.contextmanager
def rounding(model, type_name):
    """What rounding of `type_name` does, while it lasts; int8 layers stand among bf16."""
    random = torch.Generator().manual_seed(1)
    hooks, weights = [], {}

    def after(module, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, torch.Tensor):
            return None  # the decoder as a whole, whose parts were seen
        if isinstance(module, torch.nn.Linear):
            noise = torch.randn(first.shape, generator=random, dtype=torch.float64)
            first = first + noise * 2**-24 / 3**0.5 * (module.in_features / 2)**0.5 * first.square().mean().sqrt()
        first = rounded(first, "f32" if type_name == "f32" else "bf16")
        return (first, *output[1:]) if isinstance(output, tuple) else first

    for name, module in model.named_modules():
        if isinstance(module, Rotary):
            module.as_f32 = True
            continue
        if name == "":
            continue
        hooks.append(module.register_forward_hook(after))
        if type_name == "int8" and name.endswith("_proj"):
            weights[module] = module.weight.data
            module.weight.data = to_8_bits(module.weight.data)
            hooks.append(module.register_forward_pre_hook(lambda _, inputs: (to_8_bits(inputs[0]), *inputs[1:])))
    try:
        yield
    finally:
        model.model.rotary_emb.as_f32 = False
        for hook in hooks:
            hook.remove()
        for module, weight in weights.items():
            module.weight.data = weight


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].numpy()


# ------------------------------------------------------------------ the engines

def eadem_logits(directory, ids):
    engine = eadem.InferEngine.from_pretrained(directory, max_num_batched_tokens=len(ids), max_logit_rows=len(ids))
    step = eadem.InferEngine.Input(np.array([ids]), temperature=0, all_logits=True)
    return np.asarray(engine.forward(step, return_logits=True).logits, dtype=np.float64)


class WorkerError(Exception):
    pass


def run(*command):
    made = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          env=os.environ | {"OMP_WAIT_POLICY": "passive"})
    if made.returncode != 0:
        raise WorkerError(" | ".join(made.stderr.strip().splitlines()[-2:]))
    return made.stdout


def worker_logits(worker, model, type_name, ids):
    out = run(sys.executable, HERE / worker, model, "--type", type_name, "--threads", 1, "--logits", ",".join(map(str, ids)))
    return np.array(json.loads(out.splitlines()[-1])["logits"])


def openvino_logits(folder, source, type_name, ids):
    target = folder / f"openvino-{type_name}"
    run(sys.executable, HERE / "openvino_worker.py", target, "--type", type_name, "--threads", 1, "--export", source)
    return worker_logits("openvino_worker.py", target, type_name, ids)


# ------------------------------------------------------------------

def rms(x):
    return float(np.sqrt((x * x).mean()))


def compare(arguments, directory, type_name, folder):
    made = folder / type_name
    run(arguments.eadem, "convert", directory, made, "--type", type_name)
    # For int8 the other programs quantize the plain directory themselves, so the exact logits come from it.
    source = directory if type_name == "int8" else made
    model = load(source)
    ids = [(i * 193 + 7) % model.config.vocab_size for i in range(arguments.tokens)]
    exact = logits_of(model, ids)
    with rounding(model, type_name):
        simulated = rms(logits_of(model, ids) - exact)
    engines = {"eadem": lambda: eadem_logits(made, ids), "torch": lambda: worker_logits("torch_worker.py", source, type_name, ids),
               "openvino": lambda: openvino_logits(folder, source, type_name, ids)}
    if type_name == "int8":
        engines["torch dynamic"] = lambda: worker_logits("torch_worker.py", source, "int8_dynamic", ids)
    row = {"model": directory.name, "type": type_name, "logit_rms": rms(exact), "simulated_rms": simulated, "engines": {}}
    for name, logits in engines.items():
        try:
            got = logits()
        except WorkerError as error:
            row["engines"][name] = {"error": str(error)}
            continue
        row["engines"][name] = {"rms": rms(got - exact), "max": float(np.abs(got - exact).max()),
                                "top1": float((got.argmax(1) == exact.argmax(1)).mean()),
                                "agrees": bool(rms(got - exact) <= SLACK * simulated)}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--eadem", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # small models
    rows, bad = [], []
    print(f"{'model':<10} {'type':<5} {'simulated':>9}  engine: rms (top-1)")
    for directory in arguments.directories:
        for type_name in arguments.types.split(","):
            with tempfile.TemporaryDirectory() as folder:
                row = compare(arguments, directory, type_name, Path(folder))
            rows.append(row)
            texts = []
            for name, found in row["engines"].items():
                if "error" in found:
                    texts.append(f"{name}: {found['error']}")
                    continue
                texts.append(f"{name}: {found['rms']:.2g} ({found['top1']:.0%})")
                if not found["agrees"]:
                    bad.append(f"{directory.name} {type_name}: {name} is off by {found['rms']:.3g}; expected at most {SLACK} x "
                               f"{row['simulated_rms']:.3g}")
            print(f"{row['model']:<10} {type_name:<5} {row['simulated_rms']:>9.2g}  " + "; ".join(texts), flush=True)
    if arguments.output:
        import openvino
        import torchao

        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "torchao": torchao.__version__,
                    "openvino": openvino.__version__}
        arguments.output.write_text(json.dumps({"tokens": arguments.tokens, "slack": SLACK, "versions": versions,
                                                "rows": rows}, indent=1) + "\n")
    print("\n".join(bad))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
