// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/convert_types.h"

#include <charconv>

#include "eadem/core/encodings/block_encoding.h"

namespace eadem::cli {

namespace {

struct Mixture {
  std::string_view name, base;
  // For what matters most: the values and the down projection, of `more_layers`, and the LM head.
  std::string_view better;
  enum class Layers : uint8_t { first_eighth, spread } more_layers;
  uint32_t file_type;
};

constexpr Mixture kMixtures[] = {
    {"q4_k_s", "q4_k", "q5_k", Mixture::Layers::first_eighth, 14},
    {"q4_k_m", "q4_k", "q6_k", Mixture::Layers::spread, 15},
    {"q5_k_s", "q5_k", "q5_k", Mixture::Layers::first_eighth, 16},
    {"q5_k_m", "q5_k", "q6_k", Mixture::Layers::spread, 17},
};

// Source of the numbers: llama.h, enum llama_ftype.
struct FileType {
  std::string_view name;
  uint32_t id;
};
constexpr FileType kFileTypes[] = {{"f32", 0},   {"f16", 1},     {"bf16", 32},   {"q4_0", 2},
                                   {"q4_1", 3},  {"q8_0", 7},    {"q5_0", 8},    {"q5_1", 9},
                                   {"q2_k", 10}, {"q3_k", 12},   {"q4_k", 15},   {"q5_k", 17},
                                   {"q6_k", 18}, {"iq4_nl", 25}, {"iq4_xs", 30}, {"mxfp4", 38}};

const Mixture* find_mixture(std::string_view name) {
  for (const Mixture& mixture : kMixtures)
    if (mixture.name == name) return &mixture;
  return nullptr;
}

int64_t layer_of(const std::string& parameter) {
  constexpr std::string_view kLayers = "model.layers.";
  int64_t layer = -1;
  if (parameter.starts_with(kLayers))
    std::from_chars(parameter.data() + kLayers.size(), parameter.data() + parameter.size(), layer);
  return layer;
}

// The first and last eighths of the layers, and every third between them.
bool is_spread_layer(int64_t layer, int64_t layers) {
  const int64_t eighth = layers / 8;
  return layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
}

std::string_view mixed_type(const Mixture& mixture, const models::LlamaConfig& config, const std::string& parameter) {
  if (parameter == "lm_head.weight" || (config.tie_word_embeddings && parameter == "model.embed_tokens.weight"))
    return "q6_k";
  const int64_t layer = layer_of(parameter), layers = config.num_hidden_layers;
  const bool values = parameter.find(".v_proj.") != std::string::npos;
  if (layer < 0 || (!values && parameter.find(".down_proj.") == std::string::npos)) return mixture.base;
  const bool more = mixture.more_layers == Mixture::Layers::spread ? is_spread_layer(layer, layers)
                    : values                                       ? layer < 4
                                                                   : layer < layers / 8;
  return more ? mixture.better : mixture.base;
}

// A type with blocks of 32 and at least as many bits.
std::string_view smaller_blocks(std::string_view name) {
  if (name == "q2_k" || name == "q3_k" || name == "iq4_xs") return "iq4_nl";
  if (name == "q4_k") return "q5_0";
  if (name == "q5_k") return "q5_1";
  return "q8_0";
}

}  // namespace

std::vector<std::string> convert_type_names() {
  std::vector<std::string> names = {"f32", "bf16", "f16"};
  for (const BlockEncoding* encoding : BlockEncoding::all()) names.emplace_back(encoding->name());
  for (const Mixture& mixture : kMixtures) names.emplace_back(mixture.name);
  return names;
}

bool is_quantized_type(std::string_view type_name) {
  return find_mixture(type_name) != nullptr || BlockEncoding::find(type_name) != nullptr;
}

WeightType convert_type_of(std::string_view type_name, const models::LlamaConfig& config, const std::string& parameter,
                           int64_t columns) {
  if (const auto dtype = dtype_from_name(type_name)) return *dtype;
  const Mixture* mixture = find_mixture(type_name);
  std::string_view name = mixture == nullptr ? type_name : mixed_type(*mixture, config, parameter);
  const BlockEncoding* encoding = BlockEncoding::find(name);
  EADEM_CHECK(encoding != nullptr, "no encoding '{}'", name);
  if (columns % encoding->format().block_size == 0) return {DType::f32, encoding};
  if (columns % 32 != 0) return DType::f16;
  return {DType::f32, BlockEncoding::find(smaller_blocks(name))};
}

uint32_t gguf_file_type(std::string_view type_name, const WeightType& most_common) {
  if (const Mixture* mixture = find_mixture(type_name)) return mixture->file_type;
  for (const FileType& type : kFileTypes)
    if (type.name == most_common.name()) return type.id;
  return 1;
}

}  // namespace eadem::cli
