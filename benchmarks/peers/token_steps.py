# SPDX-License-Identifier: Apache-2.0
"""What the workers do with their engines: the same tokens as `eadem bench`, in the same steps, timed in the same way."""

import json
import resource
import time

STEP_TOKENS = 512


def token_of(position, vocab):
    return (position * 17 + 7) % vocab


def add_arguments(parser):
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--logits", help="ids, separated by commas: write the logits after each of them instead")


def measure(engine, arguments, start, result):
    """`engine` has vocab, forget(length) and step(ids, position), which returns when the logits of the last token are
    there. `start` is when loading began. Adds the speeds to `result` and prints it as one line of JSON."""

    def read(tokens, first):
        for done in range(0, tokens, STEP_TOKENS):
            count = min(STEP_TOKENS, tokens - done)
            engine.step([token_of(first + done + i, engine.vocab) for i in range(count)], first + done)

    def generate(tokens, first):
        for done in range(tokens):
            engine.step([token_of(first + done, engine.vocab)], first + done)

    result["load_seconds"] = time.perf_counter() - start
    read(32, 0)
    result["first_token_seconds"] = time.perf_counter() - start  # Python's own start left out
    engine.forget(0)
    time_tests(result, arguments, read, generate, engine.forget)
    print(json.dumps(result))


def time_tests(result, arguments, read, generate, forget, sequences=1):
    """Adds to `result` tokens per second of all sequences: prefill, by read(tokens, first), and decode, by
    generate(tokens, first), after --depth tokens that are read before; and the process's peak memory. Both return when
    the work is done."""
    read(arguments.depth, 0)
    for name, work, tokens, warm_up in (("prefill", read, arguments.prompt, arguments.prompt),
                                        ("decode", generate, arguments.gen, min(8, arguments.gen))):
        if tokens == 0:
            continue
        work(warm_up, arguments.depth)
        forget(arguments.depth)
        began = time.perf_counter()
        work(tokens, arguments.depth)
        result[name] = sequences * tokens / (time.perf_counter() - began)
        forget(arguments.depth)
    result["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
