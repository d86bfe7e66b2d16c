# SPDX-License-Identifier: Apache-2.0
"""What a caller can get wrong is refused by name: it neither ends the process nor gives numbers that mean nothing."""
import subprocess
import sys

import numpy as np
import pytest

import eadem
from conftest import GOLDEN

LLAMA = str(GOLDEN / "llama")


def one_step(engine):
    return engine.forward(eadem.InferEngine.Input([[1, 2, 3]], temperature=0)).output_ids


def test_a_cache_that_does_not_fit_leaves_an_engine_that_says_so():
    engine = eadem.InferEngine.from_pretrained(LLAMA)
    expected = one_step(engine)
    with pytest.raises(eadem.OutOfMemory):
        engine.reset_cache(eadem.StaticKVCacheConfig(2**24))
    with pytest.raises(eadem.InvalidArgument, match="no cache"):
        one_step(engine)
    with pytest.raises(eadem.InvalidArgument, match="no cache"):
        engine.reset_cache()
    engine.reset_cache(eadem.StaticKVCacheConfig(1))
    np.testing.assert_array_equal(one_step(engine), expected)


def test_a_refused_cache_leaves_the_old_one():
    engine = eadem.InferEngine.from_pretrained(LLAMA)
    expected = one_step(engine)
    with pytest.raises(eadem.InvalidArgument, match="max_batch_size"):
        engine.reset_cache(eadem.StaticKVCacheConfig(2**60))
    engine.reset_cache()
    np.testing.assert_array_equal(one_step(engine), expected)


@pytest.mark.parametrize("arguments", [
    {"cache_config": eadem.StaticKVCacheConfig(2**60)},
    {"cache_config": eadem.PagedKVCacheConfig(1 << 20, 2**60)},
    {"cache_config": eadem.PagedKVCacheConfig(1 << 20, 16, 2**60)},
    {"cache_config": eadem.PagedKVCacheConfig(2**62, 16)},
    {"max_num_batched_tokens": 2**62},
    {"max_num_batched_tokens": 0},
    {"max_logit_rows": 2**62},
    {"max_logit_rows": -1},
])
def test_sizes_out_of_range(arguments):
    with pytest.raises((eadem.InvalidArgument, eadem.OutOfMemory)):
        eadem.InferEngine.from_pretrained(LLAMA, **arguments)


def test_fields_that_overflow_together():
    config = eadem.AutoConfig.from_pretrained(LLAMA)
    config.num_attention_heads = config.num_key_value_heads = 2**62
    with pytest.raises(eadem.InvalidArgument, match="num_attention_heads"):
        config.validate()


def test_parameters_that_nobody_set_are_named():
    config = eadem.AutoConfig.from_pretrained(LLAMA)
    engine = eadem.InferEngine(config)
    engine.load_param("model.norm.weight", np.ones(config.hidden_size, np.float32))
    with pytest.raises(eadem.NotFound, match="lm_head.weight"):
        one_step(engine)
    engine.load_random(1)
    one_step(engine)
    trainer = eadem.Trainer(config)
    with pytest.raises(eadem.NotFound, match="lm_head.weight"):
        trainer.step([[1, 2, 3]], learning_rate=1e-3)
    with pytest.raises(eadem.NotFound, match="lm_head.weight"):
        trainer.evaluate([[1, 2, 3]])


@pytest.mark.parametrize("name, value", [("beta1", 1.0), ("beta2", -0.1), ("eps", 0.0), ("weight_decay", -1.0),
                                         ("max_grad_norm", float("nan")), ("batch_tokens", 2**60)])
def test_trainer_options_out_of_range(name, value):
    with pytest.raises(eadem.InvalidArgument, match=name):
        eadem.Trainer(LLAMA, **{name: value})


def test_a_learning_rate_that_is_no_number_changes_nothing():
    trainer = eadem.Trainer(LLAMA)
    before = trainer.state_dict()
    for rate in (float("nan"), float("inf"), -1.0):
        with pytest.raises(eadem.InvalidArgument, match="learning_rate"):
            trainer.step([[1, 2, 3]], learning_rate=rate)
    for name, weight in trainer.state_dict().items():
        np.testing.assert_array_equal(weight, before[name])


def test_top_k_below_zero():
    engine = eadem.InferEngine.from_pretrained(LLAMA)
    with pytest.raises(eadem.InvalidArgument, match="sequence 0: top_k is -3"):
        engine.forward(eadem.InferEngine.Input([[1]], top_k=-3))


def test_backward_is_of_the_last_forward_whatever_ran_between():
    model = eadem.Sequential([eadem.Linear(4, 3), eadem.Activation("silu")], 4)
    rng = np.random.default_rng(5)
    model.load_param("0.weight", rng.standard_normal((3, 4), np.float32))
    model.load_param("0.bias", rng.standard_normal(3, np.float32))
    x, dy = rng.standard_normal((2, 4), np.float32), rng.standard_normal((2, 3), np.float32)
    model.forward(x)
    expected, expected_weight = model.backward(dy), model.gradient("0.weight")
    model.zero_gradients()
    model.forward(x)
    model.inference(rng.standard_normal((5, 4), np.float32))
    with pytest.raises(eadem.InvalidArgument, match="the last forward had 2"):
        model.backward(np.ones((5, 3), np.float32))
    np.testing.assert_array_equal(model.backward(dy), expected)
    np.testing.assert_array_equal(model.gradient("0.weight"), expected_weight)


def test_a_prompt_without_utf8(stories):
    with pytest.raises(eadem.InvalidArgument, match="prompt 1 has no UTF-8"):
        eadem.LLM(stories).generate(["fine", "\ud800"])


def test_other_texts_without_utf8(stories):
    for make, name in ((lambda text: eadem.SamplingParams(stop=["fine", text]), "stop"),
                       (lambda text: eadem.SamplingParams(bad_words=text), "bad_words"),
                       (lambda text: eadem.LLM(stories, isa=text), "isa"),
                       (lambda text: eadem.LLM(stories, weights=text), "weights"),
                       (lambda text: eadem.InferEngine.from_pretrained(stories, disabled_fusions=text), "disabled_fusions"),
                       (lambda text: eadem.InferEngine.from_pretrained(stories).load_param(text, np.ones(3)), "name")):
        with pytest.raises(eadem.InvalidArgument, match=f"{name} has no UTF-8"):
            make("\ud800")


def test_the_configuration_of_a_gguf_file_can_be_shown(stories):
    config = eadem.AutoConfig.from_pretrained(stories)
    assert "interleaved rope" in repr(config)
    assert config.hidden_act == "silu"
    assert config == eadem.AutoConfig.from_pretrained(stories)
    assert config != eadem.AutoConfig.from_pretrained(LLAMA)
    with pytest.raises(eadem.Unsupported):
        config.to_json()


def test_a_hook_that_holds_its_engine_does_not_trouble_the_interpreters_end():
    code = (f"import eadem\nengine = eadem.InferEngine.from_pretrained({LLAMA!r})\n"
            "engine.hooks.register_hook('*', lambda name, tensor, layer: engine)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_are_called_by_their_public_names():
    assert repr(eadem.NotFound) == "<class 'eadem.NotFound'>"
    assert eadem.Activation("relu2").name == "relu2"
