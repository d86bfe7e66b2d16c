# SPDX-License-Identifier: Apache-2.0
import dataclasses
import threading

import numpy as np
import pytest
from conftest import GOLDEN, load_safetensors

import eadem
from eadem import InferEngine

MODELS = ["llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "yarn", "linear"]


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_match_transformers(name):
    expected = load_safetensors(GOLDEN / name / "expected.safetensors")
    engine = InferEngine.from_pretrained(GOLDEN / name, max_logit_rows=128)
    prompt = expected["prompt"]
    output = engine.forward(InferEngine.Input(prompt[None], temperature=0, all_logits=True), return_logits=True,
                            return_hidden_states=True)
    assert output.logits.dtype == np.float32 and output.logits.shape == expected["logits"].shape
    assert output.hidden_states.shape == (len(prompt), eadem.AutoConfig.from_pretrained(GOLDEN / name).hidden_size)
    # PyTorch keeps up to 64 partial sums of a product, Eadem one: tests/support/f32_error.h derives the ratio.
    torch_error = np.abs(expected["logits"] - expected["logits_f64"]).max()
    assert np.abs(output.logits - expected["logits_f64"]).max() <= 64**0.5 * torch_error
    # Greedy continuation, one token per step from the cache.
    tokens = [int(output.output_ids[0, 0])]
    while len(tokens) < len(expected["greedy"]):
        cached = len(prompt) + len(tokens) - 1
        step = InferEngine.Input([[tokens[-1]]], cache_lengths=[cached], position_ids=[[cached]], temperature=0)
        tokens.append(int(engine.forward(step).output_ids[0, 0]))
    assert tokens == expected["greedy"].tolist()


def test_padded_packed_and_paged_steps_agree():
    prompt = load_safetensors(GOLDEN / "llama/expected.safetensors")["prompt"]
    a, b = prompt[:7], prompt[7:12]
    padded = np.zeros((2, 7), np.int64)
    padded[0], padded[1, :5] = a, b
    engine = InferEngine.from_pretrained(GOLDEN / "llama", cache_config=eadem.StaticKVCacheConfig(2, 32))
    one = engine.forward(InferEngine.Input(padded, input_lengths=[7, 5], temperature=0), return_logits=True)
    engine.reset_cache()
    two = engine.forward(InferEngine.Input(np.concatenate([a, b]), input_lengths=[7, 5], temperature=[0, 0]),
                         return_logits=True)
    np.testing.assert_array_equal(one.logits, two.logits)
    assert one.output_ids.shape == (2, 1) and one.logprobs.shape == (2, 1) and one.top_ids is None
    engine.reset_cache()
    listed = engine.forward(InferEngine.Input(padded, input_lengths=[7, 5], top_logprobs=[3, 0], typical_p=0.9))
    np.testing.assert_array_equal(listed.top_ids[0, :3], np.argsort(-one.logits[0], kind="stable")[:3])
    assert listed.top_logprobs[0, 0] == one.logprobs[0, 0] and np.isnan(listed.top_logprobs[0, 3:]).all()
    assert (listed.top_ids[0, 3:] == -1).all() and (listed.top_ids[1] == -1).all()
    with pytest.raises(eadem.InvalidArgument, match="sequence 1: top_logprobs is 21; expected 0 to 20"):
        engine.forward(InferEngine.Input(padded, input_lengths=[7, 5], top_logprobs=[0, 21]))
    engine.reset_cache(eadem.PagedKVCacheConfig(max_kv_memory_bytes=1 << 20, block_size=4, max_batch_size=2))
    assert engine.block_size == 4 and engine.cache_bytes <= 1 << 20
    tables = np.array([[9, 3], [5, 1]])
    slots = [*range(36, 40), *range(12, 15), *range(20, 24), 4]
    three = engine.forward(InferEngine.Input(padded, input_lengths=[7, 5], block_tables=tables, slot_mapping=slots,
                                             temperature=0), return_logits=True)
    np.testing.assert_array_equal(one.output_ids, three.output_ids)
    np.testing.assert_array_equal(one.logits, three.logits)


def test_windows_of_a_paged_cache_follow_their_rows():
    prompt = list(range(3, 43))
    step = lambda first, **more: InferEngine.Input([prompt[first:first + 8]], cache_lengths=[first], **more)
    engine = InferEngine.from_pretrained(GOLDEN / "gemma3", cache_config=eadem.StaticKVCacheConfig(1, 64),
                                         max_num_batched_tokens=8)  # windows of long steps would keep every token
    expected = [engine.forward(step(first), return_logits=True).logits for first in range(0, 40, 8)]
    engine.reset_cache(eadem.PagedKVCacheConfig(block_size=4, max_batch_size=2, max_cache_len=64))
    for first in range(0, 40, 8):
        output = engine.forward(step(first, block_tables=[range(16)], rows=[1]), return_logits=True)
        np.testing.assert_array_equal(output.logits, expected[first // 8])
    with pytest.raises(eadem.InvalidArgument, match="does not hold its tokens"):
        engine.forward(InferEngine.Input([[1]], cache_lengths=[40], block_tables=[range(16)], rows=[0]))


def test_state_dict_round_trip():
    config = eadem.AutoConfig.from_pretrained(GOLDEN / "llama")
    source = InferEngine.from_pretrained(GOLDEN / "llama", weights="f32")
    state = source.state_dict()
    assert sorted(state) == sorted(source.parameter_names())
    files = load_safetensors(GOLDEN / "llama/model.safetensors")
    for name, array in state.items():
        np.testing.assert_array_equal(array, files[name])
    copy = InferEngine(config, weights="f32")
    for name, array in state.items():
        copy.load_param(name, array)
    step = InferEngine.Input([[3, 1, 4, 1, 5]], temperature=0)
    np.testing.assert_array_equal(source.forward(step, return_logits=True).logits,
                                  copy.forward(step, return_logits=True).logits)


def test_bf16_parameters_are_bits_and_strided_ones_are_read_in_order():
    engine = InferEngine(eadem.AutoConfig.from_pretrained(GOLDEN / "llama"), weights="bf16")
    engine.load_random(1)
    name = "model.layers.0.mlp.up_proj.weight"
    bits = np.full(engine.state_dict()[name].shape, 0x3F80, np.uint16)  # 1.0
    engine.load_param(name, bits)
    back = engine.state_dict()[name]
    np.testing.assert_array_equal(back if back.dtype == np.uint16 else back.view(np.uint16), bits)
    strided = np.arange(bits.size, dtype=np.float32).reshape(bits.shape[::-1]).T
    single = InferEngine(eadem.AutoConfig.from_pretrained(GOLDEN / "llama"), weights="f32")
    single.load_param(name, strided)
    np.testing.assert_array_equal(single.state_dict()[name], strided)


def test_arrays_are_the_callers_own_and_outlive_the_engine():
    engine = InferEngine.from_pretrained(GOLDEN / "llama")
    first = engine.forward(InferEngine.Input([[1, 2, 3]], temperature=0), return_logits=True).logits
    assert first.base is not None and not first.flags.owndata  # the engine's bytes, not a copy of them
    kept = first.copy()
    engine.reset_cache()
    engine.forward(InferEngine.Input([[4, 5]], temperature=0), return_logits=True)
    del engine
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(np.from_dlpack(first), kept)


def test_hooks_fire_with_names_shapes_and_layers():
    engine = InferEngine.from_pretrained(GOLDEN / "llama")
    seen = []
    assert not engine.hooks.has_hooks()
    engine.hooks.register_hook("model.*", lambda name, tensor, layer: seen.append((name, tensor, layer)))
    assert engine.hooks.has_hooks()
    engine.forward(InferEngine.Input([[1, 2, 3]], temperature=0))
    assert {layer for _, _, layer in seen} >= {0, 1}
    for name, tensor, layer in seen:
        assert isinstance(tensor, np.ndarray)
        assert layer == (int(name.split(".")[2]) if name.startswith("model.layers.") else -1)
    down = [tensor for name, tensor, _ in seen if "embed" in name]
    assert all(tensor.shape == (3, 64) for tensor in down) and down
    engine.hooks.clear()
    seen.clear()
    engine.forward(InferEngine.Input([[1]], cache_lengths=[3], temperature=0))
    assert not seen


def test_an_exception_of_a_hook_comes_out_and_reentry_is_refused():
    engine = InferEngine.from_pretrained(GOLDEN / "llama")
    step = InferEngine.Input([[1, 2, 3]], temperature=0)
    want = engine.forward(step).output_ids

    def fail(name, tensor, layer):
        raise KeyError(name)

    engine.hooks.register_hook("model.*", fail)
    with pytest.raises(KeyError):
        engine.forward(step)
    engine.hooks.clear()
    engine.hooks.register_hook("model.*", lambda *_: engine.forward(step))
    with pytest.raises(eadem.InvalidArgument, match="callbacks"):
        engine.forward(step)
    engine.hooks.clear()
    np.testing.assert_array_equal(engine.forward(step).output_ids, want)


def test_threads_share_an_engine():
    engine = InferEngine.from_pretrained(GOLDEN / "llama")
    step = InferEngine.Input([[1, 2, 3]], temperature=0)
    want = int(engine.forward(step).output_ids[0, 0])
    results = []
    threads = [threading.Thread(target=lambda: results.extend(int(engine.forward(step).output_ids[0, 0])
                                                              for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [want] * 80


def test_config_fields():
    config = eadem.AutoConfig.from_pretrained(GOLDEN / "llama")
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim, config.kv_dim()) == (64, 2, 16, 32)
    assert config.hidden_act == "silu" and config.bos_token_id == [1] and config.eos_token_id == [2]
    config.validate()
    own = eadem.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    assert own.head_dim == 4 and own.num_parameters() > 0 and own == own
    own.num_hidden_layers = 3
    own.validate()
    own.num_key_value_heads = 3
    with pytest.raises(eadem.InvalidArgument, match="key-value heads"):
        own.validate()
    with pytest.raises(eadem.Unsupported, match="atention_bias"):
        eadem.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                          num_attention_heads=4, max_position_embeddings=64, atention_bias=True)
    with pytest.raises(eadem.InvalidArgument, match="vocab_size"):
        eadem.LlamaConfig(hidden_size=16)


def test_dist_config():
    assert eadem.DistConfig().tp_device_ids == [0]
    assert eadem.DistConfig(tp_size=3).tp_device_ids == [0, 1, 2]
    assert eadem.DistConfig([4, 2]).tp_size == 2
    config = eadem.DistConfig()
    config.tp_device_ids = [0, 1]
    assert config.tp_size == 2
    for make in (lambda: eadem.DistConfig(tp_size=0), lambda: eadem.DistConfig([]), lambda: eadem.DistConfig([0] * 1025),
                 lambda: setattr(config, "tp_device_ids", []), lambda: setattr(config, "tp_device_ids", [0] * 1025)):
        with pytest.raises(eadem.InvalidArgument, match="tp_"):
            make()
    assert config.tp_device_ids == [0, 1]


@pytest.mark.parametrize("change, words", [
    ({"input_ids": [[256]]}, "vocabulary"),
    ({"input_ids": [[2**40]]}, "input_ids"),
    ({"input_ids": [[0.5]]}, "integers"),
    ({"input_ids": [[[1]]]}, "shape"),
    ({"position_ids": [[0, 1]]}, "position_ids"),
    ({"position_ids": [[1, 2, 128]]}, "has position 128; the model's context is 128"),
    ({"position_ids": [[-1, 2, 4]]}, "has position -1"),
    ({"cache_lengths": [127]}, "cache holds"),
    ({"input_lengths": [4]}, "lengths"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": [0.5, 0.5]}, "top_p"),
    ({"slot_mapping": [0, 1, 5]}, "slot"),
    ({"block_tables": [[7]]}, "block 7"),
])
def test_refused_inputs_leave_the_engine_as_it_was(change, words):
    engine = InferEngine.from_pretrained(GOLDEN / "llama")
    good = InferEngine.Input([[1, 2, 3]], temperature=0)
    want = engine.forward(good).output_ids
    with pytest.raises(eadem.InvalidArgument, match=words):
        engine.forward(dataclasses.replace(good, **change))
    np.testing.assert_array_equal(engine.forward(good).output_ids, want)


def test_errors_are_python_errors_too(tmp_path):
    bases = {eadem.InvalidArgument: ValueError, eadem.NotFound: FileNotFoundError,
             eadem.Unsupported: NotImplementedError, eadem.DataCorrupted: ValueError, eadem.OutOfMemory: MemoryError,
             eadem.IoError: OSError, eadem.DeviceError: RuntimeError, eadem.Cancelled: eadem.Error,
             eadem.RankFailed: RuntimeError}
    for error, base in bases.items():
        assert issubclass(error, eadem.Error) and issubclass(error, base) and error.__module__ == "eadem"
    with pytest.raises(FileNotFoundError) as caught:
        InferEngine.from_pretrained(tmp_path / "absent")
    assert isinstance(caught.value, eadem.NotFound) and "absent" in str(caught.value)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(eadem.DataCorrupted, match="config.json"):
        eadem.AutoConfig.from_pretrained(tmp_path)
    engine = InferEngine(eadem.AutoConfig.from_pretrained(GOLDEN / "llama"))
    with pytest.raises(eadem.NotFound, match="nothing"):
        engine.load_param("nothing", np.zeros(3, np.float32))
    with pytest.raises(eadem.InvalidArgument, match="norm"):
        engine.load_param("model.norm.weight", np.zeros(3, np.float32))
    with pytest.raises(eadem.InvalidArgument, match="32 bits"):
        engine.load_param("model.norm.weight", np.zeros(64, np.int32))
    with pytest.raises(ValueError, match="weights"):
        InferEngine.from_pretrained(GOLDEN / "llama", weights="f8")
    with pytest.raises(eadem.InvalidArgument):
        InferEngine.from_pretrained(GOLDEN / "llama", device_type="abacus")


def test_a_step_is_greedy_unless_asked():
    engine = InferEngine.from_pretrained(GOLDEN / "llama")
    prompt = [[3, 1, 4, 1, 5]]
    output = engine.forward(InferEngine.Input(prompt), return_logits=True)
    assert InferEngine.Input(prompt).temperature == 0
    assert output.output_ids[0, 0] == np.argmax(output.logits[0])


def test_penalties_of_each_sequence():
    engine = InferEngine.from_pretrained(GOLDEN / "llama", cache_config=eadem.StaticKVCacheConfig(3, 32))
    prompt = [3, 1, 4, 1, 5]
    plain = engine.forward(InferEngine.Input([prompt] * 3), return_logits=True)
    step = InferEngine.Input([prompt] * 3, repetition_penalty=[1, 50, 1], presence_penalty=[0, 0, 2],
                             prompt_length=[5, 5, 3])
    engine.reset_cache()
    output = engine.forward(step, return_logits=True)
    np.testing.assert_array_equal(output.logits, plain.logits)
    logits = plain.logits[0].astype(np.float64)
    repeated, present = logits.copy(), logits.copy()
    for token in set(prompt):
        repeated[token] = logits[token] * 50 if logits[token] < 0 else logits[token] / 50
    for token in {1, 5}:
        present[token] -= 2
    np.testing.assert_array_equal(output.output_ids[:, 0], [logits.argmax(), repeated.argmax(), present.argmax()])
    with pytest.raises(eadem.InvalidArgument, match="sequence 1: frequency_penalty is 3"):
        engine.forward(dataclasses.replace(step, frequency_penalty=[0, 3, 0]))


def test_a_block_has_one_owner_and_cached_tokens_an_author():
    engine = InferEngine.from_pretrained(
        GOLDEN / "llama", cache_config=eadem.PagedKVCacheConfig(1 << 20, block_size=16, max_batch_size=2))
    with pytest.raises(eadem.InvalidArgument, match="sequence 0 names block 0 twice"):
        engine.forward(InferEngine.Input([list(range(20))], block_tables=[[0, 0]]))
    with pytest.raises(eadem.InvalidArgument, match="sequences 0 and 1 both use block 0"):
        engine.forward(InferEngine.Input([[1], [2]], block_tables=[[0], [0]]))
    engine.reset_cache(eadem.StaticKVCacheConfig(1))
    with pytest.raises(eadem.InvalidArgument, match="has 100 cached tokens; block 0 holds 0 of the 100"):
        engine.forward(InferEngine.Input([[1]], cache_lengths=[100]))


def test_hooks_are_found_by_pattern_removed_alone_and_refused_with_the_nearest_names():
    engine = InferEngine.from_pretrained(GOLDEN / "llama", disabled_fusions="all")
    seen, others = [], []
    handle = engine.hooks.register_hook("model.layers.*.[qkv]_proj.reshape.y", lambda name, *_: seen.append(name))
    engine.hooks.register_hook("model.norm.*", lambda name, *_: others.append(name))
    engine.forward(InferEngine.Input([[1, 2]]))
    assert seen == [f"model.layers.{layer}.self_attn.{part}_proj.reshape.y" for layer in range(2) for part in "qkv"]
    handle.remove()
    handle.remove()
    engine.forward(InferEngine.Input([[1, 2]]))
    assert len(seen) == 6 and len(others) == 2
    assert len(set(engine.hooks.names())) == len(engine.hooks.names()) > 20
    with pytest.raises(eadem.NotFound, match="no value has that name; the nearest names are '.*mlp.gated_activation.y'"):
        engine.hooks.register_hook("model.layers.0.mlp.gated_activations.y", print)
    with pytest.raises(eadem.InvalidArgument, match="callback is 3"):
        engine.hooks.register_hook("*", 3)


def test_all_logits_says_what_it_needs():
    engine = InferEngine.from_pretrained(GOLDEN / "llama")
    step = InferEngine.Input([[1, 2, 3]], all_logits=True)
    with pytest.raises(eadem.InvalidArgument, match="set max_logit_rows of the engine to 3 or more"):
        engine.forward(step)
    InferEngine.from_pretrained(GOLDEN / "llama", max_logit_rows=3).forward(step)


@pytest.mark.parametrize("make, words", [
    (lambda: InferEngine("llama"), "config is 'llama' .str.; expected LlamaConfig"),
    (lambda: InferEngine.from_pretrained(3), "path is 3 .int.; expected a path"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama", threads="2"), "threads is '2' .str.; expected an int"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama", device_type=None), "device_type is None; expected a str"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama", cache_config=4), "cache_config is 4 .int.; expected Static"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama", disabled_fusions="a"), "no fusion is called 'a'"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama", disabled_fusions=3), "disabled_fusions is 3 .int."),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama", weights=32), "weights is 32 .int.; expected a str or None"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama").forward([[1]]), "input is .*; expected InferEngine.Input"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama").forward(InferEngine.Input("text")), "input_ids has dtype"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama").forward(InferEngine.Input([[1], [2, 3]])), "input_ids is no array"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama").forward(InferEngine.Input([[1]], temperature="hot")),
     "temperature has dtype"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama").forward(InferEngine.Input([[1]], block_tables=3)),
     "block_tables is 3"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama").load_param("model.norm.weight", "ones"), "param is 'ones'"),
    (lambda: InferEngine.from_pretrained(GOLDEN / "llama").load_param(3, np.ones(3)), "name is 3"),
    (lambda: eadem.LLM(3), "model is 3 .int.; expected a path"),
    (lambda: eadem.SamplingParams(temperature="hot"), "temperature is 'hot' .str.; expected a number"),
    (lambda: eadem.SamplingParams(top_k=1.5), "top_k is 1.5 .float.; expected an int"),
    (lambda: eadem.SamplingParams(stop=[3]), "stop is .*expected a str or a sequence of str"),
    (lambda: eadem.SamplingParams(stop_token_ids=3), "stop_token_ids is 3 .int.; expected a sequence of int"),
])
def test_wrong_types_are_named_with_what_was_expected(make, words):
    with pytest.raises(eadem.InvalidArgument, match=words) as caught:
        make()
    for leak in ("_native", "incompatible function arguments", "nanobind", "object has no attribute"):
        assert leak not in str(caught.value)
