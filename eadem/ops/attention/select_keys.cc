// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/select_keys.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "eadem/ops/attention/attention_ports.h"
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::KvSource;

SelectKeys::SelectKeys(const kernels::SelectKeysAttrs& attrs) : attrs_(attrs) {
  if (attrs.heads <= 0 || attrs.head_dim <= 0 || attrs.top_k <= 0)
    throw InvalidArgument("select_keys: heads is {}, head_dim {} and top_k {}; expected positive numbers", attrs.heads,
                          attrs.head_dim, attrs.top_k);
  if (attrs.stride < 1) throw InvalidArgument("select_keys: stride is {}; expected a positive number", attrs.stride);
  if (!std::isfinite(attrs.scale) || attrs.scale <= 0)
    throw InvalidArgument("select_keys: scale is {}; expected a positive number", attrs.scale);
}

std::vector<Port> SelectKeys::inputs() const {
  return {{"q", Port::Role::constant},
          {"k", attrs_.source == KvSource::direct ? Port::Role::constant : Port::Role::state},
          {"weights", Port::Role::constant},
          {"query_start", Port::Role::index},
          {"kv_length", Port::Role::index},
          {"block_table", Port::Role::index, /*optional=*/true}};
}

std::string SelectKeys::attrs_text() const {
  return fmt::format("heads={} head_dim={} top_k={} scale={} {}{}", attrs_.heads, attrs_.head_dim, attrs_.top_k,
                     attrs_.scale, attrs_.source == KvSource::direct ? "direct" : "cached",
                     attrs_.stride == 1 ? "" : fmt::format(" stride={}", attrs_.stride));
}

std::vector<TensorType> SelectKeys::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "q", in[kQ], 3);
  expect_dtype(name(), "q", in[kQ], kActivations);
  expect_plain(name(), "q", in[kQ]);
  expect_dim(name(), "q", in[kQ], 1, Dim(attrs_.heads), "attribute heads");
  expect_dim(name(), "q", in[kQ], 2, Dim(attrs_.head_dim), "attribute head_dim");
  expect_keys(*this, kK, in[kK], attrs_.source, in[kQ].dtype, in[kQ].dim(0), 1, attrs_.head_dim, "attribute head_dim");
  expect_plain(name(), "k", in[kK]);
  expect_rank(name(), "weights", in[kWeights], 2);
  expect_dtype(name(), "weights", in[kWeights], kF32);
  expect_plain(name(), "weights", in[kWeights]);
  expect_dim(name(), "weights", in[kWeights], 0, in[kQ].dim(0), "tokens of 'q'");
  expect_dim(name(), "weights", in[kWeights], 1, Dim(attrs_.heads), "attribute heads");
  expect_sequences(*this, in, kQueryStart, attrs_.source);
  return {TensorType(DType::i32, {in[kQ].dim(0), 1, attrs_.top_k})};
}

DType SelectKeys::wanted_dtype(std::span<const TensorType> in, int port) const {
  if (port == kWeights) return DType::f32;
  if (port == kQ || (port == kK && attrs_.source == KvSource::direct))
    return in[kQ].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  return in[static_cast<size_t>(port)].dtype;
}

std::vector<Sharding> SelectKeys::infer_sharding(std::span<const TensorType> in) const {
  for (const int port : {kQ, kK, kWeights, kQueryStart, kKvLength, kBlockTable})
    expect_replicated(name(), inputs()[static_cast<size_t>(port)].name, in[static_cast<size_t>(port)],
                      "every rank makes the same choice");
  return {Sharding::replicated()};
}

Cost SelectKeys::cost(Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> out,
                      const SymbolValues& symbols) const {
  const int64_t tokens = in[kQ].bind(symbols)[0], sequences = std::max<int64_t>(1, in[kKvLength].bind(symbols)[0]);
  const int64_t queries = (tokens + sequences - 1) / sequences;
  int64_t positions = queries;
  if (attrs_.source == KvSource::cached)
    positions = std::max(queries, in[kBlockTable].bind(symbols)[1] * in[kK].bind(symbols)[2] * attrs_.stride);
  const double keys = static_cast<double>(positions / attrs_.stride);
  // Token i sees the keys of positions - queries + 1 + i positions. A score has heads products, each with its weight; a
  // choice compares it with what was chosen.
  const double share = static_cast<double>(tokens) / static_cast<double>(std::max<int64_t>(1, queries));
  const double pairs = 0.5 * static_cast<double>(queries) * static_cast<double>(2 * positions - queries + 1) /
                       static_cast<double>(attrs_.stride);
  const double flops =
      share * pairs * (static_cast<double>(attrs_.heads) * (2 * static_cast<double>(attrs_.head_dim) + 4) + 8);
  const TensorType key(in[kK].dtype, {attrs_.head_dim});
  const TensorType others[] = {in[kQ], in[kWeights], in[kQueryStart], in[kKvLength], in[kBlockTable]};
  return {flops, share * keys * static_cast<double>(key.size_bytes(symbols)) + traffic_bytes(others, out, symbols)};
}

void SelectKeys::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto heads = static_cast<size_t>(attrs_.heads), dim = static_cast<size_t>(attrs_.head_dim),
             top_k = static_cast<size_t>(attrs_.top_k);
  std::fill(out[0].data.begin(), out[0].data.end(), -1.0);
  for (const RefSequence& s : reference_sequences(in, kQueryStart, in[kK], attrs_.source))
    for (int64_t t = s.begin; t < s.end; ++t) {
      std::vector<double> scores(static_cast<size_t>((s.position(t) + 1) / attrs_.stride), 0.0);
      for (size_t j = 0; j < scores.size(); ++j)
        for (size_t h = 0; h < heads; ++h) {
          const size_t head = static_cast<size_t>(t) * heads + h;
          // A row lies at its last token, and in a cache at its own number.
          const auto number = static_cast<int64_t>(j);
          const int64_t place = attrs_.source == KvSource::direct ? (number + 1) * attrs_.stride - 1 : number;
          const double* key = &in[kK].data[static_cast<size_t>(s.row(place, 0, 1)) * dim];
          const double dot = std::inner_product(key, key + dim, &in[kQ].data[head * dim], 0.0);
          scores[j] += in[kWeights].data[head] * std::max(0.0, static_cast<double>(attrs_.scale) * dot);
        }
      std::vector<size_t> order(scores.size());
      std::iota(order.begin(), order.end(), size_t{0});
      std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
      order.resize(std::min(order.size(), top_k));
      std::sort(order.begin(), order.end());
      std::copy(order.begin(), order.end(), out[0].data.begin() + t * attrs_.top_k);
    }
}

std::vector<Workload> SelectKeys::workloads() {
  struct Row {
    std::string_view model;
    int64_t heads, head_dim, top_k;
    DType dtype;
    StepShape step;
  };
  std::vector<Workload> rows;
  for (const Row& r : {Row{"tiny", 3, 20, 4, DType::f32, {"prefill-16", 16, 1, 16}},
                       Row{"deepseek-v3.2", 64, 128, 2048, DType::bf16, {"decode-1 at 8192", 1, 1, 8192}},
                       Row{"deepseek-v3.2", 64, 128, 2048, DType::bf16, {"prefill-512", 512, 1, 4096}}}) {
    const SymbolValues symbols = symbols_of(r.step);
    rows.push_back(
        {workload_name(r.model, r.step, "select_keys"),
         std::make_shared<SelectKeys>(
             kernels::SelectKeysAttrs{.heads = r.heads,
                                      .head_dim = r.head_dim,
                                      .top_k = r.top_k,
                                      .scale = 1.0f / std::sqrt(static_cast<float>(r.head_dim)),
                                      .source = KvSource::cached}),
         {TensorType(r.dtype, {Symbol::tokens, r.heads, r.head_dim}),
          TensorType(r.dtype, {symbols[Symbol::max_blocks], 1, kWorkloadBlockSize, r.head_dim}),
          TensorType(DType::f32, {Symbol::tokens, r.heads}), TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
          TensorType(DType::i32, {Symbol::sequences}), TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})},
         symbols});
  }
  return rows;
}

}  // namespace eadem::ops
