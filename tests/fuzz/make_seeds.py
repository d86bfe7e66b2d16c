# SPDX-License-Identifier: Apache-2.0
"""Writes the seeds of the corpora of safetensors, gguf, config_json, tokenizer_json, sentencepiece, tiktoken,
quantized_checkpoint, pack_cache and chat_template
(corpus/<name>/seed_*), and the words of families in config_json.dict.

    python tests/fuzz/make_seeds.py

The other files of a corpus are named by their hash: the fuzzer found them, and `-set_cover_merge=1` chose them.
"""
import json
import pathlib
import shutil
import struct
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "docs"))
import models_table  # noqa: E402

GOLDENS = HERE.parent / "data" / "io"
MODELS = HERE.parent / "data" / "golden"


def save(target, name, content):
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"seed_{name}").write_bytes(content)


def safetensors(header, data):
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def gguf_string(version, text):
    return struct.pack("<I" if version == 1 else "<Q", len(text)) + text


def gguf(version):
    size = "<I" if version == 1 else "<Q"
    out = b"GGUF" + struct.pack("<I", version) + struct.pack(size, 2) + struct.pack(size, 4)
    out += gguf_string(version, b"general.alignment") + struct.pack("<II", 4, 8)
    out += gguf_string(version, b"s") + struct.pack("<I", 8) + gguf_string(version, b"text")
    out += gguf_string(version, b"a") + struct.pack("<II", 9, 8) + struct.pack(size, 2)
    out += gguf_string(version, b"x") + gguf_string(version, b"")
    out += gguf_string(version, b"n") + struct.pack("<II", 9, 9) + struct.pack(size, 1)
    out += struct.pack("<I", 5) + struct.pack(size, 2) + struct.pack("<ii", 1, -1)
    out += gguf_string(version, b"w") + struct.pack("<I", 2) + struct.pack(size, 2) + struct.pack(size, 1)
    out += struct.pack("<IQ", 0, 0)
    out += gguf_string(version, b"q") + struct.pack("<I", 1) + struct.pack(size, 32) + struct.pack("<IQ", 8, 8)
    out += b"\0" * (-len(out) % 8)
    return out + struct.pack("<2f", 1, 2) + bytes(34)


save("safetensors", "empty", safetensors({}, b""))
save("safetensors", "one", safetensors({"w": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}, bytes(8)))
save("safetensors", "misaligned", safetensors({
    "p": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    "x": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [1, 5]},
    "e": {"dtype": "I64", "shape": [0], "data_offsets": [5, 5]},
    "__metadata__": {"format": "pt"},
}, bytes(5)))
save("safetensors", "packed", safetensors({"f": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, bytes(2)))
def gguf_tokenizer(model, pre, tokens, merges):
    def strings(key, values):
        packed = b"".join(gguf_string(3, value.encode()) for value in values)
        return gguf_string(3, key) + struct.pack("<IIQ", 9, 8, len(values)) + packed

    def string(key, value):
        return gguf_string(3, key) + struct.pack("<I", 8) + gguf_string(3, value)

    entries = [string(b"tokenizer.ggml.model", model), string(b"tokenizer.ggml.pre", pre),
               strings(b"tokenizer.ggml.tokens", tokens), strings(b"tokenizer.ggml.merges", merges),
               gguf_string(3, b"tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, len(tokens)) +
               b"".join(struct.pack("<f", -i) for i in range(len(tokens)))]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries)


for version in (1, 2, 3):
    save("gguf", f"v{version}", gguf(version))
save("gguf", "ranks", gguf_tokenizer(b"llama", b"", ["<s>", "a", "b", "ab", "abab", "\u2581a", "<0xC3>", "<0xA9>"], []))
for pre in (b"deepseek-llm", b"superbpe", b"kimi-k2", b"falcon"):
    save("gguf", pre.decode(), gguf_tokenizer(b"gpt2", pre, ["a", "b", "ab", "\u0120", "1", "2"], ["a b"]))
index = b"0 0 eadem, rank 0 of 1\n0 12 w f32 [4, 3] as q8_0 in panels: quants u8 [1, 1, 12]\n4096 8 v f32 [2] as f32\n"
save("pack_cache", "parts",
     struct.pack("<8sIIQQQQ", b"eadempak", 1, 0, len(index), 3, 4096, 8200).ljust(128, b"\0") + index)
save("pack_cache", "no_parts", struct.pack("<8sIIQQQQ", b"eadempak", 1, 0, 0, 0, 4096, 4096).ljust(4096, b"\0"))
save("gguf", "empty", b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
llama = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "sliding_window": None, "eos_token_id": [1, 2],
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "short_factor": [1, 1.5]},
    "layer_types": ["full_attention", {"a": 1}],
}
save("config_json", "llama", json.dumps(llama, indent=2).encode())
save("config_json", "generation", json.dumps({
    "temperature": 0.7, "top_k": 20, "top_p": 0.8, "eos_token_id": 2, "do_sample": True, "note": "grüße 😀\n\"",
}).encode())
def tokenizer(pre_tokenizer, **model):
    base = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "\u0120": 3, "<unk>": 4, "<0xC3>": 5}, "merges": ["a b"]}
    return json.dumps({"pre_tokenizer": pre_tokenizer, "model": base | model}, separators=(",", ":")).encode()


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


bytes_step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
save("tokenizer_json", "steps_after_bytes", tokenizer({"type": "Sequence", "pretokenizers": [
    {"type": "Punctuation", "behavior": "Contiguous"}, bytes_step, {"type": "Digits", "individual_digits": False},
    split("[0-9][0-9][0-9]")]}))
save("tokenizer_json", "empty_matches", tokenizer(split(r"(?=(\d{3})+(?!\d))|\b")))
save("tokenizer_json", "byte_holes", tokenizer(None, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
save("tokenizer_json", "unigram", json.dumps({
    "truncation": {"max_length": 9}, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAEAABhAA=="},
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True},
    "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": True,
              "vocab": [["<unk>", 0], ["a", -1.5], ["\u2581H", -2], ["ell", -3], ["<0xC3>", -9]]}}).encode())
save("tokenizer_json", "word_piece", json.dumps({
    "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
                   "lowercase": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"}, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "post_processor": {"type": "BertProcessing", "sep": ["?", 0], "cls": ["hello", 1]},
    "model": {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
              "vocab": {"?": 0, "hello": 1, "w": 2, "##or": 3, "##ld": 4}}}).encode())
# A SentencePiece model: whole, and another one without its end.
models_of = HERE.parent / "data" / "tokenizer"
save("sentencepiece", "unigram", (models_of / "spm_unigram.model").read_bytes())
save("sentencepiece", "bpe_cut", (models_of / "spm_bpe.model").read_bytes()[:2500])
save("tiktoken", "bytes", b"".join((models_of / "kimi/tiktoken.model").read_bytes().splitlines(True)[:300]))
save("tiktoken", "few", b"YQ== 0\nYg== 1\r\n\n4A== 2\nYWI= 3")
save("config_json", "values", b'[null,true,false,0,-1,1.5e-3,"\\ud83d\\ude00",{},[]]')
# Both spellings of a config, with each kind of rope scaling; and one seed for each other model type and for each text
# model within another model: the smallest config.json of the goldens.
SPELLED = ("linear", "llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "yarn")
for config in sorted(file for name in SPELLED for file in (MODELS / name).glob("config*.json")):
    save("config_json", f"{config.parent.name}_{config.stem}", config.read_bytes())
smallest = {}
for config in sorted(MODELS.glob("*/config.json")):
    value = json.loads(config.read_text())
    if value.get("model_type", "llama") in SPELLED:
        continue
    text = json.dumps(value, separators=(",", ":")).encode()
    name = "_with_".join([value["model_type"]] + [part["model_type"] for part in [value.get("text_config")] if part])
    smallest[name] = min(smallest.get(name, text), text, key=len)
shared = json.loads(smallest["granitemoe"]) | {"model_type": "granitemoeshared", "shared_intermediate_size": 24}
smallest["granitemoeshared"] = json.dumps(shared, separators=(",", ":")).encode()
smallest["voxtral"] = b'{"model_type":"voxtral","text_config":{},"projector_hidden_act":"gelu"}'
types = models_table.model_types(HERE.parents[1])
assert types.keys() <= {*smallest, *SPELLED}, types.keys() - {*smallest, *SPELLED}
for name, text in smallest.items():
    save("config_json", name, text)


def words_of(value):
    """The keys and the strings of a config, as they stand in it."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield json.dumps(key)
            yield from words_of(member)
    elif isinstance(value, list):
        for member in value:
            yield from words_of(member)
    elif isinstance(value, str):
        yield json.dumps(value)


DICTIONARY, MADE = HERE / "config_json.dict", "# Of the goldens' configs; made by make_seeds.py.\n"
by_hand = DICTIONARY.read_text().split(MADE)[0]
every = {word for config in MODELS.glob("*/config*.json") for word in words_of(json.loads(config.read_text()))}
every |= {json.dumps(name) for name in types}
entries = {json.dumps(word) for word in every} - set(by_hand.splitlines())
DICTIONARY.write_text(by_hand + MADE + "\n".join(sorted(entries)) + "\n")
shutil.copy(GOLDENS / "from_python.safetensors", HERE / "corpus" / "safetensors" / "seed_from_python")
shutil.copy(GOLDENS / "from_python.gguf", HERE / "corpus" / "gguf" / "seed_from_python")


# ---- Layers [8, 32] of quantized checkpoints: a config, a byte of 0, a file.

def checkpoint(name, config, **tensors):
    header, data = {}, b""
    for part, (dtype, shape, content) in tensors.items():
        header[f"X.{part}"] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps({"quantization_config": config}, separators=(",", ":")).encode()
    save("quantized_checkpoint", name, text + b"\0" + safetensors(header, data))


def scheme(form, **weights):
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": {"weights": weights}}}


def words(*shape):
    size = shape[0] * shape[1] * 4
    return "I32", list(shape), bytes(37 * i % 256 for i in range(size))


def halves(*shape):
    return "F16", list(shape), struct.pack("<e", 0.5) * (shape[0] * shape[1])


gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
checkpoint("gptq", gptq, qweight=words(4, 8), qzeros=words(1, 1), scales=halves(1, 8))
checkpoint("gptq_sym", gptq | {"sym": True, "group_size": -1, "bits": 8}, qweight=words(8, 8),
           qzeros=("I32", [1, 2], b"\x7f" * 8), scales=halves(1, 8))
checkpoint("gptq_order", gptq | {"desc_act": True}, qweight=words(8, 8), qzeros=words(2, 1), scales=halves(2, 8),
           g_idx=("I32", [64], struct.pack("<64i", *[i % 2 for i in range(64)])))
checkpoint("awq", {"quant_method": "awq", "bits": 4, "group_size": 32}, qweight=words(32, 1), qzeros=words(1, 1),
           scales=halves(1, 8))
checkpoint("packed", scheme("pack-quantized", num_bits=4, symmetric=False, strategy="group", group_size=32),
           weight_packed=words(8, 4), weight_scale=halves(8, 1), weight_zero_point=words(1, 1),
           weight_shape=("I64", [2], struct.pack("<2q", 8, 32)))
checkpoint("int8", scheme("int-quantized", num_bits=8, strategy="channel"), weight=("I8", [8, 32], bytes(range(256))),
           weight_scale=halves(8, 1))
checkpoint("float8", scheme("float-quantized", num_bits=8, type="float", strategy="tensor"),
           weight=("F8_E4M3", [8, 32], bytes(range(256))), weight_scale=("BF16", [1], b"\0\x3f"))
int8 = {"targets": ["Linear"], "format": "int-quantized", "weights": {"num_bits": 8, "strategy": "channel"}}
int4 = {"targets": ["re:.*(X|Y)$", "X"], "format": "pack-quantized", "weights": {"num_bits": 4, "strategy": "channel"}}
checkpoint("mixed", {"quant_method": "compressed-tensors", "format": "mixed-precision",
                     "config_groups": {"a": int8, "b": int4}},
           weight_packed=words(8, 4), weight_scale=halves(8, 1), weight_shape=("I64", [2], struct.pack("<2q", 8, 32)))
checkpoint("fp8", {"quant_method": "fp8", "weight_block_size": [128, 128]},
           weight=("F8_E4M3", [2, 129], bytes(258)), weight_scale_inv=("F32", [1, 2], struct.pack("<2f", 1, 2)))

# Templates, eight to a seed, and after a zero byte their variables.
TEMPLATES = HERE.parent / "data" / "templates"
sources = [source for source, text in json.loads((TEMPLATES / "constructs.json").read_text()) if text is not None]
for i in range(0, len(sources), 8):
    variables = (TEMPLATES / "construct_variables.json").read_bytes()
    save("chat_template", f"{i:03}", "\n".join(sources[i:i + 8]).encode() + b"\0" + variables)
