#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's training step in the shape of a config.json, as eadem_training_bench times Eadem's.

    torch_training.py CONFIG.json [--device cuda] [--type bf16] [--batch 8] [--sequence 2048] [--steps 8]
                      [--threads N] [--eager] [--experts grouped_mm|batched_mm|eager]

transformers' model of the config's model_type, with random weights: masters in f32, products in bf16 (autocast) or f32;
torch.compile unless --eager, the fused AdamW, gradients clipped at 1. --experts is one of transformers' ways to compute a
mixture of experts. Prints one JSON object: tokens per second of the median step, with the fastest and slowest.
"""

import argparse
import contextlib
import json
import resource
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--type", default="bf16", choices=["bf16", "f32"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, help="of the CPU; all when not given")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--experts", choices=["grouped_mm", "batched_mm", "eager"], help="transformers' own choice when not given")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    stated = json.loads(options.config.read_text())
    config = AutoConfig.for_model(stated.pop("model_type"), **stated, use_cache=False)
    ways = {} if options.experts is None else {"experts_implementation": options.experts}
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **ways)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(config.vocab_size, (options.batch, options.sequence), device=options.device)
    narrow = torch.autocast(options.device, torch.bfloat16) if options.type == "bf16" else contextlib.nullcontext()

    def plain_loss_of(tokens):
        with narrow:
            return model(input_ids=tokens, labels=tokens).loss

    loss_of = plain_loss_of if options.eager else torch.compile(plain_loss_of)

    def synchronize():
        if options.device == "cuda":
            torch.cuda.synchronize()

    def step():
        loss_of(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    seconds = []
    for _ in range(options.steps):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - start)
    count = options.batch * options.sequence
    on_gpu = options.device == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"engine": "PyTorch", "version": torch.__version__,
                      "device": torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} threads",
                      "config": options.config.name, "type": options.type, "compiled": not options.eager,
                      "experts": options.experts, "batch": options.batch, "sequence": options.sequence,
                      "parameters": sum(p.numel() for p in model.parameters()),
                      "tokens_per_second": count / statistics.median(seconds), "highest": count / min(seconds),
                      "lowest": count / max(seconds), "peak_memory_bytes": peak}))


if __name__ == "__main__":
    main()
