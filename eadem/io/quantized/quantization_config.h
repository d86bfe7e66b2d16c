// SPDX-License-Identifier: Apache-2.0
//
// QuantizationConfig: what the `quantization_config` of a config.json says of the weights beside it.
//
//   quant_method         what is read
//   gptq                 4 and 8 bits, in groups of 32, 64, 128 or per row; desc_act; checkpoint_format gptq, gptq_v2
//   awq                  4 bits, version gemm
//   fp8                  e4m3 and e5m2, per tensor, per row, or with weight_block_size [128, 128]; beside them, where
//                        `expert_dtype` of the config.json is fp4, layers of 4-bit floats (DeepSeek-V4)
//   mxfp4                4 bits with a power of two for each 32 values (GPT-OSS)
//   compressed-tensors   formats pack-quantized (4 and 8 bits), int-quantized (8), naive-quantized and float-quantized
//                        (8); layers may have different schemes, of different formats
//
// Whatever else a config says and means is refused with its name. Activations that are to be quantized dynamically are
// not an error: that is a way to save time at run time, and a kernel here chooses its own. Static scales of activations
// are one, as they clip.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/io/json.h"

namespace eadem::io {

class Regex;

// How a layer's weights are quantized.
struct QuantizationScheme {
  // The layout of a layer's codes (quantized_layouts.h).
  enum class Layout : uint8_t { gptq, awq, packed, integers, floats, mxfp4 };
  // The values that share a scale. `unstated`: a tensor or a row, as the shape of the scales says.
  enum class Scope : uint8_t { unstated, tensor, row, group, block };

  std::string place;   // "config.json: 'quantization_config'", for messages; with several, that of this scheme
  std::string method;  // "gptq", "compressed-tensors pack-quantized"
  Layout layout = Layout::gptq;
  Scope scope = Scope::group;
  int bits = 0;
  int64_t group_size = 0;  // Scope::group
  // Whether zero points are other than 2^(bits - 1). (GPTQ writes them in any case.)
  bool has_zeros = false;
  bool zeros_less_one = false;            // GPTQ: what is written is the zero point less one
  bool borrows_across_zeros = false;      // and was subtracted from whole words, so that a zero borrows from the next
  bool has_order = false;                 // groups need not be of neighbouring columns
  std::optional<Fp8Format::Kind> floats;  // Layout::floats, where it is stated
  // Layout::floats: `expert_dtype`, "fp4" or "fp8"; empty where it is not stated.
  std::string expert_dtype;

  friend bool operator==(const QuantizationScheme&, const QuantizationScheme&) = default;
};

// The scheme of all layers, where there is but one.
struct QuantizationConfig : QuantizationScheme {
  // What compressed-tensors calls layers by: the name of one, "re:" and a pattern that matches the beginning of names,
  // or the class of PyTorch's modules, "Linear" or "Embedding".
  struct Target {
    std::string text;
    std::shared_ptr<const Regex> pattern;  // null where there is no "re:", and for a pattern that is not read
    size_t scheme = 0;                     // index of `schemes`
  };

  std::vector<std::string> ignored;         // layers that are not quantized; those of compressed-tensors are `plain`
  std::vector<Target> plain;                // the layers that are not quantized, of compressed-tensors
  std::vector<QuantizationScheme> schemes;  // of different layers; empty where there is but one
  std::vector<Target> targets;  // of compressed-tensors; one that matches a name wins over those that follow
  int64_t num_layers = 0;       // of the model; 0: not stated

  // Nothing when the config.json `config` has neither `quantization_config` nor `compression_config`. Throws
  // DataCorrupted for what is malformed, Unsupported naming what is not read. Marks the key as read.
  static std::optional<QuantizationConfig> from_json(const JsonReader& config);

  // The scheme of a layer whose codes are there; null when no target is for it. With several schemes, a layer has that
  // of its name, or else of the first pattern that matches, in the order of their texts, or else of its class: the
  // package's match_targets(). Of a file's names, those that end in "embed_tokens" are of Embedding, others of Linear.
  // Throws InvalidArgument when a pattern takes too long.
  const QuantizationScheme* scheme_of(std::string_view layer) const;

  // Whether `layer` is on the list of those that are not quantized: by its name, or by that of a module around it or of
  // its last part. In compressed-tensors' list by its name, by a pattern or by its class: the package's match_name()
  // and match_class(). Throws as scheme_of().
  bool ignores(std::string_view layer) const;

  // Whether a layer of compressed-tensors that is like quantized ones but for numbers in its name may be plain in the
  // file: no target is for it, or something on the list may mean it. Beyond ignores() these are the name of a module
  // around it or of its last part, a name that agrees with it from ".layers." on (of the parts before, transformers'
  // versions and files have different names), and a pattern that is not read.
  bool may_be_plain(std::string_view layer) const;
};

}  // namespace eadem::io
