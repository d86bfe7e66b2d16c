#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One run of PyTorch, timed, as one line of JSON.

    torch_worker.py DIRECTORY --type TYPE --threads N [--compile] [--prompt P] [--gen G] [--depth D] [--logits ID,ID,...]

The model is transformers' own for a directory in Hugging Face layout, with torch's fused attention and a KV cache. TYPE:

    f32, bf16     weights and arithmetic
    int8          linear layers of the decoder as torchao's weight-only int8 per channel, beside bf16
    int8_dynamic  the same, with inputs quantized to int8 row by row

--compile passes the model through torch.compile first, with a cache of fixed size, which it needs.
"""

import argparse
import json
import os
import time

import token_steps

TYPES = ("f32", "bf16", "int8", "int8_dynamic")


class Engine:
    def __init__(self, arguments):
        import torch
        import transformers

        torch.set_num_threads(arguments.threads)
        dtype = torch.float32 if arguments.type == "f32" else torch.bfloat16
        model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, attn_implementation="sdpa")
        model.eval()
        if arguments.type.startswith("int8"):
            from torchao import quantization

            config = (quantization.Int8WeightOnlyConfig() if arguments.type == "int8"
                      else quantization.Int8DynamicActivationInt8WeightConfig())
            # As `eadem convert --type int8` does: not the head, which may be the embedding.
            quantization.quantize_(model, config, lambda module, name: isinstance(module, torch.nn.Linear)
                                   and name.endswith("_proj"))
        self.torch, self.transformers, self.model = torch, transformers, model
        self.vocab = model.config.vocab_size
        # Room for what is timed: prompts and drawn tokens each begin at the depth.
        self.length = arguments.depth + max(arguments.prompt, arguments.gen, 32) if arguments.compile else None
        self.run = torch.compile(model) if arguments.compile else model
        self.cache = self.new_cache()

    def new_cache(self):
        if self.length:
            return self.transformers.StaticCache(config=self.model.config, max_cache_len=self.length)
        return self.transformers.DynamicCache(config=self.model.config)

    def forget(self, length):
        if self.length is None:
            self.cache.crop(length)
        elif length == 0:
            with self.torch.inference_mode():
                self.cache.reset()
        # Otherwise what lies beyond `length` is written over: the position says where, and nothing sees further.

    def step(self, ids, position, every_logit=False):
        with self.torch.inference_mode():
            positions = self.torch.arange(position, position + len(ids))
            output = self.run(input_ids=self.torch.tensor([ids]), position_ids=positions[None], past_key_values=self.cache,
                              use_cache=True, logits_to_keep=0 if every_logit else 1)
        return output.logits[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    token_steps.add_arguments(parser)
    parser.add_argument("--type", choices=TYPES, required=True)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    if arguments.compile and arguments.depth > 0:
        parser.error("--depth is for models that are not compiled: transformers' cache of fixed size counts its own steps")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if arguments.type.startswith("int8"):
        import torchao
        versions["torchao"] = torchao.__version__
    start = time.perf_counter()
    engine = Engine(arguments)
    if arguments.logits:
        logits = engine.step([int(text) for text in arguments.logits.split(",")], 0, every_logit=True)
        print(json.dumps({"logits": logits.double().tolist()}))
        return
    token_steps.measure(engine, arguments, start, {"engine": "torch", "versions": versions, "threads": arguments.threads})


if __name__ == "__main__":
    main()
