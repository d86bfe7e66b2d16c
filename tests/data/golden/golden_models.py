# SPDX-License-Identifier: Apache-2.0
"""The configurations of the models that make_goldens.py writes, and of its rotary tables."""

import torch

# Dimensions shared by most models; a row below overrides what it wants to be special.
COMMON = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, pad_token_id=None)


def rope(theta, **scaling):
    return dict(rope_theta=theta, **({"rope_type": "default"} | scaling))


# Per model: its type, the prompt's length and the salt of its random ids (chosen so that the greedy continuation
# varies and is never close to a tie), the config, and keys to add to config.classic.json.
MODELS = {
    "llama": dict(
        type="llama", prompt=48, salt=14,
        config=dict(hidden_size=64, intermediate_size=56, vocab_size=256, rope_parameters=rope(10000.0))),
    # head_dim 32, theta 10000: wavelengths 6.3, 11.2, 19.9, 35.3 ...; the bands end at 32/4 = 8 and 32/1 = 32.
    "llama31": dict(
        type="llama", prompt=48, salt=4,
        config=dict(hidden_size=64, intermediate_size=56, num_attention_heads=2, num_key_value_heads=1,
                    tie_word_embeddings=True, rope_parameters=rope(
                        10000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                        original_max_position_embeddings=32))),
    "mistral": dict(
        type="mistral", prompt=44, salt=17, config=dict(head_dim=16, sliding_window=8, rope_parameters=rope(10000.0))),
    "qwen2": dict(
        type="qwen2", prompt=40, salt=12,
        classic=dict(use_sliding_window=False, sliding_window=16, max_window_layers=2),
        config=dict(intermediate_size=96, rms_norm_eps=1e-6, tie_word_embeddings=True,
                    rope_parameters=rope(1000000.0))),
    "qwen3": dict(
        type="qwen3", prompt=45, salt=2,
        config=dict(head_dim=32, intermediate_size=64, rms_norm_eps=1e-6, tie_word_embeddings=True,
                    rope_parameters=rope(1000000.0))),
    "smollm2": dict(
        type="llama", prompt=47, salt=7,
        config=dict(hidden_size=72, intermediate_size=52, num_attention_heads=3, num_key_value_heads=1,
                    vocab_size=131, tie_word_embeddings=True, rope_parameters=rope(100000.0))),
    # Default betas (32 and 1): pairs 0 | 1-4 | 5-15 of 16 are extrapolated | blended | interpolated.
    "yarn": dict(
        type="llama", prompt=72, salt=21,
        config=dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                    rope_parameters=rope(500.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=32))),
    "linear": dict(
        type="llama", prompt=48, salt=17,
        config=dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2,
                    rope_parameters=rope(10000.0, rope_type="linear", factor=2.0))),
    # A GGUF file of gemma3 can state this model: it has the pattern of six layers and the usual scale of q . k.
    "gemma3": dict(
        type="gemma3_text", prompt=44, salt=5, classic=dict(rope_theta=1000.0, rope_local_base_freq=10000.0,
                                                            sliding_window_pattern=6),
        config=dict(hidden_size=24, intermediate_size=32, num_hidden_layers=7, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=16, vocab_size=96, rms_norm_eps=1e-6, tie_word_embeddings=True,
                    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=16, sliding_window=8,
                    rope_parameters={"full_attention": rope(1000.0), "sliding_attention": rope(10000.0)})),
    # A GGUF file of gemma3 cannot state this model: the order of layers, the scale, the theta of layers with windows
    # and the rope scaling of full layers are others.
    "gemma3_mixed": dict(
        type="gemma3_text", prompt=40, salt=3, classic=dict(rope_theta=2000.0, rope_local_base_freq=50.0),
        config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
                    num_key_value_heads=2, head_dim=12, vocab_size=96, rms_norm_eps=1e-6, tie_word_embeddings=False,
                    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=20, sliding_window=12,
                    layer_types=["full_attention", "sliding_attention", "full_attention"],
                    rope_parameters={"full_attention": rope(2000.0, rope_type="linear", factor=2.0),
                                     "sliding_attention": rope(50.0)})),
    # Experts in the first and the last of three layers; their weights are not divided by their sum.
    "qwen3_moe": dict(
        type="qwen3_moe", prompt=42, salt=6,
        config=dict(hidden_size=32, intermediate_size=40, moe_intermediate_size=20, num_hidden_layers=3,
                    num_key_value_heads=2, head_dim=12, vocab_size=96, num_experts=8, num_experts_per_tok=2,
                    mlp_only_layers=[1], norm_topk_prob=False, rms_norm_eps=1e-6, rope_parameters=rope(1000000.0))),
    # A GGUF file of qwen3moe can state this model: every layer has experts, whose weights are divided by their sum.
    "qwen3_moe_all": dict(
        type="qwen3_moe", prompt=40, salt=5, gguf=True,
        config=dict(hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=16, vocab_size=96, num_experts=6, num_experts_per_tok=3,
                    norm_topk_prob=True, rms_norm_eps=1e-6, rope_parameters=rope(10000.0))),
    "mixtral": dict(
        type="mixtral", prompt=40, salt=1,
        config=dict(hidden_size=24, intermediate_size=20, num_key_value_heads=2, vocab_size=64, num_local_experts=5,
                    num_experts_per_tok=2, rope_parameters=rope(1000000.0))),
    # An expert for all tokens beside the others, in the one layer.
    "qwen2_moe": dict(
        type="qwen2_moe", prompt=42, salt=1, gguf=True,
        config=dict(hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
                    shared_expert_intermediate_size=32, vocab_size=96, num_experts=3, num_experts_per_tok=2,
                    rms_norm_eps=1e-6, rope_parameters=rope(1000000.0))),
    # A dense layer, then experts of the best two of three groups; norms and biases; half of each head rotates.
    "glm4_moe": dict(
        type="glm4_moe", prompt=40, salt=1,
        config=dict(hidden_size=24, intermediate_size=40, moe_intermediate_size=12, head_dim=12,
                    vocab_size=64, n_routed_experts=9, num_experts_per_tok=3, n_group=3, topk_group=2,
                    n_shared_experts=1, routed_scaling_factor=1.5, first_k_dense_replace=1, use_qk_norm=True,
                    attention_bias=True, num_nextn_predict_layers=0,
                    rope_parameters=rope(10000.0, partial_rotary_factor=0.5))),
    # Experts in the middle layer; a correction that leaves some without work; pairs of neighbours rotate.
    "ernie4_5_moe": dict(
        type="ernie4_5_moe", prompt=40, salt=1,
        config=dict(hidden_size=24, intermediate_size=32, moe_intermediate_size=12, num_hidden_layers=3,
                    vocab_size=64, moe_num_experts=9, moe_k=2, moe_num_shared_experts=2, moe_layer_start_index=1,
                    moe_layer_end_index=1, tie_word_embeddings=True, rope_parameters=rope(500000.0))),
    # Latent attention, queries without a latent of their own, the scale that yarn brings; experts of the best
    # two of three groups behind a dense layer.
    "deepseek_v2": dict(
        type="deepseek_v2", prompt=48, salt=3,
        config=dict(hidden_size=36, intermediate_size=40, num_attention_heads=3, num_key_value_heads=3, vocab_size=72,
                    q_lora_rank=None, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=12,
                    first_k_dense_replace=1, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=10,
                    n_shared_experts=2, topk_method="group_limited_greedy", n_group=3, topk_group=2,
                    routed_scaling_factor=1.5, rms_norm_eps=1e-6, rope_parameters=rope(
                        10000.0, rope_type="yarn", factor=4.0, mscale=0.707, mscale_all_dim=0.707,
                        original_max_position_embeddings=32))),
    # With a latent of queries; sigmoids, and a correction that the choice adds.
    "deepseek_v3": dict(
        type="deepseek_v3", prompt=42, salt=5,
        config=dict(hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=4, vocab_size=72,
                    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=9,
                    first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=12,
                    n_shared_experts=1, n_group=2, topk_group=1, rms_norm_eps=1e-6, num_mtp_layers=0,
                    rope_parameters=rope(10000.0))),
    # The only one not stored as one f32 file: bf16 tensors in several shards with an index.
    "sharded_bf16": dict(
        type="llama", prompt=40, salt=9, store=torch.bfloat16, shard="20KB",
        config=dict(hidden_size=32, intermediate_size=48, vocab_size=96, rope_parameters=rope(10000.0))),
}
# Dense families: small, and with one training step. Salts are searched (find_salt).
SMALL = dict(hidden_size=32, intermediate_size=40, vocab_size=64)
FAMILIES = {
    # Caps that scores and logits reach; heads x head_dim is not hidden.
    "gemma2": dict(
        type="gemma2", prompt=40, classic=dict(),
        config=dict(hidden_size=36, num_attention_heads=3, num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-6,
                    tie_word_embeddings=True, query_pre_attn_scalar=16, sliding_window=8, attn_logit_softcapping=3.0,
                    final_logit_softcapping=6.0, rope_parameters=rope(10000.0))),
    # A cap that logits reach.
    "gemma3_cap": dict(
        type="gemma3_text", prompt=40, classic=None,
        config=dict(hidden_size=30, num_attention_heads=3, num_key_value_heads=1, head_dim=14, rms_norm_eps=1e-6,
                    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=10, sliding_window=5,
                    final_logit_softcapping=3.0, layer_types=["sliding_attention", "full_attention"],
                    rope_parameters={"full_attention": rope(1000.0), "sliding_attention": rope(100.0)})),
    # Both kinds of layers have a scaling: of eight frequencies of those with a window the first three are kept and the
    # last four are divided; the others divide all.
    "gemma3_scaled": dict(
        type="gemma3_text", prompt=40, classic=None,
        config=dict(hidden_size=28, num_attention_heads=2, num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-6,
                    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=16, sliding_window=7,
                    num_hidden_layers=3, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                    rope_parameters={"full_attention": rope(1000.0, rope_type="linear", factor=4.0),
                                     "sliding_attention": rope(
                                         100.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                         high_freq_factor=4.0, original_max_position_embeddings=64)})),
    # Scaling of Llama 3.1 in the layer without a window, which a GGUF file states by divisors of its frequencies.
    "gemma3_llama3": dict(
        type="gemma3_text", prompt=40, classic=None,
        config=dict(hidden_size=20, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=14,
                    rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=14,
                    sliding_window=5, layer_types=["sliding_attention", "full_attention"],
                    rope_parameters={"full_attention": rope(
                        1000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                        original_max_position_embeddings=64), "sliding_attention": rope(10000.0)})),
    # A part of each head rotates, with a factor for each frequency, another beyond 80 tokens; no window.
    "phi3": dict(
        type="phi3", prompt=40, long=90, classic=None,
        config=dict(hidden_size=48, original_max_position_embeddings=80, rope_parameters=rope(
            10000.0, rope_type="longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.5, 2.25],
            long_factor=[2.0, 5.0, 9.0]))),
    "phi3_window": dict(type="phi3", prompt=40, config=dict(sliding_window=9, rope_parameters=rope(10000.0))),
    "olmo2": dict(type="olmo2", prompt=40, config=dict(hidden_size=40, rope_parameters=rope(500000.0))),
    # Three layers with a window, one without, which alone has the scaling.
    "olmo3": dict(
        type="olmo3", prompt=40, classic=None,
        config=dict(num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, sliding_window=8,
                    rope_parameters={
                        "full_attention": rope(500.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
                        "sliding_attention": rope(500.0)})),
    # Layers with a window have yarn's scaling, and its factor on the scores; the one without divides all frequencies.
    "olmo3_scaled": dict(
        type="olmo3", prompt=40, classic=None,
        config=dict(hidden_size=36, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=1, sliding_window=9,
                    rope_parameters={
                        "full_attention": rope(500.0, rope_type="linear", factor=2.0),
                        "sliding_attention": rope(500.0, rope_type="yarn", factor=4.0,
                                                  original_max_position_embeddings=32)})),
    # The layer without a window has a scaling that a GGUF file states by divisors of its frequencies.
    "olmo3_llama3": dict(
        type="olmo3", prompt=40, classic=None,
        config=dict(hidden_size=24, intermediate_size=20, num_hidden_layers=4, num_attention_heads=2,
                    num_key_value_heads=1, sliding_window=6,
                    rope_parameters={"full_attention": rope(
                        500.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                        original_max_position_embeddings=32), "sliding_attention": rope(500.0)})),
    # The fourth layer rotates nothing.
    "smollm3": dict(
        type="smollm3", prompt=40,
        config=dict(num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
                    rope_parameters=rope(2000000.0))),
    # Every third layer rotates nothing and has a window; a scaling that begins beyond the context; biases.
    "smollm3_window": dict(
        type="smollm3", prompt=40, classic=None,
        config=dict(num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, hidden_size=30, attention_bias=True,
                    mlp_bias=True, no_rope_layer_interval=3, use_sliding_window=True, sliding_window=5,
                    rope_parameters=rope(500.0, rope_type="dynamic", factor=4.0))),
    "granite": dict(
        type="granite", prompt=40,
        config=dict(tie_word_embeddings=True, embedding_multiplier=2.5, residual_multiplier=0.7,
                    attention_multiplier=0.5, logits_scaling=0.7, rope_parameters=rope(10000.0))),
    "granite_linear": dict(
        type="granite", prompt=40,
        config=dict(hidden_size=24, intermediate_size=20, num_attention_heads=2, num_key_value_heads=1,
                    attention_multiplier=0.25, logits_scaling=0.5,
                    rope_parameters=rope(10000.0, rope_type="linear", factor=2.5))),
    "starcoder2": dict(
        type="starcoder2", prompt=40,
        config=dict(norm_epsilon=1e-5, sliding_window=9, tie_word_embeddings=True, rope_parameters=rope(100000.0))),
    "gpt_neox": dict(
        type="gpt_neox", prompt=40, classic=None,
        config=dict(hidden_size=48, num_attention_heads=3,
                    rope_parameters=rope(10000.0, partial_rotary_factor=0.25))),
    # One norm after the other, exact GELU of another width.
    "gpt_neox_sequential": dict(
        type="gpt_neox", prompt=40, classic=None,
        config=dict(num_attention_heads=4, use_parallel_residual=False,
                    rope_parameters=rope(10000.0, partial_rotary_factor=0.5))),
    "gpt2": dict(
        type="gpt2", prompt=40, classic=None,
        config=dict(n_embd=36, n_head=3, n_layer=2, n_positions=96, n_inner=None, tie_word_embeddings=True)),
    # Heads of an odd width; a head of its own.
    "gpt2_odd": dict(
        type="gpt2", prompt=40, classic=None,
        config=dict(n_embd=35, n_head=5, n_layer=1, n_positions=96, n_inner=50, activation_function="relu",
                    tie_word_embeddings=False)),
    # Scores that the width of heads does not divide, but the layer does.
    "gpt2_scaled": dict(
        type="gpt2", prompt=40, classic=None,
        config=dict(n_embd=24, n_head=4, n_layer=3, n_positions=96, n_inner=32, tie_word_embeddings=True,
                    scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True)),
    # Three layers that rotate, with a window, and one of neither.
    "cohere2": dict(
        type="cohere2", prompt=40,
        config=dict(num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, sliding_window=8,
                    logit_scale=0.5, tie_word_embeddings=True, rope_parameters=rope(50000.0))),
    # No layer has the window, and so none rotates.
    "cohere2_full": dict(
        type="cohere2", prompt=40, classic=None,
        config=dict(num_attention_heads=3, num_key_value_heads=1, sliding_window=8, logit_scale=0.5,
                    hidden_size=30, layer_types=["full_attention"] * 2, tie_word_embeddings=True,
                    rope_parameters=rope(50000.0))),
    "glm4": dict(
        type="glm4", prompt=40, classic=None,
        config=dict(num_attention_heads=3, num_key_value_heads=1, head_dim=12, attention_bias=True,
                    rope_parameters=rope(10000.0, partial_rotary_factor=0.5))),
    "exaone4": dict(
        type="exaone4", prompt=40,
        config=dict(num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, sliding_window=8,
                    rope_parameters=rope(1000000.0))),
    # A window is stated that no layer has: nothing rotates.
    "exaone4_full": dict(
        type="exaone4", prompt=40, classic=None,
        config=dict(num_attention_heads=2, num_key_value_heads=1, head_dim=10, sliding_window=8,
                    layer_types=["full_attention", "full_attention"], rope_parameters=rope(1000000.0))),
    "hunyuan_v1_dense": dict(
        type="hunyuan_v1_dense", prompt=40,
        config=dict(hidden_size=36, num_attention_heads=3, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
                    rope_parameters=rope(10000.0, rope_type="dynamic", alpha=50.0, factor=1.0))),
    "ernie4_5": dict(
        type="ernie4_5", prompt=40,
        config=dict(hidden_size=36, num_attention_heads=3, num_key_value_heads=1, head_dim=16, use_bias=True,
                    tie_word_embeddings=True, rope_parameters=rope(500000.0))),
}

# Inverse frequencies alone, at the sizes of real models and with options that no model above uses.
ROPE_TABLES = {
    "llama2_7b": (128, 4096, rope(10000.0)),
    "llama31_8b": (128, 131072, rope(500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                     high_freq_factor=4.0, original_max_position_embeddings=8192)),
    "llama32_1b": (64, 131072, rope(500000.0, rope_type="llama3", factor=32.0, low_freq_factor=1.0,
                                    high_freq_factor=4.0, original_max_position_embeddings=8192)),
    "linear_4": (128, 16384, rope(10000.0, rope_type="linear", factor=4.0)),
    "qwen25_7b_yarn": (128, 131072, rope(1000000.0, rope_type="yarn", factor=4.0,
                                         original_max_position_embeddings=32768)),
    "yarn_betas": (64, 16384, rope(10000.0, rope_type="yarn", factor=8.0, beta_fast=16.0, beta_slow=2.0,
                                   original_max_position_embeddings=2048)),
    "yarn_no_truncate": (64, 131072, rope(150000.0, rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0,
                                          truncate=False, original_max_position_embeddings=4096)),
    "yarn_attention_factor": (64, 16384, rope(10000.0, rope_type="yarn", factor=8.0, attention_factor=1.25,
                                              original_max_position_embeddings=2048)),
    "dynamic": (64, 4096, rope(10000.0, rope_type="dynamic", factor=4.0)),
    "yarn_mscale_0": (64, 16384, rope(10000.0, rope_type="yarn", factor=8.0, mscale=0.0, mscale_all_dim=0.5,
                                      original_max_position_embeddings=2048)),
    "yarn_mscale": (64, 163840, rope(10000.0, rope_type="yarn", factor=40.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
                                     mscale_all_dim=0.5, original_max_position_embeddings=4096)),
}
