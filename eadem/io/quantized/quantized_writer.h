// SPDX-License-Identifier: Apache-2.0
//
// Writing layers that are quantized: the tensors that a layer in an encoding is in a safetensors checkpoint, and the
// quantization_config that says so. The layouts are those of quantized_layouts.h:
//
//   int4, int8 in groups or rows   compressed-tensors pack-quantized (as int-quantized it is not read by programs that
//                                  quantize no activations, nor experts by transformers)
//   e4m3 per tensor or row         compressed-tensors float-quantized
//   e4m3 in blocks of 128          fp8 with weight_block_size, as DeepSeek and Qwen publish
//
// Encodings with zero points or an order of columns, and e5m2, are not written.
#pragma once

#include <string>
#include <vector>

#include "eadem/io/json.h"
#include "eadem/io/weight_writer.h"

namespace eadem::io {

bool can_write_layer(const Encoding& encoding);

// The tensors of layer `name` (without ".weight"), in the order in which `layer_values` gives them.
std::vector<TensorHeader> layer_headers(const std::string& name, const Encoding& encoding, const Shape& shape);

// Their values for a whole layer in its encoding, on the host; they share `encoded`'s bytes where these lie as they are
// written, and own the others.
std::vector<Tensor> layer_values(const Tensor& encoded);

// The quantization_config of a checkpoint whose layers are in `encoding`, except those named in `ignored`.
JsonValue quantization_config_of(const Encoding& encoding, const std::vector<std::string>& ignored);

}  // namespace eadem::io
