// SPDX-License-Identifier: Apache-2.0
#include "eadem/convert/types.h"

#include <charconv>

#include "eadem/core/encodings/block_encoding.h"

namespace eadem::convert {

namespace {

// The types of one kind of matrix: `chosen` in some layers, `other` in the rest. An empty name means the mixture's
// base.
struct Choice {
  enum class Layers : uint8_t {
    all,
    first_two,
    first_four,
    first_eighth,
    first_sixteenth,
    spread,   // the first and last eighths, and every third between them
    grouped,  // all, where at least four query heads share a value
  };
  std::string_view chosen = {};
  Layers layers = Layers::all;
  std::string_view other = {};
};

// Every mixture stores the LM head as q6_k.
struct Mixture {
  std::string_view name, base;
  Choice values, outputs, down;  // v_proj, o_proj, down_proj
  uint32_t file_type;
};

using Layers = Choice::Layers;
constexpr Mixture kMixtures[] = {
    {"q2_k_m", "q2_k", {"q4_k", Layers::grouped, "q3_k"}, {"q3_k"}, {"q3_k"}, 10},
    {"q3_k_s", "q3_k", {}, {}, {}, 11},
    {"q3_k_m", "q3_k", {"q5_k", Layers::first_two, "q4_k"}, {"q4_k"}, {"q5_k", Layers::first_sixteenth, "q4_k"}, 12},
    {"q3_k_l", "q3_k", {"q5_k"}, {"q5_k"}, {"q5_k"}, 13},
    {"q4_k_s", "q4_k", {"q5_k", Layers::first_four}, {}, {"q5_k", Layers::first_eighth}, 14},
    {"q4_k_m", "q4_k", {"q6_k", Layers::spread}, {}, {"q6_k", Layers::spread}, 15},
    {"q5_k_s", "q5_k", {}, {}, {}, 16},
    {"q5_k_m", "q5_k", {"q6_k", Layers::spread}, {}, {"q6_k", Layers::spread}, 17},
};

// Source of the numbers: llama.h, enum llama_ftype.
struct FileType {
  std::string_view name;
  uint32_t id;
};
constexpr FileType kFileTypes[] = {{"f32", 0},    {"f16", 1},      {"bf16", 32},   {"q4_0", 2},     {"q4_1", 3},
                                   {"q8_0", 7},   {"q5_0", 8},     {"q5_1", 9},    {"q2_k", 10},    {"q3_k", 12},
                                   {"q4_k", 15},  {"q5_k", 17},    {"q6_k", 18},   {"iq4_nl", 25},  {"iq4_xs", 30},
                                   {"mxfp4", 38}, {"iq2_xxs", 19}, {"iq2_xs", 20}, {"iq3_xxs", 23}, {"iq1_s", 24},
                                   {"iq3_s", 26}, {"iq2_s", 28},   {"iq1_m", 31},  {"tq1_0", 36},   {"tq2_0", 37}};

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

bool is_chosen(Layers layers, int64_t layer, const models::ModelInfo& model) {
  const int64_t count = model.layers, eighth = count / 8;
  switch (layers) {
    case Layers::all: return true;
    case Layers::first_two: return layer < 2;
    case Layers::first_four: return layer < 4;
    case Layers::first_eighth: return layer < eighth;
    case Layers::first_sixteenth: return layer < count / 16;
    case Layers::spread: return layer < eighth || layer >= 7 * count / 8 || (layer - eighth) % 3 == 2;
    case Layers::grouped: return model.heads >= 4 * model.kv_heads;
  }
  return false;
}

// A rounded router would choose other experts.
bool is_router(const std::string& parameter) {
  return parameter.ends_with(".mlp.gate.weight") || parameter.ends_with(".moe.gate.weight");
}

// Weights of streams and places in pooled rows are exponents; there are few of them.
bool makes_exponents(const std::string& parameter) {
  return parameter.ends_with("_hc.fn") || parameter == "model.hc_head.fn" || parameter.ends_with(".position_bias");
}

std::string_view mixed_type(const Mixture& mixture, const models::ModelInfo& model, const std::string& parameter) {
  if (parameter == "lm_head.weight" || (model.tied && parameter == "model.embed_tokens.weight")) return "q6_k";
  const auto is = [&](std::string_view kind) { return parameter.find(kind) != std::string::npos; };
  const Choice choice = is(".v_proj.")      ? mixture.values
                        : is(".o_proj.")    ? mixture.outputs
                        : is(".down_proj.") ? mixture.down
                                            : Choice();
  const std::string_view type = is_chosen(choice.layers, layer_of(parameter), model) ? choice.chosen : choice.other;
  return type.empty() ? mixture.base : type;
}

// A type with blocks of 32 values and at least as many bits as `type`. (For q2_k and q3_k llama.cpp takes q4_0, which
// has as many bits as iq4_nl and a tenth more error.)
std::string_view smaller_blocks(std::string_view name) {
  if (name == "q2_k" || name == "q3_k" || name == "iq4_xs" || !BlockEncoding::find(name)->is_writable())
    return "iq4_nl";
  if (name == "q4_k") return "q5_0";
  if (name == "q5_k") return "q5_1";
  return "q8_0";
}

}  // namespace

std::vector<std::string> convert_type_names() {
  std::vector<std::string> names = {"f32", "bf16", "f16"};
  for (const BlockEncoding* encoding : BlockEncoding::writable()) names.emplace_back(encoding->name());
  for (const Mixture& mixture : kMixtures) names.emplace_back(mixture.name);
  return names;
}

bool is_vector(const std::string& parameter) {
  return parameter.ends_with("bias") || parameter.ends_with("norm.weight");
}

bool is_convolution(const std::string& parameter) {
  return parameter.ends_with("conv1d.weight") || parameter.ends_with("_conv.weight") ||
         parameter.ends_with(".conv.weight");
}

bool is_quantized_type(std::string_view type_name) {
  return find_mixture(type_name) != nullptr || BlockEncoding::find(type_name) != nullptr;
}

WeightType convert_type_of(std::string_view type_name, const models::ModelInfo& model, const std::string& parameter,
                           int64_t columns) {
  if (const auto dtype = dtype_from_name(type_name)) return *dtype;
  if (is_vector(parameter) || is_router(parameter) || is_convolution(parameter) || makes_exponents(parameter))
    return DType::f32;
  const Mixture* mixture = find_mixture(type_name);
  std::string_view name = mixture == nullptr ? type_name : mixed_type(*mixture, model, parameter);
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

}  // namespace eadem::convert
