#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each block type costs a model: files that `eadem convert` wrote, without and with --calibrate, beside files of the
same type that llama.cpp's quantizer wrote. All are read by `eadem perplexity` on the same text: the perplexity, and the
Kullback-Leibler divergence from the model in f32, in nats per token.

    quality.py --eadem build/release/bin/eadem --model assets/stories --text corpus.txt --calibrate other.txt
               [--chunks 120] [--types q4_0,q8_0,int4_g32] [--noise 8] [--output FILE]

Rounding moves a perplexity to either side, by luck; a divergence only grows. How much luck there is, models with random
noise of q5_0's size in their weights tell (--noise). Needs llama-cpp-python (requirements.txt).
Of the types of directories (int8, int4 in groups, fp8) there is nothing of llama.cpp's.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy

# Our name, and llama.cpp's file type.
TYPES = {
    "q8_0": "MOSTLY_Q8_0", "q6_k": "MOSTLY_Q6_K", "q5_1": "MOSTLY_Q5_1",
    "q5_0": "MOSTLY_Q5_0", "q5_k": "MOSTLY_Q5_K_M", "q4_1": "MOSTLY_Q4_1",
    "q4_0": "MOSTLY_Q4_0", "q4_k": "MOSTLY_Q4_K_M", "iq4_nl": "MOSTLY_IQ4_NL",
    "iq4_xs": "MOSTLY_IQ4_XS", "q3_k": "MOSTLY_Q3_K_M", "q2_k": "MOSTLY_Q2_K",
}
DIRECTORY_TYPES = ("int8", "int4_g32", "int4_g64", "int4_g128", "fp8", "fp8_block128")


def run(*command):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stderr}")
    return result.stdout


def quantize_with_llama(source, target, file_type):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{file_type}")
    params.pure = True  # every matrix in this type, as --type does
    params.nthread = 1
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        sys.exit(f"llama.cpp could not write {target}")


def add_noise(source, target, seed):
    """Uniform noise as large as what q5_0 does to normal values: 0.04 of each block's root mean square."""
    shutil.copyfile(source, target)
    random = numpy.random.default_rng(seed)
    for tensor in gguf.GGUFReader(target, "r+").tensors:
        if len(tensor.shape) > 1:
            blocks = tensor.data.reshape(-1, math.gcd(32, tensor.data.shape[-1]))
            size = 0.04 * numpy.sqrt((blocks * blocks).mean(1, keepdims=True))
            blocks += size * numpy.float32(math.sqrt(3)) * random.uniform(-1, 1, blocks.shape).astype(numpy.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eadem", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=120)
    parser.add_argument("--types", default=",".join([*TYPES, *DIRECTORY_TYPES]))
    parser.add_argument("--noise", type=int, default=8, help="models with noise in their weights")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    def measure(model, base=None):
        command = [arguments.eadem, "perplexity", model, arguments.text, "--chunks", arguments.chunks, "--context",
                   arguments.context, "--json"]
        result = json.loads(run(*command, *(["--kl", base] if base else [])))
        keys = ["perplexity"] + (["kl_divergence", "kl_divergence_error"] if base else ["error", "scored_tokens"])
        return {key: result[key] for key in keys}

    silent = llama_cpp.llama_log_callback(lambda *_: None)  # must outlive the calls
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    rows, noise = [], []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        plain, made = folder / "f32.gguf", folder / "made.gguf"
        run(arguments.eadem, "convert", arguments.model, plain, "--type", "f32")
        exact = measure(plain)
        print(f"f32: {exact['perplexity']:.4f}")
        for seed in range(arguments.noise):
            add_noise(plain, made, seed)
            noise.append(measure(made, plain))
            print(f"noise: {noise[-1]['perplexity']:.4f} {noise[-1]['kl_divergence']:.5f}", flush=True)
        print(f"{'':<8} {'eadem':^19} {'calibrated':^19} {'llama.cpp':^19}")
        print(f"{'type':<8} " + " ".join(f"{'perplexity':>10} {'KL':>8}" for _ in range(3)))
        for name in arguments.types.split(","):
            target = folder / name if name in DIRECTORY_TYPES else made
            convert = [arguments.eadem, "convert", plain, target, "--type", name, "--force"]
            run(*convert)
            weights = target / "model.safetensors" if target.is_dir() else target
            row = {"type": name, "bytes": weights.stat().st_size, "eadem": measure(target, plain)}
            run(*convert, "--calibrate", arguments.calibrate)
            row["eadem_calibrated"] = measure(target, plain)
            if name in TYPES:
                quantize_with_llama(plain, made, TYPES[name])
                row |= {"llama_cpp_bytes": made.stat().st_size, "llama_cpp": measure(made, plain)}
            rows.append(row)
            print(f"{name:<8} " + " ".join(f"{row[who]['perplexity']:>10.4f} {row[who]['kl_divergence']:>8.5f}"
                                           for who in ("eadem", "eadem_calibrated", "llama_cpp") if who in row), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps({
            "model": arguments.model.name, "text": arguments.text.name, "calibration_text": arguments.calibrate.name,
            "chunks": arguments.chunks, "context": arguments.context, "f32": exact,
            "noise": noise, "llama_cpp_python": llama_cpp.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
