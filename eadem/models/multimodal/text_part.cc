// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/multimodal/text_part.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "eadem/core/error.h"
#include "eadem/core/printable.h"

namespace eadem::models {

namespace {

// A multimodal model whose language model, fed with text alone, is a causal decoder of a family here.
// Source: the configuration and modeling files of transformers for these model types.
struct MultimodalType {
  std::string_view name;
  std::string_view text_type;        // of a text_config that does not state its model_type
  bool ties = true;                  // false: a head in the files is used, whatever the configuration says of it
  std::string_view defaults = "{}";  // for keys that a text_config does not have, before those of its own type
  bool may_be_flat = false;  // keys of the text may stand beside those of the other parts, without a text_config
};
constexpr MultimodalType kMultimodalTypes[] = {{"gemma3", "gemma3_text"},
                                               {"gemma4", "gemma4_text"},
                                               {"mistral3", "mistral"},
                                               {"llava", "llama"},
                                               {"llava_next", "llama"},
                                               {"llava_onevision", "qwen2"},
                                               {"internvl", "qwen2"},
                                               {"aya_vision", "cohere2"},
                                               {"cohere2_vision", "cohere2"},
                                               {"idefics3", "llama"},
                                               {"smolvlm", "llama"},
                                               {"idefics2", "mistral"},
                                               {"lfm2_vl", "lfm2"},
                                               {"llava_next_video", "llama"},
                                               {"vipllava", "llama"},
                                               {"video_llava", "llama"},
                                               {"video_llama_3", "qwen2"},
                                               {"fast_vlm", "qwen2"},
                                               {"deepseek_vl", "llama"},
                                               {"deepseek_vl_hybrid", "llama"},
                                               {"janus", "llama"},
                                               {"got_ocr2", "qwen2"},
                                               {"pp_chart2table", "qwen2"},
                                               {"lighton_ocr", "qwen3"},
                                               {"ovis2", "qwen2"},
                                               {"exaone4_5", "exaone4"},
                                               {"minicpm_ocr", "qwen3_5_text"},
                                               {"minicpmv4_6", "qwen3_5_text"},
                                               {"minicpmv4_7", "qwen3_5_text"},
                                               {"granite_speech", "granite"},
                                               {"granite_speech_plus", "granite"},
                                               {"qwen3_asr", "qwen3"},
                                               {"moss_transcribe_diarize", "qwen3"},
                                               {"glmasr", "llama", true,
                                                R"({"vocab_size": 59264, "hidden_size": 2048,
                                                    "intermediate_size": 6144, "num_hidden_layers": 28,
                                                    "num_attention_heads": 16, "num_key_value_heads": 4,
                                                    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5})"},
                                               {"qwen2_vl", "qwen2_vl_text", true, "{}", true},
                                               {"qwen2_5_vl", "qwen2_5_vl_text", true, "{}", true},
                                               {"qwen3_vl", "qwen3_vl_text"},
                                               {"qwen3_5", "qwen3_5_text"},
                                               {"qwen3_5_moe", "qwen3_5_moe_text"},
                                               {"llama4", "llama4_text", false},
                                               {"voxtral", "llama", false,
                                                R"({"vocab_size": 131072, "hidden_size": 3072,
                                                    "intermediate_size": 8192, "num_hidden_layers": 30,
                                                    "num_key_value_heads": 8, "max_position_embeddings": 131072,
                                                    "rms_norm_eps": 1e-5, "rope_theta": 1e8, "head_dim": 128})"},
                                               {"qwen2_audio", "qwen2", false},
                                               {"audioflamingo3", "qwen2", false},
                                               {"musicflamingo", "qwen2", false}};

// What transformers takes for keys that a text_config does not have and a text model's config.json must have. `as` is
// the text model that computes the same: these rotate by positions on several axes, which are one in a text.
struct TextType {
  std::string_view name, as, defaults;
};
constexpr std::string_view kQwen2Vl =
    R"({"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80,
        "rope_theta": 1000000})";
constexpr TextType kTextTypes[] = {
    {"gemma3_text", "gemma3_text",
     R"({"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8})"},
    {"gemma4_text", "gemma4_text",
     R"({"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
         "num_attention_heads": 8})"},
    {"llama", "llama",
     R"({"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32})"},
    {"mistral", "mistral",
     R"({"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32})"},
    {"mistral4", "mistral4",
     R"({"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
         "num_attention_heads": 32})"},
    {"granite", "granite",
     R"({"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32})"},
    {"qwen2", "qwen2",
     R"({"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
         "num_attention_heads": 32})"},
    {"qwen3", "qwen3",
     R"({"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
         "num_attention_heads": 32})"},
    {"qwen3_moe", "qwen3_moe",
     R"({"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
         "num_attention_heads": 32})"},
    {"gpt_oss", "gpt_oss",
     R"({"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
         "num_attention_heads": 64})"},
    {"cohere2", "cohere2",
     R"({"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
         "num_attention_heads": 64})"},
    {"lfm2", "lfm2",
     R"({"vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
         "num_attention_heads": 32})"},
    {"exaone4", "exaone4",
     R"({"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
         "num_attention_heads": 32})"},
    {"qwen2_vl_text", "qwen2", kQwen2Vl},
    {"qwen2_5_vl_text", "qwen2", kQwen2Vl},
    {"qwen3_vl_text", "qwen3",
     R"({"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
         "num_attention_heads": 32, "max_position_embeddings": 128000, "rope_theta": 500000})"},
    {"llama4_text", "llama4_text",
     R"({"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
         "num_hidden_layers": 48, "num_attention_heads": 40})"},
    {"qwen3_5_text", "qwen3_5_text",
     R"({"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
         "num_attention_heads": 16})"},
    {"qwen3_5_moe_text", "qwen3_5_moe_text",
     R"({"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16})"}};

// Keys of the whole model that concern text, where text_config does not have them.
constexpr std::string_view kSharedKeys[] = {"architectures", "transformers_version", "torch_dtype",        "dtype",
                                            "bos_token_id",  "eos_token_id",         "quantization_config"};
// Keys of other parts in configs that state those of the text beside them, as Qwen2-VL's were published.
constexpr std::string_view kOtherParts[] = {"vision_config",       "audio_config",    "vision_start_token_id",
                                            "vision_end_token_id", "vision_token_id", "image_token_id",
                                            "video_token_id"};
constexpr std::string_view kOtherReason = "is of the parts that are not text";

// Names of tensors in the whole model and in the text model alone, as their beginnings. The first that fits counts.
constexpr std::pair<std::string_view, std::string_view> kPrefixes[] = {{"model.language_model.", "model."},
                                                                       {"language_model.model.", "model."},
                                                                       {"language_model.lm_head.", "lm_head."},
                                                                       {"model.text_model.", "model."},
                                                                       {"lm_head.", "lm_head."},
                                                                       {"mtp.", "mtp."},
                                                                       {"model.embed_tokens.", "model.embed_tokens."},
                                                                       {"model.layers.", "model.layers."},
                                                                       {"model.norm.", "model.norm."}};

// Nothing for a tensor of another part.
std::optional<std::string> text_name(std::string_view name) {
  for (const auto& [whole, text] : kPrefixes)
    if (name.starts_with(whole)) return std::string(text) + std::string(name.substr(whole.size()));
  return std::nullopt;
}

// "model.vision_tower" or "multi_modal_projector".
std::string module_of(std::string_view name) {
  constexpr std::string_view kModel = "model.";
  const size_t begin = name.starts_with(kModel) ? kModel.size() : 0;
  return std::string(name.substr(0, name.find('.', begin)));
}

class TextWeights final : public io::WeightSource {
 public:
  explicit TextWeights(std::shared_ptr<const io::WeightSource> weights)
      : WeightSource(weights->path()), weights_(std::move(weights)) {
    std::vector<io::WeightInfo> tensors;
    for (const io::WeightInfo& info : weights_->tensors())
      if (auto name = text_name(info.name)) {
        names_.push_back(info.name);
        tensors.push_back(info);
        tensors.back().name = *std::move(name);
      }
    set_tensors(std::move(tensors));
  }

  void release(std::string_view name) const override {
    if (const io::WeightInfo* info = find(name))
      weights_->release(names_[static_cast<size_t>(info - tensors().data())]);
  }
  std::vector<std::shared_ptr<const io::MappedFile>> files() const override { return weights_->files(); }

 private:
  Tensor load(size_t index) const override { return weights_->get(names_[index]); }
  Tensor load_bytes(size_t index) const override { return weights_->get_bytes(names_[index]); }

  std::shared_ptr<const io::WeightSource> weights_;
  std::vector<std::string> names_;  // in the whole model, of tensors()
};

const MultimodalType* type_of(const io::JsonReader& config) {
  if (!config.value().is_object()) return nullptr;
  const io::JsonValue* type = config.value().find("model_type");
  if (type == nullptr || !type->is_string()) return nullptr;
  const auto* found = std::find_if(std::begin(kMultimodalTypes), std::end(kMultimodalTypes),
                                   [&](const MultimodalType& known) { return known.name == type->as_string(); });
  return found == std::end(kMultimodalTypes) ? nullptr : found;
}

bool has_head(const io::WeightSource& weights) {
  return weights.find("lm_head.weight") != nullptr || weights.find("language_model.lm_head.weight") != nullptr;
}

void set_defaults(io::JsonValue& text, std::string_view defaults) {
  const io::JsonValue known = io::parse_json(defaults, "defaults");
  for (const io::JsonMember& member : known.as_object())
    if (text.find(member.key) == nullptr) text.set(member.key, member.value);
}

void set_text_type(io::JsonValue& text, std::string_view type_if_absent, const io::JsonReader& config) {
  const io::JsonValue* stated = text.find("model_type");
  if (stated != nullptr && !stated->is_string()) config.fail("text_config", "an object whose 'model_type' is a string");
  const std::string type = stated == nullptr ? std::string(type_if_absent) : stated->as_string();
  const auto* known =
      std::find_if(std::begin(kTextTypes), std::end(kTextTypes), [&](const TextType& row) { return row.name == type; });
  text.set("model_type", type);
  if (known == std::end(kTextTypes)) return;
  text.set("model_type", known->as);
  set_defaults(text, known->defaults);
}

}  // namespace

bool is_multimodal(const io::JsonReader& config) { return type_of(config) != nullptr; }

io::JsonReader text_config_of(const io::JsonReader& config, const io::WeightSource* weights) {
  const MultimodalType& type = *type_of(config);
  const io::JsonValue& whole = config.value();
  const io::JsonValue* nested = whole.find("text_config");
  if (nested != nullptr && !nested->is_object()) config.fail("text_config", "an object");
  // Without it transformers takes a text model that is not the usual one of its type, and other keys of the config for
  // nothing. Its own files always have it.
  if (nested == nullptr && !type.may_be_flat) {
    throw DataCorrupted("{}: a {} model without 'text_config', the configuration of its text model", config.file(),
                        type.name);
  }
  io::JsonValue text = nested != nullptr ? *nested : io::JsonValue::object();
  const auto is_in = [](auto& keys, const std::string& key) {
    return std::find(std::begin(keys), std::end(keys), key) != std::end(keys);
  };
  for (const io::JsonMember& member : whole.as_object()) {
    const std::string& key = member.key;
    if (key == "text_config" || key == "model_type" || key == "tie_word_embeddings") continue;
    if (nested != nullptr ? !is_in(kSharedKeys, key) : is_in(kOtherParts, key))
      config.ignore(key, kOtherReason);
    else if (text.find(key) == nullptr)
      text.set(key, member.value);
  }
  set_defaults(text, type.defaults);
  set_text_type(text, type.text_type, config);
  // The whole model ties its head, whatever its text_config says of one.
  if (!type.ties)
    text.set("tie_word_embeddings", weights != nullptr && !has_head(*weights));
  else if (const io::JsonValue* tied = whole.find("tie_word_embeddings"); tied != nullptr && !tied->is_null())
    text.set("tie_word_embeddings", *tied);
  else if (weights != nullptr)
    text.set("tie_word_embeddings", !has_head(*weights));

  return io::JsonReader::parse(io::to_json(text), config.file());
}

std::shared_ptr<const io::WeightSource> text_weights_of(std::shared_ptr<const io::WeightSource> weights) {
  return std::make_shared<TextWeights>(std::move(weights));
}

std::string text_part_notice(const io::JsonReader& config, const io::WeightSource* weights) {
  std::string notice = fmt::format("only the text part of this {} model is read", type_of(config)->name);
  if (weights == nullptr) return notice;
  int64_t count = 0;
  std::set<std::string> modules;
  for (const io::WeightInfo& info : weights->tensors())
    if (!text_name(info.name)) ++count, modules.insert(printable(module_of(info.name)));
  if (count == 0) return notice + "; its files hold no other";
  constexpr size_t kMost = 8;
  std::string names;
  size_t listed = 0;
  for (const std::string& module : modules)
    if (listed++ < kMost) names += (names.empty() ? "" : ", ") + module;
  return fmt::format("{}; left out: {} tensors of {}{}", notice, count, names, modules.size() > kMost ? " ..." : "");
}

}  // namespace eadem::models
