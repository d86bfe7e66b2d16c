// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/config/config_keys.h"

#include <algorithm>
#include <filesystem>
#include <span>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

enum class Writer : uint8_t { transformers, other };

struct InertKey {
  std::string_view key;
  std::string_view types;     // model types, separated by spaces; empty: all
  std::string_view honoured;  // the one value that means nothing, as JSON; empty: every value. null always does.
  Writer writer;
  std::string_view reason;
};

constexpr std::string_view kAny, kAll;
constexpr std::string_view kHistory = "says how the file was made";
constexpr std::string_view kPythonApi = "chooses what transformers' Python calls return or keep";
constexpr std::string_view kAttentionKernel = "chooses one of transformers' attention kernels";
constexpr std::string_view kTraining = "has a meaning for training in transformers only";
constexpr std::string_view kOtherHeads = "is for classification heads";
constexpr std::string_view kEncoders = "is for encoders";
constexpr std::string_view kTokenIds = "is the tokenizer's to say";
constexpr std::string_view kLengths = "limits lengths in transformers' generate(), where callers here state theirs";
constexpr std::string_view kGeneration = "is a default of generation, which generation_config.json states";
constexpr std::string_view kFurtherTokens = "counts layers that predict further tokens, which are not computed";
constexpr std::string_view kMtp =
    "counts layers that predict further tokens, of which speculation computes the first (mtp) where the files have it";
constexpr std::string_view kMtpLayers =
    "names layers that predict further tokens, of which speculation computes attention and experts (mtp)";
// Those whose loss has no term for the load of experts in transformers. Other types with experts read these keys.
constexpr std::string_view kUnbalancedTypes =
    "glm4_moe deepseek_v2 deepseek_v3 deepseek_v32 kimi_linear nemotron_h llama4_text mistral4 longcat_flash";
constexpr std::string_view kScanChunks = "is the size of chunks in transformers' kernels";
constexpr std::string_view kUnsloth = "says which Unsloth wrote the file";

// From the configurations of transformers 4 and 5 and of published checkpoints. `Writer::other` is for keys that no
// configuration class of transformers has.
constexpr InertKey kInertKeys[] = {
    {"architectures", kAll, kAny, Writer::transformers, "names Python classes; model_type decides here"},
    {"transformers_version", kAll, kAny, Writer::transformers, kHistory},
    {"_name_or_path", kAll, kAny, Writer::transformers, kHistory},
    {"_commit_hash", kAll, kAny, Writer::transformers, kHistory},
    {"finetuning_task", kAll, kAny, Writer::transformers, kHistory},
    {"initializer_range", kAll, kAny, Writer::transformers, kTraining},
    {"gradient_checkpointing", kAll, kAny, Writer::transformers, kTraining},
    {"attention_dropout", kAll, "0", Writer::transformers, kTraining},
    {"use_cache", kAll, kAny, Writer::transformers, kPythonApi},
    {"cache_implementation", kAll, kAny, Writer::transformers, kPythonApi},
    {"return_dict", kAll, kAny, Writer::transformers, kPythonApi},
    {"return_dict_in_generate", kAll, kAny, Writer::transformers, kPythonApi},
    {"output_attentions", kAll, kAny, Writer::transformers, kPythonApi},
    {"output_hidden_states", kAll, kAny, Writer::transformers, kPythonApi},
    {"output_scores", kAll, kAny, Writer::transformers, kPythonApi},
    {"output_past", kAll, kAny, Writer::transformers, kPythonApi},
    {"torchscript", kAll, kAny, Writer::transformers, kPythonApi},
    {"tf_legacy_loss", kAll, kAny, Writer::transformers, kPythonApi},
    {"use_bfloat16", kAll, kAny, Writer::transformers, kPythonApi},
    {"_attn_implementation", kAll, kAny, Writer::transformers, kAttentionKernel},
    {"_attn_implementation_autoset", kAll, kAny, Writer::transformers, kAttentionKernel},
    {"_attn_implementation_internal", kAll, kAny, Writer::transformers, kAttentionKernel},
    {"attn_implementation", kAll, kAny, Writer::transformers, kAttentionKernel},
    {"_flash_attn_2_enabled", kAll, kAny, Writer::transformers, kAttentionKernel},
    {"base_model_tp_plan", kAll, kAny, Writer::transformers, "says how transformers splits layers over devices"},
    {"base_model_pp_plan", kAll, kAny, Writer::transformers, "says how transformers splits layers over devices"},
    {"pretraining_tp", "llama hunyuan_v1_dense", kAny, Writer::transformers,
     "splits products into sums of parts; the sum is computed"},
    {"rope_interleaved", "llama", "false", Writer::other, "is the layout of nanotron's files, before their conversion"},
    {"is_llama_config", "llama", "true", Writer::other, "says what model_type says"},
    {"max_sequence_length", "llama", kAny, Writer::other, "max_position_embeddings is what is read"},
    {"use_mrope", "qwen2", "false", Writer::other, "switches on positions of images, of which a text has none"},
    {"pretraining_tp", "deepseek_v2 deepseek_v3 deepseek_v32 kimi_linear mistral4", kAny, Writer::transformers,
     "is not read"},
    {"qk_head_dim", "deepseek_v2 deepseek_v3 deepseek_v32 kimi_linear mistral4", kAny, Writer::transformers,
     "is qk_nope_head_dim and qk_rope_head_dim"},
    {"ep_size", "deepseek_v2 deepseek_v3 deepseek_v32", kAny, Writer::other,
     "says how the experts were divided over devices"},
    {"aux_loss_alpha", "deepseek_v2 deepseek_v3 deepseek_v32", kAny, Writer::other, kTraining},
    {"seq_aux", "deepseek_v2 deepseek_v3 deepseek_v32", kAny, Writer::other, kTraining},
    {"output_router_logits", kUnbalancedTypes, kAny, Writer::transformers, kPythonApi},
    {"router_aux_loss_coef", kUnbalancedTypes, kAny, Writer::transformers, kTraining},
    {"router_jitter_noise", "mixtral minimax_m2 llama4_text deepseek_v4", kAny, Writer::transformers, kTraining},
    {"for_llm_compressor", "llama4_text", "false", Writer::other, "is for a program that quantizes"},
    {"max_window_layers", "qwen3_moe", kAny, Writer::other, "is not read: all layers have the window, or none"},
    {"resid_pdrop", "phi3 gpt2", kAny, Writer::transformers, kTraining},
    {"embd_pdrop", "phi3 gpt2", kAny, Writer::transformers, kTraining},
    {"attn_pdrop", "gpt2", kAny, Writer::transformers, kTraining},
    {"residual_dropout", "starcoder2", kAny, Writer::transformers, kTraining},
    {"embedding_dropout", "starcoder2", kAny, Writer::transformers, kTraining},
    {"hidden_dropout", "gpt_neox", kAny, Writer::transformers, kTraining},
    {"classifier_dropout", "gpt_neox", kAny, Writer::transformers, kOtherHeads},
    {"reorder_and_upcast_attn", "gpt2", kAny, Writer::transformers, "chooses a precision in training"},
    {"summary_type", "gpt2", kAny, Writer::transformers, kOtherHeads},
    {"summary_use_proj", "gpt2", kAny, Writer::transformers, kOtherHeads},
    {"summary_activation", "gpt2", kAny, Writer::transformers, kOtherHeads},
    {"summary_proj_to_labels", "gpt2", kAny, Writer::transformers, kOtherHeads},
    {"summary_first_dropout", "gpt2", kAny, Writer::transformers, kOtherHeads},
    {"eod_token_id", "hunyuan_v1_dense", kAny, Writer::transformers, kTokenIds},
    {"use_qk_norm", "hunyuan_v1_dense", "true", Writer::other, "is true of all models of this type"},
    {"num_nextn_predict_layers", "kimi_linear", kAny, Writer::transformers, kFurtherTokens},
    {"num_nextn_predict_layers", "glm4_moe deepseek_v3 deepseek_v32 deepseek_v4 longcat_flash", kAny,
     Writer::transformers, kMtp},
    {"num_mtp_layers", "glm4_moe deepseek_v3 deepseek_v32", kAny, Writer::transformers, kMtp},
    {"use_sliding_window", "qwen3_next", "false", Writer::other, "switches on windows, which no layer has"},
    {"attn_output_gate", "qwen3_5_text qwen3_5_moe_text", "true", Writer::other, "is true of all models of this type"},
    {"mamba_ssm_dtype", "qwen3_5_text qwen3_5_moe_text", "\"float32\"", Writer::other,
     "is the dtype of states, which are f32"},
    {"mtp_num_hidden_layers", "qwen3_5_text qwen3_5_moe_text", kAny, Writer::other, kFurtherTokens},
    {"mtp_use_dedicated_embeddings", "qwen3_5_text qwen3_5_moe_text", kAny, Writer::other,
     "is for what predicts further tokens, whose embedding the files have or have not"},
    {"moe_use_aux_free", "ernie4_5_moe", kAny, Writer::other, kHistory},
    {"mamba_chunk_size", "granitemoehybrid falcon_h1", kAny, Writer::transformers, kScanChunks},
    {"init_method", "granitemoe granitemoehybrid", kAny, Writer::other, kTraining},
    {"normalization_function", "granitemoehybrid", "\"rmsnorm\"", Writer::other,
     "is what all models of this type have"},
    {"num_logits_to_keep", "falcon_h1 nemotron_h", kAny, Writer::transformers, kPythonApi},
    {"attn_layer_indices", "falcon_h1", "null", Writer::other, "is for layers of one mixer"},
    {"mamba_use_mlp", "falcon_h1", "true", Writer::other, "is true of all models of this type"},
    {"mlp_expansion_factor", "falcon_h1", kAny, Writer::other, "is not read: intermediate_size says it"},
    {"chunk_size", "nemotron_h", kAny, Writer::transformers, kScanChunks},
    {"expand", "nemotron_h", kAny, Writer::transformers, "is not read: mamba_num_heads and mamba_head_dim say it"},
    {"mamba_proj_bias", "nemotron_h", kAny, Writer::transformers, "is not read: use_bias says it"},
    {"mamba_ssm_cache_dtype", "nemotron_h", kAny, Writer::transformers, "is not read: states are f32"},
    {"use_mamba_kernels", "nemotron_h", kAny, Writer::transformers, kScanChunks},
    {"moe_shared_expert_overlap", "nemotron_h", kAny, Writer::transformers, "chooses an order of execution"},
    {"n_shared_experts", "nemotron_h", kAny, Writer::transformers,
     "is not read: moe_shared_expert_intermediate_size says it"},
    {"time_step_limit", "nemotron_h", kAny, Writer::transformers, "is not read: time_step_min is the limit"},
    {"time_step_max", "nemotron_h", kAny, Writer::transformers, kTraining},
    {"time_step_floor", "nemotron_h", kAny, Writer::transformers, kTraining},
    {"rescale_prenorm_residual", "nemotron_h", kAny, Writer::transformers, kTraining},
    {"residual_in_fp32", "nemotron_h", kAny, Writer::transformers, "chooses a precision, which the device does here"},
    {"hidden_dropout", "nemotron_h", kAny, Writer::transformers, kTraining},
    {"num_nextn_predict_layers", "nemotron_h", kAny, Writer::transformers, kMtp},
    {"mtp_layers_block_type", "nemotron_h", kAny, Writer::transformers, kMtpLayers},
    {"mtp_hybrid_override_pattern", "nemotron_h", kAny, Writer::transformers, kMtpLayers},
    {"block_dim", "lfm2", kAny, Writer::other, "is hidden_size"},
    {"conv_dim", "lfm2", kAny, Writer::other, "is hidden_size"},
    {"conv_dim_out", "lfm2", kAny, Writer::other, "is hidden_size"},
    {"num_heads", "lfm2", kAny, Writer::other, "is num_attention_heads"},
    {"block_norm_eps", "lfm2", kAny, Writer::other, "is norm_eps"},
    {"block_use_swiglu", "lfm2", "true", Writer::other, "is true of all models of this type"},
    {"use_pos_enc", "lfm2", "true", Writer::other, "is true of all models of this type"},
    {"block_mlp_init_scale", "lfm2", kAny, Writer::other, kTraining},
    {"block_out_init_scale", "lfm2", kAny, Writer::other, kTraining},
    {"block_use_xavier_init", "lfm2", kAny, Writer::other, kTraining},
    {"conv_use_xavier_init", "lfm2", kAny, Writer::other, kTraining},
    {"experts_per_token", "gpt_oss", kAny, Writer::other, "num_experts_per_tok is what is read"},
    {"initial_context_length", "gpt_oss", kAny, Writer::other, "rope_scaling says it"},
    {"scoring_func", "minimax_m2", "\"sigmoid\"", Writer::other, "is so of all models of this type"},
    {"use_routing_bias", "minimax_m2", "true", Writer::other, "is so of all models of this type"},
    {"use_qk_norm", "minimax_m2", "true", Writer::other, "is so of all models of this type"},
    {"qk_norm_type", "minimax_m2", "\"per_layer\"", Writer::other, "is so of all models of this type"},
    {"shared_intermediate_size", "minimax_m2", "0", Writer::other, "is so of all models of this type"},
    {"use_mtp", "minimax_m2", kAny, Writer::other, kFurtherTokens},
    {"num_mtp_modules", "minimax_m2", kAny, Writer::other, kFurtherTokens},
    {"mtp_transformer_layers", "minimax_m2", kAny, Writer::other, kFurtherTokens},
    {"zero_expert_type", "longcat_flash", "\"identity\"", Writer::other, "is so of all models of this type"},
    {"attention_method", "longcat_flash", "\"MLA\"", Writer::other, "is so of all models of this type"},
    {"mla_scale_q_lora", "longcat_flash", "true", Writer::other, "is so of all models of this type"},
    {"mla_scale_kv_lora", "longcat_flash", "true", Writer::other, "is so of all models of this type"},
    {"norm_topk_prob", "longcat_flash", "false", Writer::other, "is so of all models of this type"},
    {"router_bias", "longcat_flash", "false", Writer::other, "adds a bias, which transformers makes and does not read"},
    {"id2label", kAll, kAny, Writer::transformers, kOtherHeads},
    {"label2id", kAll, kAny, Writer::transformers, kOtherHeads},
    {"num_labels", kAll, kAny, Writer::transformers, kOtherHeads},
    {"problem_type", kAll, kAny, Writer::transformers, kOtherHeads},
    {"task_specific_params", kAll, kAny, Writer::transformers, kOtherHeads},
    {"is_decoder", kAll, kAny, Writer::transformers, "these models are decoders"},
    {"is_encoder_decoder", kAll, "false", Writer::transformers, kEncoders},
    {"add_cross_attention", kAll, "false", Writer::transformers, kEncoders},
    {"cross_attention_hidden_size", kAll, "null", Writer::transformers, kEncoders},
    {"tie_encoder_decoder", kAll, "false", Writer::transformers, kEncoders},
    {"encoder_no_repeat_ngram_size", kAll, "0", Writer::transformers, kEncoders},
    {"decoder_start_token_id", kAll, kAny, Writer::transformers, kEncoders},
    {"pruned_heads", kAll, "{}", Writer::transformers, "removes nothing while it is empty"},
    {"chunk_size_feed_forward", kAll, "0", Writer::transformers, "computes the MLP in parts of a sequence when not 0"},
    {"pad_token_id", kAll, kAny, Writer::transformers, "nothing is padded here"},
    {"unk_token_id", kAll, kAny, Writer::transformers, kTokenIds},
    {"sep_token_id", kAll, kAny, Writer::transformers, kTokenIds},
    {"cls_token_id", kAll, kAny, Writer::transformers, kTokenIds},
    {"mask_token_id", kAll, kAny, Writer::transformers, kTokenIds},
    {"tokenizer_class", kAll, kAny, Writer::transformers, kTokenIds},
    {"model_max_length", kAll, kAny, Writer::other, "is the tokenizer's; max_position_embeddings is what is read"},
    {"max_length", kAll, kAny, Writer::transformers, kLengths},
    {"min_length", kAll, "0", Writer::transformers, kLengths},
    {"max_new_tokens", kAll, kAny, Writer::transformers, kLengths},
    {"auto_map", kAll, kAny, Writer::other, "names Python code, which transformers runs only where it is trusted"},
    {"unsloth_fixed", kAll, kAny, Writer::other, kUnsloth},
    {"unsloth_version", kAll, kAny, Writer::other, kUnsloth},
    {"transformers.js_config", kAll, kAny, Writer::other, "is for ONNX files in a browser"},
};

// Defaults of generation, which old files keep here. transformers does not read them where a generation_config.json
// lies beside the file.
constexpr InertKey kGenerationKeys[] = {
    {"prefix", kAll, "null", Writer::transformers, kGeneration},
    {"do_sample", kAll, "false", Writer::transformers, kGeneration},
    {"temperature", kAll, "1", Writer::transformers, kGeneration},
    {"top_k", kAll, "50", Writer::transformers, kGeneration},
    {"top_p", kAll, "1", Writer::transformers, kGeneration},
    {"typical_p", kAll, "1", Writer::transformers, kGeneration},
    {"repetition_penalty", kAll, "1", Writer::transformers, kGeneration},
    {"no_repeat_ngram_size", kAll, "0", Writer::transformers, kGeneration},
    {"bad_words_ids", kAll, "null", Writer::transformers, kGeneration},
    {"forced_bos_token_id", kAll, "null", Writer::transformers, kGeneration},
    {"forced_eos_token_id", kAll, "null", Writer::transformers, kGeneration},
    {"suppress_tokens", kAll, "null", Writer::transformers, kGeneration},
    {"begin_suppress_tokens", kAll, "null", Writer::transformers, kGeneration},
    {"exponential_decay_length_penalty", kAll, "null", Writer::transformers, kGeneration},
    {"remove_invalid_values", kAll, "false", Writer::transformers, kGeneration},
    {"num_beams", kAll, "1", Writer::transformers, kGeneration},
    {"num_beam_groups", kAll, "1", Writer::transformers, kGeneration},
    {"num_return_sequences", kAll, "1", Writer::transformers, kGeneration},
    {"diversity_penalty", kAll, "0", Writer::transformers, "is for searches with beams"},
    {"length_penalty", kAll, kAny, Writer::transformers, "is for searches with beams"},
    {"early_stopping", kAll, kAny, Writer::transformers, "is for searches with beams"},
};

// `types` are types of rope scaling here.
constexpr std::string_view kTextPositions = "is for positions on several axes, which are one in texts";
constexpr std::string_view kOtherScaling = "belongs to other types of rope scaling";
constexpr InertKey kInertRopeKeys[] = {
    {"factor", "default", kAny, Writer::transformers, kOtherScaling},
    {"original_max_position_embeddings", "default linear dynamic", kAny, Writer::transformers, kOtherScaling},
    {"low_freq_factor", "default linear dynamic yarn", kAny, Writer::transformers, kOtherScaling},
    {"high_freq_factor", "default linear dynamic yarn", kAny, Writer::transformers, kOtherScaling},
    {"attention_factor", "default linear dynamic llama3", kAny, Writer::transformers, kOtherScaling},
    {"beta_fast", "default linear dynamic llama3", kAny, Writer::transformers, kOtherScaling},
    {"beta_slow", "default linear dynamic llama3", kAny, Writer::transformers, kOtherScaling},
    {"finetuned", kAll, kAny, Writer::transformers, "says how the model was trained"},
    {"mrope_section", kAll, kAny, Writer::transformers, kTextPositions},
    {"mrope_interleaved", kAll, kAny, Writer::transformers, kTextPositions},
};

bool occurs_in(const InertKey& row, std::string_view model_type) {
  if (row.types.empty()) return true;
  return (" " + std::string(row.types) + " ").find(" " + std::string(model_type) + " ") != std::string::npos;
}

bool is_number(const io::JsonValue& value) {
  return value.kind() == io::JsonValue::Kind::integer || value.kind() == io::JsonValue::Kind::number;
}

bool has_generation_config(const io::JsonReader& config) {
  std::error_code unreadable;
  return std::filesystem::exists(std::filesystem::path(config.file()).parent_path() / "generation_config.json",
                                 unreadable);
}

bool is_honoured(const InertKey& row, const io::JsonValue& value) {
  if (row.honoured.empty() || value.is_null()) return true;
  const io::JsonValue honoured = io::parse_json(row.honoured, std::string(row.key));
  if (is_number(honoured) && is_number(value)) return honoured.as_number() == value.as_number();
  return honoured == value;
}

void ignore_rows(std::span<const InertKey> rows, const io::JsonReader& config, std::string_view type) {
  for (const InertKey& row : rows) {
    const io::JsonValue* value = config.value().find(row.key);
    if (value == nullptr || !occurs_in(row, type)) continue;
    if (!is_honoured(row, *value))
      throw Unsupported("{}: '{}' is {}; only {} is honoured (it {})", config.file(), row.key,
                        io::to_compact_json(*value), row.honoured, row.reason);
    config.ignore(row.key, row.reason);
  }
}

}  // namespace

void ignore_inert_keys(const io::JsonReader& config, std::string_view model_type) {
  // A family may read what says nothing elsewhere under another name.
  std::vector<InertKey> rows(std::begin(kInertKeys), std::end(kInertKeys));
  std::erase_if(rows, [&](const InertKey& row) {
    const std::span<const OwnName> names = family_of_type(model_type, config.file()).json_names;
    return std::any_of(names.begin(), names.end(), [&](const OwnName& name) { return name.own == row.key; });
  });
  ignore_rows(rows, config, model_type);
  if (has_generation_config(config))
    for (const InertKey& row : kGenerationKeys) config.ignore(row.key, row.reason);
  else
    ignore_rows(kGenerationKeys, config, model_type);
}

void ignore_inert_rope_keys(const io::JsonReader& rope, std::string_view rope_type) {
  ignore_rows(kInertRopeKeys, rope, rope_type);
}

std::vector<IgnoredKey> ignored_keys(const io::JsonReader& config) {
  std::vector<IgnoredKey> keys;
  for (const io::JsonReader::Ignored& ignored : config.ignored()) {
    // Rows of one key for several model types differ in their reasons.
    const auto* row = std::find_if(std::begin(kInertKeys), std::end(kInertKeys), [&](const InertKey& known) {
      return known.key == ignored.path && known.reason == ignored.reason;
    });
    keys.push_back({ignored.path, ignored.reason, row == std::end(kInertKeys) || row->writer == Writer::transformers});
  }
  return keys;
}

std::string unusual_keys_notice(const std::vector<IgnoredKey>& keys, const std::string& file) {
  std::string names;
  for (const IgnoredKey& key : keys)
    if (!key.usual) names += (names.empty() ? "" : ", ") + io::quote(key.path);
  return names.empty() ? ""
                       : fmt::format("{}: ignored, for they change nothing: {} (eadem inspect says why)", file, names);
}

}  // namespace eadem::models
