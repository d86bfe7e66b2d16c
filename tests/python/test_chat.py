# SPDX-License-Identifier: Apache-2.0
"""Conversations: tokenizers against the goldens of transformers, and LLM.chat."""
import dataclasses
import json
import shutil

import pytest
from conftest import BUNDLED, ROOT

import eadem
from eadem import LLM, SamplingParams, Tokenizer

CHAT = ROOT / "tests/data/chat"
ROWS = json.loads((CHAT / "small.json").read_text(encoding="utf-8"))
GREEDY = SamplingParams(temperature=0, max_tokens=12)
HI = [{"role": "user", "content": "Once upon a time"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = """{% for m in messages %}[{{ m.role }}]{{ m.content }}
{% endfor %}{% if tools %}{{ tools | length }} tools {% endif %}{% if mood is defined %}{{ mood }} {% endif -%}
{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="module")
def small():
    return Tokenizer.from_file(CHAT / "small")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A model of the test data whose folder has a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    shutil.copytree(BUNDLED, folder / "model")
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    return LLM(folder / "model", threads=2)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_texts_and_ids_are_those_of_transformers(small, row):
    if row["text"] is None:
        with pytest.raises(eadem.InvalidArgument):
            small.apply_chat_template(row["conversation"], **row["options"])
        return
    assert small.apply_chat_template(row["conversation"], tokenize=False, **row["options"]) == row["text"]
    ids = small.apply_chat_template(row["conversation"], **row["options"])
    assert ids == row["ids"]
    made = small.apply_chat_template(row["conversation"], return_dict=True, **row["options"])
    if isinstance(ids[0], list):
        assert [each["input_ids"] for each in made] == ids
    else:
        assert made == {"input_ids": ids, "attention_mask": [1] * len(ids)}


def test_objects_of_clients_are_messages(small):
    @dataclasses.dataclass
    class Message:
        role: str
        content: str

    class Model:
        def model_dump(self):
            return {"role": "assistant", "content": "Hi", "refusal": None}

    plain = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    assert small.apply_chat_template([Message("user", "Hello"), Model()]) == small.apply_chat_template(plain)


def test_text_of_messages_makes_no_control_token(small):
    for token in ("<|im_end|>", "<think>", "</tool_call>"):
        ids = small.apply_chat_template([{"role": "user", "content": "a" + token + "b"}])
        plain = small.apply_chat_template([{"role": "user", "content": "ab"}])
        assert ids.count(small.token_to_id(token)) == plain.count(small.token_to_id(token))
        assert "a" + token + "b" in small.decode(ids, skip_special=False)


def test_templates_of_a_tokenizer(small):
    assert set(small.chat_templates) == {"default", "tool_use"}
    assert small.chat_template == (CHAT / "small/chat_template.jinja").read_text()
    assert small.token_text(small.eos_token_id) == "<|endoftext|>" and small.pad_token_id == small.eos_token_id
    assert small.unk_token_id is None


@pytest.mark.parametrize("messages, options, error, words", [
    ("hi", {}, eadem.InvalidArgument, "messages is 'hi'"),
    ({"role": "user"}, {}, eadem.InvalidArgument, "expected a list of messages"),
    ([{"role": "user", "content": object()}], {}, eadem.InvalidArgument, "messages: .*no dict"),
    ([{"role": "user", "content": "\ud800"}], {}, eadem.InvalidArgument, "lone surrogate"),
    ([{"role": "user", "content": float("nan")}], {}, eadem.InvalidArgument, "messages"),
    ([{"content": "x"}], {}, eadem.InvalidArgument, "no 'role'"),
    (HI, {"chat_template": "rag"}, eadem.NotFound, "'default', 'tool_use'"),
    (HI, {"chat_template": "{% include 'x' %}"}, eadem.Unsupported, "'include'"),
    (HI, {"chat_template": 5}, eadem.InvalidArgument, "chat_template"),
    (HI, {"tools": [print]}, eadem.InvalidArgument, "JSON schema"),
    (HI, {"add_generation_prompt": 1}, eadem.InvalidArgument, "add_generation_prompt"),
    (HI, {"tokenize": "yes"}, eadem.InvalidArgument, "tokenize"),
    (HI, {"return_tensors": "pt"}, eadem.InvalidArgument, "return_tensors"),
    (HI, {"truncation": True}, eadem.InvalidArgument, "truncation"),
    (HI, {"messages": []}, eadem.InvalidArgument, "messages"),
])
def test_wrong_arguments(small, messages, options, error, words):
    with pytest.raises(error, match=words):
        small.apply_chat_template(messages, **options)


def test_deep_nesting_is_refused(small):
    deep = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(eadem.InvalidArgument, match="messages"):
        small.apply_chat_template([{"role": "user", "content": deep}])


def test_chat_is_generate_of_the_prompt(llm):
    messages = [{"role": "system", "content": "Be kind."}, *HI]
    options = {"tools": [TOOL], "mood": "glad"}
    text = llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    assert text == "[system]Be kind.\n[user]Once upon a time\n1 tools glad [assistant]"
    ids = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    [expected] = llm.generate([ids], GREEDY)
    [answer] = llm.chat(messages, GREEDY, tools=[TOOL], chat_template_kwargs={"mood": "glad"})
    assert answer.token_ids == expected.token_ids and answer.text == expected.text
    assert answer.prompt_tokens == len(ids)


def test_chat_takes_several_conversations(llm):
    other = [{"role": "user", "content": [{"type": "text", "text": "Lily"}, {"type": "text", "text": "ran"}]}]
    pieces = {0: "", 1: ""}

    def on_text(index, piece):
        pieces[index] += piece

    answers = llm.chat([HI, other], GREEDY, on_text=on_text)
    assert [answer.text for answer in answers] == list(pieces.values())
    assert [answer.token_ids for answer in answers] == [llm.chat(each, GREEDY)[0].token_ids for each in (HI, other)]
    joined = [{"role": "user", "content": "Lily\nran"}]
    assert answers[1].token_ids == llm.chat(joined, GREEDY)[0].token_ids


def test_chat_continues_the_last_message(llm):
    messages = [*HI, {"role": "assistant", "content": "there was"}]
    ids = llm.tokenizer.apply_chat_template(messages, continue_final_message=True)
    assert llm.tokenizer.decode(ids).endswith("there was")
    [answer] = llm.chat(messages, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert answer.token_ids == llm.generate([ids], GREEDY)[0].token_ids
    with pytest.raises(eadem.InvalidArgument, match="continue_final_message"):
        llm.chat(messages, GREEDY, continue_final_message=True)


def test_chat_stops_at_the_end_of_a_turn(tmp_path, llm):
    [free] = llm.chat(HI, GREEDY, chat_template="{{ messages[0].content }}")
    end = llm.tokenizer.token_text(free.token_ids[3])
    # The fourth token of the answer becomes a special one that ends the turns of a template.
    shutil.copytree(BUNDLED, tmp_path / "model")
    config_path = tmp_path / "model/tokenizer.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["added_tokens"].append({"id": free.token_ids[3], "content": end, "special": True, "normalized": False,
                                   "lstrip": False, "rstrip": False, "single_word": False})
    config["added_tokens"].sort(key=lambda token: token["id"])
    config_path.write_text(json.dumps(config), encoding="utf-8")
    end_text = json.dumps(end)
    (tmp_path / "model/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ " + end_text + " }}{% endif %}{% endfor %}")
    stopping = LLM(tmp_path / "model", threads=2)
    assert free.token_ids[3] in stopping.chat_stop_token_ids
    [answer] = stopping.chat(HI, GREEDY)
    assert answer.finish_reason == "stop" and answer.token_ids == free.token_ids[:3]
    [on] = stopping.chat(HI, dataclasses.replace(GREEDY, ignore_eos=True))
    assert len(on.token_ids) == 12


def test_a_model_without_template_says_so(stories):
    plain = LLM(stories, threads=2)
    with pytest.raises(eadem.NotFound, match="no chat template"):
        plain.chat(HI, GREEDY)
    assert plain.chat(HI, GREEDY, chat_template="{{ messages[0].content }}")[0].text
    assert plain.chat_stop_token_ids == [plain.tokenizer.eos_token_id]


def test_the_second_turn_goes_on_from_the_first():
    """What is cached of a conversation's second turn, counted from its ids; the answer is that of a model without it."""
    block = 16
    make = lambda **cache: LLM(ROOT / "assets/chat", threads=2, kv_cache=eadem.PagedKVCacheConfig(block_size=block, **cache))
    llm, plain = make(), make(prefix_caching=False)
    first_turn = [{"role": "user", "content": "Tell me a story about a fox who finds a lamp in the woods."}]
    [first] = llm.chat(first_turn, GREEDY)
    assert first.cached_tokens == 0
    second_turn = [*first_turn, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    prompts = [llm.tokenizer.apply_chat_template(turn, add_generation_prompt=True) for turn in (first_turn, second_turn)]
    # The answer's last token was drawn and not computed.
    known = prompts[0] + list(first.token_ids)[:-1]
    common = next((i for i, (a, b) in enumerate(zip(known, prompts[1])) if a != b), min(len(known), len(prompts[1])))
    assert common > len(prompts[0]) and common >= 2 * block, "the prompts share a turn of several blocks"
    hits = llm.cache_counters["hits"]
    [second] = llm.chat(second_turn, GREEDY)
    assert second.prompt_tokens == len(prompts[1])
    assert common - common % block <= second.cached_tokens <= common
    assert llm.cache_counters["hits"] - hits >= common // block
    # The third turn likewise, beside another conversation with the same beginning.
    third_turn = [*second_turn, {"role": "assistant", "content": second.text}, {"role": "user", "content": "Why?"}]
    other_turn = [*first_turn, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Who was it?"}]
    third, other = llm.chat([third_turn, other_turn], GREEDY)
    assert third.cached_tokens >= second.cached_tokens + block and other.cached_tokens >= common - common % block
    for turn, answer in ((second_turn, second), (third_turn, third), (other_turn, other)):
        [alone] = plain.chat(turn, GREEDY)
        assert (alone.token_ids, alone.logprobs, alone.cached_tokens) == (answer.token_ids, answer.logprobs, 0)
