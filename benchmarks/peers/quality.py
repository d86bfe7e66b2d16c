#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each block type costs a model: perplexity of files that `eadem convert` wrote beside files of the same type that
llama.cpp's quantizer wrote, both read by `eadem perplexity` on the same text.

    quality.py --eadem build/release/bin/eadem --model assets/stories --text corpus.txt [--chunks 40] [--output FILE]

Needs llama-cpp-python (requirements.txt).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import llama_cpp

# Our name, and llama.cpp's file type.
TYPES = {
    "q8_0": "MOSTLY_Q8_0", "q6_k": "MOSTLY_Q6_K", "q5_1": "MOSTLY_Q5_1",
    "q5_0": "MOSTLY_Q5_0", "q5_k": "MOSTLY_Q5_K_M", "q4_1": "MOSTLY_Q4_1",
    "q4_0": "MOSTLY_Q4_0", "q4_k": "MOSTLY_Q4_K_M", "iq4_nl": "MOSTLY_IQ4_NL",
    "iq4_xs": "MOSTLY_IQ4_XS", "q3_k": "MOSTLY_Q3_K_M", "q2_k": "MOSTLY_Q2_K",
}


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eadem", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    def perplexity(model):
        return json.loads(run(arguments.eadem, "perplexity", model, arguments.text, "--chunks", arguments.chunks,
                              "--context", arguments.context, "--json"))["perplexity"]

    silent = llama_cpp.llama_log_callback(lambda *_: None)  # must outlive the calls
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        plain = folder / "f32.gguf"
        run(arguments.eadem, "convert", arguments.model, plain, "--type", "f32")
        exact = perplexity(plain)
        print(f"{'type':<8} {'eadem':>9} {'llama.cpp':>10}   (f32: {exact:.4f})")
        for name, file_type in TYPES.items():
            ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
            run(arguments.eadem, "convert", plain, ours, "--type", name, "--force")
            quantize_with_llama(plain, theirs, file_type)
            rows.append({"type": name, "eadem": perplexity(ours), "llama_cpp": perplexity(theirs),
                         "eadem_bytes": ours.stat().st_size, "llama_cpp_bytes": theirs.stat().st_size})
            print(f"{name:<8} {rows[-1]['eadem']:>9.4f} {rows[-1]['llama_cpp']:>10.4f}", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps({
            "model": str(arguments.model), "text": arguments.text.name, "chunks": arguments.chunks,
            "context": arguments.context, "f32": exact, "llama_cpp_python": llama_cpp.__version__, "rows": rows},
            indent=1) + "\n")


if __name__ == "__main__":
    main()
