// SPDX-License-Identifier: Apache-2.0
//
// HardwareConfig: what a module wants of the hardware it runs on, in typed options that remember who set them.
//
// Precedence, option by option, is the order of OptionSource. A device may refuse a value with a reason (its kernels
// do, when they are chosen); nothing ever replaces one silently.
#pragma once

#include <concepts>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/core/encoding.h"
#include "eadem/core/machine/matmul_input.h"

namespace eadem {

// The source that set an option, weakest first.
enum class OptionSource : uint8_t {
  generic_default,
  mode_default,  // performance or accuracy, for this device and model size
  model_policy,  // layer x role
  module_override,
  checkpoint,  // the encoding stored in the model's files
  explicit_argument,
};

std::string_view source_name(OptionSource source);

// The aim of a configuration.
enum class HardwareMode : uint8_t { performance, accuracy };

std::string_view hardware_mode_name(HardwareMode mode);
HardwareMode hardware_mode_from_name(std::string_view name);  // throws InvalidArgument

// How latent attention computes the tokens of a prompt (kernels/attention/latent_attention.h). Others are computed in
// the absorbed form.
enum class LatentForm : uint8_t { absorbed, decompressed };

std::string_view latent_form_name(LatentForm form);
LatentForm latent_form_from_name(std::string_view name);  // throws InvalidArgument

template <typename T>
struct ConfigOption {
  T value;
  OptionSource source = OptionSource::generic_default;
  std::string set_by = "eadem";  // the file, flag or module

  // Takes `new_value` unless someone stronger has set the option.
  void set(const T& new_value, OptionSource by_source, std::string by) {
    if (by_source < source) return;
    value = new_value;
    source = by_source;
    set_by = std::move(by);
  }
};

struct HardwareConfig {
  struct Precision {
    ConfigOption<WeightType> weights{WeightType{DType::f32}};
    ConfigOption<DType> activations{DType::f32};
    ConfigOption<MatmulInput> matmul_input{MatmulInput::int8};  // how far products may round activations
    // The encoding to which linear layers round plain weights before they multiply; null: they do not.
    ConfigOption<const Encoding*> rounded_weights{nullptr};
    ConfigOption<const Encoding*> rounded_head{nullptr};        // likewise, the output layer
    ConfigOption<WeightType> kv_cache{WeightType{DType::f32}};  // see kv_cache_type in core/encodings/row_encoding.h
  };
  struct Compute {
    ConfigOption<bool> fuse_gated_activation{true};  // gate and up products with the activation in one sweep
    ConfigOption<bool> fuse_residual{true};          // residual additions into products and norms
    ConfigOption<bool> fuse_rope_append{true};       // keys are rotated on their way into the cache
    ConfigOption<LatentForm> latent_form{LatentForm::absorbed};
  };
  struct Memory {
    ConfigOption<int64_t> kv_block_size{16};  // tokens per block of a paged cache
  };
  Precision precision;
  Compute compute;
  Memory memory;
};

// A value for a option, or none.
template <typename T>
struct Override {
  std::optional<T> value;
  std::string set_by;  // the flag that gave it; empty: whoever applies it

  Override() = default;
  template <std::convertible_to<T> U>
  Override(U new_value) : value(T(std::move(new_value))) {}  // implicit, as is the next: {.weights = DType::bf16}
  Override(std::optional<T> new_value, std::string by = {}) : value(std::move(new_value)), set_by(std::move(by)) {}
};

// Values for some options; the rest is left alone.
struct HardwareOverrides {
  Override<DType> weights, activations;
  Override<MatmulInput> matmul_input;
  Override<const Encoding*> rounded_weights, rounded_head;
  Override<WeightType> kv_cache;
  Override<bool> fuse_gated_activation, fuse_residual, fuse_rope_append;
  Override<LatentForm> latent_form;
  Override<int64_t> kv_block_size;

  // Applies every value that is set, under the rules of precedence. `set_by` is for those that do not say it.
  void apply_to(HardwareConfig& config, OptionSource source, const std::string& set_by) const;
};

// One option as text, for `explain`: {"precision.weights", "bf16", "checkpoint", "model.safetensors"}.
struct OptionText {
  std::string path;
  std::string value;
  OptionSource source;
  std::string set_by;
};

std::vector<OptionText> options(const HardwareConfig& config);

// The options whose values differ, as "precision.weights: bf16 (checkpoint, model.safetensors) | f32 (…)" lines.
std::string diff(const HardwareConfig& a, const HardwareConfig& b);

}  // namespace eadem
