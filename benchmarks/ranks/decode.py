#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decoding on one rank with as many threads as processors, and on ranks with a thread each, in turn.

    decode.py MODEL [--ranks 2] [--tokens 16] [--pairs 12]

Needs the package eadem. Both engines are there at once, and answer in turn: one, several, several, one. So what the
machine does for others changes both alike, and the ratio of each such pair says more than two speeds do. Prints the
medians of the pairs' tokens/s, and of their ratios with the quartiles.
"""

import argparse
import statistics
import time


def pairs_of(one, several, count):
    """Mean speeds (one, several) of `count` turns; the first answer of each warms up."""
    one(), several()
    pairs = []
    for _ in range(count):
        first, *middle, last = one(), several(), several(), one()
        pairs.append(((first + last) / 2, sum(middle) / 2))
    return pairs


def summary(pairs):
    ratios = [several / one for one, several in pairs]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"one": statistics.median(one for one, _ in pairs), "several": statistics.median(each for _, each in pairs),
            "ratio": statistics.median(ratios), "quartiles": (low, high)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=12)
    arguments = parser.parse_args()

    import eadem

    params = eadem.SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)

    def speed_of(ranks):
        llm = eadem.LLM(arguments.model, threads=arguments.ranks, tensor_parallel_size=ranks,
                        kv_cache=eadem.StaticKVCacheConfig(1, arguments.tokens + 1))

        def speed():
            start = time.perf_counter()
            [completion] = llm.generate([[1]], params)
            if len(completion.token_ids) != arguments.tokens:
                raise SystemExit(f"decode.py: {completion.error or completion.finish_reason}")
            return arguments.tokens / (time.perf_counter() - start)
        return speed

    found = summary(pairs_of(speed_of(1), speed_of(arguments.ranks), arguments.pairs))
    print(f"1 rank, {arguments.ranks} threads: {found['one']:.2f} tokens/s; {arguments.ranks} ranks: "
          f"{found['several']:.2f}; ratio {found['ratio']:.3f} ({found['quartiles'][0]:.3f} - {found['quartiles'][1]:.3f})")


if __name__ == "__main__":
    main()
