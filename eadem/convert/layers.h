// SPDX-License-Identifier: Apache-2.0
//
// `eadem convert --type` for directories: linear layers as integers or 8-bit floats, in the safetensors layouts of
// io/quantized/quantized_writer.h. Embeddings, norms, biases and the LM head stay plain.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/convert/weights.h"

namespace eadem::convert {

// int8 (per channel), int4_g32, int4_g64, int4_g128, fp8 (per channel), fp8_block128.
std::vector<std::string> layer_type_names();
bool is_layer_type(std::string_view type_name);

// All names that --type takes except "as-is": convert_type_names(), then layer_type_names().
std::vector<std::string> all_type_names();

// Returns the type in which the matrix `parameter` of `columns` columns is stored, or nothing if it stays plain: it is
// no linear layer of the decoder, or its rows are not divisible into groups.
std::optional<WeightType> layer_type_of(std::string_view type_name, const std::string& parameter, int64_t columns);

// Likewise for a tensor of a directory. Matrices of several experts in one tensor, and transposed ones, stay plain.
std::optional<WeightType> layer_type_of(std::string_view type_name, const ConvertedTensor& tensor);

// Whether `type` is the stored type of one of layer_type_names().
bool is_layer_encoding(const WeightType& type);

// The headers of the tensors in the target; a quantized layer has several tensors.
std::vector<io::TensorHeader> headers_of(const std::vector<ConvertedTensor>& tensors);

// The config.json's quantization_config, or nothing when no layer is quantized.
std::optional<io::JsonValue> quantization_config_of(const std::vector<ConvertedTensor>& tensors);

// Quantizes a layer, writes its tensors, and records the rounding errors. Each group is rounded separately: to the
// nearest, or, if `importance` of each column ([columns]) is not empty, so that the weighted square error is least.
void convert_layer(ConvertedTensor& tensor, const TensorView& source, std::span<const float> importance,
                   ThreadPool& pool, io::WeightWriter& writer);

}  // namespace eadem::convert
