// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/attention_bounds.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/all_ops.h"
#include "tests/ops/bound_terms.h"
#include "tests/support/tolerance.h"

namespace eadem::test {

namespace {

using kernels::Pass;
using ops::RefTensor;

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

// How far x moves when it is rounded to bf16; what is below the normal numbers becomes zero.
double moved_to_bf16(double x) {
  return std::fabs(x) < 0x1p-126
             ? std::fabs(x)
             : std::fabs(x - static_cast<double>(bf16_t::from_float(static_cast<float>(x)).to_float()));
}

// How far a product moves when a and b are rounded to bf16.
double product_moved(double a, double b) {
  const double moved = moved_to_bf16(a);
  return moved * std::fabs(b) + (std::fabs(a) + moved) * moved_to_bf16(b);
}

}  // namespace

// The loops of the reference on absolute values; see kernels/attention/attention.h.
Bounds attention_bounds(const ops::Op& op, Pass pass, Inputs in, Inputs expected, bool rounded_queries,
                        bool rounded_weights, bool bf16_parts) {
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
            if (rounded_weights && backward) query_moved += product_moved(q.data[row + d], k.data[key_at(j, g) + d]);
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
        // On tiles its terms, two for each of dim, meet in chains of 16 and one addition, and these in one addition for
        // each of the two parts of 32 dimensions: 17 + dim / 16 roundings, fewer than dim where dim is 64 or more.
        const double score_error = (gamma_f32(static_cast<double>(dim) + 6) + (bf16_parts ? kBf16Parts : 0)) * widest +
                                   (cap > 0 ? (kTanh + 3 * kU) * widest : 0);
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
          // On tiles the sum over the values has chains of 16 and one addition, and four additions for each chunk, of
          // which the keys are in keys / 64 + 2 at most: 25 + keys / 16 roundings.
          const double value_terms = keys + (bf16_parts ? 25 : 4);
          const double exact_error = moved - 1 + moved * (2 * weight + gamma_f32(value_terms) + gamma_f32(keys + 4));
          // Where p is rounded to bf16 or to two parts for the sum over the values, but not for the sum of p.
          const double rounding = rounded_weights ? dtype_unit_roundoff(DType::bf16) : bf16_parts ? kBf16Parts : 0.0;
          const double error = exact_error + rounding * (1 + exact_error);
          double sum = attrs.sinks ? std::exp(sink - largest) : 0;
          for (double value : score) sum += std::exp(value - largest);
          // With an int8 cache weights times scales of values are rounded, chunk by chunk, to 16 bits of the largest.
          const auto scale_of = [&](int64_t j) {
            double most = 0;
            for (int64_t d = 0; d < v.shape.back(); ++d)
              most = std::max(most, std::fabs(v.data[value_at(j, g) + static_cast<size_t>(d)]));
            return most / 127;
          };
          std::vector<double> codes_moved(rounded_queries ? static_cast<size_t>(value_dim) : 0, 0.0);
          for (int64_t start = first; rounded_queries && start <= position;) {
            const int64_t last =
                std::min(position + 1, (start / kernels::kAttentionChunk + 1) * kernels::kAttentionChunk);
            double most = 0;
            for (int64_t j = start; j < last; ++j)
              most = std::max(most, std::exp(score[static_cast<size_t>(j - first)] - largest) / sum * scale_of(j));
            for (int64_t j = start; j < last; ++j)
              if (const double unit = scale_of(j); unit > 0)
                for (size_t d = 0; d < static_cast<size_t>(value_dim); ++d)
                  codes_moved[d] += kWeightCode * most * std::fabs(v.data[value_at(j, g) + d]) / unit;
            start = last;
          }
          for (size_t d = 0; d < static_cast<size_t>(value_dim); ++d) {
            double size = 0;
            for (int64_t j = first; j <= position; ++j)
              size += std::exp(score[static_cast<size_t>(j - first)] - largest) / sum *
                      std::fabs(v.data[value_at(j, g) + d]);
            result[0][y_row + d] = error * size + kUnderflow;
            if (rounded_queries) result[0][y_row + d] += (1 + exact_error) * codes_moved[d];
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
        // Where factors are rounded to bf16 (those of CUDA's kernels are bf16), a score moves by query_error besides.
        const double p_error = std::expm1(score_error + query_error + kU * (std::fabs(log_sum) + widest) + kExp);
        // Additions of a sum of n terms: one after the other, or those of 64 or more first.
        const auto chain_of = [&](double n) { return n + 2 + (rounded_weights ? n / 64 + 4 : 0); };
        // The slope of a soft cap: 1 - t^2, whose t has the error of its argument.
        const double slope_error = cap > 0 ? 2 * ((score_error + query_error) / cap + kTanh) + 4 * kU : 0;
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
          double dy_v = 0, dy_v_moved = 0;
          for (size_t d = 0; d < static_cast<size_t>(value_dim); ++d) {
            dy_v += std::fabs(dy.data[y_row + d] * v.data[value + d]);
            if (rounded_weights) dy_v_moved += product_moved(dy.data[y_row + d], v.data[value + d]);
          }
          const double ds = p * (dy_v + dy_y) * scale;
          // Where p and ds are rounded to bf16 before they are multiplied.
          const double rounding = rounded_weights ? dtype_unit_roundoff(DType::bf16) * (1 + 0x1p-8) : 0.0;
          const double weight_moved = p * (rounding + p_error * (1 + rounding));
          const double ds_moved = ds * (rounding + (1 + rounding) * (p_error + slope_error +
                                                                     gamma_f32(static_cast<double>(value_dim) + 4))) +
                                  (1 + rounding) * (1 + p_error + slope_error) * p * scale * dy_v_moved;
          // Of a sum of products of `size`, one factor of which is off by `moved`, and the other rounded.
          const auto term = [&](double size, double moved, double other, double terms) {
            const double other_moved = rounded_weights ? moved_to_bf16(other) : 0.0;
            const double most = (size + moved) * (std::fabs(other) + other_moved);
            return most - size * std::fabs(other) + gamma_f32(terms) * most + (rounded_weights ? kUnderflow : 0);
          };
          for (size_t d = 0; d < static_cast<size_t>(dim); ++d) {
            if (!result[0].empty()) result[0][row + d] += term(ds, ds_moved, k.data[key + d], chain_of(keys));
            if (!result[1].empty()) result[1][key + d] += term(ds, ds_moved, q.data[row + d], chain_of(group));
          }
          for (size_t d = 0; d < static_cast<size_t>(value_dim) && !result[2].empty(); ++d)
            result[2][value + d] += term(p, weight_moved, dy.data[y_row + d], chain_of(group));
        }
      }
  }
  return result;
}

}  // namespace eadem::test
