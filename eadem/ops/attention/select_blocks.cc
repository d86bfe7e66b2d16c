// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/select_blocks.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "eadem/ops/attention/attention_ports.h"
#include "eadem/ops/attention/compress_keys.h"
#include "eadem/ops/attention/compressed_attention.h"
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::KvSource;

SelectBlocks::SelectBlocks(const kernels::SelectBlocksAttrs& attrs) : attrs_(attrs) {
  if (attrs.heads <= 0 || attrs.kv_heads <= 0 || attrs.heads % attrs.kv_heads != 0)
    throw InvalidArgument(
        "select_blocks: heads is {} and kv_heads is {}; expected a positive multiple of a positive number", attrs.heads,
        attrs.kv_heads);
  if (attrs.head_dim <= 0 || !std::isfinite(attrs.scale))
    throw InvalidArgument("select_blocks: head_dim is {} and scale {}; expected a positive and a finite number",
                          attrs.head_dim, attrs.scale);
  expect_grid(name(), attrs.grid);
  if (attrs.span <= 0 || attrs.span % attrs.grid.stride != 0)
    throw InvalidArgument("select_blocks: span is {}; expected a positive multiple of the stride {}", attrs.span,
                          attrs.grid.stride);
  if (attrs.first_blocks < 0 || attrs.local_blocks < 1 || attrs.top_n < attrs.first_blocks + attrs.local_blocks)
    throw InvalidArgument(
        "select_blocks: first_blocks is {}, local_blocks {} and top_n {}; expected at least 0, 1 and both together",
        attrs.first_blocks, attrs.local_blocks, attrs.top_n);
}

std::vector<Port> SelectBlocks::inputs() const {
  return {{"q", Port::Role::constant},
          {"k", attrs_.source == KvSource::direct ? Port::Role::constant : Port::Role::state},
          {"query_start", Port::Role::index},
          {"kv_length", Port::Role::index},
          {"block_table", Port::Role::index, /*optional=*/true}};
}

std::string SelectBlocks::attrs_text() const {
  return fmt::format(
      "heads={} kv_heads={} head_dim={} scale={} length={} stride={} span={} top_n={} first={} local={} {}",
      attrs_.heads, attrs_.kv_heads, attrs_.head_dim, attrs_.scale, attrs_.grid.length, attrs_.grid.stride, attrs_.span,
      attrs_.top_n, attrs_.first_blocks, attrs_.local_blocks, attrs_.source == KvSource::direct ? "direct" : "cached");
}

std::vector<TensorType> SelectBlocks::infer_types(std::span<const TensorType> in) const {
  expect_queries(name(), in[kQ], attrs_.heads, attrs_.head_dim);
  expect_rows_like(*this, in, kK, attrs_.source, attrs_.kv_heads, attrs_.head_dim, "attribute head_dim");
  expect_sequences(*this, in, kQueryStart, attrs_.source);
  return {TensorType(DType::i32, {in[kQ].dim(0), attrs_.kv_heads, attrs_.top_n})};
}

DType SelectBlocks::wanted_dtype(std::span<const TensorType> in, int port) const {
  if (port == kQ || (port == kK && attrs_.source == KvSource::direct))
    return in[kQ].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  return in[static_cast<size_t>(port)].dtype;
}

std::vector<Sharding> SelectBlocks::infer_sharding(std::span<const TensorType> in) const {
  return {expect_divided_heads(*this, in, kQueryStart)};
}

Cost SelectBlocks::cost(Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> out,
                        const SymbolValues& symbols) const {
  const double pairs = compressed_pairs(attrs_.grid, in[kK], in[kKvLength], in[kQ].bind(symbols)[0], symbols);
  const double flops = pairs * static_cast<double>(attrs_.heads) * (2 * static_cast<double>(attrs_.head_dim) + 14);
  const TensorType others[] = {in[kQ], in[kQueryStart], in[kKvLength], in[kBlockTable]};
  double rows = static_cast<double>(in[kQ].bind(symbols)[0]);
  if (attrs_.source == KvSource::cached)
    rows = static_cast<double>(in[kKvLength].bind(symbols)[0] * symbols[Symbol::max_blocks] * in[kK].fixed(2));
  const TensorType row(in[kK].dtype, {attrs_.kv_heads, attrs_.head_dim});
  return {flops, rows * static_cast<double>(row.size_bytes(symbols)) + traffic_bytes(others, out, symbols)};
}

void SelectBlocks::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto [length, stride] = attrs_.grid;
  const int64_t heads = attrs_.heads, kv_heads = attrs_.kv_heads, group = heads / kv_heads;
  const auto dim = static_cast<size_t>(attrs_.head_dim);
  std::fill(out[0].data.begin(), out[0].data.end(), -1.0);
  for (const RefSequence& s : reference_sequences(in, kQueryStart, in[kK], attrs_.source))
    for (int64_t t = s.begin; t < s.end; ++t)
      for (int64_t g = 0; g < kv_heads; ++g) {
        const int64_t blocks = s.position(t) / attrs_.span + 1;
        const int64_t first = attrs_.grid.first_row(), end = attrs_.grid.end_row(s.position(t));
        std::vector<double> importance(static_cast<size_t>(blocks), 0.0);
        for (int64_t h = g * group; h < (g + 1) * group && first < end; ++h) {
          std::vector<double> scores;
          for (int64_t r = first; r < end; ++r) {
            const int64_t at = attrs_.source == KvSource::direct ? attrs_.grid.last_position(r) : r;
            const double* key = &in[kK].data[static_cast<size_t>(s.row(at, g, kv_heads)) * dim];
            scores.push_back(
                static_cast<double>(attrs_.scale) *
                std::inner_product(key, key + dim, &in[kQ].data[static_cast<size_t>(t * heads + h) * dim], 0.0));
          }
          const double largest = *std::max_element(scores.begin(), scores.end());
          double sum = 0;
          for (const double score : scores) sum += std::exp(score - largest);
          for (int64_t r = first; r < end; ++r)
            for (int64_t i = 0; i < length; ++i) {
              const int64_t block = (attrs_.grid.last_position(r) + 1 - length + i) / attrs_.span;
              importance[static_cast<size_t>(block)] +=
                  std::exp(scores[static_cast<size_t>(r - first)] - largest) / sum / static_cast<double>(stride);
            }
        }
        for (int64_t j = 0; j < blocks; ++j)
          if (j < attrs_.first_blocks || j >= blocks - attrs_.local_blocks)
            importance[static_cast<size_t>(j)] = HUGE_VAL;
        std::vector<size_t> order(importance.size());
        std::iota(order.begin(), order.end(), size_t{0});
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return importance[a] > importance[b]; });
        order.resize(std::min(order.size(), static_cast<size_t>(attrs_.top_n)));
        std::sort(order.begin(), order.end());
        std::copy(order.begin(), order.end(), out[0].data.begin() + (t * kv_heads + g) * attrs_.top_n);
      }
}

std::vector<Workload> SelectBlocks::workloads() {
  struct Row {
    std::string_view model;
    kernels::SelectBlocksAttrs attrs;
    DType dtype;
    StepShape step;
  };
  const auto attrs = [](int64_t heads, int64_t kv_heads, int64_t head_dim, kernels::RowGrid grid, int64_t span,
                        int64_t top_n) {
    return kernels::SelectBlocksAttrs{.heads = heads,
                                      .kv_heads = kv_heads,
                                      .head_dim = head_dim,
                                      .scale = 1.0f / std::sqrt(static_cast<float>(head_dim)),
                                      .grid = grid,
                                      .span = span,
                                      .top_n = top_n,
                                      .source = KvSource::cached};
  };
  std::vector<Workload> rows;
  for (const Row& r :
       {Row{"tiny", attrs(4, 2, 20, {4, 2}, 4, 3), DType::f32, {"prefill-16", 16, 1, 16}},
        Row{"nsa-27b", attrs(64, 4, 192, {32, 16}, 64, 16), DType::bf16, {"decode-1 at 8192", 1, 1, 8192}},
        Row{"nsa-27b", attrs(64, 4, 192, {32, 16}, 64, 16), DType::bf16, {"prefill-512", 512, 1, 4096}}}) {
    const SymbolValues symbols = symbols_of(r.step);
    rows.push_back({workload_name(r.model, r.step, "select_blocks"),
                    std::make_shared<SelectBlocks>(r.attrs),
                    {TensorType(r.dtype, {Symbol::tokens, r.attrs.heads, r.attrs.head_dim}),
                     TensorType(r.dtype, {symbols[Symbol::max_blocks], r.attrs.kv_heads,
                                          kWorkloadBlockSize / r.attrs.grid.stride, r.attrs.head_dim}),
                     TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
                     TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})},
                    symbols});
  }
  return rows;
}

}  // namespace eadem::ops
