// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/compressed_attention.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/attention/attention_ports.h"
#include "eadem/ops/attention/compress_keys.h"
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::KvSource;

void expect_queries(std::string_view op, const TensorType& q, int64_t heads, int64_t head_dim) {
  expect_rank(op, "q", q, 3);
  expect_dtype(op, "q", q, kActivations);
  expect_plain(op, "q", q);
  expect_dim(op, "q", q, 1, Dim(heads), "attribute heads");
  expect_dim(op, "q", q, 2, Dim(head_dim), "attribute head_dim");
}

void expect_rows_like(const Op& op, std::span<const TensorType> in, size_t port, KvSource source, int64_t kv_heads,
                      int64_t width, std::string_view because) {
  expect_keys(op, port, in[port], source, in[0].dtype, in[0].dim(0), kv_heads, width, because);
  expect_plain(op.name(), op.inputs()[port].name, in[port]);
}

Sharding expect_divided_heads(const Op& op, std::span<const TensorType> in, size_t rows_end) {
  const Sharding& q = in[0].sharding;
  if (!(q == Sharding::replicated()) && !(q == Sharding::along(1)))
    throw InvalidArgument("{}: 'q' is {}; expected replicated or sharded(1), its heads", op.name(), to_string(in[0]));
  const std::vector<Port> ports = op.inputs();
  for (size_t port = 1; port < in.size(); ++port) {
    if (port >= rows_end)
      expect_replicated(op.name(), ports[port].name, in[port], "every rank sees every sequence");
    else if (!(in[port].sharding == q))
      throw InvalidArgument("{}: '{}' is {} but 'q' is {}; expected both divided alike", op.name(), ports[port].name,
                            to_string(in[port].sharding), to_string(q));
  }
  return q;
}

double compressed_pairs(const kernels::RowGrid& grid, const TensorType& k, const TensorType& kv_length, int64_t tokens,
                        const SymbolValues& symbols) {
  const int64_t sequences = std::max<int64_t>(1, kv_length.bind(symbols)[0]);
  const int64_t queries = (tokens + sequences - 1) / sequences;
  // The types bound a cached sequence only by its max_blocks blocks: all their positions count.
  const int64_t positions =
      k.rank() == 4 ? std::max(queries, symbols[Symbol::max_blocks] * k.fixed(2) * grid.stride) : queries;
  double pairs = 0;
  for (int64_t p = positions - queries; p < positions; ++p)
    pairs += static_cast<double>(std::max<int64_t>(0, grid.end_row(p) - grid.first_row()));
  return queries == 0 ? 0 : pairs * static_cast<double>(tokens) / static_cast<double>(queries);
}

CompressedAttention::CompressedAttention(const kernels::CompressedAttentionAttrs& attrs) : attrs_(attrs) {
  if (attrs.heads <= 0 || attrs.kv_heads <= 0 || attrs.heads % attrs.kv_heads != 0)
    throw InvalidArgument(
        "compressed_attention: heads is {} and kv_heads is {}; expected a positive multiple of a positive number",
        attrs.heads, attrs.kv_heads);
  if (attrs.head_dim <= 0 || attrs.value_dim <= 0)
    throw InvalidArgument("compressed_attention: head_dim is {} and value_dim {}; expected positive numbers",
                          attrs.head_dim, attrs.value_dim);
  if (!std::isfinite(attrs.scale))
    throw InvalidArgument("compressed_attention: scale is {}; expected a finite number", attrs.scale);
  expect_grid(name(), attrs.grid);
}

std::vector<Port> CompressedAttention::inputs() const {
  const Port::Role rows = attrs_.source == KvSource::direct ? Port::Role::activation : Port::Role::state;
  return {{"q"},
          {"k", rows},
          {"v", rows},
          {"query_start", Port::Role::index},
          {"kv_length", Port::Role::index},
          {"block_table", Port::Role::index, /*optional=*/true}};
}

std::string CompressedAttention::attrs_text() const {
  return fmt::format("heads={} kv_heads={} head_dim={} value_dim={} scale={} length={} stride={} {}", attrs_.heads,
                     attrs_.kv_heads, attrs_.head_dim, attrs_.value_dim, attrs_.scale, attrs_.grid.length,
                     attrs_.grid.stride, attrs_.source == KvSource::direct ? "direct" : "cached");
}

std::vector<TensorType> CompressedAttention::infer_types(std::span<const TensorType> in) const {
  expect_queries(name(), in[kQ], attrs_.heads, attrs_.head_dim);
  expect_rows_like(*this, in, kK, attrs_.source, attrs_.kv_heads, attrs_.head_dim, "attribute head_dim");
  expect_rows_like(*this, in, kV, attrs_.source, attrs_.kv_heads, attrs_.value_dim, "attribute value_dim");
  TensorType like_v = in[kK];  // but as wide as values
  like_v.dim(-1) = in[kV].dim(-1);
  expect_same_dims(name(), "v", in[kV], like_v, "k");
  const DType like_k[] = {in[kK].dtype};
  expect_dtype(name(), "v", in[kV], like_k);
  expect_sequences(*this, in, kQueryStart, attrs_.source);
  TensorType y = plain_type(in[kQ].dtype, in[kQ].dims());
  y.dim(-1) = attrs_.value_dim;
  return {y};
}

DType CompressedAttention::wanted_dtype(std::span<const TensorType> in, int port) const {
  if (port == kQ || (attrs_.source == KvSource::direct && (port == kK || port == kV)))
    return in[kQ].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  return in[static_cast<size_t>(port)].dtype;
}

std::vector<Sharding> CompressedAttention::infer_sharding(std::span<const TensorType> in) const {
  return {expect_divided_heads(*this, in, kQueryStart)};
}

std::vector<Saved> CompressedAttention::saved() const {
  using enum Saved::Kind;
  return {{input, kQ}, {input, kK}, {input, kV}, {input, kQueryStart}, {input, kKvLength}, {output, 0}, {extra, 0}};
}

std::vector<TensorType> CompressedAttention::extra_types(std::span<const TensorType> in) const {
  if (attrs_.source == KvSource::cached) return {};
  return {TensorType(DType::f32, {in[kQ].dim(0), in[kQ].dim(1)})};
}

Cost CompressedAttention::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                               const SymbolValues& symbols) const {
  const double pairs = compressed_pairs(attrs_.grid, in[kK], in[kKvLength], in[kQ].bind(symbols)[0], symbols);
  const double heads = static_cast<double>(attrs_.heads), head_dim = static_cast<double>(attrs_.head_dim),
               value_dim = static_cast<double>(attrs_.value_dim);
  const bool backward = pass == Pass::backward;
  const double flops = pairs * heads * ((backward ? 3 : 1) * 2 * head_dim + (backward ? 2 : 1) * 2 * value_dim + 13);
  if (attrs_.source == KvSource::direct) return {flops, traffic_bytes(*this, pass, in, out, symbols)};
  // Every row of a sequence is read once for all of its tokens.
  const TensorType row(in[kK].dtype, {attrs_.kv_heads, attrs_.head_dim + attrs_.value_dim});
  const double rows =
      static_cast<double>(in[kKvLength].bind(symbols)[0] * symbols[Symbol::max_blocks] * in[kK].fixed(2));
  const TensorType others[] = {in[kQ], in[kQueryStart], in[kKvLength], in[kBlockTable]};
  return {flops, rows * static_cast<double>(row.size_bytes(symbols)) + traffic_bytes(others, out, symbols)};
}

SelectedAttention CompressedAttention::as_selected() const {
  return SelectedAttention({.heads = attrs_.heads,
                            .kv_heads = attrs_.kv_heads,
                            .head_dim = attrs_.head_dim,
                            .value_dim = attrs_.value_dim,
                            .scale = attrs_.scale,
                            .span = 1,
                            .source = attrs_.source});
}

std::vector<RefTensor> CompressedAttention::selected_inputs(std::span<const RefTensor> in) const {
  const std::vector<RefSequence> sequences = reference_sequences(in, kQueryStart, in[kK], attrs_.source);
  int64_t most = 0;
  for (const RefSequence& s : sequences) most = std::max(most, attrs_.grid.end_row(s.length - 1));
  const int64_t tokens = in[kQ].shape[0];
  RefTensor selection{Shape{tokens, attrs_.kv_heads, most},
                      std::vector<double>(static_cast<size_t>(tokens * attrs_.kv_heads * most), -1.0)};
  for (const RefSequence& s : sequences)
    for (int64_t t = s.begin; t < s.end; ++t)
      for (int64_t g = 0; g < attrs_.kv_heads; ++g) {
        double* entry = selection.data.data() + (t * attrs_.kv_heads + g) * most;
        for (int64_t r = attrs_.grid.first_row(); r < attrs_.grid.end_row(s.position(t)); ++r)
          *entry++ = static_cast<double>(attrs_.source == KvSource::direct ? attrs_.grid.last_position(r) : r);
      }
  std::vector<RefTensor> result(in.begin(), in.end());
  result.insert(result.begin() + kQueryStart, std::move(selection));
  return result;
}

void CompressedAttention::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  as_selected().reference(pass, selected_inputs(in), out);
}

std::vector<Workload> CompressedAttention::workloads() {
  struct Row {
    std::string_view model;
    int64_t heads, kv_heads, head_dim, value_dim;
    kernels::RowGrid grid;
    DType dtype;
    StepShape step;
  };
  std::vector<Workload> rows;
  for (const Row& r : {Row{"tiny", 4, 2, 20, 20, {4, 2}, DType::f32, {"prefill-16", 16, 1, 16}},
                       Row{"nsa-27b", 64, 4, 192, 128, {32, 16}, DType::bf16, {"decode-1 at 8192", 1, 1, 8192}},
                       Row{"nsa-27b", 64, 4, 192, 128, {32, 16}, DType::bf16, {"prefill-512", 512, 1, 4096}}}) {
    const SymbolValues symbols = symbols_of(r.step);
    const auto cache = [&](int64_t width) {
      return TensorType(r.dtype, {symbols[Symbol::max_blocks], r.kv_heads, kWorkloadBlockSize / r.grid.stride, width});
    };
    rows.push_back({workload_name(r.model, r.step, "compressed_attention"),
                    std::make_shared<CompressedAttention>(
                        kernels::CompressedAttentionAttrs{.heads = r.heads,
                                                          .kv_heads = r.kv_heads,
                                                          .head_dim = r.head_dim,
                                                          .value_dim = r.value_dim,
                                                          .scale = 1.0f / std::sqrt(static_cast<float>(r.head_dim)),
                                                          .grid = r.grid,
                                                          .source = KvSource::cached}),
                    {TensorType(r.dtype, {Symbol::tokens, r.heads, r.head_dim}), cache(r.head_dim), cache(r.value_dim),
                     TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
                     TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})},
                    symbols});
  }
  return rows;
}

}  // namespace eadem::ops
