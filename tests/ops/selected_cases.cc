// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/selected_cases.h"

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/op_cases.h"

namespace eadem::test {

namespace {

using kernels::KvSource;
using ops::Workload;

// A step, and with max_blocks > 0 its cache.
struct SelectedStep {
  int64_t tokens, sequences, block_size = 0, max_blocks = 0;

  bool cached() const { return max_blocks > 0; }
  KvSource source() const { return cached() ? KvSource::cached : KvSource::direct; }
  SymbolValues symbols() const {
    SymbolValues result;
    result[Symbol::tokens] = tokens;
    result[Symbol::sequences] = sequences;
    result[Symbol::max_blocks] = max_blocks;
    return result;
  }
  TensorType keys(const WeightType& stored, int64_t heads, int64_t width) const {
    if (!cached()) return TensorType(stored.dtype, {Symbol::tokens, heads, width});
    return TensorType(stored.dtype, {sequences * max_blocks + 2, heads, block_size, width}, stored.encoding);
  }
  void append_sequences(std::vector<TensorType>& types) const {
    types.emplace_back(DType::i32, std::initializer_list<Dim>{Dim(Symbol::sequences, 1)});
    types.emplace_back(DType::i32, std::initializer_list<Dim>{Symbol::sequences});
    types.push_back(cached() ? TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})
                             : kernels::absent_port());
  }
};

// Whole prompts around the chunk of 64 keys; decode, chunked prefill, a contiguous cache, blocks of one position.
constexpr SelectedStep kDirectSteps[] = {{0, 0}, {1, 1}, {2, 1}, {63, 1}, {64, 1}, {66, 2}, {75, 5}};
constexpr SelectedStep kCachedSteps[] = {{0, 0, 16, 4},  {1, 1, 16, 30}, {3, 3, 16, 9},
                                         {20, 3, 7, 12}, {9, 1, 200, 1}, {2, 2, 1, 66}};

std::vector<Workload> select_keys() {
  std::vector<Workload> cases;
  const auto add = [&](DType dtype, DType stored, int64_t heads, int64_t head_dim, int64_t top_k,
                       const SelectedStep& step) {
    std::vector<TensorType> types = {TensorType(dtype, {Symbol::tokens, heads, head_dim}),
                                     step.keys(stored, 1, head_dim), TensorType(DType::f32, {Symbol::tokens, heads})};
    step.append_sequences(types);
    cases.push_back(named_case(std::make_shared<ops::SelectKeys>(kernels::SelectKeysAttrs{
                                   heads, head_dim, top_k, 1.0f / static_cast<float>(head_dim), step.source()}),
                               std::move(types), step.symbols()));
  };
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const SelectedStep& step : kDirectSteps)
      for (const int64_t top_k : {1, 5, 64, 200}) add(dtype, dtype, 4, 20, top_k, step);
  for (const DType stored : {DType::f32, DType::bf16, DType::f16})
    for (const SelectedStep& step : kCachedSteps)
      for (const int64_t top_k : {1, 7, 200}) add(DType::f32, stored, 3, 33, top_k, step);
  // More rows than a block of tokens has, and one head.
  add(DType::f32, DType::f32, 200, 16, 9, {5, 1, 16, 12});
  add(DType::f32, DType::f32, 1, 1, 9, {130, 1});
  return cases;
}

std::vector<Workload> selected_attention() {
  struct Heads {
    int64_t heads, kv_heads, head_dim, value_dim, span = 1, value_row = value_dim;
  };
  std::vector<Workload> cases;
  const auto add = [&](DType dtype, const WeightType& stored, const Heads& shape, int64_t entries,
                       const SelectedStep& step) {
    std::vector<TensorType> types = {TensorType(dtype, {Symbol::tokens, shape.heads, shape.head_dim}),
                                     step.keys(stored, shape.kv_heads, shape.head_dim),
                                     step.keys(stored, shape.kv_heads, shape.value_row),
                                     TensorType(DType::i32, {Symbol::tokens, shape.kv_heads, entries})};
    step.append_sequences(types);
    cases.push_back(named_case(std::make_shared<ops::SelectedAttention>(kernels::SelectedAttentionAttrs{
                                   shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim,
                                   1.0f / static_cast<float>(shape.head_dim), shape.span, step.source()}),
                               std::move(types), step.symbols()));
  };
  // Grouped heads; a single one; values wider than keys; latent rows; entries of several positions.
  constexpr Heads kShapes[] = {{4, 2, 8, 8}, {1, 1, 16, 16}, {3, 1, 7, 33}, {5, 1, 72, 64, 1, 72}, {6, 2, 24, 17, 16}};
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const SelectedStep& step : kDirectSteps)
      for (const Heads& shape : kShapes)
        for (const int64_t entries : {1, 6, 70}) add(dtype, dtype, shape, entries, step);
  const WeightType stored_types[] = {DType::f32, DType::bf16, DType::f16, WeightType{DType::f32, &RowEncoding::int8()},
                                     WeightType{DType::f32, &RowEncoding::fp8_e4m3()}};
  for (const WeightType& stored : stored_types)
    for (const SelectedStep& step : kCachedSteps)
      for (const Heads& shape : kShapes)
        for (const int64_t entries : {1, 70}) add(DType::f32, stored, shape, entries, step);
  add(DType::f32, DType::f32, {40, 1, 17, 16}, 9, {3, 1});
  return cases;
}

}  // namespace

std::vector<Workload> selected_cases(std::string_view op) {
  if (op == "select_keys") return select_keys();
  if (op == "selected_attention") return selected_attention();
  return {};
}

}  // namespace eadem::test
