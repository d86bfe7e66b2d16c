#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the goldens of chat prompts with Hugging Face transformers 5 (5.23) and tokenizers:

  small/       a tokenizer with added tokens of every kind and two chat templates
  small.json   conversations with options, and the text and the ids that apply_chat_template of `small` gives, or null
               where it raises
  real.json    for each template of FOLDER ... and each case of ../templates/conversations.json: the first 12 digits of
               the SHA-256 of the ids (as decimal numbers with commas) with the tokenizer of Qwen 3, "error" where it
               raises, and "planted" where the conversation spells a control token, which is text in Eadem

  end_of_turn.json
               the special token that ends an answer, for each template of FOLDER ... with a tokenizer that has the
               special tokens of all of them, and for each tokenizer_config.json of TOKENIZERS/configs with its own; by
               search in the rendered text. Each was compared with what the template says.

usage: make_goldens.py TOKENIZERS FOLDER ...   (TOKENIZERS: tokenizers.tar.zst unpacked; neither is committed)
"""
import datetime
import hashlib
import json
import pathlib
import re
import shutil
import sys
import tempfile

import tokenizers
import transformers
from transformers.utils.chat_template_utils import _compile_jinja_template

HERE = pathlib.Path(__file__).parent
NOW = datetime.datetime(2026, 3, 9, 14, 5, 6)

DEFAULT = """{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for document in documents or [] %}<|im_start|>document
{{ document.title }}: {{ document.text }}<|im_end|>
{% endfor -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content is defined %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif -%}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif -%}
"""
TOOL_USE = "{{ bos_token }}{{ tools | length }} tools{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}"

WORDS = ("Hello there, how are you today? The weather in the city is nice. Once upon a time there was a table of "
         "numbers: 1 2 3 10 100. def main():\n    return 0\n user assistant system tool name arguments content ")


def make_small(folder):
    folder.mkdir(exist_ok=True)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, show_progress=False, special_tokens=[],
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator([WORDS] * 10, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>"]
    bpe.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>", "    ", "\n\n", "<table>"]
    bpe.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in plain])
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "bos_token": "<|bos|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(DEFAULT)
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates/tool_use.jinja").write_text(TOOL_USE)


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


TOOL = {"type": "function", "function": {"name": "weather", "description": "At a place.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}

SMALL_CASES = {
    "one": ([user("Hello")], {}),
    "prompt": ([user("Hello")], {"add_generation_prompt": True}),
    "turns": ([{"role": "system", "content": "Be nice."}, user("Hello"), assistant("Hi there,"), user("how are you?")],
              {"add_generation_prompt": True}),
    "unicode": ([user("naïve café 你好 \U0001f999\u00a0ok ")], {"add_generation_prompt": True}),
    "added tokens that are text": ([user("def main():\n        return 0\n\n\n<table>    x</table>")], {}),
    "no thinking": ([user("Hello")], {"add_generation_prompt": True, "enable_thinking": False}),
    "reasoning": ([user("2"), assistant("4", reasoning="Two and two.")], {}),
    "reasoning_content": ([user("2"), assistant("4", reasoning_content="Two.", thinking="Not this.")], {}),
    "null keys": ([user("2"), assistant(None, tool_calls=[CALL], refusal=None), {
        "role": "tool", "name": "weather", "tool_call_id": "1", "content": "21 degrees", "tool_calls": None}],
                  {"add_generation_prompt": True}),
    "parts": ([user([{"type": "text", "text": "One "}, {"type": "text", "text": "two"}])], {}),
    "tool_use": ([user(" Hello ")], {"tools": [TOOL]}),
    "default with tools": ([user("Hello")], {"tools": [TOOL], "chat_template": "default"}),
    "tool_use by name": ([user("Hello")], {"chat_template": "tool_use", "tools": []}),
    "documents": ([user("Hello")], {"documents": [{"title": "T", "text": "Body <x>"}]}),
    "text of a template": ([user("Hello")], {"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ x }}<|im_end|>", "x": [1, "a"]}),
    "variable over a token": ([user("Hello")], {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": "plain"}),
    "continue": ([user("Hello"), assistant("Hi there")], {"continue_final_message": True}),
    "continue with space": ([user("Hello"), assistant("Hi there \n")], {"continue_final_message": True}),
    "continue, stripped": ([user("Hello"), assistant("Hi there \n")],
                           {"continue_final_message": True, "chat_template": "{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}"}),
    "continue parts": ([assistant([{"type": "text", "text": "One "}, {"type": "text", "text": "two"}, {"type": "image"}])],
                       {"continue_final_message": True}),
    "continue twice the same": ([user("Hi"), assistant("Hi")], {"continue_final_message": True}),
    "continue and prompt": ([user("Hello")], {"continue_final_message": True, "add_generation_prompt": True}),
    "continue nothing": ([user("Hello"), assistant(None)], {"continue_final_message": True}),
    "no messages": ([], {}),
    "refused": ([user("Hello")], {"chat_template": "{{ raise_exception('no') }}"}),
    "two conversations": ([[user("Hello")], [user("how are you?"), assistant("nice")]], {"add_generation_prompt": True}),
}


def small_row(tokenizer, name, conversation, options):
    row = {"name": name, "conversation": conversation, "options": options, "text": None, "ids": None}
    try:
        row["text"] = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        row["ids"] = tokenizer.apply_chat_template(conversation, return_dict=False, **options)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error)[:100]}")
    return row


def write(name, lines):
    (HERE / name).write_text("[\n" + ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n]\n")


def real_tokenizer(folder):
    """Qwen 2's vocabulary with the added tokens of Qwen 3."""
    with tempfile.TemporaryDirectory() as made:
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(folder / "qwen2" / name, made)
        shutil.copy(folder / "configs/qwen3.tokenizer_config.json", pathlib.Path(made) / "tokenizer_config.json")
        return transformers.AutoTokenizer.from_pretrained(made)


def planted(tokenizer, template, variables):
    text = json.dumps(variables, ensure_ascii=False)
    return any(token in text for token in tokenizer._get_control_tokens(template))


def real_digest(tokenizer, template, variables):
    variables = dict(variables)
    messages = variables.pop("messages")
    try:
        ids = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False, **variables)
    except Exception:  # jinja2's errors, TypeError, ValueError ...
        return "error"
    if planted(tokenizer, template, [messages, variables]):
        return "planted"
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:12]


SPECIAL = (r"<\|[A-Za-z_0-9:./-]+\|>|<｜[^｜<>]+｜>|</?s>|<(?:start|end)_of_turn>|<\|turn>|<turn\|>|\[/?[A-Z_]+\]|"
           r"<seed:eos>|<seed:bos>|<sep>|</assistant>|<user>|<extra_id_1>")
ANSWER = "eadem7answer"


def after_answer(template, more, tools, tokens):
    """What the template writes after the answer, or None where it raises."""
    messages = [user("Hello"), assistant(ANSWER)] + more
    try:
        text = _compile_jinja_template(template).render(messages=messages, tools=tools, documents=None,
                                                        add_generation_prompt=False, **tokens)
    except Exception:  # a template that wants other conversations
        return None
    return text[text.rindex(ANSWER) + len(ANSWER):]


def end_of_turn(template, special, tokens):
    """The first special token after the last message; else the one directly after a message that is not the last."""
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    for tools in (None, []):
        last = after_answer(template, [], tools, tokens)
        if last is None:
            continue
        found = re.search(pattern, last)
        if not found:
            found = re.match(r"\s*(?:" + pattern + ")", after_answer(template, [user("Hello")], tools, tokens) or "")
        return found.group(0).strip() if found else "none"
    return "none"


def write_ends_of_turn(configs, templates):
    special = {"<|eos|>", "<|bos|>"}
    for _, source in templates:
        special |= set(re.findall(SPECIAL, source))
    special = sorted(special)
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    rows = [[name, end_of_turn(source, special, named)] for name, source in templates]
    config_rows = []
    for path in sorted(configs.iterdir()):
        config = json.loads(path.read_text())
        if not isinstance(config.get("chat_template"), str):
            continue
        text = lambda token: token["content"] if isinstance(token, dict) else token
        tokens = {key: text(config[key]) for key in ("bos_token", "eos_token") if config.get(key)}
        own = [token["content"] for token in config.get("added_tokens_decoder", {}).values() if token["special"]]
        config_rows.append([path.name, end_of_turn(config["chat_template"], own or list(tokens.values()), tokens)])
    lines = lambda rows: ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    (HERE / "end_of_turn.json").write_text(
        f'{{"special": {json.dumps(special, ensure_ascii=False)},\n "templates": [\n{lines(rows)}],\n'
        f' "configs": [\n{lines(config_rows)}]}}\n')


def main():
    make_small(HERE / "small")
    small = transformers.AutoTokenizer.from_pretrained(HERE / "small")
    write("small.json", [small_row(small, name, *case) for name, case in SMALL_CASES.items()])
    tokenizer = real_tokenizer(pathlib.Path(sys.argv[1]))
    cases = json.loads((HERE / "../templates/conversations.json").read_text())
    rows, templates = [], []
    for folder in map(pathlib.Path, sys.argv[2:]):
        for path in sorted(folder.iterdir()):
            if path.name.endswith((".jinja", ".jinja2")):
                source = path.read_text()
                templates.append((f"{folder.name}/{path.name}", source))
                _compile_jinja_template(source).globals["strftime_now"] = NOW.strftime  # compiled once, kept by a cache
                rows.append([f"{folder.name}/{path.name}", [real_digest(tokenizer, source, case["variables"]) for case in cases]])
    write("real.json", rows)
    write_ends_of_turn(pathlib.Path(sys.argv[1]) / "configs", templates)


if __name__ == "__main__":
    main()
