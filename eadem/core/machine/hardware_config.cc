// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/machine/hardware_config.h"

#include "eadem/core/error.h"

namespace eadem {

namespace {

std::string text_of(DType value) { return std::string(dtype_name(value)); }
std::string text_of(const WeightType& value) { return std::string(value.name()); }
std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(int64_t value) { return std::to_string(value); }

// The one list of leaves: calls visit(path, leaf of each config…).
template <typename Visit, typename... Configs>
void for_each_leaf(Visit&& visit, Configs&... configs) {
  visit("precision.weights", configs.precision.weights...);
  visit("precision.activations", configs.precision.activations...);
  visit("precision.kv_cache", configs.precision.kv_cache...);
  visit("compute.fuse_gated_activation", configs.compute.fuse_gated_activation...);
  visit("compute.fuse_residual", configs.compute.fuse_residual...);
  visit("compute.fuse_rope_append", configs.compute.fuse_rope_append...);
  visit("memory.kv_block_size", configs.memory.kv_block_size...);
}

}  // namespace

std::string_view origin_name(Origin origin) {
  switch (origin) {
    case Origin::generic_default: return "generic default";
    case Origin::mode_default: return "mode default";
    case Origin::model_policy: return "model policy";
    case Origin::module_override: return "module override";
    case Origin::checkpoint: return "checkpoint";
    case Origin::explicit_argument: return "explicit argument";
  }
  return "?";
}

std::string_view hardware_mode_name(HardwareMode mode) {
  return mode == HardwareMode::performance ? "performance" : "accuracy";
}

HardwareMode hardware_mode_from_name(std::string_view name) {
  for (HardwareMode mode : {HardwareMode::performance, HardwareMode::accuracy})
    if (hardware_mode_name(mode) == name) return mode;
  throw InvalidArgument("unknown mode '{}'; expected performance or accuracy", name);
}

void HardwareOverrides::apply_to(HardwareConfig& config, Origin origin, const std::string& set_by) const {
  const auto apply = [&](auto& leaf, const auto& override_) {
    if (override_.value) leaf.set(*override_.value, origin, override_.set_by.empty() ? set_by : override_.set_by);
  };
  apply(config.precision.weights, weights);
  apply(config.precision.activations, activations);
  apply(config.precision.kv_cache, kv_cache);
  apply(config.compute.fuse_gated_activation, fuse_gated_activation);
  apply(config.compute.fuse_residual, fuse_residual);
  apply(config.compute.fuse_rope_append, fuse_rope_append);
  apply(config.memory.kv_block_size, kv_block_size);
}

std::vector<LeafText> leaves(const HardwareConfig& config) {
  std::vector<LeafText> result;
  for_each_leaf(
      [&](std::string_view path, const auto& leaf) {
        result.push_back({std::string(path), text_of(leaf.value), leaf.origin, leaf.set_by});
      },
      config);
  return result;
}

std::string diff(const HardwareConfig& a, const HardwareConfig& b) {
  std::string text;
  for_each_leaf(
      [&](std::string_view path, const auto& left, const auto& right) {
        if (left.value != right.value)
          text += fmt::format("{}: {} ({}, {}) | {} ({}, {})\n", path, text_of(left.value), origin_name(left.origin),
                              left.set_by, text_of(right.value), origin_name(right.origin), right.set_by);
      },
      a, b);
  return text;
}

}  // namespace eadem
