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


def test_tensors_and_devices():
    tensor = infini.from_list([[1, 2], [3, 4]], dtype=infini.int64)
    assert tensor.shape == [2, 2] and tensor.dtype == np.int64 and tensor._underlying.tolist() == [[1, 2], [3, 4]]
    array = np.ones(3, np.float32)
    assert infini.from_numpy(array)._underlying is array and infini.from_numpy(array).numpy() is array
    assert infini.device("cpu")._underlying.type == "cpu"
    assert infini.device("nvidia", 0)._underlying.type == "cuda"
    assert infini.device("cuda", 1)._underlying.type == "cuda:1"
    for make in (lambda: infini.device("abacus"), lambda: infini.device("cpu", 1), lambda: infini.from_numpy([1]),
                 lambda: infini.from_list([[1], [2, 3]])):
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
