// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/machine/hardware_config.h"

#include "eadem/core/error.h"

namespace eadem {

namespace {

std::string text_of(DType value) { return std::string(dtype_name(value)); }
std::string text_of(const WeightType& value) { return std::string(value.name()); }
std::string text_of(const Encoding* value) { return value == nullptr ? "none" : std::string(value->name()); }
std::string text_of(MatmulInput value) { return std::string(matmul_input_name(value)); }
std::string text_of(LatentForm value) { return std::string(latent_form_name(value)); }
std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(int64_t value) { return std::to_string(value); }

// The one list of options: calls visit(path, option of each config…).
template <typename Visit, typename... Configs>
void for_each_leaf(Visit&& visit, Configs&... configs) {
  visit("precision.weights", configs.precision.weights...);
  visit("precision.activations", configs.precision.activations...);
  visit("precision.matmul_input", configs.precision.matmul_input...);
  visit("precision.rounded_weights", configs.precision.rounded_weights...);
  visit("precision.rounded_head", configs.precision.rounded_head...);
  visit("precision.kv_cache", configs.precision.kv_cache...);
  visit("compute.fuse_gated_activation", configs.compute.fuse_gated_activation...);
  visit("compute.fuse_residual", configs.compute.fuse_residual...);
  visit("compute.fuse_rope_append", configs.compute.fuse_rope_append...);
  visit("compute.latent_form", configs.compute.latent_form...);
  visit("memory.kv_block_size", configs.memory.kv_block_size...);
}

}  // namespace

std::string_view source_name(OptionSource source) {
  switch (source) {
    case OptionSource::generic_default: return "generic default";
    case OptionSource::mode_default: return "mode default";
    case OptionSource::model_policy: return "model policy";
    case OptionSource::module_override: return "module override";
    case OptionSource::checkpoint: return "checkpoint";
    case OptionSource::explicit_argument: return "explicit argument";
  }
  return "?";
}

std::string_view matmul_input_name(MatmulInput input) {
  switch (input) {
    case MatmulInput::f32: return "f32";
    case MatmulInput::bf16: return "bf16";
    case MatmulInput::int8: return "int8";
  }
  return "?";
}

std::string matmul_input_text(MatmulInput input) {
  return input == MatmulInput::int8 ? "" : fmt::format(" matmul_input={}", matmul_input_name(input));
}

MatmulInput matmul_input_from_name(std::string_view name) {
  for (MatmulInput input : {MatmulInput::f32, MatmulInput::bf16, MatmulInput::int8})
    if (matmul_input_name(input) == name) return input;
  throw InvalidArgument("matmul_input is '{}'; expected f32, bf16 or int8", name);
}

std::string_view hardware_mode_name(HardwareMode mode) {
  return mode == HardwareMode::performance ? "performance" : "accuracy";
}

HardwareMode hardware_mode_from_name(std::string_view name) {
  for (HardwareMode mode : {HardwareMode::performance, HardwareMode::accuracy})
    if (hardware_mode_name(mode) == name) return mode;
  throw InvalidArgument("unknown mode '{}'; expected performance or accuracy", name);
}

std::string_view latent_form_name(LatentForm form) {
  return form == LatentForm::absorbed ? "absorbed" : "decompressed";
}

LatentForm latent_form_from_name(std::string_view name) {
  for (LatentForm form : {LatentForm::absorbed, LatentForm::decompressed})
    if (latent_form_name(form) == name) return form;
  throw InvalidArgument("latent_form is '{}'; expected absorbed or decompressed", name);
}

void HardwareOverrides::apply_to(HardwareConfig& config, OptionSource source, const std::string& set_by) const {
  const auto apply = [&](auto& option, const auto& override_) {
    if (override_.value) option.set(*override_.value, source, override_.set_by.empty() ? set_by : override_.set_by);
  };
  apply(config.precision.weights, weights);
  apply(config.precision.activations, activations);
  apply(config.precision.matmul_input, matmul_input);
  apply(config.precision.rounded_weights, rounded_weights);
  apply(config.precision.rounded_head, rounded_head);
  apply(config.precision.kv_cache, kv_cache);
  apply(config.compute.fuse_gated_activation, fuse_gated_activation);
  apply(config.compute.fuse_residual, fuse_residual);
  apply(config.compute.fuse_rope_append, fuse_rope_append);
  apply(config.compute.latent_form, latent_form);
  apply(config.memory.kv_block_size, kv_block_size);
}

std::vector<OptionText> options(const HardwareConfig& config) {
  std::vector<OptionText> result;
  for_each_leaf(
      [&](std::string_view path, const auto& option) {
        result.push_back({std::string(path), text_of(option.value), option.source, option.set_by});
      },
      config);
  return result;
}

std::string diff(const HardwareConfig& a, const HardwareConfig& b) {
  std::string text;
  for_each_leaf(
      [&](std::string_view path, const auto& left, const auto& right) {
        if (left.value != right.value)
          text += fmt::format("{}: {} ({}, {}) | {} ({}, {})\n", path, text_of(left.value), source_name(left.source),
                              left.set_by, text_of(right.value), source_name(right.source), right.set_by);
      },
      a, b);
  return text;
}

}  // namespace eadem
