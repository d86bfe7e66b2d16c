// SPDX-License-Identifier: Apache-2.0
//
// How checkpoints lay out a quantized layer, and what becomes of it: one tensor in the encoding that means the same.
// For quantized_checkpoint.cc. `words` hold codes of `bits` bits, the first in the lowest bits; value and zero below
// are codes, unsigned.
//
//   gptq       X.qweight  words [in / n, out] along in          n = 32 / bits
//              X.qzeros   words [groups, out / n] along out, each zero less one (checkpoint_format gptq_v2: as it is)
//              X.scales   [groups, out]
//              X.g_idx    i32 [in]: the group of each column; may be absent where groups are of neighbours
//   awq        X.qweight  words [in, out / 8] along out, in the order 0 2 4 6 1 3 5 7 of each eight
//              X.qzeros   words [groups, out / 8] likewise      X.scales [groups, out]
//   packed     X.weight_packed      words [out, ceil(in / n)] along in
//              X.weight_zero_point  words [ceil(out / n), groups] along out
//              X.weight_scale       [out, groups]
//              X.weight_shape       i64 [2]: out, in
//              X.weight_g_idx       as g_idx above
//   integers   X.weight i8 [out, in]   X.weight_zero_point i8 [out, groups]   X.weight_scale [out, groups]
//              (signed; here they are 128 more)
//   floats     X.weight f8_e4m3 or f8_e5m2 [out, in]
//              X.weight_scale, X.weight_scale_inv or X.scale: [], [1], [out, 1], or [ceil(out / 128), ceil(in / 128)];
//              each name is what codes are multiplied by. f8_e8m0 scales are bytes e that mean 2^(e - 127); 255, which
//              would be NaN, is refused
//              Where `expert_dtype` is fp4, also X.weight i8 or u8 [out, in / 2], two codes of E2M1 in a byte, the
//              first in the lower half, with f8_e8m0 scales [out, in / 32]
//   mxfp4      X_blocks u8 [out, in / 32, 16], two codes of E2M1 in a byte, the first in the lower half
//              X_scales u8 [out, in / 32], exponents plus 127; experts have an axis before these
// Scales are f16, bf16 or f32 where nothing else is said. Sources: AutoGPTQ (qlinear), AutoAWQ (WQLinear_GEMM),
// compressed-tensors (compressors), DeepSeek-V3 (weight_dequant), DeepSeek-V4 (inference), transformers
// (integrations/mxfp4).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/quantized/quantization_config.h"
#include "eadem/io/weights.h"

namespace eadem::io {

struct QuantizedLayer {
  std::string name;                // X
  WeightType type;                 // the storage type that Eadem gives it
  Shape shape;                     // [out, in], of mxfp4 also [experts, out, in]
  std::vector<std::string> parts;  // the tensors of the file that it consists of
};

// The layer whose codes `tensor` is, or "" when it is no layer's codes in this layout.
std::string quantized_layer_of(const QuantizationScheme& config, const WeightInfo& tensor);

// Layer `name` by its headers (and its g_idx). Throws NotFound for a part that is missing, DataCorrupted for parts that
// contradict one another or the config, Unsupported; all name the file and the tensor.
QuantizedLayer describe_layer(const WeightSource& files, const QuantizationScheme& config, const std::string& name);

// Its planes, one after another. Throws DataCorrupted for values that contradict the config.
Tensor load_layer(const WeightSource& files, const QuantizationScheme& config, const QuantizedLayer& layer);

}  // namespace eadem::io
