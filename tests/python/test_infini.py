# SPDX-License-Identifier: Apache-2.0
"""A program that was written for InfiniLM runs with other imports, a device that is here and a model of its own."""
import re

import numpy as np
import pytest
from conftest import GOLDEN, ROOT, load_safetensors

import eadem
from eadem import infini

MODEL = GOLDEN / "llama"


def example(ranks):
    """The program in docs/python.md for so many ranks."""
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```python\n(import eadem.infini as infinicore\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert "tp_size=2" in block
    return block.replace("tp_size=2", f"tp_size={ranks}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_usage_example_runs(ranks, long_model):
    names = {"model_path": long_model}
    exec(compile(example(ranks), "docs/python.md", "exec"), names)
    engine, config = names["engine"], names["config"]
    assert type(config) is eadem.LlamaConfig
    assert len(engine._engine.rank_processes()) == ranks - 1
    assert names["generated_token"].shape == (1, 1)
    # The token is one that a single engine may draw: one of the 50 likeliest of its logits.
    plain = eadem.InferEngine.from_pretrained(long_model)
    logits = plain.forward(eadem.InferEngine.Input([[1, 2, 3, 4]]), return_logits=True).logits[0]
    assert int(names["generated_token"][0, 0]) in np.argsort(logits)[-51:]
    assert (engine.max_batch_size, engine.max_sequence_length) == (16, 4096)


def test_the_fields_of_a_configuration():
    config = infini.AutoConfig.from_pretrained(MODEL)
    fields = {"vocab_size": int, "hidden_size": int, "intermediate_size": int, "num_hidden_layers": int,
              "num_attention_heads": int, "num_key_value_heads": int, "head_dim": int, "max_position_embeddings": int,
              "rms_norm_eps": float, "hidden_act": str, "rope_theta": float, "attention_bias": bool,
              "tie_word_embeddings": bool, "use_cache": bool, "eos_token_id": list, "bos_token_id": list}
    for name, kind in fields.items():
        assert type(getattr(config, name)) is kind, name
    config.validate()
    assert config.kv_dim() == config.num_key_value_heads * config.head_dim
    for name in fields:  # each can be set: first to what it is
        setattr(config, name, getattr(config, name))
    assert config == infini.AutoConfig.from_pretrained(MODEL)
    config.hidden_act = "gelu"
    config.validate()
    assert config.hidden_act == "gelu" and type(config) is infini._infinilm.LlamaConfig
    with pytest.raises(eadem.Error, match="hidden_act"):
        config.hidden_act = "silo"
    with pytest.raises(eadem.Unsupported, match="use_cache is False; an engine keeps the keys and values of earlier"):
        config.use_cache = False


def test_cache_configurations_state_their_sizes_by_methods():
    native = infini._infinilm
    for make in (native.StaticKVCacheConfig, lambda: native.PagedKVCacheConfig(1 << 20)):
        assert isinstance(make(), native.CacheConfig)
    static, paged = native.StaticKVCacheConfig(), native.PagedKVCacheConfig(1 << 20)
    assert (static.max_batch_size(), static.max_cache_len()) == (1, 2**63 - 1)
    assert (paged.max_kv_memory_bytes(), paged.block_size()) == (1 << 20, 16)
    static, paged = native.StaticKVCacheConfig(3, max_cache_len=40), native.PagedKVCacheConfig(1 << 20, block_size=32)
    assert (static.max_batch_size(), static.max_cache_len(), paged.block_size()) == (3, 40, 32)
    engine = native.InferEngine.from_pretrained(MODEL, cache_config=static)
    assert (engine.max_batch_size, engine.max_sequence_length) == (3, 40)
    engine.reset_cache(native.StaticKVCacheConfig(2))  # as long as the model's context
    assert (engine.max_batch_size, engine.max_sequence_length) == (2, 128)
    engine.reset_cache(paged)
    assert engine.block_size == 32
    engine.reset_cache(eadem.StaticKVCacheConfig(4))
    assert engine.max_batch_size == 4
    engine.reset_cache()
    assert engine.max_batch_size == 4
    for make in (lambda: native.StaticKVCacheConfig(0), lambda: native.StaticKVCacheConfig(1, 2**63),
                 lambda: native.StaticKVCacheConfig("3"), lambda: native.PagedKVCacheConfig(),
                 lambda: native.PagedKVCacheConfig(-1), lambda: native.PagedKVCacheConfig(1 << 20, 0),
                 lambda: native.InferEngine.from_pretrained(MODEL, cache_config=4)):
        with pytest.raises((eadem.InvalidArgument, TypeError)):
            make()


def test_fields_of_an_input_that_are_left_out():
    Input = infini._infinilm.InferEngine.Input
    fields = ["input_ids", "position_ids", "cache_lengths", "input_lengths", "block_tables", "slot_mapping", "temperature",
              "top_k", "top_p"]
    empty = Input()
    assert [getattr(empty, name) for name in fields] == [None] * 6 + [1.0, 50, 1.0]
    engine = infini._infinilm.InferEngine.from_pretrained(MODEL, cache_config=infini._infinilm.StaticKVCacheConfig(64))
    with pytest.raises(eadem.InvalidArgument, match="input_ids is None"):
        engine.forward(empty)
    # Each of many sequences draws a token of its own, from the 50 likeliest; None stands for the value left out.
    prompts = [[1, 2, 3, 4]] * 64
    for step in (Input(prompts), Input(input_ids=prompts, temperature=None, top_k=None, top_p=None)):
        engine.reset_cache()
        output = engine.forward(step, return_logits=True)
        drawn = {int(token) for token in output.output_ids[:, 0]}
        assert 3 < len(drawn) and drawn <= set(np.argsort(output.logits[0])[-50:].tolist())
    engine.reset_cache()
    again = engine.forward(Input(prompts)).output_ids
    assert not np.array_equal(again, output.output_ids)
    # Every field takes a tensor.
    engine.reset_cache(infini._infinilm.PagedKVCacheConfig(1 << 20))
    tensors = {"input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 2]], "cache_lengths": [0], "input_lengths": [3],
               "block_tables": [[2, -1]], "slot_mapping": [32, 33, 34]}
    whole = engine.forward(Input(**{name: infini.from_list(value, dtype=infini.int64) for name, value in tensors.items()}),
                           return_logits=True)
    np.testing.assert_array_equal(whole.logits[0], eadem.InferEngine.from_pretrained(MODEL).forward(
        eadem.InferEngine.Input([[1, 2, 3]]), return_logits=True).logits[0])
    engine.reset_cache(infini._infinilm.StaticKVCacheConfig(64))
    # Sampling parameters may differ from one sequence to the next.
    engine.reset_cache()
    mixed = engine.forward(Input(prompts, temperature=[0.0] * 32 + [1.0] * 32)).output_ids[:, 0]
    assert set(mixed[:32].tolist()) == {int(np.argmax(output.logits[0]))} and len(set(mixed[32:].tolist())) > 1


def test_parameters_are_listed_by_rank():
    one = infini._infinilm.InferEngine.from_pretrained(MODEL)
    [whole] = one.state_dict()
    two = infini._infinilm.InferEngine.from_pretrained(MODEL, infini._infinilm.DistConfig(tp_size=2))
    parts = two.state_dict()
    assert len(parts) == 2 and list(parts[0]) == list(whole)
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), whole[name])
    for name, array in whole.items():
        two.load_param(name, infini.from_numpy(array))
    for engine in (one, two):
        with pytest.raises(eadem.NotFound, match="model.nrom.weight"):
            engine.load_param("model.nrom.weight", whole["model.norm.weight"])
        with pytest.raises(eadem.InvalidArgument, match=r"model.norm.weight.*\[3\].*\[64\]|model.norm.weight.*\[64\].*\[3\]"):
            engine.load_param("model.norm.weight", np.ones(3, np.float32))
    one.load_state_dict(whole)


def test_tensors_and_devices():
    tensor = infini.from_list([[1, 2], [3, 4]], dtype=infini.int64)
    assert tensor.shape == [2, 2] and tensor.dtype == np.int64 and tensor._underlying.tolist() == [[1, 2], [3, 4]]
    array = np.ones(3, np.float32)
    assert infini.from_numpy(array)._underlying is array and infini.from_numpy(array).numpy() is array
    assert np.asarray(infini.from_numpy(array)) is array and np.shares_memory(np.from_dlpack(infini.from_numpy(array)), array)
    assert infini.Tensor(array)._underlying is array
    assert infini.device("cpu")._underlying.type == "cpu"
    assert infini.device("nvidia", 0)._underlying.type == "cuda"
    assert infini.device("cuda", 1)._underlying.type == "cuda:1"
    for make in (lambda: infini.device("abacus"), lambda: infini.device("cpu", 1), lambda: infini.from_numpy([1]),
                 lambda: infini.from_list([[1], [2, 3]]), lambda: infini.from_list(["1"])):
        with pytest.raises(eadem.InvalidArgument):
            make()


def test_a_hook_registry_of_ones_own():
    seen = []
    registry = infini._infinilm.HookRegistry()
    assert not registry.has_hooks()
    registry.register_hook("model.norm.*", lambda name, tensor, layer: seen.append((name, tensor.shape, layer)))
    assert registry.has_hooks() and registry.names() == []
    engine = eadem.InferEngine.from_pretrained(MODEL)
    engine.hooks = registry
    assert engine.hooks is registry and registry.names()
    engine.forward(eadem.InferEngine.Input([[1, 2, 3]]))
    assert len(seen) == 1 and seen[0][2] == -1
    with pytest.raises(eadem.InvalidArgument, match="serves another engine"):
        eadem.InferEngine.from_pretrained(MODEL).hooks = registry
    registry.clear()
    assert not registry.has_hooks()
    engine.reset_cache()
    engine.forward(eadem.InferEngine.Input([[1, 2, 3]]))
    assert len(seen) == 1
    # Names are looked up when there is an engine: all of them, or none is registered.
    wrong = eadem.HookRegistry()
    wrong.register_hook("model.norm.*", print)
    wrong.register_hook("model.nrom.*", print)
    with pytest.raises(eadem.NotFound, match="hook on 'model.nrom.*': no value has that name; the nearest names are"):
        engine.hooks = wrong
    assert engine.hooks is registry
    engine.reset_cache()
    engine.forward(eadem.InferEngine.Input([[1, 2, 3]]))  # prints nothing


def test_a_fusion_gives_way_to_a_hook():
    engine = eadem.InferEngine.from_pretrained(MODEL, mode="accuracy")
    whole = eadem.InferEngine.from_pretrained(MODEL, mode="accuracy", disabled_fusions="all")
    step = eadem.InferEngine.Input([[1, 2, 3]])
    expected = engine.forward(step, return_logits=True).logits
    [name, *_] = [name for name in whole.hooks.names() if name not in engine.hooks.names() and "mlp" in name]
    seen = []
    with pytest.raises(eadem.NotFound, match="a fusion keeps that value inside its kernel .*the nearest values"):
        engine.hooks.register_hook(name, lambda *_: seen.append(1))
    engine.hooks.register_hook(name, lambda *_: seen.append(1), unfuse=True)
    np.testing.assert_array_equal(engine.forward(step, return_logits=True).logits, expected)
    assert seen == [1]
