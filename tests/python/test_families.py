# SPDX-License-Identifier: Apache-2.0
"""Models of any family through the generic configuration, and frozen parameters."""
import numpy as np
import pytest
from conftest import GOLDEN, load_safetensors

import eadem
from eadem import InferEngine

EXACT = dict(weights="f32", activations="f32", max_logit_rows=64)


def logits_of(engine):
    ids = 3 + np.arange(20)[None] % 90
    return engine.forward(InferEngine.Input(ids, all_logits=True), return_logits=True).logits


def test_a_configuration_of_any_family():
    gemma = eadem.AutoConfig.from_pretrained(GOLDEN / "gemma3")
    assert type(gemma) is eadem.Gemma3Config and gemma.model_type == "gemma3_text" and gemma.head_dim == 16
    llama = eadem.AutoConfig.from_pretrained(GOLDEN / "llama")
    assert type(llama) is eadem.LlamaConfig and isinstance(llama, eadem.ModelConfig)
    own = eadem.ModelConfig(model_type="gemma3_text", vocab_size=32, hidden_size=16, intermediate_size=24,
                            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    assert own.tie_word_embeddings and "gemma3_text" in repr(own)
    with pytest.raises(eadem.InvalidArgument, match="not of the family llama"):
        eadem.LlamaConfig(model_type="gemma3_text", vocab_size=32, hidden_size=16, intermediate_size=24,
                          num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    with pytest.raises(eadem.InvalidArgument, match="model_type"):
        eadem.ModelConfig(vocab_size=32)


def test_an_engine_of_a_config_takes_the_values_of_the_checkpoint():
    whole = InferEngine.from_pretrained(GOLDEN / "gemma3", **EXACT)
    engine = InferEngine(eadem.AutoConfig.from_pretrained(GOLDEN / "gemma3"), **EXACT)
    stored = load_safetensors(GOLDEN / "gemma3" / "model.safetensors")
    for name in engine.parameter_names():
        engine.load_param(name, stored[name])
    assert np.array_equal(logits_of(engine), logits_of(whole))
    # The values of norms are those of the file, though the model keeps 1 + w.
    for name, array in whole.state_dict().items():
        assert np.abs(array - stored[name]).max() <= (2.0**-23 if name.endswith("norm.weight") else 0), name


def test_what_is_saved_reads_back(tmp_path):
    whole = InferEngine.from_pretrained(GOLDEN / "gemma3_mixed", **EXACT)
    whole.save_pretrained(tmp_path / "saved")
    assert np.array_equal(logits_of(InferEngine.from_pretrained(tmp_path / "saved", **EXACT)), logits_of(whole))


def test_frozen_parameters_stay():
    trainer = eadem.Trainer(GOLDEN / "gemma3", batch_tokens=64, frozen=["model.embed_tokens.*", "model.layers.[0-5].*"])
    before = trainer.state_dict()
    loss, _ = trainer.step(3 + np.arange(32).reshape(2, 16) % 17, learning_rate=1e-2)
    assert np.isfinite(loss)
    for name, array in trainer.state_dict().items():
        assert np.array_equal(array, before[name]) == (not name.startswith(("model.layers.6.", "model.norm."))), name
    with pytest.raises(eadem.NotFound, match="is trained"):
        trainer.gradient("model.embed_tokens.weight")
    with pytest.raises(eadem.InvalidArgument, match="no parameter matches"):
        eadem.Trainer(GOLDEN / "gemma3", frozen=["nothing.*"])
