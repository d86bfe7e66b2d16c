// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/selected_attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "eadem/ops/attention/attention_ports.h"
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::KvSource;

SelectedAttention::SelectedAttention(const kernels::SelectedAttentionAttrs& attrs) : attrs_(attrs) {
  if (attrs.heads <= 0 || attrs.kv_heads <= 0 || attrs.heads % attrs.kv_heads != 0)
    throw InvalidArgument(
        "selected_attention: heads is {} and kv_heads is {}; expected a positive multiple of a positive number",
        attrs.heads, attrs.kv_heads);
  if (attrs.head_dim <= 0 || attrs.value_dim <= 0 || attrs.span <= 0)
    throw InvalidArgument("selected_attention: head_dim is {}, value_dim {} and span {}; expected positive numbers",
                          attrs.head_dim, attrs.value_dim, attrs.span);
  if (!std::isfinite(attrs.scale))
    throw InvalidArgument("selected_attention: scale is {}; expected a finite number", attrs.scale);
}

std::vector<Port> SelectedAttention::inputs() const {
  const Port::Role kv = attrs_.source == KvSource::direct ? Port::Role::activation : Port::Role::state;
  return {{"q"},
          {"k", kv},
          {"v", kv},
          {"selection", Port::Role::index},
          {"query_start", Port::Role::index},
          {"kv_length", Port::Role::index},
          {"block_table", Port::Role::index, /*optional=*/true}};
}

std::string SelectedAttention::attrs_text() const {
  return fmt::format("heads={} kv_heads={} head_dim={} value_dim={} scale={} span={} {}", attrs_.heads, attrs_.kv_heads,
                     attrs_.head_dim, attrs_.value_dim, attrs_.scale, attrs_.span,
                     attrs_.source == KvSource::direct ? "direct" : "cached");
}

std::vector<TensorType> SelectedAttention::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "q", in[kQ], 3);
  expect_dtype(name(), "q", in[kQ], kActivations);
  expect_plain(name(), "q", in[kQ]);
  expect_dim(name(), "q", in[kQ], 1, Dim(attrs_.heads), "attribute heads");
  expect_dim(name(), "q", in[kQ], 2, Dim(attrs_.head_dim), "attribute head_dim");
  // Values have a width of their own, or are the first columns of keys.
  const bool in_keys =
      attrs_.value_dim < attrs_.head_dim && in[kV].rank() > 0 && in[kV].dim(-1) == Dim(attrs_.head_dim);
  expect_keys(*this, kK, in[kK], attrs_.source, in[kQ].dtype, in[kQ].dim(0), attrs_.kv_heads, attrs_.head_dim,
              "attribute head_dim");
  expect_keys(*this, kV, in[kV], attrs_.source, in[kQ].dtype, in[kQ].dim(0), attrs_.kv_heads,
              in_keys ? attrs_.head_dim : attrs_.value_dim, "attribute value_dim");
  TensorType like_v = in[kK];  // but as wide as values
  like_v.dim(-1) = in[kV].dim(-1);
  expect_same_dims(name(), "v", in[kV], like_v, "k");
  if (in[kV].dtype != in[kK].dtype || in[kV].encoding != in[kK].encoding)
    throw InvalidArgument("selected_attention: 'v' is {} but 'k' is {}; expected both stored alike", to_string(in[kV]),
                          to_string(in[kK]));
  expect_rank(name(), "selection", in[kSelection], 3);
  expect_dtype(name(), "selection", in[kSelection], kI32);
  expect_dim(name(), "selection", in[kSelection], 0, in[kQ].dim(0), "tokens of 'q'");
  expect_dim(name(), "selection", in[kSelection], 1, Dim(attrs_.kv_heads), "attribute kv_heads");
  expect_sequences(*this, in, kQueryStart, attrs_.source);
  TensorType y = plain_type(in[kQ].dtype, in[kQ].dims());
  y.dim(-1) = attrs_.value_dim;
  return {y};
}

DType SelectedAttention::wanted_dtype(std::span<const TensorType> in, int port) const {
  if (port == kQ || (attrs_.source == KvSource::direct && (port == kK || port == kV)))
    return in[kQ].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  return in[static_cast<size_t>(port)].dtype;
}

std::vector<Sharding> SelectedAttention::infer_sharding(std::span<const TensorType> in) const {
  const Sharding& q = in[kQ].sharding;
  if (!(q == Sharding::replicated()) && !(q == Sharding::along(1)))
    throw InvalidArgument("selected_attention: 'q' is {}; expected replicated or sharded(1), its heads",
                          to_string(in[kQ]));
  // A single head of keys, as in latent attention, may be whole on every rank.
  const bool shared = attrs_.kv_heads == 1 && in[kK].sharding == Sharding::replicated();
  for (const int port : {kK, kV, kSelection})
    if (const Sharding& own = in[static_cast<size_t>(port)].sharding;
        !(own == q) && !(shared && own == Sharding::replicated()))
      throw InvalidArgument("selected_attention: '{}' is {} but 'q' is {}; expected both divided alike",
                            inputs()[static_cast<size_t>(port)].name, to_string(own), to_string(q));
  for (const int port : {kQueryStart, kKvLength, kBlockTable})
    expect_replicated(name(), inputs()[static_cast<size_t>(port)].name, in[static_cast<size_t>(port)],
                      "every rank sees every sequence");
  return {q};
}

std::vector<Saved> SelectedAttention::saved() const {
  using enum Saved::Kind;
  return {{input, kQ},          {input, kK},        {input, kV}, {input, kSelection},
          {input, kQueryStart}, {input, kKvLength}, {output, 0}, {extra, 0}};
}

std::vector<TensorType> SelectedAttention::extra_types(std::span<const TensorType> in) const {
  if (attrs_.source == KvSource::cached) return {};
  return {TensorType(DType::f32, {in[kQ].dim(0), in[kQ].dim(1)})};
}

Cost SelectedAttention::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                             const SymbolValues& symbols) const {
  const double tokens = static_cast<double>(in[kQ].bind(symbols)[0]);
  const double keys = static_cast<double>(in[kSelection].bind(symbols)[2] * attrs_.span);
  const double heads = static_cast<double>(attrs_.heads), head_dim = static_cast<double>(attrs_.head_dim),
               value_dim = static_cast<double>(attrs_.value_dim);
  // As attention, for every token and key of its selection.
  const bool backward = pass == Pass::backward;
  const double flops =
      tokens * keys * heads * ((backward ? 3 : 1) * 2 * head_dim + (backward ? 2 : 1) * 2 * value_dim + 13);
  if (attrs_.source == KvSource::direct) return {flops, traffic_bytes(*this, pass, in, out, symbols)};
  const TensorType key(in[kK].dtype, {attrs_.kv_heads, attrs_.head_dim}, in[kK].encoding),
      value(in[kV].dtype, {attrs_.kv_heads, attrs_.value_dim}, in[kV].encoding);
  const bool shared = in[kV].fixed(3) != attrs_.value_dim;  // values lie in the rows of keys
  const double kv_rows = static_cast<double>(key.size_bytes(symbols) + (shared ? 0 : value.size_bytes(symbols)));
  const TensorType others[] = {in[kQ], in[kSelection], in[kQueryStart], in[kKvLength], in[kBlockTable]};
  return {flops, tokens * keys * kv_rows + traffic_bytes(others, out, symbols)};
}

// A head of a token: where its query and its result lie, and where the keys and values that it sees.
struct SelectedAttention::Row {
  size_t index, q, y;
  std::vector<size_t> keys, values;
  std::vector<double> scores;
};

void SelectedAttention::reference_row(const Row& row, const RefTensor& v, std::span<RefTensor> out) const {
  double* y = &out[0].data[row.y];
  std::fill_n(y, attrs_.value_dim, 0.0);
  if (out.size() > 1 && !out[1].data.empty()) out[1].data[row.index] = 0;
  if (row.scores.empty()) return;
  const double largest = *std::max_element(row.scores.begin(), row.scores.end());
  double sum = 0;
  for (const double score : row.scores) sum += std::exp(score - largest);
  for (size_t i = 0; i < row.values.size(); ++i)
    for (size_t d = 0; d < static_cast<size_t>(attrs_.value_dim); ++d)
      y[d] += std::exp(row.scores[i] - largest) / sum * v.data[row.values[i] + d];
  if (out.size() > 1 && !out[1].data.empty()) out[1].data[row.index] = largest + std::log(sum);
}

// p = exp(s - lse); dv_j = p_j dy; ds_j = p_j (dy . v_j - dy . y)
void SelectedAttention::reference_gradients(const Row& row, std::span<const RefTensor> in,
                                            std::span<RefTensor> out) const {
  const RefTensor &q = in[kQ], &k = in[kK], &v = in[kV], &y = in[6], &lse = in[7], &dy = in[8];
  const auto head_dim = static_cast<size_t>(attrs_.head_dim), value_dim = static_cast<size_t>(attrs_.value_dim);
  const double* row_dy = &dy.data[row.y];
  const double dy_y = std::inner_product(row_dy, row_dy + value_dim, &y.data[row.y], 0.0);
  for (size_t i = 0; i < row.keys.size(); ++i) {
    const double p = std::exp(row.scores[i] - lse.data[row.index]);
    const double dy_v = std::inner_product(row_dy, row_dy + value_dim, &v.data[row.values[i]], 0.0);
    const double ds = p * (dy_v - dy_y) * static_cast<double>(attrs_.scale);
    for (size_t d = 0; d < head_dim; ++d) {
      if (!out[0].data.empty()) out[0].data[row.q + d] += ds * k.data[row.keys[i] + d];
      if (!out[1].data.empty()) out[1].data[row.keys[i] + d] += ds * q.data[row.q + d];
    }
    for (size_t d = 0; d < value_dim && !out[2].data.empty(); ++d) out[2].data[row.values[i] + d] += p * row_dy[d];
  }
}

void SelectedAttention::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const int64_t heads = attrs_.heads, kv_heads = attrs_.kv_heads, entries = in[kSelection].shape[2];
  const auto head_dim = static_cast<size_t>(attrs_.head_dim), value_dim = static_cast<size_t>(attrs_.value_dim),
             value_row = static_cast<size_t>(in[kV].shape.back());
  if (pass == Pass::backward)
    for (RefTensor& gradient : out) std::fill(gradient.data.begin(), gradient.data.end(), 0.0);
  for (const RefSequence& s : reference_sequences(in, kQueryStart, in[kK], attrs_.source))
    for (int64_t t = s.begin; t < s.end; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t g = h / (heads / kv_heads);
        const auto index = static_cast<size_t>(t * heads + h);
        Row row{.index = index, .q = index * head_dim, .y = index * value_dim, .keys = {}, .values = {}, .scores = {}};
        for (int64_t e = 0; e < entries; ++e) {
          const auto entry =
              static_cast<int64_t>(in[kSelection].data[static_cast<size_t>((t * kv_heads + g) * entries + e)]);
          if (entry < 0) break;
          for (int64_t j = entry * attrs_.span; j < (entry + 1) * attrs_.span && j <= s.position(t); ++j) {
            const auto at = static_cast<size_t>(s.row(j, g, kv_heads));
            row.keys.push_back(at * head_dim);
            row.values.push_back(at * value_row);
            const double* key = &in[kK].data[at * head_dim];
            row.scores.push_back(static_cast<double>(attrs_.scale) *
                                 std::inner_product(key, key + head_dim, &in[kQ].data[row.q], 0.0));
          }
        }
        if (pass == Pass::backward)
          reference_gradients(row, in, out);
        else
          reference_row(row, in[kV], out);
      }
}

std::vector<Workload> SelectedAttention::workloads() {
  struct Shapes {
    std::string_view model;
    int64_t heads, row, latent, entries;
    DType dtype;
    StepShape step;
  };
  std::vector<Workload> rows;
  for (const Shapes& r : {Shapes{"tiny", 3, 28, 20, 4, DType::f32, {"prefill-16", 16, 1, 16}},
                          Shapes{"deepseek-v3.2", 128, 576, 512, 2048, DType::bf16, {"decode-1 at 8192", 1, 1, 8192}},
                          Shapes{"deepseek-v3.2", 128, 576, 512, 2048, DType::bf16, {"prefill-64", 64, 1, 4096}}}) {
    const SymbolValues symbols = symbols_of(r.step);
    const TensorType cache(r.dtype, {symbols[Symbol::max_blocks], 1, kWorkloadBlockSize, r.row});
    rows.push_back(
        {workload_name(r.model, r.step, "selected_attention"),
         std::make_shared<SelectedAttention>(
             kernels::SelectedAttentionAttrs{.heads = r.heads,
                                             .kv_heads = 1,
                                             .head_dim = r.row,
                                             .value_dim = r.latent,
                                             .scale = 1.0f / std::sqrt(static_cast<float>(r.row)),
                                             .source = KvSource::cached}),
         {TensorType(r.dtype, {Symbol::tokens, r.heads, r.row}), cache, cache,
          TensorType(DType::i32, {Symbol::tokens, 1, r.entries}), TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
          TensorType(DType::i32, {Symbol::sequences}), TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})},
         symbols});
  }
  return rows;
}

}  // namespace eadem::ops
