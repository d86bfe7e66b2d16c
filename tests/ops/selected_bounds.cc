// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/selected_bounds.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "eadem/kernels/attention/selected_attention.h"
#include "eadem/ops/attention/attention_ports.h"
#include "eadem/ops/attention/compress_keys.h"
#include "eadem/ops/attention/compressed_attention.h"
#include "eadem/ops/attention/pooled/pool_keys.h"
#include "eadem/ops/attention/pooled/pooled_attention.h"
#include "tests/ops/bound_terms.h"
#include "tests/support/tolerance.h"

namespace eadem::test {

namespace {

using ops::RefTensor;

double size_of(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::fabs(x[i] * y[i]);
  return sum;
}

// A head of a token, as the reference has it.
struct SelectedRow {
  size_t index, q, y;                // elements
  std::vector<size_t> keys, values;  // elements
  std::vector<double> scores;
  double largest = -HUGE_VAL, widest = 0;  // of scores, and of the sums of their terms' absolute values

  // A score is a product of head_dim terms, of which those of an encoded key have a scale, times the scale, less a
  // maximum that is itself a score.
  double score_error(int64_t head_dim) const { return gamma_f32(static_cast<double>(head_dim) + 6) * widest; }
};

void add_key(SelectedRow& row, const kernels::SelectedAttentionAttrs& attrs, std::span<const RefTensor> in,
             size_t key_row) {
  const auto scale = static_cast<double>(attrs.scale);
  const size_t key = key_row * static_cast<size_t>(attrs.head_dim);
  row.keys.push_back(key);
  row.values.push_back(key_row * static_cast<size_t>(in[2].shape.back()));
  double dot = 0;
  for (size_t d = 0; d < static_cast<size_t>(attrs.head_dim); ++d) dot += in[0].data[row.q + d] * in[1].data[key + d];
  row.scores.push_back(scale * dot);
  row.largest = std::max(row.largest, scale * dot);
  row.widest = std::max(row.widest, std::fabs(scale) * size_of(&in[0].data[row.q], &in[1].data[key], attrs.head_dim));
}

// p: its score and the maximum, and an exponential; then the sum over the keys of p times values, which encoded have
// scales as well, the sum of p, and their quotient.
void forward_bounds(const SelectedRow& row, const kernels::SelectedAttentionAttrs& attrs, const RefTensor& v,
                    Bounds& result) {
  if (row.keys.empty()) return;  // exactly 0
  const double keys = static_cast<double>(row.keys.size());
  const double weight = 2 * row.score_error(attrs.head_dim) + kExp, error = 2 * weight + 2 * gamma_f32(keys + 4);
  double sum = 0;
  for (const double score : row.scores) sum += std::exp(score - row.largest);
  for (size_t d = 0; d < static_cast<size_t>(attrs.value_dim); ++d) {
    double size = 0;
    for (size_t i = 0; i < row.keys.size(); ++i)
      size += std::exp(row.scores[i] - row.largest) / sum * std::fabs(v.data[row.values[i] + d]);
    result[0][row.y + d] = error * size + kUnderflow;
  }
  if (result.size() > 1 && !result[1].empty())
    result[1][row.index] = weight + gamma_f32(keys) + kExp * std::log(sum) + kU * std::fabs(row.largest);
}

// p = exp(s - lse); every gradient sums products of p over keys, or over `sharers`, the queries that share a key.
void backward_bounds(const SelectedRow& row, const kernels::SelectedAttentionAttrs& attrs,
                     std::span<const RefTensor> in, double sharers, Bounds& result) {
  const RefTensor &q = in[0], &k = in[1], &v = in[2], &y = in[6], &lse = in[7], &dy = in[8];
  const double* own_dy = &dy.data[row.y];
  const double log_sum = lse.data[row.index], dy_y = size_of(own_dy, &y.data[row.y], attrs.value_dim);
  const double p_error = row.score_error(attrs.head_dim) + kU * (std::fabs(log_sum) + row.widest) + kExp;
  const double ds_error = p_error + gamma_f32(static_cast<double>(attrs.value_dim) + 4);
  const double over_keys = gamma_f32(static_cast<double>(row.keys.size()) + 2), over_queries = gamma_f32(sharers + 2);
  for (size_t i = 0; i < row.keys.size(); ++i) {
    const double p = std::exp(row.scores[i] - log_sum);
    const double ds = p * (size_of(own_dy, &v.data[row.values[i]], attrs.value_dim) + dy_y) *
                      std::fabs(static_cast<double>(attrs.scale));
    for (size_t d = 0; d < static_cast<size_t>(attrs.head_dim); ++d) {
      if (!result[0].empty()) result[0][row.q + d] += ds * std::fabs(k.data[row.keys[i] + d]) * (ds_error + over_keys);
      if (!result[1].empty())
        result[1][row.keys[i] + d] += ds * std::fabs(q.data[row.q + d]) * (ds_error + over_queries);
    }
    for (size_t d = 0; d < static_cast<size_t>(attrs.value_dim) && !result[2].empty(); ++d)
      result[2][row.values[i] + d] += p * std::fabs(own_dy[d]) * (p_error + over_queries);
  }
}

}  // namespace

Bounds selected_bounds(const ops::Op& op, kernels::Pass pass, std::span<const RefTensor> in,
                       std::span<const RefTensor> expected) {
  const auto attrs = op.attrs().get<kernels::SelectedAttentionAttrs>();
  const int64_t group = attrs.heads / attrs.kv_heads, entries = in[3].shape[2];
  Bounds result;
  for (const RefTensor& tensor : expected) result.emplace_back(tensor.data.size(), 0.0);
  for (const ops::RefSequence& s : ops::reference_sequences(in, 4, in[1], attrs.source))
    for (int64_t t = s.begin; t < s.end; ++t)
      for (int64_t h = 0; h < attrs.heads; ++h) {
        const int64_t g = h / group;
        const auto index = static_cast<size_t>(t * attrs.heads + h);
        SelectedRow row{.index = index,
                        .q = index * static_cast<size_t>(attrs.head_dim),
                        .y = index * static_cast<size_t>(attrs.value_dim),
                        .keys = {},
                        .values = {},
                        .scores = {}};
        for (int64_t e = 0; e < entries; ++e) {
          const auto entry =
              static_cast<int64_t>(in[3].data[static_cast<size_t>((t * attrs.kv_heads + g) * entries + e)]);
          for (int64_t j = entry * attrs.span; entry >= 0 && j < (entry + 1) * attrs.span && j <= s.position(t); ++j)
            add_key(row, attrs, in, static_cast<size_t>(s.row(j, g, attrs.kv_heads)));
        }
        if (pass == kernels::Pass::backward)
          backward_bounds(row, attrs, in, static_cast<double>((s.end - s.begin) * group), result);
        else
          forward_bounds(row, attrs, in[2], result);
      }
  return result;
}

// Attention over the rows that each token sees.
Bounds compressed_bounds(const ops::Op& op, kernels::Pass pass, std::span<const RefTensor> in,
                         std::span<const RefTensor> expected) {
  const ops::CompressedAttention compressed(op.attrs().get<kernels::CompressedAttentionAttrs>());
  return selected_bounds(compressed.as_selected(), pass, compressed.selected_inputs(in), expected);
}

// The op on absolute values has the sums of the absolute values of its terms. A term of z takes five roundings: its
// value's scale in an encoded cache, the position, the weight that is 1 / length, the product and the first sum. A
// token is part of length / stride rows, and a place in a block of no more rows than there are tokens; the sum of a
// place of dweight runs over the columns as well.
Bounds compress_bounds(const ops::Op& op, kernels::Pass pass, std::span<const RefTensor> in,
                       std::span<const RefTensor> expected, std::span<const RefTensor> initial) {
  const auto attrs = op.attrs().get<kernels::CompressKeysAttrs>();
  std::vector<RefTensor> sizes = absolute(initial), inputs(in.begin(), in.end());
  for (const size_t port : {size_t{0}, size_t{1}, size_t{2}}) inputs[port] = absolute(in.subspan(port, 1))[0];
  if (pass == kernels::Pass::backward) inputs[5] = absolute(in.subspan(5, 1))[0];
  op.reference(pass, inputs, sizes);
  const double length = static_cast<double>(attrs.grid.length), tokens = static_cast<double>(in[0].shape[0]),
               width = static_cast<double>(attrs.width);
  const std::vector<double> additions = pass == kernels::Pass::backward
                                            ? std::vector<double>{length, tokens + width + 4, tokens + 3}
                                            : std::vector<double>{length};
  Bounds result;
  for (size_t i = 0; i < expected.size(); ++i) {
    result.emplace_back();
    for (const double size : sizes[i].data) result[i].push_back(gamma_f32(additions[i] + 5) * size);
  }
  // Rows of the cache that no token of this step writes stay as they are.
  for (size_t i = 0; i < expected.size() && attrs.source == kernels::KvSource::cached; ++i)
    for (size_t j = 0; j < result[i].size(); ++j)
      if (expected[i].data[j] == initial[i].data[j]) result[i][j] = 0;
  return result;
}

// A weight p of a column: the sum of its gate and e, the difference to the largest one, each with its rounding, and an
// exponential; then a sum of as many, of p or of products with x, and their quotient.
Bounds pool_bounds(const ops::Op& op, kernels::Pass pass, std::span<const RefTensor> in,
                   std::span<const RefTensor> expected, std::span<const RefTensor> initial) {
  const auto attrs = op.attrs().get<kernels::PoolKeysAttrs>();
  const bool cached = attrs.source == kernels::KvSource::cached, backward = pass == kernels::Pass::backward;
  const auto width = static_cast<size_t>(attrs.width), columns = static_cast<size_t>(attrs.columns());
  const double over_row = gamma_f32(static_cast<double>(attrs.length()) + 3);
  Bounds result;
  for (const RefTensor& tensor : expected) result.emplace_back(tensor.data.size(), 0.0);
  for (const ops::RefSequence& s : ops::reference_sequences(in, 3, in[0], attrs.source))
    for (int64_t t = s.begin; t < s.end; ++t) {
      if (!attrs.ends_row(s.position(t)) || (cached && in[6].data[static_cast<size_t>(t)] < 0)) continue;
      for (size_t d = 0; d < width; ++d) {
        std::vector<double> scores;
        std::vector<size_t> at, places;
        double size = 0;  // of a score
        for (const ops::PooledTerm& term : ops::pooled_terms(attrs, s.position(t))) {
          const size_t column = static_cast<size_t>(term.column) + d;
          at.push_back(static_cast<size_t>(s.row(term.position, 0, 1)) * columns + column);
          places.push_back(static_cast<size_t>(term.position % attrs.stride) * columns + column);
          scores.push_back(in[1].data[at.back()] + in[2].data[places.back()]);
          size = std::max(size, std::fabs(scores.back()));
        }
        const double largest = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (double& score : scores) sum += score = std::exp(score - largest);
        const double p_error = 2 * (4 * kU * size + kExp) + over_row;
        const size_t z = static_cast<size_t>(t) * width + d;
        for (size_t i = 0; i < scores.size(); ++i) {
          const double p = scores[i] / sum, x = std::fabs(in[0].data[at[i]]);
          if (!backward) {
            result[0][z] += (p_error + over_row) * p * x + kUnderflow;
            continue;
          }
          const double pd = p * std::fabs(in[6].data[z]), gate = pd * (x + std::fabs(in[5].data[z])) + kUnderflow;
          if (!result[0].empty()) result[0][at[i]] = (p_error + 2 * kU) * pd + kUnderflow;
          if (!result[1].empty()) result[1][at[i]] = (p_error + 4 * kU) * gate + kUnderflow;
          if (!result[2].empty())
            result[2][places[i]] += (p_error + 4 * kU + gamma_f32(static_cast<double>(in[0].shape[0]) + 1)) * gate;
        }
      }
    }
  for (size_t i = 0; backward && i < result[2].size(); ++i)
    result[2][i] += gamma_f32(static_cast<double>(in[0].shape[0]) + 1) * std::fabs(initial[2].data[i]);
  return result;
}

// Attention over the keys of both ports, one behind the other, and a key of zeros whose score is the sink. A key's
// gradient has products with queries and with gradients in one sum.
Bounds pooled_bounds(const ops::Op& op, kernels::Pass pass, std::span<const RefTensor> in,
                     std::span<const RefTensor> expected, std::span<const RefTensor> initial) {
  const auto& pooled = dynamic_cast<const ops::PooledAttention&>(op);
  const auto attrs = op.attrs().get<kernels::PooledAttentionAttrs>();
  const bool backward = pass == kernels::Pass::backward;
  const auto width = static_cast<size_t>(attrs.width), heads = static_cast<size_t>(attrs.heads);
  const size_t of_k = in[1].data.size(), of_rows = in[2].data.size();
  std::vector<double> all = in[1].data;
  all.insert(all.end(), in[2].data.begin(), in[2].data.end());
  all.resize(all.size() + width, 0.0);
  const RefTensor keys{Shape{static_cast<int64_t>(all.size() / width), 1, attrs.width}, all};
  const RefTensor none{};
  std::vector<RefTensor> inputs = {in[0], keys, keys, none, in[4], in[5]};
  if (backward) inputs.insert(inputs.end(), in.end() - 3, in.end());
  const kernels::SelectedAttentionAttrs as_selected{
      .heads = attrs.heads, .kv_heads = 1, .head_dim = attrs.width, .value_dim = attrs.width, .scale = attrs.scale};
  Bounds whole;
  if (backward)
    for (const size_t size : {expected[0].data.size(), all.size(), all.size()}) whole.emplace_back(size, 0.0);
  else
    for (const RefTensor& tensor : expected) whole.emplace_back(tensor.data.size(), 0.0);
  std::vector<double> sinks(heads, 0.0);
  for (const ops::RefSequence& s : ops::reference_sequences(in, 4, in[1], attrs.source))
    for (int64_t t = s.begin; t < s.end; ++t)
      for (size_t h = 0; h < heads; ++h) {
        const size_t index = static_cast<size_t>(t) * heads + h;
        SelectedRow row{.index = index, .q = index * width, .y = index * width, .keys = {}, .values = {}, .scores = {}};
        for (const ops::PooledAttention::Key& key : pooled.keys_of(pass, in, s, t))
          add_key(row, as_selected, inputs, (key.at + (key.port == 1 ? 0 : of_k)) / width);
        const double sink = in[3].data[h];
        row.widest = std::max(row.widest, std::fabs(sink));
        if (!backward) {
          add_key(row, as_selected, inputs, (of_k + of_rows) / width);
          row.scores.back() = sink;
          row.largest = std::max(row.largest, sink);
          forward_bounds(row, as_selected, keys, whole);
          continue;
        }
        backward_bounds(row, as_selected, inputs, static_cast<double>((s.end - s.begin) * 2 * attrs.heads), whole);
        const RefTensor &y = in[in.size() - 3], &lse = in[in.size() - 2], &dy = in[in.size() - 1];
        const double p = std::exp(sink - lse.data[index]), size = size_of(&dy.data[row.y], &y.data[row.y], attrs.width);
        const double terms = static_cast<double>(attrs.width) + static_cast<double>(in[0].shape[0]) + 4;
        sinks[h] += p * size * (kU * (std::fabs(sink) + std::fabs(lse.data[index])) + kExp + gamma_f32(terms));
      }
  if (!backward) return whole;
  Bounds result = {expected[0].data.empty() ? std::vector<double>() : whole[0]};
  for (const auto& [port, first, size] : {std::tuple{size_t{1}, size_t{0}, of_k}, {size_t{2}, of_k, of_rows}}) {
    result.emplace_back();
    for (size_t i = first; i < first + size && !expected[port].data.empty(); ++i)
      result[port].push_back(whole[1][i] + whole[2][i]);
  }
  result.emplace_back();
  for (size_t h = 0; h < expected[3].data.size(); ++h)
    result[3].push_back(sinks[h] + kU * (std::fabs(initial[3].data[h]) + std::fabs(expected[3].data[h])));
  return result;
}

}  // namespace eadem::test
