// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/linear_bounds.h"

#include <algorithm>
#include <cmath>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/bound_terms.h"
#include "tests/ops/error_bounds.h"
#include "tests/support/tolerance.h"

namespace eadem::test {

namespace {

using kernels::Pass;
using ops::RefTensor;

// Rounded to bf16, a value moves by 2^-8 of itself at most, and below the normal numbers it becomes zero. Of y and of
// the gradient of x one factor is rounded, and of the gradient of the weight both. Tiles round a sum once more.
Bounds linear(const ops::Op& op, Pass pass, Inputs in, Inputs initial, bool rounds) {
  const std::vector<RefTensor> sizes = magnitudes(op, pass, in, initial);
  const double tokens = static_cast<double>(in[0].shape[0]), width = static_cast<double>(in[0].shape[1]),
               outputs = static_cast<double>(in[1].shape[0]);
  const double rounding = dtype_unit_roundoff(DType::bf16);
  if (pass != Pass::backward && rounds) {
    Bounds result = {scaled(rounding + (1 + rounding) * gamma_f32(width + 2), sizes[0].data)};
    for (double& bound : result[0]) bound += kUnderflow;
    return result;
  }
  if (pass != Pass::backward) return {scaled(gamma_f32(width + 1), sizes[0].data)};  // products, then the bias
  Bounds result = {scaled(gamma_f32(outputs), sizes[0].data), scaled(gamma_f32(tokens + 1), sizes[1].data),
                   scaled(gamma_f32(tokens + 1), sizes[2].data)};
  if (!rounds) return result;
  const double both = rounding * (2 + rounding);
  result[0] = scaled(rounding + (1 + rounding) * gamma_f32(outputs + 1), sizes[0].data);
  result[1] = scaled(both + (1 + both) * gamma_f32(tokens + 2), sizes[1].data);
  for (size_t i : {0, 1})
    for (double& bound : result[i]) bound += kUnderflow;
  return result;
}

// |scale level| + |min| of each column of a row.
void term_sizes(std::vector<double>& sizes, const TensorView& encoded, int64_t row) {
  const int64_t width = encoded.shape[1];
  if (const GroupEncoding* groups = GroupEncoding::of(encoded.encoding)) {
    std::vector<uint8_t> codes(static_cast<size_t>(width));
    groups->unpack_codes(codes.data(), encoded, row, 0, width);
    for (int64_t j = 0; j < width; ++j) {
      const int64_t g = j / groups->group_columns(width);
      const int middle = groups->format().middle();
      sizes[static_cast<size_t>(groups->column(encoded, j))] =
          std::fabs(static_cast<double>(groups->scale(encoded, row, g))) *
          (std::abs(codes[static_cast<size_t>(j)] - middle) + std::abs(groups->zero(encoded, row, g) - middle));
    }
    return;
  }
  const BlockEncoding& encoding = *BlockEncoding::of(encoded.encoding);
  const BlockFormat& format = encoding.format();
  const auto* block = static_cast<const uint8_t*>(encoded.data) + row * encoding.row_bytes(width);
  for (size_t k = 0; k < static_cast<size_t>(width); block += format.block_bytes) {
    BlockParts parts{};
    encoding.unpack(parts, block);
    for (size_t i = 0; i < static_cast<size_t>(format.block_size); ++i, ++k) {
      const size_t g = i / static_cast<size_t>(format.group_size);
      sizes[k] = std::fabs(static_cast<double>(parts.scale) * parts.sub_scales[g] * format.level(parts.codes[i]));
      if (format.has_min) sizes[k] += std::fabs(static_cast<double>(parts.min) * parts.sub_mins[g]);
    }
  }
}

// A value of x moves by at most half a unit, 1 / 254 of the largest of its 32 (256 where an output has one scale), and
// by the roundings of the unit and of the quotient (8 u of that largest are more). Then one f32 chain over the groups
// of 32, whose terms are no larger than the largest x times (|scale level| + |min|); a term takes at most 7 roundings,
// and so does the bias.
Bounds quantized_linear(Inputs in, const TensorView& encoded, size_t group) {
  const size_t tokens = static_cast<size_t>(in[0].shape[0]), width = static_cast<size_t>(in[0].shape[1]),
               outputs = static_cast<size_t>(in[1].shape[0]);
  const size_t row_groups = (width + group - 1) / group;
  std::vector<double> largest(tokens * row_groups, 0.0);
  for (size_t t = 0; t < tokens; ++t)
    for (size_t k = 0; k < width; ++k) {
      double& most = largest[t * row_groups + k / group];
      most = std::max(most, std::fabs(in[0].data[t * width + k]));
    }
  std::vector<double> sizes(width), bound(tokens * outputs);
  for (size_t n = 0; n < outputs; ++n) {
    term_sizes(sizes, encoded, static_cast<int64_t>(n));
    for (size_t t = 0; t < tokens; ++t) {
      double moved = 0, magnitude = 0;
      for (size_t k = 0; k < width; ++k) {
        const double most = largest[t * row_groups + k / group];
        moved += most * (0.5 / 127 + 8 * kU) * std::fabs(in[1].data[n * width + k]);
        magnitude += most * sizes[k];
      }
      if (!in[2].data.empty()) magnitude += std::fabs(in[2].data[n]);
      bound[t * outputs + n] = moved + gamma_f32(static_cast<double>(row_groups) + 8) * magnitude;
    }
  }
  return {bound};
}

}  // namespace

std::vector<double> bounds_of_chunked_linear(Inputs in, const TensorView& encoded) {
  std::vector<double> bounds = quantized_linear(in, encoded, 256)[0];
  const size_t width = static_cast<size_t>(in[0].shape[1]), outputs = static_cast<size_t>(in[1].shape[0]);
  for (size_t i = 0; i < bounds.size(); ++i)
    for (size_t k = 0; k < width; ++k)
      bounds[i] += 0x1p-11 * std::fabs(in[0].data[i / outputs * width + k] * in[1].data[i % outputs * width + k]);
  return bounds;
}

Bounds linear_bounds(const ops::Op& op, Pass pass, Inputs in, Inputs initial, const TensorView& encoded,
                     bool rounds_to_bf16) {
  // 8-bit floats are decoded, and multiplied as f32.
  const bool rounds_to_int8 =
      pass != Pass::backward && op.attrs().get<kernels::LinearAttrs>().matmul_input == MatmulInput::int8;
  if (rounds_to_int8 && encoded.defined() && Fp8Encoding::of(encoded.encoding) == nullptr &&
      Fp8TensorEncoding::of(encoded.encoding) == nullptr) {
    const GroupEncoding* groups = GroupEncoding::of(encoded.encoding);
    return quantized_linear(in, encoded, groups != nullptr && groups->format().group_size == 0 ? 256 : 32);
  }
  return linear(op, pass, in, initial, rounds_to_bf16);
}

}  // namespace eadem::test
