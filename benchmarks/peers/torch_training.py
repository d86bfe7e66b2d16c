#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's training step in the shape of a config.json, on a GPU, as eadem_training_bench times Eadem's.

    torch_training.py CONFIG.json [--batch 8] [--sequence 2048] [--steps 8]

CONFIG.json is of a dense Llama. Weights are random, masters in f32, products in bf16 (autocast); torch.compile, the fused
AdamW, gradients clipped at 1. Prints one JSON object: tokens per second of the median step, with the fastest and slowest.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    config = LlamaConfig(**json.loads(options.config.read_text()), use_cache=False)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(config.vocab_size, (options.batch, options.sequence), device="cuda")

    @torch.compile
    def loss_of(tokens):
        with torch.autocast("cuda", torch.bfloat16):
            return model(input_ids=tokens, labels=tokens).loss

    def step():
        loss_of(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    seconds = []
    for _ in range(options.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    count = options.batch * options.sequence
    print(json.dumps({"engine": "PyTorch", "version": torch.__version__, "device": torch.cuda.get_device_name(),
                      "config": options.config.name, "batch": options.batch, "sequence": options.sequence,
                      "tokens_per_second": count / statistics.median(seconds), "highest": count / min(seconds),
                      "lowest": count / max(seconds), "peak_memory_bytes": torch.cuda.max_memory_allocated()}))


if __name__ == "__main__":
    main()
