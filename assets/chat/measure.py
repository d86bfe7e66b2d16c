#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts how many questions about held-out stories the chat model answers as the patterns of prepare_chat.py do.

    measure.py PROGRAM MODEL EVAL_JSONL
"""

import collections
import json
import subprocess
import sys


def kind_of(question):
    for start in ("Was there somebody", "Was there a", "Was ", "How did", "What was the name", "Who was in", "Who is the",
                  "Who was it", "Where"):
        if question.startswith(start):
            return {"Was there somebody": "was there somebody named X?", "Was there a": "was there an X in the story?",
                    "Was ": "was X happy?", "How did": "how did X feel?", "What was the name": "what was the name of X?",
                    "Where": "where were they?"}.get(start, "who was in the story?")
    return None


def main():
    program, model, path = sys.argv[1:4]
    right, asked = collections.Counter(), collections.Counter()
    for line in open(path, encoding="utf-8"):
        history = ""
        for turn in json.loads(line)["text"].split("<|user|>")[1:]:
            question, answer = turn.split("<|assistant|>")
            kind = kind_of(question)
            if kind:
                prompt = f"{history}<|user|>{question}<|assistant|>"
                output = subprocess.run([program, "run", model, "-p", prompt, "--parse-special", "--temperature", "0", "-n",
                                         "32", "-t", "1", "--json"], capture_output=True, check=True).stdout
                asked[kind] += 1
                right[kind] += json.loads(output)["text"].strip() == answer.removesuffix("<|endoftext|>")
            history += "<|user|>" + turn
    for kind, count in asked.most_common():
        print(f"{right[kind]:4} of {count:4}  {kind}")


if __name__ == "__main__":
    main()
