// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/error_bounds.h"

#include <algorithm>
#include <cmath>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/delta_rule_bounds.h"
#include "tests/ops/expert_bounds.h"
#include "tests/ops/latent_bounds.h"
#include "tests/ops/recurrent_bounds.h"
#include "tests/ops/selected_bounds.h"
#include "tests/ops/state_space_cases.h"
#include "tests/ops/stream_bounds.h"
#include "tests/support/tolerance.h"

namespace eadem::test {

namespace {

using kernels::ActivationKind;
using kernels::Pass;
using ops::RefTensor;
using Bounds = std::vector<std::vector<double>>;
using Inputs = std::span<const RefTensor>;

constexpr double kU = 0x1p-24;
constexpr double kExp = 4 * kU, kTanh = 8 * kU;
// Where an exponential leaves f32 the quotients it stands in are below this; kernels may flush them.
constexpr double kUnderflow = 0x1p-120;

RefTensor absolute(const RefTensor& x) {
  RefTensor result = x;
  for (double& value : result.data) value = std::fabs(value);
  return result;
}

std::vector<RefTensor> absolute(Inputs tensors) {
  std::vector<RefTensor> result;
  for (const RefTensor& tensor : tensors) result.push_back(absolute(tensor));
  return result;
}

// Sums of the absolute values of the terms of every output of an op that is linear in each input: the op itself on
// absolute values.
std::vector<RefTensor> magnitudes(const ops::Op& op, Pass pass, Inputs in, Inputs initial) {
  const std::vector<RefTensor> sizes = absolute(in);
  std::vector<RefTensor> out = absolute(initial);
  op.reference(pass, sizes, out);
  return out;
}

std::vector<double> scaled(double factor, const std::vector<double>& values) {
  std::vector<double> result = values;
  for (double& value : result) value = factor * std::fabs(value);
  return result;
}

// Every output is exact, or rounded from an exact value.
Bounds exact(std::span<const RefTensor> expected) {
  Bounds result;
  for (const RefTensor& tensor : expected) result.emplace_back(tensor.data.size(), 0.0);
  return result;
}

Bounds relative(double error, std::span<const RefTensor> expected) {
  Bounds result;
  for (const RefTensor& tensor : expected) result.push_back(scaled(error, tensor.data));
  return result;
}

Bounds embedding(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  const bool scaled_rows = op.attrs().get<kernels::EmbeddingAttrs>().scale != 1;
  if (pass != Pass::backward) return scaled_rows ? relative(kU, expected) : exact(expected);
  // At most every token hits one row; a scale is one more rounding of each term.
  const double additions = static_cast<double>(in[0].data.size()) + (scaled_rows ? 2 : 1);
  return {scaled(gamma_f32(additions), magnitudes(op, pass, in, initial)[0].data)};
}

// Rounded to bf16, a value of x moves by 2^-8 of itself at most, and below the normal numbers it becomes zero.
Bounds linear(const ops::Op& op, Pass pass, Inputs in, Inputs initial, bool rounds_x) {
  const std::vector<RefTensor> sizes = magnitudes(op, pass, in, initial);
  const double tokens = static_cast<double>(in[0].shape[0]), width = static_cast<double>(in[0].shape[1]),
               outputs = static_cast<double>(in[1].shape[0]);
  if (pass != Pass::backward && rounds_x) {
    const double rounding = dtype_unit_roundoff(DType::bf16);
    Bounds result = {scaled(rounding + (1 + rounding) * gamma_f32(width + 2), sizes[0].data)};
    for (double& bound : result[0]) bound += kUnderflow;
    return result;
  }
  if (pass != Pass::backward) return {scaled(gamma_f32(width + 1), sizes[0].data)};  // products, then the bias
  return {scaled(gamma_f32(outputs), sizes[0].data), scaled(gamma_f32(tokens + 1), sizes[1].data),
          scaled(gamma_f32(tokens + 1), sizes[2].data)};
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

Bounds rms_norm(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  const double hidden = static_cast<double>(in[0].shape.back()), rows = static_cast<double>(in[0].shape.num_rows());
  if (pass != Pass::backward) {
    // The square root halves the error of the sum; then root, quotient and (for y) two products.
    const double inverse = gamma_f32(hidden + 2) / 2 + 3 * kU;
    return relative(inverse + 2 * kU, expected);
  }
  // dx = s w dy - s^3 x sum(dy w x) / hidden: the two terms' sizes add; dweight is a sum over rows.
  std::vector<double> dx(in[0].data.size());
  const auto n = static_cast<size_t>(hidden);
  for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
    const double s = in[2].data[r];
    const double* weight = &in[1].data[r * n % in[1].data.size()];
    double dot = 0;
    for (size_t i = 0; i < n; ++i) dot += std::fabs(in[3].data[r * n + i] * weight[i] * in[0].data[r * n + i]);
    for (size_t i = 0; i < n; ++i)
      dx[r * n + i] = gamma_f32(hidden + 8) * (std::fabs(s * weight[i] * in[3].data[r * n + i]) +
                                               std::fabs(s * s * s * in[0].data[r * n + i]) * dot / hidden);
  }
  if (expected[0].data.empty()) dx.clear();
  std::vector<RefTensor> sizes(initial.begin(), initial.end());
  sizes = absolute(sizes);
  sizes[0] = {};
  const std::vector<RefTensor> in_sizes = absolute(in);
  op.reference(pass, in_sizes, sizes);
  return {dx, scaled(gamma_f32(rows + 3), sizes[1].data)};
}

Bounds layer_norm(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  Bounds result = exact(expected);
  const auto n = static_cast<size_t>(in[0].shape.back()), rows = static_cast<size_t>(in[0].shape.num_rows());
  const double hidden = static_cast<double>(n),
               eps = static_cast<double>(op.attrs().get<kernels::LayerNormAttrs>().eps);
  for (size_t r = 0; r < rows; ++r) {
    const double* x = &in[0].data[r * n];
    if (pass == Pass::backward) {
      const double mean = in[2].data[r], s = in[3].data[r];
      const auto g = [&](size_t i) { return std::fabs(in[1].data[i] * in[4].data[r * n + i]); };
      const auto z = [&](size_t i) { return std::fabs((x[i] - mean) * s); };
      double g_sum = 0, gz_sum = 0;
      for (size_t i = 0; i < n; ++i) g_sum += g(i), gz_sum += g(i) * z(i);
      for (size_t i = 0; i < n && !result[0].empty(); ++i)
        result[0][r * n + i] = gamma_f32(hidden + 10) * s * (g(i) + (g_sum + z(i) * gz_sum) / hidden);
      // Sums over rows, onto what was there.
      const double error = gamma_f32(static_cast<double>(rows) + 5);
      for (size_t i = 0; i < n; ++i) {
        const double dy = std::fabs(in[4].data[r * n + i]), share = 1 / static_cast<double>(rows);
        if (!result[1].empty()) result[1][i] += error * (dy * z(i) + share * std::fabs(initial[1].data[i]));
        if (!result[2].empty()) result[2][i] += error * (dy + share * std::fabs(initial[2].data[i]));
      }
      continue;
    }
    double sum = 0, sizes = 0, squares = 0, distances = 0;
    for (size_t i = 0; i < n; ++i) sum += x[i], sizes += std::fabs(x[i]);
    const double mean = sum / hidden;
    for (size_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean), distances += std::fabs(x[i] - mean);
    // The mean moves every difference alike, and each is rounded; their squares are summed, and the root halves the
    // error of the sum.
    const double mean_error = gamma_f32(hidden + 1) * sizes / hidden, variance = squares / hidden;
    const double variance_error = 2 * mean_error * distances / hidden + mean_error * mean_error +
                                  gamma_f32(hidden + 5) * (variance + mean_error * mean_error);
    const double inverse_error =
        variance_error / (2 * (variance + eps)) / (1 - std::min(0.5, variance_error / (variance + eps))) + 4 * kU;
    const double s = 1 / std::sqrt(variance + eps);
    for (size_t i = 0; i < n; ++i) {
      const double w = std::fabs(in[1].data[i]) * s, difference = std::fabs(x[i] - mean);
      result[0][r * n + i] = w * (mean_error + kU * difference) * (1 + inverse_error) +
                             w * difference * (inverse_error + 3 * kU) +
                             2 * kU * (std::fabs(expected[0].data[r * n + i]) + w * (difference + mean_error));
    }
    if (result.size() < 3) continue;
    if (!result[1].empty()) result[1][r] = mean_error;
    if (!result[2].empty()) result[2][r] = inverse_error * s;
  }
  return result;
}

// A soft cap's slope is 1 - t^2, whose t has the error of its argument and of the hyperbolic tangent.
Bounds scale(const ops::Op& op, Pass pass, Inputs in, Inputs expected) {
  const auto attrs = op.attrs().get<kernels::ScaleAttrs>();
  if (attrs.softcap == 0) return relative(kU, expected);
  const double cap = static_cast<double>(attrs.softcap), factor = std::fabs(static_cast<double>(attrs.factor));
  Bounds result = exact(expected);
  for (size_t i = 0; i < result[0].size(); ++i) {
    const double argument = factor * std::fabs(in[0].data[i]) / cap, t = std::tanh(argument);
    const double t_error = kTanh * t + 3 * kU * argument * (1 - t * t) + 0x1p-44;
    result[0][i] =
        pass == Pass::backward ? factor * std::fabs(in[1].data[i]) * (2 * t_error + 6 * kU) : cap * (t_error + kU * t);
  }
  return result;
}

// One product. Gradients of scales are sums in f64, rounded, and added to what is there.
Bounds scale_by(Pass pass, Inputs expected, Inputs initial) {
  Bounds result = relative(kU, expected);
  if (pass != Pass::backward) return result;
  for (size_t j = 0; j < result[1].size(); ++j) {
    const double sum = expected[1].data[j] - initial[1].data[j];
    result[1][j] = (kU + 0x1p-40) * (std::fabs(sum) + std::fabs(expected[1].data[j])) + 0x1p-40;
  }
  return result;
}

// Bounds of f and f' at x, f32.
struct ActivationBound {
  double value, slope;
};

ActivationBound activation_bound(ActivationKind kind, double x) {
  const double a = std::fabs(x);
  switch (kind) {
    case ActivationKind::silu: {
      // sigmoid: exponential, sum, quotient.
      const double sigmoid = 1 / (1 + std::exp(-x)), rest = 1 / (1 + std::exp(x)), error = kExp + 2 * kU;
      return {a * sigmoid * (error + kU) + kUnderflow, sigmoid * (1 + a * rest) * (2 * error + 3 * kU) + kUnderflow};
    }
    case ActivationKind::gelu: {
      // Phi with small relative error in its lower tail: exp(-x^2/2) (two exponentials and their product), times a
      // polynomial in one quotient (ten steps, each at most one rounding of a positive partial sum).
      const double cdf = 0.5 * std::erfc(-x / std::sqrt(2.0));
      const double density = std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
      const double error = 2 * kExp + 16 * kU;
      return {a * cdf * (error + kU) + kUnderflow, (cdf + a * density) * (error + 3 * kU) + kUnderflow};
    }
    case ActivationKind::gelu_tanh: {
      // x sigmoid(w), w = 2 sqrt(2/pi) (x + 0.044715 x^3): six roundings of terms of one sign, which the exponential
      // turns into a relative error of 6u |w| (1 - sigmoid).
      const double c = 2 * std::sqrt(2 / M_PI), w = c * (x + 0.044715 * x * x * x);
      const double sigmoid = 1 / (1 + std::exp(-w)), rest = 1 / (1 + std::exp(w));
      const double error = kExp + 2 * kU + 6 * kU * std::fabs(w);
      const double slope = c * (1 + 3 * 0.044715 * x * x);
      return {a * sigmoid * (error + kU) + kUnderflow,
              sigmoid * (1 + a * rest * slope) * (2 * error + 6 * kU) + kUnderflow};
    }
    case ActivationKind::relu: return {0, 0};
    case ActivationKind::relu2: return {kU * x * x, 2 * kU * a};
    case ActivationKind::sigmoid: {
      const double sigmoid = 1 / (1 + std::exp(-x)), rest = 1 / (1 + std::exp(x)), error = kExp + 2 * kU;
      return {sigmoid * error + kUnderflow, sigmoid * rest * (2 * error + kU) + kUnderflow};
    }
  }
  return {};
}

double activation_size(ActivationKind kind, double x) {  // |f(x)| and |f'(x)| are below these
  return kind == ActivationKind::relu2 ? x * x : kind == ActivationKind::sigmoid ? 1 : std::fabs(x);
}
double slope_size(ActivationKind kind, double x) { return kind == ActivationKind::relu2 ? 2 * std::fabs(x) : 1.2; }

Bounds activation(const ops::Op& op, Pass pass, Inputs in, Inputs expected) {
  const ActivationKind kind = op.attrs().get<kernels::ActivationAttrs>().kind;
  const bool gated = op.name() == "gated_activation", backward = pass == Pass::backward;
  Bounds result = exact(expected);
  for (size_t i = 0; i < in[0].data.size(); ++i) {
    const double x = in[0].data[i], up = gated ? std::fabs(in[1].data[i]) : 1;
    const double dy = backward ? std::fabs(in.back().data[i]) : 1;
    const ActivationBound f = activation_bound(kind, x);
    // Up to two products follow.
    if (!result[0].empty())
      result[0][i] = backward ? dy * up * (f.slope + 2 * kU * slope_size(kind, x))
                              : up * (f.value + (gated ? kU * activation_size(kind, x) : 0));
    if (backward && gated && !result[1].empty()) result[1][i] = dy * (f.value + kU * activation_size(kind, x));
  }
  return result;
}

Bounds rope(const ops::Op& op, Inputs in, Pass pass, Inputs expected) {
  // A difference of two products. On absolute values one direction of rotation subtracts and the other adds, so the
  // larger of the two is the sum of the terms' sizes.
  const RefTensor &x = pass == Pass::backward ? in[1] : in[0], &table = pass == Pass::backward ? in[0] : in[1];
  const RefTensor forward_in[] = {absolute(x), absolute(table)}, backward_in[] = {absolute(table), absolute(x)};
  std::vector<RefTensor> forward = {{x.shape, std::vector<double>(x.data.size())}}, backward = forward;
  op.reference(Pass::inference, forward_in, forward);
  op.reference(Pass::backward, backward_in, backward);
  Bounds result = exact(expected);
  for (size_t i = 0; i < result[0].size(); ++i)
    result[0][i] = gamma_f32(2) * std::max(std::fabs(forward[0].data[i]), std::fabs(backward[0].data[i]));
  return result;
}

// How far each of n numbers moves when they are rounded to codes -127 … 127 times a scale. The roundings of the scale
// and of a quotient move it by no more than 4 u of the largest, or choose between two codes that are as far.
std::vector<double> moved_by_codes(const double* x, size_t n) {
  double largest = 0;
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  std::vector<double> moved(n, 0.0);
  const double unit = largest / 127;
  for (size_t i = 0; i < n && unit > 0; ++i)
    moved[i] = std::fabs(x[i] - unit * std::nearbyint(x[i] / unit)) + 4 * kU * largest;
  return moved;
}

// The loops of the reference on absolute values; see kernels/attention/attention.h.
Bounds attention(const ops::Op& op, Pass pass, Inputs in, Inputs expected, bool rounded_queries, bool rounded_weights) {
  const auto attrs = op.attrs().get<kernels::AttentionAttrs>();
  const int64_t heads = attrs.heads, kv_heads = attrs.kv_heads, dim = attrs.head_dim, value_dim = attrs.values();
  const double scale = std::fabs(static_cast<double>(attrs.scale)), cap = static_cast<double>(attrs.softcap);
  const bool cached = attrs.source == kernels::KvSource::cached, backward = pass == Pass::backward;
  const RefTensor &q = in[0], &k = in[1], &v = in[2];
  const auto first_of = [&](int64_t position) {
    if (attrs.chunk > 0) return position - position % attrs.chunk;
    return attrs.window > 0 ? std::max<int64_t>(0, position - attrs.window + 1) : 0;
  };
  Bounds result = exact(expected);
  for (int64_t s = 0; s < in[4].shape[0]; ++s) {
    const auto begin = static_cast<int64_t>(in[3].data[static_cast<size_t>(s)]);
    const auto end = static_cast<int64_t>(in[3].data[static_cast<size_t>(s) + 1]);
    const auto length = static_cast<int64_t>(in[4].data[static_cast<size_t>(s)]);
    // The row of a key and its value.
    const auto row_at = [&](int64_t j, int64_t g) {
      if (!cached) return (begin + j) * kv_heads + g;
      const int64_t size = k.shape[2];
      const auto block = static_cast<int64_t>(in[5].data[static_cast<size_t>(s * in[5].shape[1] + j / size)]);
      return (block * kv_heads + g) * size + j % size;
    };
    const auto key_at = [&](int64_t j, int64_t g) { return static_cast<size_t>(row_at(j, g) * dim); };
    const auto value_at = [&](int64_t j, int64_t g) { return static_cast<size_t>(row_at(j, g) * v.shape.back()); };
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t g = h / (heads / kv_heads), position = length - (end - begin) + t - begin;
        const int64_t first = first_of(position);
        const auto row = static_cast<size_t>((t * heads + h) * dim),
                   y_row = static_cast<size_t>((t * heads + h) * value_dim);
        const double keys = static_cast<double>(position - first + 1);
        std::vector<double> score;
        double largest = -HUGE_VAL, widest = 0, query_error = 0;
        const std::vector<double> moved =
            rounded_queries ? moved_by_codes(&q.data[row], static_cast<size_t>(dim)) : std::vector<double>();
        for (int64_t j = first; j <= position; ++j) {
          double dot = 0, size = 0, query_moved = 0;
          for (size_t d = 0; d < static_cast<size_t>(dim); ++d) {
            const double term = q.data[row + d] * k.data[key_at(j, g) + d];
            dot += term;
            size += std::fabs(term);
            if (!rounded_queries) continue;
            query_moved += moved[d] * std::fabs(k.data[key_at(j, g) + d]);
          }
          const double product = static_cast<double>(attrs.scale) * dot;
          score.push_back(cap > 0 ? cap * std::tanh(product / cap) : product);
          largest = std::max(largest, score.back());
          widest = std::max(widest, scale * (size + query_moved));
          query_error = std::max(query_error, scale * query_moved);
        }
        // A score is a product of head_dim terms, the scale and the subtraction of a maximum that is itself a score;
        // in an encoded cache a key has a scale besides, which the kernel multiplies the product with and whoever
        // decodes it (that is where the reference's keys are from) each number.
        // A soft cap, of slope 1 at most, has its quotient, its hyperbolic tangent and a product besides.
        const double score_error =
            gamma_f32(static_cast<double>(dim) + 6) * widest + (cap > 0 ? (kTanh + 3 * kU) * widest : 0);
        const double sink = attrs.sinks ? in[backward ? 7 : 6].data[static_cast<size_t>(h)] : -HUGE_VAL;
        if (attrs.sinks) largest = std::max(largest, sink), widest = std::max(widest, std::fabs(sink));
        if (!backward) {
          // p: its score and the maximum, an exponential; rescaled once per chunk, and when its span's sums are merged
          // with those of other spans; then the weighted sum over the keys (whose values, encoded, have scales as
          // well), the sum of p over the keys, and their quotient.
          const double chunks = keys / static_cast<double>(kernels::kAttentionChunk) + 2 +
                                keys / static_cast<double>(kernels::kAttentionSplit) + 2;
          // A sink rescales once more.
          const double weight =
              2 * score_error + kExp + (attrs.sinks ? kExp + kU * widest : 0) + chunks * (kExp + 2 * kU);
          // Where the query moves, every exponential and so their sum may change by the factor exp(query_error).
          const double moved = std::exp(2 * query_error);
          const double exact_error = moved - 1 + moved * (2 * weight + 2 * gamma_f32(keys + 4));
          // Where p is rounded to bf16 for the sum over the values, but not for the sum of p.
          const double rounding = rounded_weights ? dtype_unit_roundoff(DType::bf16) : 0.0;
          const double error = exact_error + rounding * (1 + exact_error);
          double sum = attrs.sinks ? std::exp(sink - largest) : 0;
          for (double value : score) sum += std::exp(value - largest);
          for (size_t d = 0; d < static_cast<size_t>(value_dim); ++d) {
            double size = 0;
            for (int64_t j = first; j <= position; ++j)
              size += std::exp(score[static_cast<size_t>(j - first)] - largest) / sum *
                      std::fabs(v.data[value_at(j, g) + d]);
            result[0][y_row + d] = error * size + kUnderflow;
          }
          if (result.size() > 1 && !result[1].empty())
            result[1][static_cast<size_t>(t * heads + h)] =
                score_error + weight + gamma_f32(keys) + kExp * std::log(sum) + kU * std::fabs(largest);
          continue;
        }
        // p = exp(s - lse) with s of the error above; every gradient sums products of p over keys or tokens and heads.
        const RefTensor &y = in[5], &lse = in[6], &dy = in.back();
        const double log_sum = lse.data[static_cast<size_t>(t * heads + h)];
        const double group = static_cast<double>((end - begin) * (heads / kv_heads));
        double dy_y = 0;
        for (size_t d = 0; d < static_cast<size_t>(value_dim); ++d)
          dy_y += std::fabs(dy.data[y_row + d] * y.data[y_row + d]);
        const double p_error = score_error + kU * (std::fabs(log_sum) + widest) + kExp;
        // The slope of a soft cap: 1 - t^2, whose t has the error of its argument.
        const double slope_error = cap > 0 ? 2 * (score_error / cap + kTanh) + 4 * kU : 0;
        if (attrs.sinks && !result[3].empty()) {
          const auto tokens = static_cast<double>(q.shape[0]);
          const double term = std::exp(sink - log_sum) * dy_y;
          result[3][static_cast<size_t>(h)] +=
              term * (p_error + gamma_f32(static_cast<double>(value_dim) + tokens + 4)) +
              kU * std::fabs(expected[3].data[static_cast<size_t>(h)]) / tokens;
        }
        for (int64_t j = first; j <= position; ++j) {
          const double p = std::exp(score[static_cast<size_t>(j - first)] - log_sum);
          const size_t key = key_at(j, g), value = value_at(j, g);
          double dy_v = 0;
          for (size_t d = 0; d < static_cast<size_t>(value_dim); ++d)
            dy_v += std::fabs(dy.data[y_row + d] * v.data[value + d]);
          const double ds = p * (dy_v + dy_y) * scale;
          // Where p and ds are rounded to bf16 before they are multiplied.
          const double rounding = rounded_weights ? dtype_unit_roundoff(DType::bf16) * (1 + 0x1p-8) : 0.0;
          const double ds_error = rounding + p_error + slope_error + gamma_f32(static_cast<double>(value_dim) + 4);
          for (size_t d = 0; d < static_cast<size_t>(dim); ++d) {
            if (!result[0].empty())
              result[0][row + d] += ds * std::fabs(k.data[key + d]) * (ds_error + gamma_f32(keys + 2));
            if (!result[1].empty())
              result[1][key + d] += ds * std::fabs(q.data[row + d]) * (ds_error + gamma_f32(group + 2));
          }
          for (size_t d = 0; d < static_cast<size_t>(value_dim) && !result[2].empty(); ++d)
            result[2][value + d] += p * std::fabs(dy.data[y_row + d]) * (rounding + p_error + gamma_f32(group + 2));
        }
      }
  }
  return result;
}

Bounds softmax(Pass pass, Inputs in, Inputs expected) {
  Bounds result = exact(expected);
  const auto n = static_cast<size_t>(in[0].shape.back());
  const double sum = gamma_f32(static_cast<double>(n) + 2);
  for (size_t r = 0; r < static_cast<size_t>(in[0].shape.num_rows()) && !result[0].empty(); ++r) {
    const double* x = &in[0].data[r * n];
    if (pass == Pass::backward) {
      double dot = 0;
      for (size_t i = 0; i < n; ++i) dot += std::fabs(x[i] * in[1].data[r * n + i]);
      for (size_t i = 0; i < n; ++i)
        result[0][r * n + i] = std::fabs(x[i]) * (2 * kU * std::fabs(in[1].data[r * n + i]) + (sum + 2 * kU) * dot);
      continue;
    }
    // The argument x - max is rounded once; its error is relative to its own size, and so is that of every term.
    double largest = -HUGE_VAL, widest = 0;
    for (size_t i = 0; i < n; ++i) largest = std::max(largest, x[i]);
    for (size_t i = 0; i < n; ++i) widest = std::max(widest, largest - x[i]);
    for (size_t i = 0; i < n; ++i)
      result[0][r * n + i] =
          (2 * (kExp + kU * widest) + sum + 2 * kU) * std::fabs(expected[0].data[r * n + i]) + kUnderflow;
  }
  return result;
}

// Bounds the error of the logarithm of the sum of exponentials of x[0, n). The argument x - max is rounded once; the
// relative error of the sum is the absolute error of its logarithm; the logarithm itself (2 ulp) and one addition
// follow.
double log_sum_exp_error(const double* x, size_t n) {
  double largest = -HUGE_VAL, widest = 0, sum = 0;
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, x[i]);
  for (size_t i = 0; i < n; ++i) {
    widest = std::max(widest, largest - x[i]);
    sum += std::exp(x[i] - largest);
  }
  return kExp + kU * widest + gamma_f32(static_cast<double>(n)) + 4 * kU * std::log(sum) +
         kU * (std::fabs(largest) + std::log(sum));
}

Bounds cross_entropy(Pass pass, Inputs in, Inputs expected) {
  Bounds result = exact(expected);
  const auto rows = static_cast<size_t>(in[0].shape[0]), n = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    const double* x = &in[0].data[r * n];
    const auto label = static_cast<int64_t>(in[1].data[r]);
    if (pass == Pass::backward) {
      if (result[0].empty()) break;
      for (size_t i = 0; i < n && label >= 0; ++i) {
        const double p = std::exp(x[i] - in[2].data[r]);
        const double argument = kU * (std::fabs(x[i]) + std::fabs(in[2].data[r]));
        const double target = static_cast<int64_t>(i) == label ? 1 : 0;
        result[0][r * n + i] = std::fabs(in[3].data[r]) * (p * (kExp + argument) + 2 * kU * (p + target)) + kUnderflow;
      }
      continue;
    }
    const double lse = log_sum_exp_error(x, n);
    result[0][r] = label < 0 ? 0 : lse + kU * std::fabs(x[label]);
    if (pass == Pass::forward && !result[1].empty()) result[1][r] = lse;
  }
  return result;
}

// The tokens are exact (the cases stay away from borders; the likeliest ones stand in the order of the logits
// themselves); a log-probability is a logit less the log-sum-exp.
Bounds sample(Inputs in, Inputs expected) {
  Bounds result = exact(expected);
  const auto rows = static_cast<size_t>(in[0].shape[0]), n = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    if (expected[0].data[r] < 0) continue;
    const double* x = &in[0].data[r * n];
    const double lse = log_sum_exp_error(x, n);
    const auto bound = [&](double token) { return lse + kU * std::fabs(x[static_cast<size_t>(token)]); };
    result[1][r] = bound(expected[0].data[r]);
    for (size_t i = r * kernels::kMostTopLogprobs; i < (r + 1) * kernels::kMostTopLogprobs; ++i)
      if (expected[2].data[i] >= 0) result[3][i] = bound(expected[2].data[i]);
  }
  return result;
}

Bounds adamw(const ops::Op& op, Inputs in, Inputs expected) {
  const std::vector<double>& hyper = in[2].data;
  const double b1 = hyper[kernels::kHyperBeta1], b2 = hyper[kernels::kHyperBeta2];
  const double max_norm = hyper[kernels::kHyperMaxNorm], lr = hyper[kernels::kHyperLearningRate];
  const double clip = max_norm > 0 ? std::min(1.0, max_norm / (in[1].data[0] + 1e-6)) : 1.0;
  const double c1 = hyper[kernels::kHyperBiasCorrection1], c2 = hyper[kernels::kHyperBiasCorrection2];
  const double decay = op.attrs().get<kernels::AdamWAttrs>().decay ? hyper[kernels::kHyperWeightDecay] : 0;
  Bounds result = exact(expected);
  for (size_t i = 0; i < in[0].data.size(); ++i) {
    const double g = clip * in[0].data[i];  // norm + 1e-6, quotient, product: three roundings
    const double m_size = std::fabs(b1 * in[4].data[i]) + (1 - b1) * std::fabs(g);
    const double v_size = b2 * in[5].data[i] + (1 - b2) * g * g;
    result[1][i] = gamma_f32(3 + 3) * m_size;      // 1 - b1, product, sum
    result[2][i] = gamma_f32(2 * 3 + 4) * v_size;  // g twice, 1 - b2, two products, sum
    // m / c1 / (sqrt(v / c2) + eps): m cancels, v does not; quotient and root, sum, two quotients.
    const double denominator = std::sqrt(expected[2].data[i] / c2) + hyper[kernels::kHyperEps];
    const double step_size = m_size / c1 / denominator;
    const double step_error = (gamma_f32(6) + gamma_f32(10) / 2 + gamma_f32(5)) * step_size;
    const double decayed = decay * std::fabs(in[3].data[i]);
    result[0][i] = lr * (step_error + gamma_f32(4) * (step_size + decayed)) + kU * std::fabs(expected[0].data[i]);
    if (!result[3].empty()) result[3][i] = result[0][i] + kU * std::fabs(expected[0].data[i]);
  }
  return result;
}

// m and z are exact. l: the exponentials, whose arguments are rounded, and their sum.
Bounds softmax_state(Inputs in, Inputs expected) {
  Bounds result = exact(expected);
  const auto rows = static_cast<size_t>(in[0].shape[0]), n = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    double widest = 0;
    for (size_t i = 0; i < n; ++i) widest = std::max(widest, expected[0].data[3 * r] - in[0].data[r * n + i]);
    result[0][3 * r + 1] = expected[0].data[3 * r + 1] * (kExp + kU * widest + gamma_f32(static_cast<double>(n) + 1));
  }
  return result;
}

// The differences of largest logits are rounded before their exponential is taken in f64; so is the label's logit from
// the largest one, the sum of the labels' logits, and the loss. The gradient is that of cross_entropy.
Bounds parallel_cross_entropy(Pass pass, Inputs in, Inputs expected) {
  Bounds result = exact(expected);
  const auto rows = static_cast<size_t>(in[0].shape[0]), n = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    if (pass == Pass::backward) {
      const double lse = std::fabs(in[2].data[r]), dloss = std::fabs(in[3].data[r]);
      for (size_t i = 0; !result[0].empty() && in[1].data[r] >= 0 && i < n; ++i) {
        const double p = std::exp(in[0].data[r * n + i] - in[2].data[r]);
        const double argument = kU * (std::fabs(in[0].data[r * n + i]) + lse);
        result[0][r * n + i] = dloss * (p * (kExp + argument) + 2 * kU * (p + 1)) + kUnderflow;
      }
      continue;
    }
    double sizes = 0;
    const auto words = static_cast<size_t>(in[2].shape[1]);
    for (size_t word = 0; word < words; ++word)
      if (word % 3 != 1) sizes += std::fabs(in[2].data[r * words + word]);
    const double lse = 2 * kU * sizes + kU * std::log(300.0);
    if (in[1].data[r] >= 0) result[0][r] = lse + 3 * kU * sizes;
    if (pass == Pass::forward && !result[1].empty()) result[1][r] = lse;
  }
  return result;
}

// Products and their sums, over the streams or, for the gradients of weights, over the columns.
Bounds streams(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  const std::vector<RefTensor> sizes = magnitudes(op, pass, in, initial);
  const double n = static_cast<double>(in[0].shape[1]), hidden = static_cast<double>(in[0].shape[2]);
  Bounds result;
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool weights = pass == Pass::backward && i + 1 == expected.size();
    result.push_back(scaled(gamma_f32(weights ? hidden + 2 : n + 2), sizes[i].data));
  }
  return result;
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

Bounds error_bounds(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial, const TensorView& encoded,
                    bool rounds_to_bf16) {
  const std::string_view name = op.name();
  if (name == "embedding") return embedding(op, pass, in, expected, initial);
  // 8-bit floats are decoded, and multiplied as f32.
  const bool rounds_to_int8 = name == "linear" && pass != Pass::backward &&
                              op.attrs().get<kernels::LinearAttrs>().matmul_input == MatmulInput::int8;
  if (rounds_to_int8 && encoded.defined() && Fp8Encoding::of(encoded.encoding) == nullptr &&
      Fp8TensorEncoding::of(encoded.encoding) == nullptr) {
    const GroupEncoding* groups = GroupEncoding::of(encoded.encoding);
    return quantized_linear(in, encoded, groups != nullptr && groups->format().group_size == 0 ? 256 : 32);
  }
  if (name == "linear") return linear(op, pass, in, initial, rounds_to_bf16);
  if (name == "rms_norm") return rms_norm(op, pass, in, expected, initial);
  if (name == "layer_norm") return layer_norm(op, pass, in, expected, initial);
  if (name == "scale") return scale(op, pass, in, expected);
  if (name == "scale_by") return scale_by(pass, expected, initial);
  if (name == "add" || name == "mul") return relative(kU, expected);  // one operation
  // A term goes through as many additions as there are others, at most.
  if (name == "shard_sum")
    return {scaled(gamma_f32(static_cast<double>(in.size()) - 1), magnitudes(op, pass, in, initial)[0].data)};
  if (name == "activation" || name == "gated_activation") return activation(op, pass, in, expected);
  if (name == "rope") return rope(op, in, pass, expected);
  if (name == "scale_by_position") return relative(gamma_f32(2), expected);  // a factor that is rounded, and a product
  // Queries are rounded as the keys of an int8 cache are, but on a GPU.
  if (name == "attention")
    return attention(op, pass, in, expected, encoded.encoding == &RowEncoding::int8() && !rounds_to_bf16,
                     rounds_to_bf16);
  if (name == "selected_attention") return selected_bounds(op, pass, in, expected);
  if (name == "latent_attention")
    return latent_bounds(op, in, encoded.encoding == &RowEncoding::int8(), rounds_to_bf16);
  if (name == "compressed_attention") return compressed_bounds(op, pass, in, expected);
  if (name == "compress_keys") return compress_bounds(op, pass, in, expected, initial);
  if (name == "pool_keys") return pool_bounds(op, pass, in, expected, initial);
  if (name == "pooled_attention") return pooled_bounds(op, pass, in, expected, initial);
  if (name == "stream_weights") return stream_weights_bounds(op, pass, in, expected);
  if (name == "collapse_streams" || name == "expand_streams") return streams(op, pass, in, expected, initial);
  if (name == "softmax") return softmax(pass, in, expected);
  if (name == "cross_entropy") return cross_entropy(pass, in, expected);
  if (name == "softmax_state") return softmax_state(in, expected);
  if (name == "parallel_cross_entropy") return parallel_cross_entropy(pass, in, expected);
  if (name == "add_bias" && pass != Pass::backward) return relative(kU, expected);
  if (name == "add_bias") {
    Bounds result = exact(expected);
    if (!result[1].empty())
      result[1] = scaled(gamma_f32(static_cast<double>(in[0].shape[0]) + 1), magnitudes(op, pass, in, initial)[1].data);
    return result;
  }
  // Copies of a head are added in order.
  if (name == "select_heads" && pass == Pass::backward)
    return {scaled(gamma_f32(static_cast<double>(in[0].shape[1])), magnitudes(op, pass, in, initial)[0].data)};
  if (name == "state_space_scan") return state_space_bounds(op, pass, in, expected, initial);
  if (name == "sample") return sample(in, expected);
  if (name == "adamw") return adamw(op, in, expected);
  // The angle is reduced in double; its rounding (u pi), sine or cosine within 2 ulp (4u) and the scale.
  if (name == "rope_table") {
    Bounds result = exact(expected);
    const double scale = std::fabs(static_cast<double>(op.attrs().get<kernels::RopeTableAttrs>().scale));
    for (double& bound : result[0]) bound = 9 * kU * scale;
    return result;
  }
  if (name == "route" || name == "permute" || name == "grouped_linear" || name == "unpermute" ||
      name == "clamped_swiglu" || name == "gate_rows" || name == "identity_experts" || name == "load_balancing_loss" ||
      name == "head_linear")
    return expert_bounds(op, pass, in, expected, initial, encoded, rounds_to_bf16);
  if (name == "short_convolution") return recurrent_bounds(op, pass, in, expected, initial);
  if (name == "gated_delta_rule") return delta_rule_bounds(op, pass, in, expected, initial);
  // Squares and their sums in double.
  if (name == "grad_norm") return relative(0x1p-40, expected);
  return exact(expected);
}

}  // namespace eadem::test
