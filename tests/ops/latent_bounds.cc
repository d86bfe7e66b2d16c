// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/latent_bounds.h"

#include <algorithm>
#include <cmath>

#include "eadem/kernels/attention/attention.h"
#include "eadem/ops/attention/attention_ports.h"
#include "eadem/ops/attention/latent_attention.h"
#include "tests/ops/bound_terms.h"
#include "tests/support/tolerance.h"

namespace eadem::test {

namespace {

using ops::RefTensor;

constexpr double kBf16 = 0x1p-8;

// A head's keys and values of one sequence; `sizes` are the sums of their terms' absolute values.
struct Head {
  std::vector<double> keys, key_sizes;  // [length, head_dim]
  std::vector<double> value_sizes;      // [length, value_dim]
  std::vector<double> row_sizes;        // [length]: the sum of a row's absolute values
  std::vector<double> row_scales;       // [length]: that of its codes in an int8 cache
};

Head head_of(const kernels::LatentAttentionAttrs& attrs, std::span<const RefTensor> in, const ops::RefSequence& s,
             size_t h) {
  const auto latent = static_cast<size_t>(attrs.latent_dim), nope = static_cast<size_t>(attrs.nope_dim),
             rope = static_cast<size_t>(attrs.rope_dim), value = static_cast<size_t>(attrs.value_dim);
  Head result;
  for (int64_t j = 0; j < s.length; ++j) {
    const double* row = in[1].data.data() + static_cast<size_t>(s.row(j, 0, 1)) * (latent + rope);
    for (size_t n = 0; n < nope; ++n) {
      double sum = 0, size = 0;
      for (size_t l = 0; l < latent; ++l) {
        const double term = in[2].data[(h * latent + l) * nope + n] * row[l];
        sum += term, size += std::fabs(term);
      }
      result.keys.push_back(sum), result.key_sizes.push_back(size);
    }
    for (size_t r = 0; r < rope; ++r) {
      result.keys.push_back(row[latent + r]), result.key_sizes.push_back(std::fabs(row[latent + r]));
    }
    for (size_t v = 0; v < value; ++v) {
      double size = 0;
      for (size_t l = 0; l < latent; ++l) size += std::fabs(in[3].data[(h * value + v) * latent + l] * row[l]);
      result.value_sizes.push_back(size);
    }
    double size = 0, most = 0;
    for (size_t l = 0; l < latent + rope; ++l) size += std::fabs(row[l]), most = std::max(most, std::fabs(row[l]));
    result.row_sizes.push_back(size), result.row_scales.push_back(most / 127);
  }
  return result;
}

// The largest of the sums of absolute values of what an absorbed query consists of.
double largest_query(const kernels::LatentAttentionAttrs& attrs, const RefTensor& k_b, const double* query, size_t h) {
  const auto latent = static_cast<size_t>(attrs.latent_dim), nope = static_cast<size_t>(attrs.nope_dim);
  double largest = 0;
  for (size_t l = 0; l < latent; ++l) {
    double size = 0;
    for (size_t n = 0; n < nope; ++n) size += std::fabs(k_b.data[(h * latent + l) * nope + n] * query[n]);
    largest = std::max(largest, size);
  }
  for (size_t r = 0; r < static_cast<size_t>(attrs.rope_dim); ++r)
    largest = std::max(largest, std::fabs(query[nope + r]));
  return largest;
}

}  // namespace

// Both forms compute the same sums of products of three numbers,
//   score = scale * sum_{l, n} q_n k_b[l, n] latent_l + sum_r q_r key_r,   y = sum_{j, l} p_j v_b[v, l] latent_l,
// one over n first and one over l first. Either way a product of a score is in a chain of nope_dim or latent_dim
// roundings, and its sum in one of row_dim or head_dim; latent_dim + head_dim is the longer way of both. Products of
// the result are in a chain over latent_dim and one over the keys. So one bound holds for both, and their distance is
// at most twice that. On tiles (bf16_parts) attention's sums have fewer roundings than they have terms for each product
// and, of the result, 25 more (attention_bounds.cc), in the place of which a chain over latent_dim, 32 or more, counts.
std::vector<std::vector<double>> latent_bounds(const ops::Op& op, std::span<const RefTensor> in, bool rounded_queries,
                                               bool rounds_to_bf16, bool bf16_parts) {
  const auto attrs = op.attrs().get<kernels::LatentAttentionAttrs>();
  const auto heads = static_cast<size_t>(attrs.heads), dim = static_cast<size_t>(attrs.head_dim()),
             value = static_cast<size_t>(attrs.value_dim);
  // vdpbf16ps rounds products and sums, so that a chain is twice as long.
  const double latent = static_cast<double>(attrs.latent_dim) * (rounds_to_bf16 ? 2 : 1);
  const double nope = static_cast<double>(attrs.nope_dim) * (rounds_to_bf16 ? 2 : 1);
  // Six for the scale, the maximum, and the scales of encoded rows and weights.
  const double score_terms = latent + nope + static_cast<double>(attrs.rope_dim) + 6;
  std::vector<double> result(in[0].data.size() / dim * value, 0.0);
  for (const ops::RefSequence& s : ops::reference_sequences(in, 4, in[1], kernels::KvSource::cached))
    for (size_t h = 0; h < heads; ++h) {
      const Head head = head_of(attrs, in, s, h);
      for (int64_t t = s.begin; t < s.end; ++t) {
        const size_t index = static_cast<size_t>(t) * heads + h;
        const double* query = in[0].data.data() + index * dim;
        const auto keys = static_cast<size_t>(s.position(t) + 1);
        const bool absorbed = s.position(t) >= static_cast<int64_t>(in[7].data[static_cast<size_t>(s.index)]);
        const double scale = std::fabs(static_cast<double>(attrs.scale));
        // What rounding an absorbed query to codes moves each of its numbers by: half a code, and the scale's rounding.
        const double code =
            absorbed && rounded_queries ? (1.0 / 254 + 4 * kU) * largest_query(attrs, in[2], query, h) : 0;
        std::vector<double> scores;
        double largest = -HUGE_VAL, widest = 0, moved = 0;
        for (size_t j = 0; j < keys; ++j) {
          double dot = 0, size = 0, own_moved = code * head.row_sizes[j];
          for (size_t d = 0; d < dim; ++d) {
            dot += query[d] * head.keys[j * dim + d];
            size += std::fabs(query[d]) * head.key_sizes[j * dim + d];
            if (absorbed && rounds_to_bf16 && d < static_cast<size_t>(attrs.nope_dim))
              own_moved += kBf16 * std::fabs(query[d]) * head.key_sizes[j * dim + d];
          }
          if (absorbed && bf16_parts) own_moved += kBf16Parts * (size + own_moved);
          scores.push_back(static_cast<double>(attrs.scale) * dot);
          largest = std::max(largest, scores.back());
          widest = std::max(widest, scale * (size + own_moved));
          moved = std::max(moved, scale * own_moved);
        }
        // A weight: its score and the maximum, an exponential; rescaled with each chunk and split. It and the sum of
        // weights change by as much.
        const double count = static_cast<double>(keys), chunks = count / static_cast<double>(kernels::kAttentionChunk) +
                                                                 count / static_cast<double>(kernels::kAttentionSplit) +
                                                                 4;
        const double weight =
            std::expm1(2 * (gamma_f32(score_terms) * widest + moved)) + kExp + chunks * (kExp + 2 * kU);
        const double error = 2 * weight + weight * weight + 2 * gamma_f32(count + latent + 8) +
                             (absorbed && rounds_to_bf16 ? kBf16 : 0) + (absorbed && bf16_parts ? kBf16Parts : 0);
        double sum = 0;
        for (const double score : scores) sum += std::exp(score - largest);
        for (size_t v = 0; v < value; ++v) {
          double size = 0;
          for (size_t j = 0; j < keys; ++j)
            size += std::exp(scores[j] - largest) / sum * head.value_sizes[j * value + v];
          result[index * value + v] = error * (1 + weight) * size + kUnderflow;
          if (!absorbed || !rounded_queries) continue;
          // Weights times scales of latents are rounded, chunk by chunk, to 16 bits of the largest.
          for (size_t start = 0; start < keys; start += kernels::kAttentionChunk) {
            double most = 0, codes = 0;
            for (size_t j = start; j < std::min<size_t>(keys, start + kernels::kAttentionChunk); ++j) {
              most = std::max(most, std::exp(scores[j] - largest) / sum * head.row_scales[j]);
              if (head.row_scales[j] > 0) codes += head.value_sizes[j * value + v] / head.row_scales[j];
            }
            result[index * value + v] += kWeightCode * (1 + weight) * most * codes;
          }
        }
      }
    }
  return {result};
}

}  // namespace eadem::test
