# SPDX-License-Identifier: Apache-2.0
"""Trainers on a mesh from Python: the bits of the command, whole weights, and nothing left when something ends."""
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN
from test_ranks import is_gone

import eadem
from eadem import DistConfig, Trainer

COMMAND = Path(sys.executable).parent / "eadem"
CONFIG = {"model_type": "llama", "vocab_size": 270, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}
EXPERTS = CONFIG | {"model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MESHES = [dict(dp_size=2), dict(tp_size=2), dict(pp_size=2), dict(dp_size=2, tp_size=2, pp_size=2)]


def batches(count, seed=1, tokens=48):
    rng = np.random.default_rng(seed)
    return [Trainer.Batch(rng.integers(0, 270, tokens), lengths=[20, tokens - 20]) for _ in range(count)]


def trained(config, steps=3, passes=4, **ranks):
    trainer = Trainer(config, batch_tokens=64, distributed_config=DistConfig(**ranks) if ranks else None)
    trainer.load_random(seed=3, stddev=0.1)
    losses = [trainer.step(batches(passes, step), learning_rate=1e-3) for step in range(steps)]
    return trainer, losses


def run_command(folder, extra, *arguments):
    """A run of the command in which every pass is the one document, at one learning rate."""
    text = "the cat and the dog and the hat. " * 3
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text(text)
    run = lambda *words: subprocess.run([COMMAND, *words], cwd=folder, check=True, capture_output=True, text=True)
    run("tokenizer", "train", "text.txt", "--vocab-size", "270", "--special", "<|endoftext|>", "--eos", "<|endoftext|>",
        "-o", "tokenizer")
    ids = [*eadem.Tokenizer.from_file(folder / "tokenizer").encode(text.strip()), 0]
    (folder / "recipe.toml").write_text(f"""
[model]
config = "config.json"
init_std = 0.1
[tokenizer]
path = "tokenizer"
[data]
train = ["text.txt"]
[training]
steps = 3
batch_tokens = {len(ids)}
accumulation = 2
sequence_length = {len(ids)}
warmup_steps = 0
learning_rate = 1e-3
min_learning_rate = 1e-3
seed = 5
{extra}
[output]
directory = "out"
""")
    run("train", "recipe.toml", *arguments)
    return ids, folder / "out/checkpoints/step_00000003"


@pytest.mark.skipif(not COMMAND.exists(), reason="the package has no command")
@pytest.mark.parametrize("weights", ["f32", "bf16"])
@pytest.mark.parametrize("ranks", [{}, *MESHES], ids=str)
def test_checkpoints_have_the_bytes_of_the_command(tmp_path, ranks, weights):
    options = [word for name, size in ranks.items() for word in (f"--{name[:2]}", str(size))]
    ids, expected = run_command(tmp_path, f'weights = "{weights}"', *options)
    trainer = Trainer(eadem.LlamaConfig(**CONFIG), batch_tokens=len(ids), weights=weights,
                      distributed_config=DistConfig(**ranks))
    trainer.load_random(seed=5, stddev=0.1)
    for _ in range(3):
        trainer.step([Trainer.Batch(ids), Trainer.Batch(ids)], learning_rate=1e-3)
    trainer.save_checkpoint(tmp_path / "own")
    for name in ("config.json", "model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "own" / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.parametrize("ranks", MESHES, ids=str)
def test_meshes_train_what_one_rank_trains(ranks):
    config = eadem.LlamaConfig(**CONFIG)
    one, expected = trained(config)
    several, losses = trained(config, **ranks)
    # Ranks of dp and tp regroup sums of f32: tests/distributed bounds losses of a few steps by 1e-3.
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-3)
    assert losses[2][0] < losses[0][0] + 0.1 and several.num_steps == 3
    assert several.parameter_names() == one.parameter_names()
    batch = batches(1, 9)[0]
    loss, labels = several.evaluate(batch.input_ids, lengths=batch.lengths)
    assert labels == 46 and loss == pytest.approx(one.evaluate(batch.input_ids, lengths=batch.lengths)[0], abs=1e-3)
    whole, state = one.state_dict(), several.state_dict()
    assert {name: array.shape for name, array in state.items()} == {name: array.shape for name, array in whole.items()}
    for name in whole:
        np.testing.assert_allclose(state[name], whole[name], rtol=0, atol=4e-3)  # AdamW moves by the rate, of either sign
        gradient = several.gradient(name)
        assert gradient.shape == whole[name].shape and np.isfinite(gradient).all() and gradient.any()


def test_stages_share_tied_weights_and_balance_experts():
    for config, name in ((eadem.LlamaConfig(**CONFIG | {"tie_word_embeddings": True}), "model.embed_tokens.weight"),
                         (eadem.Qwen3MoeConfig(**EXPERTS, router_aux_loss_coef=0.1), "model.layers.0.mlp.gate.weight")):
        one, expected = trained(config)
        several, losses = trained(config, pp_size=2)
        assert losses[0][0] == expected[0][0]
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-3)  # of a norm that is rounded for each stage
        assert several.parameter_names() == one.parameter_names()
        assert sorted(several.state_dict()) == sorted(one.state_dict())
        np.testing.assert_allclose(several.gradient(name), one.gradient(name), rtol=0, atol=1e-3)


def test_experts_divide():
    config = eadem.Qwen3MoeConfig(**EXPERTS)
    _, expected = trained(config)
    for ranks in (dict(ep_size=2), dict(ep_size=4), dict(dp_size=2, ep_size=2)):
        several, losses = trained(config, **ranks)
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-3)
        assert several.gradient("model.layers.0.mlp.experts.up_proj.weight").shape[0] == 4


def test_any_mesh_goes_on_from_a_checkpoint(tmp_path):
    config = eadem.LlamaConfig(**CONFIG)
    first, _ = trained(config, dp_size=2)
    first.save_checkpoint(tmp_path / "first")
    first.save(tmp_path / "model")
    expected = first.state_dict()
    for ranks in (dict(tp_size=2), dict(pp_size=2), {}):
        again = Trainer(config, batch_tokens=64, distributed_config=DistConfig(**ranks))
        again.load_checkpoint(tmp_path / "first")
        assert again.num_steps == 3
        for name, array in again.state_dict().items():
            np.testing.assert_array_equal(array, expected[name])
        again.save_checkpoint(tmp_path / "again")
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "first" / file).read_bytes()
        from_files = Trainer(tmp_path / "model", batch_tokens=64, distributed_config=DistConfig(**ranks))
        np.testing.assert_array_equal(from_files.state_dict()["lm_head.weight"], expected["lm_head.weight"])


def test_parameters_are_given_whole():
    config = eadem.LlamaConfig(**CONFIG)
    source, _ = trained(config, steps=1)
    state = source.state_dict()
    for ranks in (dict(tp_size=2), dict(pp_size=2)):
        several = Trainer(config, batch_tokens=64, distributed_config=DistConfig(**ranks))
        # The last stage alone lacks it; nobody waits for that stage.
        for name in state:
            if name != "lm_head.weight":
                several.load_param(name, state[name])
        with pytest.raises(eadem.NotFound, match="not set|lm_head.weight"):
            several.step(batches(1), learning_rate=1e-3)
        several.load_state_dict(state)
        for name, array in several.state_dict().items():
            np.testing.assert_array_equal(array, state[name])
        several.step(batches(1), learning_rate=1e-3)


def test_what_is_refused_leaves_the_ranks_together(tmp_path):
    config = eadem.LlamaConfig(**CONFIG)
    trainer, _ = trained(config, steps=1, dp_size=2)
    [good] = batches(1)
    for steps, words in (([good], "1 batches; 2 ranks of dp and 1 of ep.* a multiple of 2"),
                         ([good, Trainer.Batch([300])], "token 0 of the batch is 300"),
                         ([good, Trainer.Batch(np.zeros(65, int))], "the batch has 65 tokens; expected 1 to 64"),
                         ([good, 7], "batch 1 is 7 .int.; expected a Trainer.Batch")):
        with pytest.raises(eadem.InvalidArgument, match=words):
            trainer.step(steps, learning_rate=1e-3)
    with pytest.raises(eadem.InvalidArgument, match="learning_rate is -1"):
        trainer.step([good, good], learning_rate=-1)
    with pytest.raises(eadem.NotFound, match="nothing"):
        trainer.load_param("nothing", np.zeros(3, np.float32))
    with pytest.raises(eadem.InvalidArgument, match="norm"):
        trainer.load_param("model.norm.weight", np.zeros(3, np.float32))
    with pytest.raises(eadem.NotFound, match="no parameter 'x' is trained"):
        trainer.gradient("x")
    with pytest.raises(eadem.NotFound):
        trainer.load_checkpoint(tmp_path / "none")
    assert np.isfinite(trainer.step([good, good], learning_rate=1e-3)[0])


@pytest.mark.parametrize("make, error, words", [
    (lambda: Trainer(eadem.LlamaConfig(**CONFIG), distributed_config=DistConfig(3)), eadem.Error, "2 attention heads"),
    (lambda: Trainer(eadem.LlamaConfig(**CONFIG), distributed_config=DistConfig(pp_size=3)), eadem.Error,
     "2 layers for 3 pipeline stages"),
    (lambda: Trainer(eadem.LlamaConfig(**CONFIG), distributed_config=DistConfig(ep_size=2)), eadem.Error,
     "2 ranks to divide experts; the model has none"),
    (lambda: Trainer(GOLDEN / "llama", distributed_config=DistConfig(dp_size=2), threads=1), eadem.InvalidArgument,
     "threads is 1; 2 ranks need at least one each"),
    (lambda: Trainer(GOLDEN / "llama", distributed_config=DistConfig(dp_size=2), device="reference"), eadem.Unsupported,
     "2 ranks on 'reference'"),
    (lambda: Trainer(GOLDEN / "llama", distributed_config=2), eadem.InvalidArgument, "distributed_config is 2 .int."),
    (lambda: DistConfig(dp_size=0), eadem.InvalidArgument, "dp_size is 0; expected 1 to 1024"),
    (lambda: eadem.InferEngine.from_pretrained(GOLDEN / "llama", DistConfig(dp_size=2)), eadem.Unsupported,
     "dp_size is 2 and pp_size 1; the ranks of an engine"),
    (lambda: eadem.InferEngine.from_pretrained(GOLDEN / "qwen3_moe", DistConfig(2, ep_size=2)), eadem.Unsupported,
     "tp_size is 2 and ep_size 2"),
])
def test_what_cannot_be_divided_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_rank_that_is_killed_ends_the_step_and_a_new_trainer_works():
    config = eadem.LlamaConfig(**CONFIG)
    trainer, expected = trained(config, dp_size=2, tp_size=2)
    ranks = trainer._trainer.rank_processes()
    assert len(ranks) == 3
    os.kill(ranks[2], signal.SIGKILL)
    with pytest.raises(eadem.RankFailed, match=rf"rank 3 \(process {ranks[2]}\) died: signal 9"):
        while True:
            trainer.step(batches(2), learning_rate=1e-3)
    del trainer
    gc.collect()
    assert all(is_gone(rank) for rank in ranks)
    assert trained(config, dp_size=2, tp_size=2)[1] == expected


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_die_with_a_parent_that_is_killed(how):
    program = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import eadem
trainer = eadem.Trainer(eadem.LlamaConfig(**{CONFIG!r}), batch_tokens=64, distributed_config=eadem.DistConfig(2, dp_size=2))
trainer.load_random(1)
print(*trainer._trainer.rank_processes(), flush=True)
while True:
    trainer.step([eadem.Trainer.Batch(range(48))] * 2, learning_rate=1e-3)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = [int(word) for word in process.stdout.readline().split()]
    assert len(ranks) == 3
    process.send_signal(how)
    process.communicate(timeout=30)
    assert all(is_gone(rank) for rank in ranks)
