# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest
from conftest import GOLDEN, load_safetensors

import eadem


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_losses_and_gradient_norms_match_pytorch(name):
    tokens = load_safetensors(GOLDEN / name / "train.safetensors")["tokens"]
    golden = json.loads((GOLDEN / name / "train.json").read_text())
    trainer = eadem.Trainer(GOLDEN / name, batch_tokens=256, weight_decay=0.1, max_grad_norm=1.0)
    for step, rows in enumerate(tokens):
        # Labels given, and the same labels by default.
        arguments = (rows[:, :-1], rows[:, 1:]) if step % 2 == 0 else (rows,)
        loss, norm = trainer.step(*arguments, learning_rate=1e-3)
        loss32, loss64 = (golden[run]["loss"][step] for run in ("f32", "f64"))
        norm32, norm64 = (golden[run]["grad_norm"][step] for run in ("f32", "f64"))
        # The bounds of tests/train/golden_train_test.cc.
        assert abs(loss - loss64) <= 8 * abs(loss32 - loss64) + 8 * 2.0**-23 * abs(loss64)
        assert abs(norm - norm64) <= 8 * abs(norm32 - norm64) + 64 * 2.0**-23 * abs(norm64)
    assert trainer.num_steps == len(tokens)


def test_products_in_8_bit_floats():
    tokens = load_safetensors(GOLDEN / "llama" / "train.safetensors")["tokens"][0]
    golden = json.loads((GOLDEN / "llama" / "fp8.json").read_text())
    trainer = eadem.Trainer(GOLDEN / "llama", products="fp8_block128", batch_tokens=256)
    loss, _ = trainer.step(tokens, learning_rate=1e-3)
    # The bound of tests/train/fp8_test.cc: a twentieth of what the rounding moves.
    plain = json.loads((GOLDEN / "llama" / "train.json").read_text())["f64"]["loss"][0]
    assert abs(loss - golden["loss_f64"]) < abs(plain - golden["loss_f64"]) / 20
    with pytest.raises(eadem.InvalidArgument, match="products is 'fp8'; expected one of plain, fp8_block128, fp8_tensor"):
        eadem.Trainer(GOLDEN / "llama", products="fp8")
    with pytest.raises(eadem.Unsupported, match="experts.*fp8_e4m3_block128"):
        eadem.Trainer(GOLDEN / "qwen3_moe", products="fp8_block128")


def test_layers_computed_again_have_the_bits_of_kept_ones():
    tokens = load_safetensors(GOLDEN / "llama" / "train.safetensors")["tokens"][0]
    kept, again = (eadem.Trainer(GOLDEN / "llama", batch_tokens=256, recompute=recompute) for recompute in ("none", "layers"))
    for _ in range(2):
        assert kept.step(tokens, learning_rate=1e-3) == again.step(tokens, learning_rate=1e-3)
    with pytest.raises(eadem.InvalidArgument, match="recompute is 'all'; expected one of none, layers"):
        eadem.Trainer(GOLDEN / "llama", recompute="all")


@pytest.mark.parametrize("products", ["fp8_tensor", "fp8_tensor_delayed"])
def test_products_in_8_bit_floats_with_one_scale(products):
    tokens = load_safetensors(GOLDEN / "llama" / "train.safetensors")["tokens"][0]
    golden = json.loads((GOLDEN / "llama" / "fp8_tensor.json").read_text())["losses_f64"][0]
    history = {"amax_history": 4} if products == "fp8_tensor_delayed" else {}
    trainer = eadem.Trainer(GOLDEN / "llama", products=products, batch_tokens=256, **history)
    loss, _ = trainer.step(tokens, learning_rate=1e-3)
    plain = json.loads((GOLDEN / "llama" / "train.json").read_text())["f64"]["loss"][0]
    assert abs(loss - golden) < abs(plain - golden) / 20
    golden = json.loads((GOLDEN / "llama" / "fp8_head.json").read_text())["losses_f64"][0]
    trainer = eadem.Trainer(GOLDEN / "llama", products=products, head_products=products, batch_tokens=256)
    loss, _ = trainer.step(tokens, learning_rate=1e-3)
    assert abs(loss - golden) < abs(plain - golden) / 20
    with pytest.raises(eadem.InvalidArgument, match="head_products is 'fp8_block128'; expected one of plain, fp8_tensor,"):
        eadem.Trainer(GOLDEN / "llama", head_products="fp8_block128")
    with pytest.raises(eadem.InvalidArgument, match="amax_history is 0; expected 1 to"):
        eadem.Trainer(GOLDEN / "llama", products=products, amax_history=0)
    with pytest.raises(eadem.InvalidArgument, match="amax_history is 4, but products are 'plain'"):
        eadem.Trainer(GOLDEN / "llama", amax_history=4)


def test_a_trained_model_serves_the_same_loss():
    config = eadem.LlamaConfig(vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                               num_attention_heads=2, max_position_embeddings=32)
    trainer = eadem.Trainer(config, batch_tokens=64)
    trainer.load_random(seed=3, stddev=0.1)
    ids = np.arange(32).reshape(2, 16) % 17
    first, _ = trainer.step(ids, learning_rate=1e-2)
    for _ in range(30):
        last, norm = trainer.step(ids, learning_rate=1e-2)
    assert last < first / 2 and norm > 0
    loss, labels = trainer.evaluate(ids)
    assert labels == 30 and loss < last
    assert trainer.gradient("model.norm.weight").shape == (16,)
    engine = eadem.InferEngine(config, weights="f32", activations="f32", max_logit_rows=16)
    for name, array in trainer.state_dict().items():
        engine.load_param(name, array)
    total = 0.0
    for row in ids:
        logits = engine.forward(eadem.InferEngine.Input(row[None], all_logits=True), return_logits=True).logits
        logits = logits.astype(np.float64)
        total += (np.log(np.exp(logits).sum(1))[:-1] - logits[np.arange(15), row[1:]]).sum()
    assert total / 30 == pytest.approx(loss, rel=1e-5)


def test_refusals():
    trainer = eadem.Trainer(GOLDEN / "llama", batch_tokens=8)
    with pytest.raises(eadem.InvalidArgument, match="tokens"):
        trainer.step(np.zeros((2, 8), np.int32), learning_rate=1e-3)
    with pytest.raises(eadem.InvalidArgument, match="labels"):
        trainer.step([[1, 2]], [[1]], learning_rate=1e-3)
    with pytest.raises(eadem.InvalidArgument, match="weights"):
        eadem.Trainer(GOLDEN / "llama", weights="f16")
    with pytest.raises(TypeError):
        trainer.step([[1, 2]])


def test_sequential_against_numpy():
    rng = np.random.default_rng(5)
    model = eadem.Sequential([eadem.RMSNorm(6, eps=1e-5), eadem.Linear(6, 10), eadem.Activation("silu"),
                              eadem.Linear(10, 3, bias=False)], 6, max_rows=8)
    with pytest.raises(eadem.NotFound):
        model.inference(np.zeros((1, 6), np.float32))
    shapes = {"0.weight": (6,), "1.weight": (10, 6), "1.bias": (10,), "3.weight": (3, 10)}
    assert sorted(model.parameter_names()) == sorted(shapes)
    p = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, array in p.items():
        model.load_param(name, array)
        np.testing.assert_array_equal(model.state_dict()[name], array)

    def run(p, x):
        n = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * p["0.weight"]
        h = n @ p["1.weight"].T + p["1.bias"]
        return h / (1 + np.exp(-h)) @ p["3.weight"].T

    x = rng.normal(size=(5, 6)).astype(np.float32)
    dy = rng.normal(size=(5, 3)).astype(np.float32)
    with pytest.raises(eadem.InvalidArgument, match="before forward"):
        model.backward(dy)
    wide = {name: array.astype(np.float64) for name, array in p.items()}
    y = model.forward(x)
    np.testing.assert_array_equal(y, model.inference(x))
    # Sums of at most 10 terms of size about 10, three in a row, in f32.
    np.testing.assert_allclose(y, run(wide, x.astype(np.float64)), rtol=0, atol=3 * 10 * 10 * 2.0**-24)
    model.forward(x)
    dx = model.backward(dy)
    with pytest.raises(eadem.InvalidArgument, match="each needs one of its own"):
        model.backward(dy)
    step = 1e-6  # central differences in f64: error about step^2 plus 2^-53 / step, far below f32's

    def numeric(evaluate, array):
        result = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            for sign in (1, -1):
                array[index] += sign * step
                result[index] += sign * (evaluate() * dy).sum() / (2 * step)
                array[index] -= sign * step
        return result

    wide_x = x.astype(np.float64)
    scale = 3 * 10 * 30 * 2.0**-24  # as above; gradients are of size about 30
    np.testing.assert_allclose(dx, numeric(lambda: run(wide, wide_x), wide_x), rtol=0, atol=scale)
    for name in p:
        want = numeric(lambda: run(wide, wide_x), wide[name])
        np.testing.assert_allclose(model.gradient(name), want, rtol=0, atol=scale)
    model.zero_gradients()
    assert not model.gradient("1.bias").any()


def test_sequential_refusals():
    with pytest.raises(eadem.InvalidArgument, match="module 1"):
        eadem.Sequential([eadem.Linear(4, 5), eadem.RMSNorm(4)], 4)
    with pytest.raises(eadem.InvalidArgument, match="tanh"):
        eadem.Activation("tanh")
    model = eadem.Sequential([eadem.Activation("relu")], 4, max_rows=2)
    with pytest.raises(eadem.InvalidArgument, match="'x'"):
        model.inference(np.zeros((3, 4), np.float32))
