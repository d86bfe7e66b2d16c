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
    # The bound of tests/engine/golden_test.cc: PyTorch's own f32 error, times what a maximum varies by.
    torch_error = np.abs(expected["logits"] - expected["logits_f64"]).max()
    assert np.abs(output.logits - expected["logits_f64"]).max() <= 8 * torch_error
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
    assert one.output_ids.shape == (2, 1) and one.logprobs.shape == (2, 1)
    engine.reset_cache(eadem.PagedKVCacheConfig(max_kv_memory_bytes=1 << 20, block_size=4, max_batch_size=2))
    assert engine.block_size == 4 and engine.cache_bytes <= 1 << 20
    tables = np.array([[9, 3], [5, 1]])
    slots = [*range(36, 40), *range(12, 15), *range(20, 24), 4]
    three = engine.forward(InferEngine.Input(padded, input_lengths=[7, 5], block_tables=tables, slot_mapping=slots,
                                             temperature=0), return_logits=True)
    np.testing.assert_array_equal(one.output_ids, three.output_ids)
    np.testing.assert_array_equal(one.logits, three.logits)


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
    with pytest.raises(eadem.Unsupported, match="2 ranks"):
        InferEngine(eadem.AutoConfig.from_pretrained(GOLDEN / "llama"), eadem.DistConfig(2))


@pytest.mark.parametrize("change, words", [
    ({"input_ids": [[256]]}, "vocabulary"),
    ({"input_ids": [[2**40]]}, "input_ids"),
    ({"input_ids": [[0.5]]}, "integers"),
    ({"input_ids": [[[1]]]}, "shape"),
    ({"position_ids": [[0, 1]]}, "position_ids"),
    ({"position_ids": [[1, 2, 4]]}, "position"),
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
             eadem.IoError: OSError, eadem.DeviceError: RuntimeError, eadem.Cancelled: eadem.Error}
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
        InferEngine.from_pretrained(GOLDEN / "llama", device="abacus")
