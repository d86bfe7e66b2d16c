# SPDX-License-Identifier: Apache-2.0
"""What is saved reads back: models in Hugging Face layout, states by name, checkpoints of training."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, load_safetensors

import eadem
from eadem import InferEngine

IDS = np.arange(32).reshape(2, 16) % 17
STEP = InferEngine.Input([[3, 1, 4, 1, 5]], temperature=0)


def small_trainer(**options):
    config = eadem.LlamaConfig(vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                               num_attention_heads=2, max_position_embeddings=32)
    return eadem.Trainer(config, batch_tokens=64, **options)


def assert_same_state(a, b):
    assert sorted(a) == sorted(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def test_an_engine_saves_what_it_was_made_from(tmp_path):
    engine = InferEngine.from_pretrained(GOLDEN / "llama", weights="f32")
    engine.save_pretrained(tmp_path / "new/model")
    assert_same_state(load_safetensors(tmp_path / "new/model/model.safetensors"),
                      load_safetensors(GOLDEN / "llama/model.safetensors"))
    assert eadem.AutoConfig.from_pretrained(tmp_path / "new/model") == eadem.AutoConfig.from_pretrained(GOLDEN / "llama")
    copy = InferEngine.from_pretrained(tmp_path / "new/model", weights="f32")
    np.testing.assert_array_equal(engine.forward(STEP, return_logits=True).logits,
                                  copy.forward(STEP, return_logits=True).logits)
    bits = InferEngine.from_pretrained(GOLDEN / "llama", weights="bf16")
    bits.save_pretrained(tmp_path / "bf16")
    assert json.loads((tmp_path / "bf16/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_same_state(InferEngine.from_pretrained(tmp_path / "bf16").state_dict(), bits.state_dict())


def test_a_gguf_model_is_saved_with_its_tokenizer(tmp_path, stories):
    params = eadem.SamplingParams(temperature=0, max_tokens=60)
    [expected] = eadem.LLM(stories).generate("Once upon a time", params)
    InferEngine.from_pretrained(stories).save_pretrained(tmp_path / "engine")
    eadem.Trainer(stories, batch_tokens=8).save(tmp_path / "trainer")
    for name in ("engine", "trainer"):
        assert (tmp_path / name / "tokenizer.json").exists()
        [completion] = eadem.LLM(tmp_path / name).generate("Once upon a time", params)
        assert completion.token_ids == expected.token_ids
    assert_same_state(*(load_safetensors(tmp_path / name / "model.safetensors") for name in ("engine", "trainer")))
    trainer = small_trainer()
    trainer.load_random(seed=1)
    trainer.save(tmp_path / "other", tokenizer=stories)
    assert (tmp_path / "other/tokenizer.json").read_bytes() == (tmp_path / "engine/tokenizer.json").read_bytes()


def test_states_go_from_one_class_to_the_other():
    trainer = eadem.Trainer(GOLDEN / "llama", batch_tokens=64)
    engine = InferEngine.from_pretrained(GOLDEN / "llama", weights="f32")
    assert_same_state(trainer.state_dict(), engine.state_dict())
    trainer.step(IDS, learning_rate=1e-2)
    engine.load_state_dict(trainer.state_dict())
    assert_same_state(trainer.state_dict(), engine.state_dict())
    other = eadem.Trainer(eadem.AutoConfig.from_pretrained(GOLDEN / "llama"), batch_tokens=64)
    other.load_state_dict(engine.state_dict())
    assert other.evaluate(IDS) == trainer.evaluate(IDS)


@pytest.mark.parametrize("name", ["llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "yarn", "linear"])
def test_every_model_comes_back_from_gguf(tmp_path, name):
    program = Path(sys.executable).parent / "eadem"
    subprocess.run([program, "convert", GOLDEN / name, tmp_path / "model.gguf"], check=True, capture_output=True)
    trainer = eadem.Trainer(tmp_path / "model.gguf", batch_tokens=8)
    assert_same_state(trainer.state_dict(), eadem.Trainer(GOLDEN / name, batch_tokens=8).state_dict())
    trainer.save(tmp_path / "model")
    assert eadem.AutoConfig.from_pretrained(tmp_path / "model") == eadem.AutoConfig.from_pretrained(GOLDEN / name)


def test_states_of_gguf_models_are_those_of_the_same_directory(tmp_path, stories):
    engine = InferEngine.from_pretrained(stories)
    state = engine.state_dict()
    assert_same_state(state, eadem.Trainer(stories, batch_tokens=8).state_dict())
    engine.save_pretrained(tmp_path)
    assert_same_state(state, InferEngine.from_pretrained(tmp_path).state_dict())
    # In again, and into models that were made from the GGUF file's configuration.
    expected = engine.forward(STEP, return_logits=True).logits
    engine.load_state_dict({name: np.zeros_like(array) for name, array in state.items()})
    engine.load_state_dict(state)
    engine.reset_cache()
    np.testing.assert_array_equal(engine.forward(STEP, return_logits=True).logits, expected)
    config = eadem.AutoConfig.from_pretrained(stories)
    made = InferEngine(config, weights="f32")
    made.load_state_dict(state)
    served = InferEngine.from_pretrained(tmp_path, weights="f32").forward(STEP, return_logits=True).logits
    np.testing.assert_array_equal(made.forward(STEP, return_logits=True).logits, served)
    # Interleaved or in halves, dot products of q and k add in another order: 8 terms of f32, of 8 * 2^-24 together, which
    # five layers may make 200 times as large.
    np.testing.assert_allclose(served, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    trainer = eadem.Trainer(config, batch_tokens=8)
    trainer.load_state_dict(state)
    trainer.save(tmp_path / "trained")
    assert_same_state(load_safetensors(tmp_path / "trained/model.safetensors"), state)


@pytest.mark.parametrize("make", [lambda: eadem.Trainer(GOLDEN / "llama", batch_tokens=8),
                                  lambda: InferEngine.from_pretrained(GOLDEN / "llama", weights="f32")])
def test_refused_states_change_nothing(make):
    target = make()
    before = target.state_dict()
    state = {name: array + 1 for name, array in before.items()}
    norm = state.pop("model.norm.weight")
    with pytest.raises(eadem.NotFound, match=r"1 lacking \(model.norm.weight\)"):
        target.load_state_dict(state)
    with pytest.raises(eadem.NotFound, match=r"1 that the model does not have \(norm\)"):
        target.load_state_dict({**state, "model.norm.weight": norm, "norm": norm})
    with pytest.raises(eadem.InvalidArgument, match="this is a list"):
        target.load_state_dict([state])
    assert_same_state(before, target.state_dict())
    with pytest.raises(eadem.InvalidArgument, match="norm"):
        target.load_state_dict({**state, "model.norm.weight": norm[:3]})


@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_a_trainer_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path, weights):
    trainer = small_trainer(weights=weights)
    trainer.load_random(seed=3, stddev=0.1)
    for _ in range(3):
        trainer.step(IDS, learning_rate=1e-2)
    for _ in range(2):  # the second replaces the first
        trainer.save_checkpoint(tmp_path / "checkpoint")
    more = [trainer.step(IDS, learning_rate=1e-2) for _ in range(3)]
    again = small_trainer(weights=weights)
    again.load_checkpoint(tmp_path / "checkpoint")
    assert again.num_steps == 3
    assert [again.step(IDS, learning_rate=1e-2) for _ in range(3)] == more
    assert_same_state(again.state_dict(), trainer.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert InferEngine.from_pretrained(tmp_path / "checkpoint").forward(STEP).output_ids.shape == (1, 1)


def test_refused_checkpoints_change_nothing(tmp_path):
    trainer = small_trainer()
    trainer.load_random(seed=3)
    trainer.step(IDS, learning_rate=1e-2)
    path = tmp_path / "checkpoint"
    trainer.save_checkpoint(path)
    other = small_trainer(weights="bf16")
    other.load_random(seed=4)
    before = other.state_dict()
    with pytest.raises(eadem.Error, match="master"):
        other.load_checkpoint(path)
    assert_same_state(before, other.state_dict())
    wide = eadem.LlamaConfig(vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                             num_attention_heads=2, max_position_embeddings=32, rope_theta=5e5)
    with pytest.raises(eadem.InvalidArgument, match=r"'rope_theta' is 10000.0; the trainer's model has 5e\+05"):
        eadem.Trainer(wide, batch_tokens=64).load_checkpoint(path)
    damaged = bytearray((path / "optimizer.safetensors").read_bytes())
    damaged[-5] ^= 1
    (path / "optimizer.safetensors").write_bytes(damaged)
    with pytest.raises(eadem.DataCorrupted, match="optimizer.safetensors"):
        trainer.load_checkpoint(path)
    with pytest.raises(eadem.NotFound, match="absent"):
        trainer.load_checkpoint(tmp_path / "absent")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("precious")
    with pytest.raises(eadem.InvalidArgument, match="no checkpoint"):
        trainer.save_checkpoint(tmp_path / "mine")
    with pytest.raises(eadem.IoError, match="notes.txt"):
        trainer.save(tmp_path / "mine/notes.txt")
    assert (tmp_path / "mine/notes.txt").read_text() == "precious"


def test_a_model_without_values_is_not_saved(tmp_path):
    with pytest.raises(eadem.NotFound):
        small_trainer().save(tmp_path / "out")
    with pytest.raises(eadem.NotFound):
        InferEngine(eadem.AutoConfig.from_pretrained(GOLDEN / "llama")).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
