# SPDX-License-Identifier: Apache-2.0
"""Logits of transformers for tokens whose positions are stated: positions.safetensors beside the models that are here.

    venv/bin/python make_position_goldens.py [--out DIR]

Positions leave gaps, fall and repeat. Every token attends to itself and to those before it in the prompt, whatever
their positions are.
"""
import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import AutoConfig

from make_goldens import build, precision

MODELS = ["llama", "yarn", "gpt2"]  # rotary, rotary with scaled frequencies, learned
TOKENS = 14
POSITIONS = [0, 1, 2, 10, 11, 12, 40, 41, 5, 6, 7, 7, 90, 3]


@torch.no_grad()
def logits(config, weights, dtype, prompt, positions):
    with precision(dtype):
        model = build(config, weights, dtype)
        # A mask of four dimensions is used as it is; without one, positions would be taken for several sequences.
        mask = torch.full((TOKENS, TOKENS), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
        run = lambda **more: model(input_ids=torch.from_numpy(prompt.astype(np.int64))[None], use_cache=False, **more)
        usual = run(attention_mask=mask, position_ids=torch.arange(TOKENS)[None]).logits
        assert torch.equal(usual, run().logits), "stated positions that are the usual ones change nothing"
        stated = run(attention_mask=mask, position_ids=torch.tensor(positions)[None]).logits[0]
        assert (stated - usual[0]).abs().max() > 0.01, "positions matter"
        return stated.numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out = parser.parse_args().out
    for name in MODELS:
        folder = Path(__file__).parent / name
        config = AutoConfig.from_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        prompt = np.random.default_rng(7).integers(3, config.vocab_size, TOKENS).astype(np.int32)
        tensors = {"prompt": prompt, "positions": np.array(POSITIONS, np.int32),
                   "logits": logits(config, weights, torch.float32, prompt, POSITIONS),
                   "logits_f64": logits(config, weights, torch.float64, prompt, POSITIONS).astype(np.float32)}
        (out / name).mkdir(exist_ok=True)
        save_file(tensors, out / name / "positions.safetensors")
        print(name, np.abs(tensors["logits"] - tensors["logits_f64"]).max())


if __name__ == "__main__":
    main()
