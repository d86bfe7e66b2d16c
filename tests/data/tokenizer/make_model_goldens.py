#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes models.json and four SentencePiece models beside this file, from the Hugging Face `tokenizers` package and the
`sentencepiece` package: unigram models and WordPiece, and the steps that come with them (models_test.cc).

    pip install tokenizers==0.23.3 sentencepiece==0.2.3 protobuf
    python make_model_goldens.py
"""
import base64
import json
import pathlib

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from make_small_goldens import texts_of_every_kind

HERE = pathlib.Path(__file__).parent
STORY = ("Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
         "big, red ball. She wanted to play with it, but it was too high. ")
CJK = "\u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f"
# Runs of characters and what becomes of them, some of several characters, one of which another one begins with.
RULES = {"\u00a0": " ", "\t": " ", "\uff21": "A", "\ufb01": "fi", "\u00e9": "e\u0301", "\u2026": "...", "\u00bd": "1\u20442",
         "ab": "ba", "\u200d": "", "e\u0301": "\u00e9", "\u4e2d\u6587": "\u6587"}


def sentencepiece_model(path, corpus, **options):
    rules = path.with_suffix(".tsv")
    rules.write_text("".join(f"{' '.join(f'{ord(c):X}' for c in a)}\t{' '.join(f'{ord(c):X}' for c in b)}\n"
                             for a, b in RULES.items()))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_prefix=str(path.with_suffix("")), normalization_rule_tsv=str(rules),
        num_threads=1, minloglevel=2, **options)
    rules.unlink()
    path.with_suffix(".vocab").unlink()
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(path.read_bytes())
    return proto


def sentencepiece_cases(corpus, texts):
    cases = []
    # Spellings of spaces, a line feed, overlapping ones, and one that the rules would change.
    symbols = ["\u2581\u2581", "\n", "ab", "abc", "\u2581a", "\u4e2d\u6587", "\u00e9", "  x", "\ufb01"]
    options = {"spm_unigram.model": dict(model_type="unigram", vocab_size=230, user_defined_symbols=["<sep>"],
                                         character_coverage=0.98),
               "spm_bpe.model": dict(model_type="bpe", vocab_size=480, byte_fallback=True, character_coverage=0.98,
                                     remove_extra_whitespaces=False, pad_id=3),
               "spm_unigram_symbols.model": dict(model_type="unigram", vocab_size=200, user_defined_symbols=symbols,
                                                 character_coverage=0.98, remove_extra_whitespaces=False),
               "spm_bpe_symbols.model": dict(model_type="bpe", vocab_size=200, user_defined_symbols=symbols,
                                             character_coverage=0.98, add_dummy_prefix=False)}
    for name, chosen in options.items():
        proto = sentencepiece_model(HERE / name, corpus, **chosen)
        # Not what an option was on the machine that trained it.
        proto.trainer_spec.ClearField("input")
        proto.trainer_spec.model_prefix = ""
        proto.normalizer_spec.normalization_rule_tsv = ""
        (HERE / name).write_bytes(proto.SerializeToString())
        processor = sentencepiece.SentencePieceProcessor(model_file=str(HERE / name))
        ids = [processor.encode(text) for text in texts]
        unk = processor.unk_id()
        decoded = [None if unk in one else processor.decode(one) for one in ids]
        cases.append({"file": name, "ids": ids, "decoded": decoded, "bos": processor.bos_id(), "eos": processor.eos_id(),
                      "pad": processor.pad_id()})
    return cases, proto.normalizer_spec.precompiled_charsmap


def unigram(corpus, byte_fallback):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_tokens = [f"<0x{b:02X}>" for b in range(256)] if byte_fallback else []
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False,
                                      initial_alphabet=[])
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    # The trainer's order of equals is that of a hash table.
    vocab = sorted(([t, round(s, 4)] for t, s in model["vocab"][1:]), key=lambda entry: (-entry[1], entry[0]))[:280]
    return {"type": "Unigram", "unk_id": 0, "byte_fallback": byte_fallback,
            "vocab": [["<unk>", 0.0]] + [[t, -20.0] for t in bytes_tokens] + vocab}


def word_piece(corpus):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.normalizer = normalizers.BertNormalizer()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    kept = ["[UNK]", "[CLS]", "[SEP]"] + sorted(set(model["vocab"]) - {"[UNK]", "[CLS]", "[SEP]"})
    return {**model, "max_input_chars_per_word": 12, "vocab": {token: i for i, token in enumerate(kept)}}


def sequence(key, *steps):
    return {"type": "Sequence", key: list(steps)}


def documents(corpus, texts, charsmap):
    all_models = {"unigram": unigram(corpus, False), "unigram bytes": unigram(corpus, True), "word piece": word_piece(corpus)}
    precompiled = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    cases = {}
    for scheme in ("always", "first", "never"):
        for split in (True, False):
            metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": split}
            cases[f"metaspace {scheme} {split}"] = {"model": "unigram", "pre_tokenizer": metaspace, "decoder": metaspace}
    cases["bytes"] = {**cases["metaspace always True"], "model": "unigram bytes"}
    cases["precompiled"] = {**cases["metaspace always True"], "normalizer": sequence("normalizers", precompiled, spaces)}
    bert = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    ends = {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]}
    for name, normalizer in {"bert": bert, "cased": {**bert, "lowercase": False},
                             "accents": {**bert, "lowercase": False, "strip_accents": True, "clean_text": False},
                             "steps": sequence("normalizers", {"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"})}.items():
        cases[name] = {"model": "word piece", "normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"},
                       "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": name != "cased"}, "post_processor": ends}
    cases["roberta"] = {**cases["bert"], "post_processor": {"type": "RobertaProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1],
                                                            "trim_offsets": True, "add_prefix_space": False}}
    out = []
    for name, case in cases.items():
        skeleton = {"version": "1.0", "added_tokens": []}
        skeleton |= {key: case.get(key) for key in ("normalizer", "pre_tokenizer", "decoder", "post_processor")}
        tokenizer = Tokenizer.from_str(json.dumps({**skeleton, "model": all_models[case["model"]]}))
        ids = [tokenizer.encode(text).ids for text in texts]
        out.append({"name": name, **case, "ids": ids, "decoded": [tokenizer.decode(one, skip_special_tokens=False) for one in ids]})
    return {"models": all_models, "documents": out}


def main():
    texts = texts_of_every_kind()[:48] + [STORY, f"  {STORY[:40]}  {CJK} <sep> \u00c9t\u00e9 \u0130zmir \u03a3\u03a3 don't , do not . ",
                                          "unaffordable, unbelievable waterfalls!" * 3, "ab\uff21b \ufb01n\u00e9 e\u0301 \u2026 \u4e2d\u6587\u4e2d"]
    corpus = [STORY, STORY.upper(), CJK, "\u00c9t\u00e9 na\u00efve caf\u00e9 waterfall water falls affordable unable believe"] * 3 + texts
    models_of, charsmap = sentencepiece_cases(corpus, texts)
    value = {"texts": texts, "sentencepiece": models_of, **documents(corpus, texts, charsmap)}
    (HERE / "models.json").write_text(json.dumps(value, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
