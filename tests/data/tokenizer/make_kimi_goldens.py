#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes, from the `tiktoken` package, which is what the tokenizer class of Kimi runs on:

kimi/tiktoken.model          the byte-level vocabulary of pre_types.json as ranks
kimi/tokenizer_config.json   as that of Kimi K2, with ids behind these ranks
kimi.json                    ids of texts with that vocabulary, and of wiki.test.raw with the ranks of Llama 3 in the place
                             of Kimi's, which are not here (kimi_test.cc)

    pip install tiktoken==0.14.0
    python make_kimi_goldens.py SHARED_DATA

SHARED_DATA holds tokenizers.tar.zst and corpora/wikitext2/wiki.test.raw.
"""

import base64
import hashlib
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

import tiktoken
from tiktoken.load import load_tiktoken_bpe

HERE = pathlib.Path(__file__).parent
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
END = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# The `pat_str` of tokenization_kimi.py and of tokenization_moonshot.py.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+" + END,
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*" + END,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# Named special tokens by their distance from the ranks; those not in NOT_SPECIAL are special for the config too.
NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    13: "<|tool_call_begin|>",
    17: "<|im_middle|>",
    254: "[UNK]",
    255: "[PAD]",
}
NOT_SPECIAL = ("<|tool_call_begin|>",)


def bytes_of_alphabet():
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {**{chr(b): b for b in kept}, **{chr(256 + i): b for i, b in enumerate(others)}}


def encoding(ranks):
    """As the class makes it: the 256 ids behind the ranks are special, named or not."""
    specials = {NAMED.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(256)}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)


def texts_with_han():
    rng = random.Random(20250711)
    atoms = list("\u4f60\u597d\u4e2d\u6587\u4e16\u754c\u3001\u3002\uff0c\uff01\u300c\u300d\u300a\u3005\u3007\u3006\u3038\u2e80\u2f00\u30fc\u30fb\u3042\u30ab\uac00\u1100")
    atoms += list(" \t\n\r'\u00a0\u3000.,!?-/#\u0301\u0915\u093f\u0439\u0411\u01c5\u02b0\u05d0AbZzsS1\u0662\u2160\u00bd\u3220\u3280\U00020000\U0001f600")
    atoms += ["'s", "'RE", "'ll", "  ", "   ", "\r\n", "\n\n", "2024", "1234567", "HELLOworld", "helloWORLD", "don't", "CJK\u6587"]
    atoms += ["[BOS]", "[EOS]", "<|im_end|>", "<|im_middle|>", "<|tool_call_begin|>", "<|reserved_token_999|>", "<|reserved_token_9|>"]
    texts = ["", "\u4f60\u597d\u3001\u4e16\u754c\u3002", "\u4f60\u597d\u3001\u3002\u4e16", "\u300c\u4e2d\u6587\u300dABC\u4e2dabc\u6587", "\u4e2d\u3005\u3007\u4e2d"]
    return texts + ["".join(rng.choice(atoms) for _ in range(rng.randint(1, 28))) for _ in range(150)]


def compact(value):
    return json.dumps(value, separators=(",", ":")) + "\n"


def main():
    shared = pathlib.Path(sys.argv[1])
    pre_types = json.loads((HERE / "pre_types.json").read_text(encoding="utf-8"))
    byte_of = bytes_of_alphabet()
    tokens = [bytes(byte_of[c] for c in token) for token in pre_types["byte_level"]["tokens"]]
    folder = HERE / "kimi"
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    config = {
        "added_tokens_decoder": {
            str(len(tokens) + i): {"content": name, **flags, "special": name not in NOT_SPECIAL}
            for i, name in NAMED.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "chat_template": "{% for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

    small = encoding(load_tiktoken_bpe(str(folder / "tiktoken.model")))
    texts = pre_types["texts"] + texts_with_han()
    wiki = (shared / "corpora/wikitext2/wiki.test.raw").read_bytes().decode("utf-8")
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run(["tar", "--zstd", "-xf", shared / "tokenizers.tar.zst", "-C", unpacked], check=True)
        large = encoding(load_tiktoken_bpe(f"{unpacked}/tokenizers/llama3/tokenizer.model"))
    wiki_ids = large.encode(wiki, disallowed_special=())
    goldens = {
        "texts": texts,
        "ids": [small.encode(text, allowed_special="all") for text in texts],
        "plain_ids": [small.encode(text, disallowed_special=()) for text in texts],
        "large_ids": [large.encode(text, disallowed_special=()) for text in texts],
        "wiki_count": len(wiki_ids),
        "wiki_sha256": hashlib.sha256(struct.pack(f"<{len(wiki_ids)}i", *wiki_ids)).hexdigest(),
    }
    (HERE / "kimi.json").write_text(compact(goldens), encoding="utf-8")


if __name__ == "__main__":
    main()
