// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/pooled/pooled_attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::KvSource;

PooledAttention::PooledAttention(const kernels::PooledAttentionAttrs& attrs) : attrs_(attrs) {
  if (attrs.heads <= 0 || attrs.width <= 0 || attrs.window <= 0 || attrs.stride <= 0 || attrs.selected < 0)
    throw InvalidArgument(
        "pooled_attention: heads is {}, width {}, window {}, stride {} and selected {}; expected positive numbers, the "
        "last one or 0",
        attrs.heads, attrs.width, attrs.window, attrs.stride, attrs.selected);
  if (!std::isfinite(attrs.scale))
    throw InvalidArgument("pooled_attention: scale is {}; expected a finite number", attrs.scale);
}

std::vector<Port> PooledAttention::inputs() const {
  const bool cached = attrs_.source == KvSource::cached;
  const Port::Role keys = cached ? Port::Role::state : Port::Role::activation;
  std::vector<Port> ports = {{"q"},
                             {"k", keys},
                             {"rows", keys},
                             {"sinks", Port::Role::parameter},
                             {"query_start", Port::Role::index},
                             {"kv_length", Port::Role::index},
                             {"block_table", Port::Role::index, /*optional=*/true}};
  if (cached) ports.push_back({"rows_table", Port::Role::index});
  if (attrs_.selected > 0) ports.push_back({"selection", Port::Role::index});
  return ports;
}

std::string PooledAttention::attrs_text() const {
  return fmt::format("heads={} width={} scale={} window={} stride={} selected={} {}", attrs_.heads, attrs_.width,
                     attrs_.scale, attrs_.window, attrs_.stride, attrs_.selected,
                     attrs_.source == KvSource::direct ? "direct" : "cached");
}

std::vector<TensorType> PooledAttention::infer_types(std::span<const TensorType> in) const {
  const bool cached = attrs_.source == KvSource::cached;
  expect_rank(name(), "q", in[kQ], 3);
  expect_dtype(name(), "q", in[kQ], kActivations);
  expect_plain(name(), "q", in[kQ]);
  expect_dim(name(), "q", in[kQ], 1, Dim(attrs_.heads), "attribute heads");
  expect_dim(name(), "q", in[kQ], 2, Dim(attrs_.width), "attribute width");
  for (const size_t port : {kK, kRows})
    expect_keys(*this, port, in[port], attrs_.source, in[kQ].dtype, in[kQ].dim(0), 1, attrs_.width, "attribute width");
  expect_plain(name(), "rows", in[kRows]);
  expect_rank(name(), "sinks", in[kSinks], 1);
  expect_dtype(name(), "sinks", in[kSinks], kF32);
  expect_plain(name(), "sinks", in[kSinks]);
  expect_dim(name(), "sinks", in[kSinks], 0, Dim(attrs_.heads), "attribute heads");
  expect_sequences(*this, in, kQueryStart, attrs_.source);
  if (cached) {
    expect_rank(name(), "rows_table", in[kRowsTable], 2);
    expect_dtype(name(), "rows_table", in[kRowsTable], kI32);
    expect_dim(name(), "rows_table", in[kRowsTable], 0, in[kKvLength].dim(0), "sequences of 'kv_length'");
  }
  if (attrs_.selected > 0) {
    const TensorType& selection = in[static_cast<size_t>(selection_port(Pass::inference))];
    expect_rank(name(), "selection", selection, 3);
    expect_dtype(name(), "selection", selection, kI32);
    expect_dim(name(), "selection", selection, 0, in[kQ].dim(0), "tokens of 'q'");
    expect_dim(name(), "selection", selection, 1, Dim(1), "one head of keys");
    expect_dim(name(), "selection", selection, 2, Dim(attrs_.selected), "attribute selected");
  }
  return {plain_type(in[kQ].dtype, in[kQ].dims())};
}

DType PooledAttention::wanted_dtype(std::span<const TensorType> in, int port) const {
  if (port == kSinks) return DType::f32;
  if (port == kQ || (attrs_.source == KvSource::direct && (port == kK || port == kRows)))
    return in[kQ].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  return in[static_cast<size_t>(port)].dtype;
}

std::vector<Sharding> PooledAttention::infer_sharding(std::span<const TensorType> in) const {
  const Sharding& q = in[kQ].sharding;
  const bool divided = q == Sharding::along(1);
  if (!divided && !(q == Sharding::replicated()))
    throw InvalidArgument("pooled_attention: 'q' is {}; expected replicated or sharded(1), its heads",
                          to_string(in[kQ]));
  if (!(in[kSinks].sharding == (divided ? Sharding::along(0) : q)))
    throw InvalidArgument("pooled_attention: 'sinks' is {} but 'q' is {}; expected both divided by heads",
                          to_string(in[kSinks]), to_string(in[kQ]));
  const std::vector<Port> ports = inputs();
  for (size_t port = 1; port < in.size(); ++port)
    if (port != kSinks && !kernels::is_unconnected(in[port]))
      expect_replicated(name(), ports[port].name, in[port], "every rank sees every key");
  return {q};
}

std::vector<Saved> PooledAttention::saved() const {
  using enum Saved::Kind;
  std::vector<Saved> list = {{input, kQ},     {input, kK},          {input, kRows},
                             {input, kSinks}, {input, kQueryStart}, {input, kKvLength}};
  if (attrs_.selected > 0) list.push_back({input, selection_port(Pass::forward)});
  list.push_back({output, 0});
  list.push_back({extra, 0});
  return list;
}

std::vector<TensorType> PooledAttention::extra_types(std::span<const TensorType> in) const {
  if (attrs_.source == KvSource::cached) return {};
  return {TensorType(DType::f32, {in[kQ].dim(0), in[kQ].dim(1)})};
}

Cost PooledAttention::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                           const SymbolValues& symbols) const {
  const int64_t tokens = in[kQ].bind(symbols)[0], sequences = std::max<int64_t>(1, in[kKvLength].bind(symbols)[0]);
  const int64_t queries = (tokens + sequences - 1) / sequences;
  const bool cached = attrs_.source == KvSource::cached, backward = pass == Pass::backward;
  int64_t positions = queries;
  if (cached)
    positions = std::max(queries, in[kRowsTable].bind(symbols)[1] * in[kRows].bind(symbols)[2] * attrs_.stride);
  double window_keys = 0, rows = 0;
  for (int64_t p = positions - queries; p < positions; ++p) {
    window_keys += static_cast<double>(std::min(attrs_.window, p + 1));
    const int64_t seen = attrs_.rows_seen(p);
    rows += static_cast<double>(attrs_.selected > 0 ? std::min(attrs_.selected, seen) : seen);
  }
  const double share = static_cast<double>(tokens) / static_cast<double>(std::max<int64_t>(1, queries));
  const double flops = share * (window_keys + rows) * static_cast<double>(attrs_.heads) *
                       ((backward ? 10 : 4) * static_cast<double>(attrs_.width) + 13);
  if (!cached) return {flops, traffic_bytes(*this, pass, in, out, symbols)};
  const TensorType key(in[kK].dtype, {attrs_.width}, in[kK].encoding), row(in[kRows].dtype, {attrs_.width});
  std::vector<TensorType> others = {in[kQ], in[kSinks]};
  others.insert(others.end(), in.begin() + kQueryStart, in.end());
  return {flops, share * (window_keys * static_cast<double>(key.size_bytes(symbols)) +
                          rows * static_cast<double>(row.size_bytes(symbols))) +
                     traffic_bytes(others, out, symbols)};
}

std::vector<PooledAttention::Key> PooledAttention::keys_of(Pass pass, std::span<const RefTensor> in,
                                                           const RefSequence& s, int64_t token) const {
  const bool cached = attrs_.source == KvSource::cached;
  const int64_t position = s.position(token);
  const auto width = static_cast<size_t>(attrs_.width);
  std::vector<Key> keys;
  for (int64_t j = attrs_.first_key(position); j <= position; ++j)
    keys.push_back({kK, static_cast<size_t>(s.row(j, 0, 1)) * width});
  RefSequence of_rows = s;
  of_rows.keys = &in[kRows];
  if (cached) of_rows.block_table = &in[kRowsTable];
  const auto add_row = [&](int64_t r) {
    const int64_t place = cached ? r : (r + 1) * attrs_.stride - 1;
    keys.push_back({kRows, static_cast<size_t>(of_rows.row(place, 0, 1)) * width});
  };
  if (attrs_.selected == 0) {
    for (int64_t r = 0; r < attrs_.rows_seen(position); ++r) add_row(r);
    return keys;
  }
  const double* entry =
      &in[static_cast<size_t>(selection_port(pass))].data[static_cast<size_t>(token * attrs_.selected)];
  for (int64_t e = 0; e < attrs_.selected && entry[e] >= 0; ++e) add_row(static_cast<int64_t>(entry[e]));
  return keys;
}

// With p = exp(s - lse), ds = p (dy . k - dy . y): dq = scale ds k, dk = scale ds q + p dy, and for the sink -p dy . y.
void PooledAttention::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const bool backward = pass == Pass::backward;
  const auto width = static_cast<size_t>(attrs_.width), heads = static_cast<size_t>(attrs_.heads);
  const auto scale = static_cast<double>(attrs_.scale);
  const auto dot = [&](const double* a, const double* b) { return std::inner_product(a, a + width, b, 0.0); };
  for (size_t i = 0; i < out.size() && backward; ++i)
    if (i != kSinks) std::fill(out[i].data.begin(), out[i].data.end(), 0.0);
  for (const RefSequence& s : reference_sequences(in, kQueryStart, in[kK], attrs_.source))
    for (int64_t t = s.begin; t < s.end; ++t) {
      const std::vector<Key> keys = keys_of(pass, in, s, t);
      for (size_t h = 0; h < heads; ++h) {
        const size_t row = static_cast<size_t>(t) * heads + h;
        const double *q = &in[kQ].data[row * width], sink = in[kSinks].data[h];
        std::vector<double> scores;
        for (const Key& key : keys) scores.push_back(scale * dot(q, &in[static_cast<size_t>(key.port)].data[key.at]));
        if (!backward) {
          const double largest = std::max(sink, *std::max_element(scores.begin(), scores.end()));
          double sum = std::exp(sink - largest);
          for (const double score : scores) sum += std::exp(score - largest);
          double* y = &out[0].data[row * width];
          std::fill_n(y, width, 0.0);
          for (size_t i = 0; i < keys.size(); ++i)
            for (size_t d = 0; d < width; ++d)
              y[d] += std::exp(scores[i] - largest) / sum * in[static_cast<size_t>(keys[i].port)].data[keys[i].at + d];
          if (out.size() > 1 && !out[1].data.empty()) out[1].data[row] = largest + std::log(sum);
          continue;
        }
        const RefTensor &y = in[in.size() - 3], &lse = in[in.size() - 2], &all_dy = in[in.size() - 1];
        const double* dy = &all_dy.data[row * width];
        const double dy_y = dot(dy, &y.data[row * width]);
        if (!out[kSinks].data.empty()) out[kSinks].data[h] -= std::exp(sink - lse.data[row]) * dy_y;
        for (size_t i = 0; i < keys.size(); ++i) {
          const double* key = &in[static_cast<size_t>(keys[i].port)].data[keys[i].at];
          RefTensor& dkey = out[static_cast<size_t>(keys[i].port)];
          const double p = std::exp(scores[i] - lse.data[row]), ds = scale * p * (dot(dy, key) - dy_y);
          for (size_t d = 0; d < width; ++d) {
            if (!out[kQ].data.empty()) out[kQ].data[row * width + d] += ds * key[d];
            if (!dkey.data.empty()) dkey.data[keys[i].at + d] += ds * q[d] + p * dy[d];
          }
        }
      }
    }
}

std::vector<Workload> PooledAttention::workloads() {
  struct Row {
    std::string_view model;
    kernels::PooledAttentionAttrs attrs;
    DType dtype;
    StepShape step;
  };
  const auto attrs = [](int64_t heads, int64_t width, int64_t window, int64_t stride, int64_t selected) {
    return kernels::PooledAttentionAttrs{.heads = heads,
                                         .width = width,
                                         .scale = 1.0f / std::sqrt(static_cast<float>(width)),
                                         .window = window,
                                         .stride = stride,
                                         .selected = selected,
                                         .source = KvSource::cached};
  };
  std::vector<Workload> rows;
  for (const Row& r : {Row{"tiny", attrs(3, 20, 5, 4, 2), DType::f32, {"prefill-16", 16, 1, 16}},
                       Row{"deepseek-v4", attrs(64, 512, 128, 4, 512), DType::bf16, {"decode-1 at 8192", 1, 1, 8192}},
                       Row{"deepseek-v4", attrs(64, 512, 128, 128, 0), DType::bf16, {"decode-1 at 8192", 1, 1, 8192}},
                       Row{"deepseek-v4", attrs(64, 512, 128, 4, 512), DType::bf16, {"prefill-64", 64, 1, 4096}}}) {
    // Blocks are a multiple of a row's tokens.
    const int64_t block_size = std::max(kWorkloadBlockSize, r.attrs.stride);
    SymbolValues symbols = symbols_of(r.step);
    symbols[Symbol::max_blocks] = symbols[Symbol::max_blocks] * kWorkloadBlockSize / block_size;
    const auto cache = [&](int64_t stride) {
      return TensorType(r.dtype, {symbols[Symbol::max_blocks], 1, block_size / stride, r.attrs.width});
    };
    const TensorType table(DType::i32, {Symbol::sequences, Symbol::max_blocks});
    std::vector<TensorType> types = {TensorType(r.dtype, {Symbol::tokens, r.attrs.heads, r.attrs.width}),
                                     cache(1),
                                     cache(r.attrs.stride),
                                     TensorType(DType::f32, {r.attrs.heads}),
                                     TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
                                     TensorType(DType::i32, {Symbol::sequences}),
                                     table,
                                     table};
    if (r.attrs.selected > 0)
      types.emplace_back(DType::i32, std::initializer_list<Dim>{Symbol::tokens, 1, r.attrs.selected});
    rows.push_back(
        {workload_name(r.model, r.step, r.attrs.selected > 0 ? "pooled_attention selected" : "pooled_attention"),
         std::make_shared<PooledAttention>(r.attrs), std::move(types), symbols});
  }
  return rows;
}

}  // namespace eadem::ops
