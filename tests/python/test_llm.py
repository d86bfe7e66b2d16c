# SPDX-License-Identifier: Apache-2.0
import _thread
import dataclasses
import os
import re
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from conftest import BUNDLED, GOLDEN, STORIES

import eadem
from eadem import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def llm(stories):
    return LLM(stories)


def test_greedy_text_is_the_reference_programs(llm):
    expected = (STORIES.parent / "expected_t0_n200.txt").read_text()
    [completion] = llm.generate("", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    assert completion.text == expected
    assert completion.error == "" and completion.finish_reason == "length"
    assert len(completion.token_ids) == len(completion.logprobs) == 200
    assert all(logprob <= 0 for logprob in completion.logprobs)


def test_streamed_pieces_make_the_text_on_this_thread(llm):
    pieces = {0: [], 1: []}
    threads = set()

    def on_text(index, piece):
        pieces[index].append(piece)
        threads.add(threading.get_ident())

    completions = llm.generate(["Once", "Lily"], GREEDY, on_text=on_text)
    assert [completion.text for completion in completions] == ["".join(pieces[0]), "".join(pieces[1])]
    assert threads == {threading.get_ident()} and len(pieces[0]) > 1
    assert [llm.generate(prompt, GREEDY)[0].text for prompt in ("Once", "Lily")] == [c.text for c in completions]


def test_token_ids_seeds_and_stops(llm):
    ids = llm.tokenizer.encode("Once upon a time")
    assert llm.generate([ids], GREEDY)[0].text == llm.generate("Once upon a time", GREEDY)[0].text
    params = SamplingParams(temperature=1.0, max_tokens=20)
    [first] = llm.generate("Once", params)
    assert llm.generate("Once", dataclasses.replace(params, seed=first.seed))[0].text == first.text
    text = llm.generate("Once", GREEDY)[0].text
    stop = text[10:14]
    [stopped] = llm.generate("Once", dataclasses.replace(GREEDY, stop=stop))
    assert stopped.text == text[:text.index(stop)] and stopped.finish_reason == "stop"


def test_a_long_prompt_is_refused_alone(llm):
    good, bad = llm.generate(["Once", "word " * 2000], GREEDY)
    assert bad.finish_reason == "error" and bad.error
    assert good.error == "" and good.text


def test_prompts_that_begin_alike_share_the_cache(llm, stories):
    prompt = [5 + i % 300 for i in range(70)]
    params = SamplingParams(temperature=0, max_tokens=4)
    alone = llm.generate([prompt], params)[0]
    before = llm.cache_counters
    again, other = llm.generate([prompt, prompt[:50] + [7]], params)
    assert again.token_ids == alone.token_ids and again.logprobs == alone.logprobs
    assert 0 < other.cached_tokens <= 50 < again.cached_tokens < again.prompt_tokens == 70
    assert llm.cache_counters["hits"] > before["hits"]
    assert set(before) == {"hits", "misses", "evictions", "preemptions"}
    off = eadem.PagedKVCacheConfig(prefix_caching=False)
    assert not off.prefix_caching and eadem.PagedKVCacheConfig().prefix_caching
    assert eadem.PagedKVCacheConfig(state_snapshots=3).state_snapshots == 3
    plain = LLM(stories, kv_cache=off, threads=1)
    for _ in range(2):
        completion = plain.generate([prompt], params)[0]
        assert completion.cached_tokens == 0 and completion.logprobs == alone.logprobs


def test_speculation_changes_no_token(llm, stories):
    prompts = ["The cat sat on the mat. The dog sat on the mat. The cat sat on the", "Once upon a time"]
    params = SamplingParams(temperature=0.8, max_tokens=60, seed=3, ignore_eos=True)
    expected = llm.generate(prompts, params)
    for speculate in ("lookup", stories):
        speculating = LLM(stories, threads=1, speculate=speculate, draft_tokens=5)
        for each, alone in zip(speculating.generate(prompts, params), expected):
            assert each.token_ids == alone.token_ids and each.logprobs == alone.logprobs
            assert 0 <= each.accepted_tokens <= each.proposed_tokens
            assert alone.proposed_tokens == 0
    for arguments, words in [({"speculate": ""}, "speculate is empty"), ({"speculate": 3}, "speculate is 3"),
                             ({"speculate": "lookup", "draft_tokens": 16}, "draft_tokens is 16; expected 1 to 15"),
                             ({"draft_tokens": "2"}, "draft_tokens is")]:
        with pytest.raises(eadem.InvalidArgument, match=words):
            LLM(stories, **arguments)


def test_a_models_own_head_changes_no_token(stories, tmp_path):
    for path in [*(GOLDEN / "glm4_moe_mtp").iterdir(), *(GOLDEN.parent / "chat/small").glob("*.json")]:
        shutil.copy(path, tmp_path)
    params = SamplingParams(temperature=0.8, max_tokens=50, seed=3, ignore_eos=True)
    prompts = ["Hello there", "one two"]
    plain, mtp = (LLM(tmp_path, threads=1, speculate=speculate).generate(prompts, params) for speculate in ("none", "mtp"))
    for each, alone in zip(mtp, plain):
        assert each.token_ids == alone.token_ids and each.logprobs == alone.logprobs
        assert 0 <= each.accepted_tokens <= each.proposed_tokens
    with pytest.raises(eadem.Unsupported, match="llama has no head for multi-token prediction"):
        LLM(stories, speculate="mtp")


def test_n_answers_to_a_prompt(llm):
    prompts = [[5 + i % 300 for i in range(40)], "Once upon"]
    params = SamplingParams(temperature=0.9, max_tokens=6, seed=11, n=3)
    pieces = {}
    completions = [each for prompt in prompts
                   for each in llm.generate([prompt], params, on_text=lambda i, piece: pieces.update({i: piece}))]
    assert len(completions) == 6 and set(pieces) <= {0, 1, 2}
    for i, completion in enumerate(completions):
        assert completion.seed == 11 + i % 3
        [alone] = llm.generate([prompts[i // 3]], dataclasses.replace(params, n=1, seed=completion.seed))
        assert (completion.token_ids, completion.logprobs) == (alone.token_ids, alone.logprobs)
    assert len({tuple(each.token_ids) for each in completions[:3]}) > 1
    for wrong in (0, 1025):
        with pytest.raises(eadem.InvalidArgument, match="n is"):
            SamplingParams(n=wrong)


def test_sampling_params_are_checked():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"min_p": 2}, {"max_tokens": 0}, {"stop": [""]}):
        with pytest.raises(eadem.InvalidArgument, match=next(iter(wrong))):
            SamplingParams(**wrong)
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"])


def test_defaults_are_the_models(llm):
    assert isinstance(llm.default_params, SamplingParams)
    assert llm.eos_token_ids


def test_tokenizer(llm):
    tokenizer = llm.tokenizer
    ids = tokenizer.encode("Once upon a time")
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids).strip() == "Once upon a time"
    with pytest.raises(eadem.InvalidArgument):
        tokenizer.decode([10**6])


def test_other_threads_run_meanwhile(llm):
    ticks = []
    done = threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    llm.generate("", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    end = time.monotonic()
    done.set()
    thread.join()
    # Were the GIL held, no tick could fall inside.
    assert sum(begin < tick < end for tick in ticks) >= 3


def test_ctrl_c_stops_at_the_next_step(llm):
    seen = []

    def on_text(index, piece):
        seen.append(piece)
        if len(seen) == 3:
            _thread.interrupt_main()

    # Whoever started the tests in the background has left them with Ctrl-C ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True), on_text=on_text)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert llm.generate("Once", GREEDY)[0].text  # goes on working


def test_an_exception_of_the_callback_comes_out(llm):
    def on_text(index, piece):
        raise LookupError(piece)

    with pytest.raises(LookupError):
        llm.generate("Once", GREEDY, on_text=on_text)
    with pytest.raises(eadem.InvalidArgument, match="callbacks"):
        llm.generate("Once", GREEDY, on_text=lambda *_: llm.generate("Once", GREEDY))
    assert llm.generate("Once", GREEDY)[0].text


def test_arguments(stories):
    paged = LLM(stories, kv_cache=eadem.PagedKVCacheConfig(1 << 24, 16, 4), threads=1, isa="scalar", mode="accuracy")
    assert paged.generate("Once", GREEDY)[0].text
    for kv in ("int8", "fp8_e4m3"):
        assert LLM(stories, kv_dtype=kv, threads=1).generate("Once", GREEDY)[0].text
    with pytest.raises(eadem.InvalidArgument, match="kv_dtype is 'q8_0'; expected f32, bf16, f16, int8 or fp8_e4m3"):
        LLM(stories, kv_dtype="q8_0")
    with pytest.raises(eadem.NotFound, match="bundled"):
        LLM("no_such_model")
    one = LLM(stories, threads=1).generate("Once", GREEDY)[0].text
    assert LLM(stories, threads=1, prefill_threads=2).generate("Once", GREEDY)[0].text == one
    assert LLM(stories, threads=2, prefill_threads=1, pin=False).generate("Once", GREEDY)[0].text == one
    with pytest.raises(eadem.InvalidArgument, match="threads"):
        LLM(stories, threads=-1)
    with pytest.raises(eadem.InvalidArgument, match="prefill_threads is 5000; expected 0 to 4096"):
        LLM(stories, prefill_threads=5000)
    with pytest.raises(TypeError):
        LLM(stories, thread=1)
    with pytest.raises(eadem.InvalidArgument, match="mix"):
        paged.generate(["a", [1]])


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The bundled model as huggingface_hub would cache it under the name org/stories; its snapshot."""
    repository = tmp_path / "models--org--stories"
    snapshot = repository / "snapshots" / ("a" * 40)
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    for file in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (repository / "blobs" / file).write_bytes((BUNDLED / file).read_bytes())
        (snapshot / file).symlink_to(os.path.join("../../blobs", file))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_a_name_finds_a_model_in_the_cache_of_this_machine(cached, caplog):
    with caplog.at_level("INFO", logger="eadem"):
        llm = LLM("org/stories", threads=1)
    assert f"using org/stories from the Hugging Face cache, main at aaaaaaa ({cached})" in caplog.text
    assert llm.generate("Once", GREEDY)[0].text == LLM(BUNDLED, threads=1).generate("Once", GREEDY)[0].text
    engine = eadem.InferEngine.from_pretrained("org/stories@main", threads=1)
    config = eadem.AutoConfig.from_pretrained("org/stories")
    assert config.hidden_size == eadem.AutoConfig.from_pretrained(BUNDLED).hidden_size
    assert eadem.Trainer("org/stories", threads=1).state_dict().keys() == engine.state_dict().keys()
    with pytest.raises(eadem.NotFound, match="`hf download org/other` fetches it"):
        LLM("org/other")


def test_a_gguf_file_without_an_ending_is_known_by_its_content(stories, tmp_path):
    blob = tmp_path / "sha256-0"
    blob.write_bytes(open(stories, "rb").read())
    assert eadem.AutoConfig.from_pretrained(blob).hidden_size == eadem.AutoConfig.from_pretrained(stories).hidden_size


def test_without_a_model_the_bundled_one_is_used(caplog):
    try:
        path = eadem.bundled_model()
    except eadem.NotFound as error:
        pytest.skip(str(error))  # not installed by pip
    with caplog.at_level("INFO", logger="eadem"):
        llm = LLM()
    assert path in caplog.text
    [completion] = llm.generate("Once upon a time", GREEDY)
    assert completion.error == "" and completion.text


def test_a_pack_cache_changes_no_text(llm, stories, tmp_path, caplog):
    expected = llm.generate("Once", GREEDY)[0].text
    for _ in range(2):
        assert LLM(stories, pack_cache=tmp_path).generate("Once", GREEDY)[0].text == expected
    [pack] = tmp_path.glob("*.pack")
    pack.write_bytes(b"something else")
    engine = eadem.InferEngine.from_pretrained(stories, pack_cache=tmp_path)
    assert "is no pack file (it begins with 'somethin'); packing again" in caplog.text
    assert engine.parameter_names() == eadem.InferEngine.from_pretrained(stories).parameter_names()


@pytest.fixture(scope="module")
def bundled():
    return LLM(BUNDLED)


def test_prompts_run_side_by_side_by_default(bundled):
    prompts = ["Once", "The dog", "A", "Tom and"]
    order = []
    together = bundled.generate(prompts, GREEDY, on_text=lambda index, piece: order.append(index))
    assert sorted(order[:4]) == [0, 1, 2, 3]  # the first piece of each before a second one of any
    alone = [bundled.generate(prompt, GREEDY)[0].text for prompt in prompts]
    assert [completion.text for completion in together] == alone


def test_threads_share_steps(bundled):
    """A call begins and ends while another is in the middle, and both have the texts that they would have alone."""
    first, second = (bundled.generate(prompt, GREEDY)[0].text for prompt in ("Once", "The dog"))
    results = []

    def on_text(index, piece):
        if not results:
            thread = threading.Thread(target=lambda: results.append(bundled.generate("The dog", GREEDY)[0].text))
            thread.start()
            thread.join(timeout=60)

    assert bundled.generate("Once", GREEDY, on_text=on_text)[0].text == first
    assert results == [second]


def test_what_ends_one_call_leaves_the_others(bundled):
    expected = bundled.generate("Once", GREEDY)[0].text
    results = []
    threads = [threading.Thread(target=lambda: results.append(bundled.generate("Once", GREEDY)[0].text))
               for _ in range(4)]

    def on_text(index, piece):
        for thread in threads:
            thread.start()
        raise LookupError(piece)

    with pytest.raises(LookupError):
        bundled.generate("The dog", GREEDY, on_text=on_text)
    for thread in threads:
        thread.join(timeout=60)
    assert results == [expected] * 4


def test_a_refused_prompt_shows_why(bundled):
    good, bad = bundled.generate(["Once", "word " * 20000], GREEDY)
    assert good.error == "" and "error" not in repr(good)
    assert "tokens; the context holds" in bad.error and bad.error in repr(bad)


def test_special_tokens_of_a_prompt_are_text_unless_asked_for(bundled):
    special = bundled.tokenizer.token_text(bundled.tokenizer.eos_token_id)
    params = dataclasses.replace(GREEDY, max_tokens=1)
    as_text, parsed = (bundled.generate(f"Once{special} upon", params, parse_special=parse)[0].prompt_tokens
                       for parse in (False, True))
    assert parsed < as_text
    assert bundled.generate(f"Once{special} upon", params)[0].prompt_tokens == as_text


def test_penalties_change_the_text(bundled):
    params = dataclasses.replace(GREEDY, max_tokens=60, ignore_eos=True)
    plain = bundled.generate("Once", params)[0].token_ids
    for penalty in ({"repetition_penalty": 1.5}, {"presence_penalty": 2}, {"frequency_penalty": 2}):
        ids = bundled.generate("Once", dataclasses.replace(params, **penalty))[0].token_ids
        assert ids != plain and len(set(ids)) > len(set(plain))
        with pytest.raises(eadem.InvalidArgument, match=next(iter(penalty))):
            dataclasses.replace(params, **{name: -300 for name in penalty})


def test_biases_and_the_least_number_of_tokens(bundled):
    plain = dataclasses.replace(GREEDY, ignore_eos=True)
    ids = bundled.generate("Once", plain)[0].token_ids
    biased = dataclasses.replace(plain, logit_bias={ids[3]: 100})
    assert set(bundled.generate("Once", biased)[0].token_ids) == {ids[3]}
    stopping = dataclasses.replace(plain, stop_token_ids=[ids[3]])
    assert len(bundled.generate("Once", stopping)[0].token_ids) <= 3
    assert len(bundled.generate("Once", dataclasses.replace(stopping, min_tokens=9))[0].token_ids) >= 9
    assert SamplingParams(logit_bias={}) == SamplingParams()
    assert bundled.default_params.logit_bias is None and bundled.default_params.min_tokens == 0
    for wrong, words in (({"logit_bias": {1: 101}}, "logit_bias is 101 for token 1"), ({"logit_bias": [1]}, "logit_bias"),
                         ({"logit_bias": {"a": 1}}, "a token of logit_bias is 'a'"),
                         ({"logit_bias": {2**40: 1}}, "logit_bias is for token"), ({"min_tokens": -1}, "min_tokens"),
                         ({"min_tokens": 41}, "min_tokens is 41; expected 0 to max_tokens")):
        with pytest.raises(eadem.InvalidArgument, match=words):
            dataclasses.replace(plain, **wrong)


def test_logprobs_of_text_and_prompt(bundled):
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [completion] = bundled.generate("Once upon a time", dataclasses.replace(plain, logprobs=3, prompt_logprobs=2))
    ids = bundled.tokenizer.encode("Once upon a time")
    assert [len(top) for top in completion.top_logprobs] == [3] * 6
    assert [top[0] for top in completion.top_logprobs] == list(zip(completion.token_ids, completion.logprobs))
    assert len(completion.prompt_logprobs) == len(completion.prompt_top_logprobs) == len(ids)
    assert completion.prompt_logprobs[0] is None and completion.prompt_top_logprobs[0] == []
    for token, logprob, top in list(zip(ids, completion.prompt_logprobs, completion.prompt_top_logprobs))[1:]:
        assert logprob <= top[0][1] and len(top) == 2 and dict(top).get(token, logprob) == logprob
    [without] = bundled.generate("Once upon a time", plain)
    assert without.top_logprobs == without.prompt_logprobs == without.prompt_top_logprobs == []
    assert (without.token_ids, without.logprobs) == (completion.token_ids, completion.logprobs)


def test_bad_words_and_allowed_tokens(bundled):
    plain = SamplingParams(temperature=0, max_tokens=30)
    text = bundled.generate("Once upon a time", plain)[0].text
    word = text.split()[3]
    assert word not in bundled.generate("Once upon a time", dataclasses.replace(plain, bad_words=word))[0].text.split()
    assert word not in bundled.generate(
        "Once upon a time", dataclasses.replace(
            plain, bad_words_ids=[bundled.tokenizer.encode(before + word, add_special_tokens=False)
                                  for before in ("", " ")]))[0].text.split()
    [only] = bundled.generate("Once", SamplingParams(temperature=2, max_tokens=9, seed=1, allowed_token_ids=[300, 301]))
    assert set(only.token_ids) == {300, 301}
    assert bundled.generate("Once", dataclasses.replace(plain, typical_p=0.5, temperature=1, seed=2))[0].text


def test_logits_processors_and_masks_in_python(bundled):
    vocab = bundled.tokenizer.vocab_size
    seen = []

    def ban(token_ids, logits):
        assert token_ids.dtype == np.int32 and logits.dtype == np.float32 and logits.size >= vocab
        seen.append(token_ids.tolist())
        logits[:] = -np.inf
        logits[300 + len(seen)] = 0

    plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    ids = bundled.tokenizer.encode("Once")
    with_processor = dataclasses.replace(plain, logits_processors=[ban])
    [changed] = bundled.generate("Once", with_processor)
    assert changed.token_ids == [301, 302, 303] and changed.logprobs == [0, 0, 0]
    assert seen == [ids, ids + [301], ids + [301, 302]]
    replacing = dataclasses.replace(plain, logits_processors=[lambda _, logits: np.where(
        np.arange(logits.size) == 305, np.float32(9), logits * np.float32(0))])
    assert bundled.generate("Once", replacing)[0].token_ids == [305] * 3

    def only(token_ids):
        words = np.zeros((len(seen_logits) + 31) // 32, np.int32)
        words[310 // 32] = 1 << 310 % 32
        return words

    seen_logits = []
    bundled.generate("Once", dataclasses.replace(plain, max_tokens=1, logits_processors=[
        lambda _, logits: seen_logits.extend(logits)]))
    assert bundled.generate("Once", dataclasses.replace(plain, token_mask=only))[0].token_ids == [310] * 3
    assert bundled.generate("Once", dataclasses.replace(plain, token_mask=lambda ids: None))[0].error == ""


@pytest.mark.parametrize("change, words", [
    ({"logits_processors": [lambda ids, logits: 1 / 0]}, "a logits processor failed: .*division by zero"),
    ({"logits_processors": [lambda ids, logits: logits[:-1]]}, "it returned .*; expected None or a contiguous array"),
    ({"logits_processors": [lambda ids, logits: "x"]}, "it returned 'x' .str.; expected None or a contiguous array"),
    ({"token_mask": lambda ids: np.zeros(1, np.int32)}, "a token mask failed: it returned"),
    ({"token_mask": lambda ids: ids.nothing}, "a token mask failed: .*nothing"),
])
def test_an_exception_of_a_callback_fails_its_request_alone(bundled, change, words):
    plain = SamplingParams(temperature=0, max_tokens=20)
    expected = bundled.generate("Once", plain)[0].token_ids
    beside = []
    thread = threading.Thread(target=lambda: beside.extend(bundled.generate(["Once"] * 2, plain)))
    thread.start()
    [failed] = bundled.generate("Once", dataclasses.replace(plain, **change))
    thread.join()
    assert failed.finish_reason == "error" and re.search(words, failed.error), failed.error
    assert [each.token_ids for each in beside] == [expected] * 2


def test_a_processor_may_not_call_its_llm(bundled):
    params = SamplingParams(max_tokens=2, logits_processors=[lambda ids, logits: bundled.generate("a", GREEDY)])
    assert "from inside one of its own callbacks" in bundled.generate("Once", params)[0].error


def test_beam_search(bundled):
    params = SamplingParams(temperature=0, num_beams=3, n=2, max_tokens=8, ignore_eos=True)
    best, second = bundled.generate("Once upon a time", params)
    assert best.score >= second.score and best.token_ids != second.token_ids
    assert best.score == pytest.approx(sum(best.logprobs) / 8, abs=1e-6)
    [greedy] = bundled.generate("Once upon a time", dataclasses.replace(params, num_beams=1, n=1))
    assert sum(best.logprobs) >= sum(greedy.logprobs)
    for wrong, words in (({"temperature": 1}, "temperature is 1; expected 0 with num_beams 3"), ({"n": 4}, "n is 4"),
                         ({"early_stopping": "soon"}, "early_stopping is 'soon'"),
                         ({"stop": "x"}, "num_beams is 3 and stop is given")):
        with pytest.raises(eadem.Error, match=words):
            dataclasses.replace(params, **wrong)


def test_what_rows_are_asked_is_checked():
    for wrong, words in (({"logprobs": 21}, "logprobs is 21; expected 0 to 20"), ({"prompt_logprobs": -1}, "prompt_"),
                         ({"typical_p": 0}, "typical_p is 0"), ({"allowed_token_ids": []}, "allowed_token_ids is"),
                         ({"bad_words": [""]}, "bad_words is"), ({"bad_words_ids": [[]]}, "bad_words_ids is"),
                         ({"bad_words_ids": 3}, "bad_words_ids is 3"),
                         ({"logits_processors": [3]}, "logits_processors is 3 .int.; expected a function"),
                         ({"token_mask": 3}, "token_mask is 3 .int.; expected a function")):
        with pytest.raises(eadem.InvalidArgument, match=words):
            SamplingParams(**wrong)


def test_generation_config_gives_the_defaults(tmp_path, caplog):
    for file in BUNDLED.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(
        '{"repetition_penalty": 1.05, "temperature": 0.7, "max_length": 99, "num_beams": 2}')
    llm = LLM(tmp_path)
    assert llm.default_params.repetition_penalty == 1.05 and llm.default_params.temperature == 0.7
    assert "max_length 99 is ignored" in caplog.text and "num_beams 2 is ignored" in caplog.text
    assert llm.generate("Once", GREEDY)[0].text == LLM(BUNDLED).generate("Once", GREEDY)[0].text
    # An end that the model has no row for is never drawn, and is nothing that min_tokens could forbid.
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 50256]}')
    llm = LLM(tmp_path)
    assert llm.eos_token_ids == [1] and 50256 not in llm.chat_stop_token_ids
    assert llm.generate("Once", dataclasses.replace(GREEDY, min_tokens=2))[0].error == ""


@pytest.mark.parametrize("arguments, words", [
    (("Once", {"temperature": 0}), "params is {'temperature': 0} .dict.; expected SamplingParams or None"),
    ((5,), "prompts is 5 .int.; expected a str, a sequence of str"),
    (([5],), "prompt 0 is 5 .int.; prompts are a str"),
    ((None,), "prompts is None; expected a str"),
    ((["a", [1]],), "prompts mix texts and lists of token ids"),
    (([[1, 2.5]],), "prompt 0.1. is 2.5 .float.; expected an int"),
    (([[2**40]],), "prompt 0 holds the token id 1099511627776"),
    (([b"Once"],), "prompt 0 is b'Once' .bytes."),
    (({"prompt": "Once"},), "prompts is {'prompt': 'Once'} .dict.; expected a str"),
    (([{"prompt": "Once"}],), "prompt 0 is {'prompt': 'Once'} .dict."),
    (({"Once", "Twice"},), "prompts is .*set"),
])
def test_wrong_types_are_named_with_what_was_expected(bundled, arguments, words):
    with pytest.raises(eadem.InvalidArgument, match=words):
        bundled.generate(*arguments)


def test_wrong_types_for_the_tokenizer(bundled):
    with pytest.raises(eadem.InvalidArgument, match="text is 5 .int.; expected a str"):
        bundled.tokenizer.encode(5)
    with pytest.raises(eadem.InvalidArgument, match="text has no UTF-8"):
        bundled.tokenizer.encode("\ud800")
    with pytest.raises(eadem.InvalidArgument, match="ids is 'abc' .str.; expected a sequence of int"):
        bundled.tokenizer.decode("abc")
    with pytest.raises(eadem.InvalidArgument, match="on_text is 3 .int.; expected a function or None"):
        bundled.generate("Once", GREEDY, on_text=3)
