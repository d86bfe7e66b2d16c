# SPDX-License-Identifier: Apache-2.0
"""A configuration class for each family: its name, its fields, validate() and kv_dim()."""
import json

import numpy as np
import pytest
from conftest import GOLDEN, load_safetensors

import eadem

# The class of each family's models, as a reader of transformers' names expects it.
CLASSES = {
    "Cohere2Config": "cohere2", "DeepseekConfig": "deepseek_v2 deepseek_v3 deepseek_v32 mistral4",
    "DeepseekV4Config": "deepseek_v4", "Ernie4_5Config": "ernie4_5", "Ernie4_5_MoeConfig": "ernie4_5_moe",
    "Exaone4Config": "exaone4", "FalconH1Config": "falcon_h1", "GPT2Config": "gpt2", "GPTNeoXConfig": "gpt_neox",
    "Gemma2Config": "gemma2", "Gemma3Config": "gemma3_text", "Gemma4Config": "gemma4_text", "Glm4Config": "glm4",
    "Glm4MoeConfig": "glm4_moe", "GptOssConfig": "gpt_oss", "GraniteConfig": "granite",
    "GraniteMoeConfig": "granitemoe granitemoeshared granitemoehybrid", "HunYuanConfig": "hunyuan_v1_dense",
    "KimiLinearConfig": "kimi_linear", "Lfm2Config": "lfm2", "Llama4Config": "llama4_text",
    "LlamaConfig": "llama mistral qwen2 qwen3", "LongcatFlashConfig": "longcat_flash", "MiniMaxM2Config": "minimax_m2",
    "MixtralConfig": "mixtral", "NemotronHConfig": "nemotron_h", "OlmoConfig": "olmo2 olmo3", "OlmoeConfig": "olmoe",
    "Phi3Config": "phi3", "Qwen2MoeConfig": "qwen2_moe", "Qwen3MoeConfig": "qwen3_moe",
    "Qwen3NextConfig": "qwen3_next", "Qwen3_5Config": "qwen3_5_text qwen3_5_moe_text", "SmolLM3Config": "smollm3",
    "Starcoder2Config": "starcoder2",
}
CLASS_OF = {model_type: name for name, types in CLASSES.items() for model_type in types.split()}


def text_config(path):
    config = json.loads((path / "config.json").read_text())
    return config.get("text_config", config)


GOLDENS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json")
                 if text_config(path.parent).get("model_type") in CLASS_OF)


# Keys whose value in the file is not the one in force.
DERIVED = {
    ("exaone4_full", "sliding_window"), ("cohere2_full", "sliding_window"),  # no layer has the window
    # There is no norm: mamba_rms_norm is false.
    ("falcon_h1", "mamba_norm_before_gate"), ("falcon_h1_bias", "mamba_norm_before_gate"),
    ("granitemoehybrid_dense", "num_experts_per_tok"),  # there are no experts
    ("deepseek_vl_multimodal", "tie_word_embeddings"),  # the whole model ties its head, as transformers' logits show
    ("lfm2_bias", "intermediate_size"), ("lfm2_bias", "block_auto_adjust_ff_dim"),  # the latter has changed the former
}


def loaded(name):
    return eadem.AutoConfig.from_pretrained(GOLDEN / name)


def test_every_family_has_a_class():
    classes = {name for name in eadem.__all__ if name.endswith("Config") and isinstance(getattr(eadem, name), type)
               and issubclass(getattr(eadem, name), eadem.ModelConfig)} - {"ModelConfig"}
    assert classes == set(CLASSES)
    assert {CLASS_OF[text_config(GOLDEN / name)["model_type"]] for name in GOLDENS} == set(CLASSES), "each has a golden"
    for name in classes:
        documented = getattr(eadem, name).__doc__
        assert all(model_type in documented for model_type in CLASSES[name].split()), documented


@pytest.mark.parametrize("name", GOLDENS)
def test_from_pretrained_gives_the_class_of_the_family(name):
    config = loaded(name)
    assert type(config).__name__ == CLASS_OF[config.model_type] and type(config) is getattr(eadem, type(config).__name__)
    assert isinstance(config, eadem.ModelConfig) and repr(config).startswith(type(config).__name__ + "(")
    config.validate()
    assert config.num_parameters() > 0
    # The same configuration from its own keys; a class takes its family's alone.
    keys = json.loads(config.to_json())
    assert type(config)(**keys) == config
    other = eadem.Gemma2Config if type(config) is not eadem.Gemma2Config else eadem.LlamaConfig
    with pytest.raises(eadem.InvalidArgument, match=f"'{config.model_type}' is not of the family .* {other.__name__}"):
        other(**keys)


@pytest.mark.parametrize("name", GOLDENS)
def test_fields_are_those_of_the_file(name):
    config = loaded(name)
    stated = text_config(GOLDEN / name)
    written = json.loads(config.to_json())
    compared = 0
    for key, value in written.items():
        if key in ("architectures", "torch_dtype"):
            continue
        field = getattr(config, key)  # every key that is written is a field
        if key in ("bos_token_id", "eos_token_id"):
            field, value = sorted(field), sorted(value if isinstance(value, list) else [value])
        assert field == value, key
        # transformers' file says the same, where it has the key and does not write it in another form.
        if isinstance(stated.get(key), (int, float, str)) and key not in ("model_type", "bos_token_id", "eos_token_id"):
            assert field == stated[key] or (name, key) in DERIVED, (key, field, stated[key])
            compared += 1
    assert compared >= 8, "it compares something"


def test_a_field_is_set_through_the_checks_of_a_file():
    config = loaded("qwen3_moe")
    config.num_experts = 4
    assert config.num_experts == 4 and json.loads(config.to_json())["num_experts"] == 4
    for value, words in ((0, "num_experts.* is 0"), ("x", "num_experts")):
        with pytest.raises(eadem.InvalidArgument, match=words):
            config.num_experts = value
    assert config.num_experts == 4
    with pytest.raises(AttributeError):
        config.kv_lora_rank
    config.num_attention_heads = 0
    with pytest.raises(eadem.InvalidArgument, match="num_attention_heads"):
        config.validate()


def test_arguments_of_a_class():
    config = eadem.Gemma2Config(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    assert config.model_type == "gemma2" and config.attn_logit_softcapping == 50 and config.kv_dim() == 8
    config.__init__(**json.loads(config.to_json()))
    assert config.final_logit_softcapping == 30
    with pytest.raises(eadem.Unsupported, match="colour"):
        eadem.Gemma2Config(**json.loads(config.to_json()), colour=1)
    with pytest.raises(eadem.InvalidArgument, match="vocab_size"):
        eadem.GPT2Config()

    with pytest.raises(AttributeError):
        config.colour = 1

    class Mine(eadem.LlamaConfig):
        pass

    mine = Mine(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                max_position_embeddings=8)
    assert mine.kv_dim() == 16 and "Mine" in repr(mine)


# Names of a layer's weights whose rows are those of k, or of q, k and v.
OF_K = ("self_attn.k_proj.weight", "attention.k_proj.weight", "mixer.k_proj.weight")
OF_QKV = ("self_attn.qkv_proj.weight", "attention.query_key_value.weight")


@pytest.mark.parametrize("name", GOLDENS)
def test_kv_dim_is_that_of_the_checkpoint(name):
    config = loaded(name)
    path = GOLDEN / name / "model.safetensors"
    if not path.exists():
        pytest.skip("the golden has no weights of its own")
    rows = set()
    try:
        weights = load_safetensors(path)
    except KeyError:
        pytest.skip("weights in a dtype that this test does not read")
    for weight, array in weights.items():
        if "vision" in weight or "visual" in weight:  # of a tower for images
            continue
        if weight.endswith(OF_K):
            rows.add(array.shape[0])
        elif weight.endswith(OF_QKV):
            rows.add((array.shape[0] - config.num_attention_heads * config.head_dim) // 2)
        elif weight.endswith("attn.c_attn.weight"):  # GPT-2 stores it transposed
            rows.add(array.shape[1] // 3)
    if type(config).__name__ in ("DeepseekConfig", "DeepseekV4Config", "KimiLinearConfig", "LongcatFlashConfig"):
        rows = set()  # latents, or rows that are keys and values
    if len(rows) == 1:
        assert config.kv_dim() == rows.pop()
    else:
        with pytest.raises(eadem.Unsupported, match=f"kv_dim of type {config.model_type}"):
            config.kv_dim()


def test_a_configuration_makes_an_engine_and_a_trainer():
    for name in ("gpt2", "falcon_h1", "deepseek_v3"):
        config = loaded(name)
        engine = eadem.InferEngine(config)
        engine.load_random(1)
        assert engine.forward(eadem.InferEngine.Input([[5, 6, 7]])).output_ids.shape == (1, 1)
        trainer = eadem.Trainer(config, batch_tokens=16)
        trainer.load_random(1)
        loss, _ = trainer.step(5 + np.arange(16)[None] % 7, learning_rate=1e-3)
        assert np.isfinite(loss)
