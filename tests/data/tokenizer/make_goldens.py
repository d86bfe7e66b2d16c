#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes two files beside this one, from the Hugging Face `tokenizers` package:

goldens.json    the ids of wiki.test.raw and of short hostile texts, for the GPT-2, Qwen2, Llama 3 and Llama 2
                vocabularies (goldens_test.cc)
pipelines.json  a small model that merges across every border, and the ids it gives behind each normalizer,
                pre-tokenizer, decoder, post-processor and kind of added token (pipeline_test.cc)

    pip install tokenizers==0.23.3
    python make_goldens.py SHARED_DATA

SHARED_DATA holds tokenizers.tar.zst and corpora/wikitext2/wiki.test.raw. Its llama2-hf/tokenizer.json has lost its no-break spaces (four tokens and three merges hold plain spaces, and the
package refuses the file); `repair` puts them back, as the test does.
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

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def byte_alphabet():
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def byte_level(model, pattern):
    tokenizer = Tokenizer(model)
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def gpt2(data):
    return byte_level(models.BPE.from_file(f"{data}/gpt2/vocab.json", f"{data}/gpt2/merges.txt"), None)


def qwen2(data):
    tokenizer = byte_level(models.BPE.from_file(f"{data}/qwen2/vocab.json", f"{data}/qwen2/merges.txt"), QWEN2)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def llama3(data):
    """The tiktoken ranks as merges: every split of a token into two tokens, in the order of ranks."""
    alphabet = byte_alphabet()
    spell = lambda token: "".join(alphabet[b] for b in token)
    ranks = {}
    for line in pathlib.Path(data, "llama3/tokenizer.model").read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    merges = []
    for token in ranks:
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        splits = [(a, b) for a, b in splits if a in ranks and b in ranks]
        merges += sorted(splits, key=lambda split: (ranks[split[0]], ranks[split[1]]))
    vocab = {spell(token): rank for token, rank in ranks.items()}
    pairs = [(spell(a), spell(b)) for a, b in merges]
    return byte_level(models.BPE(vocab, pairs, ignore_merges=True), LLAMA3)


def repair(text):
    nbsp = "\u00a0"
    for old, new in [
        ('"  ": 8655', f'"{nbsp * 2}": 8655'),
        ('"    ": 17891', f'"{nbsp * 4}": 17891'),
        ('"\u2581 ": 20246', f'"\u2581{nbsp}": 20246'),
        ('" ": 30081', f'"{nbsp}": 30081'),
        ('"   "', f'"{nbsp} {nbsp}"'),
        ('"     "', f'"{nbsp * 2} {nbsp * 2}"'),
        ('"\u2581  "', f'"\u2581 {nbsp}"'),
    ]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def llama2(data):
    return Tokenizer.from_str(repair(pathlib.Path(data, "llama2-hf/tokenizer.json").read_text(encoding="utf-8")))


def hostile_texts():
    rng = random.Random(20240611)
    atoms = list(" \t\n\r'\u00a0\u3000.,!?-_#\u0301\u0915\u093f\u4e00\u0439Ab1\u0662\u2160\u00bd\"sStTreERdDllmM")
    atoms += list("\u017f\U0001f600\ufe0f\u200d\u1100\u1161\uac00\u00e9\u0085\u180e\u2028\u2581")
    atoms += ["'s", "'RE", "  ", "   ", "<s>", "</s>", "<|im_end|>", "<|endoftext|>", "2024", "hello", " world"]
    texts = ["", " ", "a", "\u00e9", "e\u0301", "<|im_start|>user\nhi<|im_end|>\n", "<s> hi </s>", "x" * 200, " " * 100]
    return texts + ["".join(rng.choice(atoms) for _ in range(rng.randint(1, 24))) for _ in range(150)]


def split(pattern, behavior, invert=False):
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def metaspace(**options):
    return {"type": "Metaspace", "replacement": "\u2581", **options}


def sequence(key, *steps):
    return {"type": "Sequence", key: list(steps)}


def added(token_id, content, **options):
    token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token_id, "content": content, **token, **options}


def pipelines(texts):
    """Components of a tokenizer.json by name; every one is put around the same model."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False))
    model = json.loads(trained.to_str())["model"]
    space = {"String": " "}
    cases = {"plain": {}}
    for behavior in ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        cases[f"split {behavior}"] = {"pre_tokenizer": split(space, behavior)}
        cases[f"split {behavior} inverted"] = {"pre_tokenizer": split({"Regex": r"\s+|'\w"}, behavior, True)}
        cases[f"split {behavior} regex"] = {"pre_tokenizer": split({"Regex": r"\p{L}+|[^\S\n]"}, behavior)}
    for scheme in ("always", "first", "never"):
        for splits in (True, False):
            step = metaspace(prepend_scheme=scheme, split=splits)
            cases[f"metaspace {scheme} {splits}"] = {"pre_tokenizer": step, "decoder": metaspace(prepend_scheme=scheme)}
    for name, step in {
        "digits": {"type": "Digits", "individual_digits": False},
        "single digits": {"type": "Digits", "individual_digits": True},
        "whitespace": {"type": "Whitespace"},
        "whitespace split": {"type": "WhitespaceSplit"},
        "punctuation": {"type": "Punctuation", "behavior": "Isolated"},
        "punctuation contiguous": {"type": "Punctuation", "behavior": "Contiguous"},
    }.items():
        cases[name] = {"pre_tokenizer": step}
    cases["two pre-tokenizers"] = {
        "pre_tokenizer": sequence("pretokenizers", {"type": "WhitespaceSplit"}, {"type": "Punctuation", "behavior": "Isolated"})
    }
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        cases[form] = {"normalizer": {"type": form}}
    cases["strip"] = {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}
    cases["strip left"] = {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": False}}
    cases["prepend and replace"] = {
        "normalizer": sequence(
            "normalizers",
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": space, "content": "\u2581"},
            {"type": "Replace", "pattern": {"Regex": "[0-9]+"}, "content": "1"},
        ),
        "decoder": sequence(
            "decoders",
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ),
    }
    cases["strip decoder"] = {
        "decoder": sequence("decoders", {"type": "Strip", "content": "e", "start": 1, "stop": 1}, {"type": "Fuse"})
    }
    # The ids that the vocabulary gives, else the next free ones: the library does not keep others.
    def token_ids(*contents):
        new = [content for content in contents if content not in model["vocab"]]
        return [model["vocab"].get(c, len(model["vocab"]) + (new.index(c) if c in new else 0)) for c in contents]

    options = [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}, {"single_word": True}]
    options += [{"normalized": True}, {"special": True}, {"normalized": True, "single_word": True, "lstrip": True}]
    for option in options:
        name = "added " + " ".join(option)
        contents = ("hello", "<s>", "<s></s>")
        tokens = [added(i, content, **option) for i, content in zip(token_ids(*contents), contents)]
        cases[name] = {"added_tokens": tokens, "pre_tokenizer": {"type": "WhitespaceSplit"}}
    bos, eos = token_ids("<s>", "</s>")
    cases["template"] = {
        "added_tokens": [added(i, s, special=True) for i, s in zip((bos, eos), ("<s>", "</s>"))],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "</s>", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                "<s>": {"id": "<s>", "ids": [bos], "tokens": ["<s>"]},
                "</s>": {"id": "</s>", "ids": [eos], "tokens": ["</s>"]},
            },
        },
    }

    out = []
    for fuse_unk in (False, True):
        for name, parts in cases.items():
            if fuse_unk and name not in ("plain", "whitespace"):
                continue
            skeleton = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
            skeleton |= {"pre_tokenizer": None, "post_processor": None, "decoder": None, **parts}
            tokenizer = Tokenizer.from_str(json.dumps({**skeleton, "model": {**model, "fuse_unk": fuse_unk}}))
            ids = [tokenizer.encode(text).ids for text in texts]
            decoded = [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
            out.append({"name": name, "fuse_unk": fuse_unk, "parts": skeleton, "ids": ids, "decoded": decoded})
    return {"texts": texts, "model": model, "pipelines": out}


def write(name, value):
    path = pathlib.Path(__file__).with_name(name)
    path.write_text(json.dumps(value, separators=(",", ":")) + "\n", encoding="utf-8")


def main():
    shared = pathlib.Path(sys.argv[1])
    wiki = (shared / "corpora/wikitext2/wiki.test.raw").read_bytes().decode("utf-8")
    texts = hostile_texts()
    goldens = {"texts": texts, "tokenizers": {}}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "--zstd", "-xf", shared / "tokenizers.tar.zst", "-C", folder], check=True)
        for make in (gpt2, qwen2, llama3, llama2):
            tokenizer = make(f"{folder}/tokenizers")
            ids = tokenizer.encode(wiki, add_special_tokens=False).ids
            packed = struct.pack(f"<{len(ids)}i", *ids)
            decoded = tokenizer.decode(ids, skip_special_tokens=False)
            goldens["tokenizers"][make.__name__] = {
                "wiki_count": len(ids),
                "wiki_sha256": hashlib.sha256(packed).hexdigest(),
                "wiki_first": ids[:16],
                "wiki_decoded_sha256": hashlib.sha256(decoded.encode("utf-8")).hexdigest(),
                "text_ids": [tokenizer.encode(text, add_special_tokens=False).ids for text in texts],
            }
    write("goldens.json", goldens)
    # Characters that no training text has become unknown.
    unknown = ["\u05d0\u05d1 \u05d0", "a\u05d0\u05d1\u05d2b", "hello<s>hello </s> <s></s> <s> hello_ hello"]
    small = pipelines([text for text in texts[:9] if len(text) < 40] + texts[9:40] + ["  hello, world!  "])
    model = small["model"]
    all_texts = small["texts"] + unknown
    for pipeline in small["pipelines"]:
        full = {**pipeline["parts"], "model": {**model, "fuse_unk": pipeline["fuse_unk"]}}
        tokenizer = Tokenizer.from_str(json.dumps(full))
        pipeline["ids"] += [tokenizer.encode(text).ids for text in unknown]
        pipeline["decoded"] += [tokenizer.decode(ids, skip_special_tokens=True) for ids in pipeline["ids"][-len(unknown):]]
    write("pipelines.json", {**small, "texts": all_texts})


if __name__ == "__main__":
    main()
