#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One run of llama.cpp, timed, as one line of JSON.

    llama_cpp_worker.py MODEL.gguf --threads N --prompt P --gen G [--depth D] [--batch B] [--logits ID,ID,...]

Steps through llama.cpp's C interface, so that Python costs nothing that is timed beyond one call a step: a prompt of P
tokens in batches of at most 512, then G steps of one token for each of B sequences after D cached tokens, flash
attention on, f16 KV. --logits writes the logits after those tokens instead. Ids are those of `eadem bench`.
"""

import argparse
import ctypes
import json
import sys
import time

import token_steps

UBATCH = token_steps.STEP_TOKENS


def main():
    parser = argparse.ArgumentParser()
    token_steps.add_arguments(parser)
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()

    import llama_cpp

    @llama_cpp.llama_log_callback
    def quiet(level, text, _):
        if level >= 4:  # errors
            sys.stderr.write(text.decode(errors="replace"))

    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    start = time.perf_counter()
    model_params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(arguments.model.encode(), model_params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {arguments.model}")
    ids = [int(text) for text in arguments.logits.split(",")] if arguments.logits else []
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = arguments.batch * (arguments.depth + max(arguments.prompt, arguments.gen, len(ids)) + 32)
    params.n_batch = params.n_ubatch = UBATCH
    params.n_seq_max = arguments.batch
    params.n_threads = params.n_threads_batch = arguments.threads
    params.no_perf = True
    if hasattr(params, "flash_attn_type"):
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    else:
        params.flash_attn = True
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp makes no context for {arguments.model}")
    memory = llama_cpp.llama_get_memory(context)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(UBATCH, 0, 1)

    def step(entries, every_logit):
        """`entries`: (id, position, sequence). Logits of the last of them, or of all."""
        batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = every_logit or i == len(entries) - 1
        if llama_cpp.llama_decode(context, batch) != 0:
            raise SystemExit("llama.cpp: decode failed")

    def token_of(sequence, position):
        return (sequence * 31 + position * 17 + 7) % vocab

    def read(tokens, first):
        for done in range(0, tokens, UBATCH):
            count = min(UBATCH, tokens - done)
            for sequence in range(arguments.batch):
                step([(token_of(sequence, first + done + i), first + done + i, sequence) for i in range(count)], False)

    def generate(tokens, first):
        for done in range(tokens):
            step([(token_of(sequence, first + done), first + done, sequence) for sequence in range(arguments.batch)], True)

    def forget(first):
        llama_cpp.llama_memory_seq_rm(memory, -1, first, -1)

    def finished(work):
        def until_done(tokens, first):
            work(tokens, first)
            llama_cpp.llama_synchronize(context)
        return until_done

    if ids:
        step([(token, position, 0) for position, token in enumerate(ids)], False)
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        print(json.dumps({"logits": [logits[i] for i in range(vocab)]}))
        return

    result = {"engine": "llama.cpp", "version": llama_cpp.__version__, "threads": arguments.threads,
              "load_seconds": time.perf_counter() - start}
    step([(token_of(0, i), i, 0) for i in range(32)], False)
    llama_cpp.llama_synchronize(context)
    result["first_token_seconds"] = time.perf_counter() - start  # load, context, prompt of 32; Python's start left out
    forget(0)
    token_steps.time_tests(result, arguments, finished(read), finished(generate), forget, arguments.batch)
    result["system"] = llama_cpp.llama_print_system_info().decode()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
