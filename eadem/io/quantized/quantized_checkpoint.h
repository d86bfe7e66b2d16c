// SPDX-License-Identifier: Apache-2.0
//
// Safetensors checkpoints whose layers are quantized: the tensors that a layer consists of appear as one, `X.weight`,
// in an encoding, so that whoever reads weights need not know of GPTQ, AWQ or compressed-tensors.
#pragma once

#include <memory>

#include "eadem/io/quantized/quantization_config.h"
#include "eadem/io/weights.h"

namespace eadem::io {

// `files` as `config` says they are to be read. Tensors that belong to no quantized layer pass through. Every layer's
// headers are checked here; what is in them when it is read. Throws NotFound for a layer that lacks its scales,
// DataCorrupted, or Unsupported, naming file and tensor: also when no layer is quantized, or one that the config says
// is not.
std::shared_ptr<const WeightSource> open_quantized(std::shared_ptr<const WeightSource> files,
                                                   const QuantizationConfig& config);

}  // namespace eadem::io
