# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks from Python: one result, however they are started, and nothing left when something ends."""
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import BUNDLED, GOLDEN, load_safetensors

import eadem
from eadem import DistConfig, InferEngine

LLAMA = GOLDEN / "llama"  # 4 heads, 2 key-value heads
EXACT = {"mode": "accuracy", "threads": 2}  # products are not rounded: only the order of sums differs from one rank's
PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6]]


def processes(engine):
    return engine._engine.rank_processes()


def is_gone(pid, seconds=5.0):
    """Whether the process ends within so many seconds; a zombie that nobody waits for has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def greedy(engine, prompt=PROMPT[0], count=12):
    engine.reset_cache()
    tokens, ids, cached = [], [prompt], 0
    while len(tokens) < count:
        output = engine.forward(InferEngine.Input(ids, cache_lengths=[cached]))
        cached += len(ids[0])
        tokens.append(int(output.output_ids[0, 0]))
        ids = [tokens[-1:]]
    return tokens


@pytest.fixture(scope="module")
def one():
    return InferEngine.from_pretrained(LLAMA, **EXACT)


@pytest.fixture(scope="module")
def two():
    return InferEngine.from_pretrained(LLAMA, DistConfig(tp_size=2), **EXACT)


def test_two_ranks_draw_the_tokens_of_one(one, two):
    assert len(processes(one)) == 0 and len(processes(two)) == 1
    assert greedy(two) == greedy(one)
    assert greedy(two) == greedy(one)
    two.reset_cache(eadem.StaticKVCacheConfig(max_batch_size=2, max_cache_len=64))
    assert two.max_batch_size == 2
    assert greedy(two) == greedy(one)
    two.reset_cache(eadem.StaticKVCacheConfig())


def test_positions_reach_every_rank(one, two):
    expected = load_safetensors(LLAMA / "positions.safetensors")
    step = InferEngine.Input(expected["prompt"][None], position_ids=expected["positions"][None])
    logits = []
    for engine in (one, two):
        engine.reset_cache()
        logits.append(engine.forward(step, return_logits=True).logits[-1])
    # PyTorch keeps up to 64 partial sums of a product, Eadem one: tests/support/f32_error.h derives the ratio.
    bound = 64**0.5 * np.abs(expected["logits"] - expected["logits_f64"]).max()
    for row in logits:
        assert np.abs(row - expected["logits_f64"][-1]).max() <= bound


def test_a_configuration_and_its_parameters(one):
    config = eadem.AutoConfig.from_pretrained(LLAMA)
    engine = InferEngine(config, DistConfig(2), "cpu", eadem.StaticKVCacheConfig(1, 64), **EXACT)
    state = one.state_dict()
    with pytest.raises(eadem.NotFound, match="21 of the model's 21 tensors are missing"):
        engine.forward(InferEngine.Input(PROMPT))
    for name, array in state.items():
        engine.load_param(name, array)
    with pytest.raises(eadem.NotFound, match="the model has no parameter 'model.nrom.weight'; the nearest names are 'model.norm.weight'"):
        engine.load_param("model.nrom.weight", state["model.norm.weight"])
    with pytest.raises(eadem.InvalidArgument, match=r"'lm_head.weight' is \[3\]; the model's config implies \[256, 64\]"):
        engine.load_param("lm_head.weight", np.zeros(3, np.float32))
    assert greedy(engine) == greedy(one)
    # Each rank has exactly its part: rows of a product whose outputs are divided, columns where its inputs are.
    parts = engine.state_dict()
    assert len(parts) == 2 and all(list(part) == list(state) for part in parts)
    for name, axis in (("model.layers.0.self_attn.q_proj.weight", 0), ("model.layers.1.mlp.down_proj.weight", 1),
                       ("lm_head.weight", 0), ("model.embed_tokens.weight", 0)):
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts], axis), state[name])
        assert parts[0][name].shape[axis] * 2 == state[name].shape[axis]
    for part in parts:
        np.testing.assert_array_equal(part["model.norm.weight"], state["model.norm.weight"])


def test_every_number_of_ranks_has_the_same_bits():
    results = []
    for size in (1, 2, 4):
        ranks = DistConfig(tp_size=size, deterministic_across_tp=True)
        engine = InferEngine.from_pretrained(LLAMA, ranks, **EXACT | {"threads": 4})
        output = engine.forward(InferEngine.Input(PROMPT), return_logits=True)
        results.append((output.logits.tobytes(), np.asarray(output.logprobs).tobytes(), greedy(engine)))
    assert results[1] == results[0] and results[2] == results[0]
    plain = InferEngine.from_pretrained(LLAMA, **EXACT)
    assert plain.forward(InferEngine.Input(PROMPT), return_logits=True).logits.tobytes() != results[0][0]

    params = eadem.SamplingParams(temperature=0.9, seed=3, max_tokens=24)
    texts = set()
    for size in (1, 2, 3):
        llm = eadem.LLM(BUNDLED, tensor_parallel_size=size, deterministic_across_tp=True, **EXACT | {"threads": 3})
        completion = llm.generate("Once upon a time", params)[0]
        texts.add((completion.text, np.asarray(completion.logprobs, np.float32).tobytes()))
    assert len(texts) == 1


@pytest.mark.parametrize("target, kind", [("model.gguf", "q4_k_m"), ("int8", "int8")])
def test_quantized_files_have_the_same_bits_on_every_number_of_ranks(tmp_path, target, kind):
    # Parts of 256 columns on four ranks: one block of q4_k.
    config = eadem.LlamaConfig(vocab_size=96, hidden_size=256, intermediate_size=1024, num_hidden_layers=2,
                               num_attention_heads=16, num_key_value_heads=2, head_dim=64, max_position_embeddings=64)
    engine = InferEngine(config)
    engine.load_random(seed=5)
    engine.save_pretrained(tmp_path / "plain")
    eadem.convert(tmp_path / "plain", tmp_path / target, type=kind)
    results = set()
    for size in (1, 2, 4):
        engine = InferEngine.from_pretrained(tmp_path / target, DistConfig(size, deterministic_across_tp=True), threads=4)
        output = engine.forward(InferEngine.Input(PROMPT), return_logits=True)
        results.add((output.logits.tobytes(), np.asarray(output.logprobs).tobytes(), *greedy(engine)))
    assert len(results) == 1


def test_the_option_of_equal_bits_has_a_value_and_a_limit():
    assert not DistConfig(2).deterministic_across_tp
    assert DistConfig([0, 1], deterministic_across_tp=True).deterministic_across_tp
    with pytest.raises(eadem.InvalidArgument, match="the same bits on 1, 2, 3 ranks of a model with 6 attention heads; there are 6"):
        eadem.LLM(BUNDLED, tensor_parallel_size=6, deterministic_across_tp=True, **EXACT | {"threads": 6})
    with pytest.raises(eadem.InvalidArgument, match="deterministic_across_tp is 1 .int.; expected True or False"):
        eadem.LLM(BUNDLED, tensor_parallel_size=2, deterministic_across_tp=1)


def test_what_is_saved_is_whole(one, two, tmp_path):
    one.save_pretrained(tmp_path / "one")
    two.save_pretrained(tmp_path / "two")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


def test_a_gguf_keeps_the_order_of_hugging_face(stories):
    whole = InferEngine.from_pretrained(stories, **EXACT).state_dict()
    engine = InferEngine.from_pretrained(stories, DistConfig(2), **EXACT)
    name = "model.layers.0.self_attn.q_proj.weight"  # rows of each head are interleaved in the file
    np.testing.assert_array_equal(np.concatenate([part[name] for part in engine.state_dict()]), whole[name])


def test_divided_experts_have_the_bits_of_one_rank():
    one = InferEngine.from_pretrained(GOLDEN / "qwen3_moe", **EXACT)
    expected = one.forward(InferEngine.Input(PROMPT), return_logits=True).logits
    for ranks in (2, 3):
        engine = InferEngine.from_pretrained(GOLDEN / "qwen3_moe", DistConfig(ep_size=ranks), **EXACT | {"threads": ranks})
        assert len(processes(engine)) == ranks - 1
        np.testing.assert_array_equal(engine.forward(InferEngine.Input(PROMPT), return_logits=True).logits, expected)
        name = "model.layers.2.mlp.experts.up_proj.weight"
        assert [part[name].shape[0] for part in engine.state_dict()] == [8 // ranks + (rank < 8 % ranks) for rank in range(ranks)]


def test_hooks_see_every_rank(one):
    engine = InferEngine.from_pretrained(LLAMA, DistConfig(2), disabled_fusions="all", **EXACT)
    name = "model.layers.0.self_attn.q_proj.reshape.y"
    seen, second = [], []
    hook = engine.hooks.register_hook(name, lambda name, tensor, layer: seen.append((name, tensor, layer)))
    engine.hooks.register_hook(name, lambda name, tensor, layer: second.append(tensor), rank=1)
    engine.forward(InferEngine.Input([[1, 2, 3]]))
    assert [(each[0], each[1].shape, each[2]) for each in seen] == [(name, (3, 2, 16), 0)] * 2
    np.testing.assert_array_equal(second[0], seen[1][1])
    assert len(second) == 1 and not np.array_equal(seen[0][1], seen[1][1])
    hook.remove()
    engine.reset_cache()
    engine.forward(InferEngine.Input([[1, 2, 3]]))
    assert len(seen) == 2 and len(second) == 2
    with pytest.raises(eadem.InvalidArgument, match="of rank 2; expected 0 to 1"):
        engine.hooks.register_hook(name, print, rank=2)

    def fail(*_):
        raise KeyError("no")

    engine.hooks.register_hook("model.*", fail)
    with pytest.raises(KeyError):
        engine.forward(InferEngine.Input([[1, 2, 3]]))
    engine.hooks.clear()
    assert greedy(engine) == greedy(one)


def test_text_is_the_same_however_ranks_are_started():
    command = Path(sys.executable).parent / "eadem"
    if not command.exists():
        pytest.skip("the package has no command")
    prompt, count = "Once upon a time", 24
    run = lambda *more: subprocess.run([command, "run", str(BUNDLED), "-p", prompt, "--temperature", "0", "-n", str(count),
                                        "--threads", "2", "--mode", "accuracy", *more], capture_output=True, text=True,
                                       check=True).stdout.strip()
    params = eadem.SamplingParams(temperature=0, max_tokens=count)
    texts = {run(), run("--tp", "2")}
    for size in (1, 2):
        llm = eadem.LLM(BUNDLED, tensor_parallel_size=size, **EXACT)
        texts.add((prompt + llm.generate(prompt, params)[0].text).strip())
    assert len(texts) == 1, texts


def test_several_threads_share_an_llm_of_two_ranks():
    llm = eadem.LLM(BUNDLED, tensor_parallel_size=2, **EXACT)
    params = eadem.SamplingParams(temperature=0, max_tokens=16)
    prompts = ["Once upon a time", "The dog", "Lily"]
    expected = [llm.generate(prompt, params)[0].text for prompt in prompts]
    texts = [None] * 3
    threads = [threading.Thread(target=lambda i=i: texts.__setitem__(i, llm.generate(prompts[i], params)[0].text))
               for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == expected

    def stop(index, piece):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts[0], params, on_text=stop)
    assert llm.generate(prompts[1], params)[0].text == expected[1]


@pytest.mark.parametrize("make, words", [
    (lambda: InferEngine.from_pretrained(LLAMA, DistConfig(3)), "tp_size is 3; the model's 4 attention heads"),
    (lambda: InferEngine.from_pretrained(LLAMA, DistConfig([1, 0])), "tp_device_ids.0. is 1; on the CPU, rank 0 has"),
    (lambda: InferEngine.from_pretrained(LLAMA, DistConfig([3])), "tp_device_ids.0. is 3"),
    (lambda: InferEngine.from_pretrained(LLAMA, DistConfig(2), threads=1), "threads is 1; 2 ranks need at least one each"),
    (lambda: InferEngine.from_pretrained(LLAMA, 2), "distributed_config is 2 .int.; expected DistConfig"),
    (lambda: eadem.LLM(BUNDLED, tensor_parallel_size=0), "tensor_parallel_size is 0; expected 1 to 1024"),
    (lambda: eadem.LLM(BUNDLED, tensor_parallel_size=1024), "tp_size is 1024; the model's"),
])
def test_what_does_not_divide_is_refused(make, words):
    with pytest.raises(eadem.InvalidArgument, match=words):
        make()


def test_ranks_of_other_devices_are_refused():
    with pytest.raises(eadem.Unsupported, match="2 ranks on 'reference'; ranks compute on the CPU"):
        InferEngine.from_pretrained(LLAMA, DistConfig(2), "reference")


def test_memory_that_is_not_there_is_refused_with_a_plan():
    config = eadem.LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                               num_attention_heads=4, max_position_embeddings=2**24)
    for size in (1, 2):
        with pytest.raises(MemoryError, match="needs weights .* KV cache .*all tokens .* activations .* are free") as caught:
            InferEngine(config, DistConfig(size), cache_config=eadem.StaticKVCacheConfig(max_batch_size=1024))
        assert "would fit" in str(caught.value)


def test_a_rank_that_is_killed_ends_the_call_and_a_new_engine_works(one):
    engine = InferEngine.from_pretrained(LLAMA, DistConfig(2), **EXACT)
    expected = greedy(engine)
    [rank] = processes(engine)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(eadem.RankFailed, match=rf"rank 1 \(process {rank}\) died: signal 9"):
        while True:
            greedy(engine)
    with pytest.raises(eadem.RankFailed, match="died"):
        engine.forward(InferEngine.Input(PROMPT))
    again = InferEngine.from_pretrained(LLAMA, DistConfig(2), **EXACT)
    assert greedy(again) == expected == greedy(one)


def test_ranks_end_with_their_engine():
    engine = InferEngine.from_pretrained(LLAMA, DistConfig(4), **EXACT | {"threads": 4})
    ranks = processes(engine)
    assert len(ranks) == 3 and not any(is_gone(rank, 0) for rank in ranks)
    del engine
    gc.collect()
    assert all(is_gone(rank, 0.1) for rank in ranks)


def test_ranks_outlive_the_thread_that_made_them(one):
    made = []
    thread = threading.Thread(target=lambda: made.append(InferEngine.from_pretrained(LLAMA, DistConfig(2), **EXACT)))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert greedy(made[0]) == greedy(one)


PROGRAM = f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import eadem
from eadem import InferEngine
engine = InferEngine.from_pretrained({str(LLAMA)!r}, eadem.DistConfig(2), threads=2)
output = engine.forward(InferEngine.Input([[1, 2, 3]])).output_ids
print(*engine._engine.rank_processes(), flush=True)
"""


def started(end):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM + textwrap.dedent(end)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    return process, [int(word) for word in process.stdout.readline().split()]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_die_with_a_parent_that_is_killed(how):
    process, ranks = started("""
        while True:
            time.sleep(1)
    """)
    assert len(ranks) == 1
    process.send_signal(how)
    process.communicate(timeout=30)
    assert all(is_gone(rank) for rank in ranks)


def test_ranks_die_with_a_parent_that_is_killed_while_they_compute():
    process, ranks = started("""
        while True:
            engine.reset_cache()
            engine.forward(InferEngine.Input([list(range(100))]))
    """)
    time.sleep(0.2)
    process.kill()
    process.communicate(timeout=30)
    assert all(is_gone(rank) for rank in ranks)


def test_the_interpreter_ends_with_an_engine_alive():
    process, ranks = started("")
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert all(is_gone(rank) for rank in ranks)


def test_a_forked_process_is_no_rank_and_leaves_the_engine_alone():
    process, _ = started("""
        child = os.fork()
        if child == 0:
            try:
                engine.forward(InferEngine.Input([[1]], cache_lengths=[3]))
            except eadem.RankFailed as error:
                assert "was forked from it and is no rank" in str(error)
                del engine
                sys.exit(7)
            sys.exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        engine.reset_cache()
        assert engine.forward(InferEngine.Input([[1, 2, 3]])).output_ids == output
    """)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (0, "7\n", "")
