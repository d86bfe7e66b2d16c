# SPDX-License-Identifier: Apache-2.0
"""A chat model whose answers are known: each token is followed by one other, whatever stands before.

    <|assistant|>  Hello there<|end|>                      the usual answer
    <|reason|>     <think> well</think>Yes<|end|>          to a message with "why"
    <|sing|>       " la" for ever                          to a message with "sing"
    <|crack|>      "crack", after which no logits are finite: to one with "crash"
    <think>        " well</think>Yes<|end|>"               where the template begins the reasoning: to one with "how"

Its tokenizer spells everything else byte by byte, so that the numbers of tokens are easy to tell.
"""

import json
import struct

SPECIAL = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|reason|>", "<|sing|>", "<|crack|>"]
WORDS = ["<think>", " well", "</think>", "Yes", "Hello", " there", " la", "crack"]
CHAINS = [["<|assistant|>", "Hello", " there", "<|end|>"], ["<|reason|>", "<think>", " well", "</think>", "Yes", "<|end|>"],
          ["<|sing|>", " la", " la"], ["<|crack|>", "crack"]]
TEMPLATE = """{{ bos_token }}{% for m in messages -%}
{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}{% endif -%}
<|{{ m.role }}|>{% if m.reasoning_content and show_reasoning %}{{ m.reasoning_content }}/{% endif %}{{ m.content }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}{% set last = messages[-1].content -%}
{% if 'why' in last %}<|reason|>{% elif 'sing' in last %}<|sing|>{% elif 'crash' in last %}<|crack|>{% elif 'how' in last -%}
<|assistant|><think>{% else -%}
<|assistant|>{% endif %}{% endif %}"""


def byte_characters():
    """The characters that byte-level tokenizers write for the bytes 0 to 255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def tensor_file(tensors):
    """A safetensors file of f32 tensors: {name: (shape, {flat index: value})}; other elements are 0."""
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        size = 1
        for dim in shape:
            size *= dim
        elements = bytearray(4 * size)
        for index, value in values.items():
            struct.pack_into("<f", elements, 4 * index, value)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(elements)]}
        data += elements
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_chat_model(folder, context=1 << 17, template=TEMPLATE):
    folder.mkdir()
    words = SPECIAL + WORDS
    vocab = len(words) + 256
    ids = {word: i for i, word in enumerate(words)}
    hidden, ffn = vocab + -vocab % 32, 32
    follower = {ids[a]: ids[b] for chain in CHAINS for a, b in zip(chain, chain[1:])}
    zeros = lambda *shape: (list(shape), {})
    ones = ([hidden], {i: 1.0 for i in range(hidden)})
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": ([vocab, hidden], {i * hidden + i: 1.0 for i in range(vocab)}),
        "lm_head.weight": ([vocab, hidden], {b * hidden + a: 4.0 for a, b in follower.items()} |
                           {ids["crack"]: 3e38}),  # overflows
        "model.norm.weight": ones, layer + "input_layernorm.weight": ones, layer + "post_attention_layernorm.weight": ones,
        layer + "self_attn.q_proj.weight": zeros(16, hidden), layer + "self_attn.k_proj.weight": zeros(16, hidden),
        layer + "self_attn.v_proj.weight": zeros(16, hidden), layer + "self_attn.o_proj.weight": zeros(hidden, 16),
        layer + "mlp.gate_proj.weight": zeros(ffn, hidden), layer + "mlp.up_proj.weight": zeros(ffn, hidden),
        layer + "mlp.down_proj.weight": zeros(hidden, ffn)}
    (folder / "model.safetensors").write_bytes(tensor_file(tensors))
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": context, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 1}))
    added = [{"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": word in SPECIAL} for word, i in ids.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {**ids, **{c: len(words) + i for i, c in enumerate(byte_characters())}}, "merges": []}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|end|>"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
