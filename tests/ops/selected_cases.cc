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
                             : kernels::unconnected_port());
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

constexpr kernels::RowGrid kGrids[] = {{4, 2}, {1, 1}, {6, 6}, {16, 4}};

// Steps of blocks of a multiple of each stride but one, whose cache is contiguous; whole rows, parts of one, none.
constexpr SelectedStep kGridSteps[] = {{0, 0, 12, 4}, {1, 1, 24, 9}, {3, 3, 12, 9}, {20, 3, 12, 7}, {33, 1, 37, 1}};

TensorType compressed_rows(const SelectedStep& step, const WeightType& stored, int64_t heads, int64_t width,
                           const kernels::RowGrid& grid) {
  if (!step.cached()) return step.keys(stored, heads, width);
  SelectedStep rows = step;
  rows.block_size = (step.block_size + grid.stride - 1) / grid.stride;
  return rows.keys(stored, heads, width);
}

// A block of several positions that a row's stride does not divide can only be a contiguous cache's.
bool fits_grid(const SelectedStep& step, const kernels::RowGrid& grid) {
  return step.max_blocks == 1 || step.block_size % grid.stride == 0;
}

std::vector<Workload> compress_keys() {
  std::vector<Workload> cases;
  const auto add = [&](DType dtype, const WeightType& stored, int64_t heads, int64_t width,
                       const kernels::RowGrid& grid, bool weight, bool position, const SelectedStep& step) {
    if (step.cached() && !fits_grid(step, grid)) return;
    std::vector<TensorType> types = {
        step.keys(stored, heads, width),
        weight ? TensorType(DType::f32, {heads, grid.length}) : kernels::unconnected_port(),
        position ? TensorType(DType::f32, {heads, grid.length, width}) : kernels::unconnected_port()};
    step.append_sequences(types);
    if (step.cached()) {
      types.emplace_back(DType::i64, std::initializer_list<Dim>{Symbol::tokens});
      types.push_back(compressed_rows(step, dtype, heads, width, grid));
    }
    cases.push_back(
        named_case(std::make_shared<ops::CompressKeys>(kernels::CompressKeysAttrs{heads, width, grid, step.source()}),
                   std::move(types), step.symbols()));
  };
  for (const kernels::RowGrid& grid : kGrids)
    for (const int64_t width : {1, 8, 33})
      for (const bool weight : {false, true})
        for (const bool position : {false, true}) {
          for (const DType dtype : {DType::f32, DType::bf16})
            for (const SelectedStep& step : kDirectSteps) add(dtype, dtype, 2, width, grid, weight, position, step);
          for (const SelectedStep& step : kGridSteps)
            add(DType::f32, DType::f32, 2, width, grid, weight, position, step);
        }
  const WeightType stored_types[] = {DType::bf16, DType::f16, WeightType{DType::f32, &RowEncoding::int8()},
                                     WeightType{DType::f32, &RowEncoding::fp8_e4m3()}};
  for (const WeightType& stored : stored_types)
    for (const DType rows : {DType::bf16, DType::f16})
      for (const SelectedStep& step : kGridSteps) add(rows, stored, 3, 17, {4, 2}, true, true, step);
  return cases;
}

struct GroupedHeads {
  int64_t heads, kv_heads, head_dim, value_dim;
};

std::vector<Workload> compressed_attention() {
  std::vector<Workload> cases;
  const auto add = [&](DType dtype, DType stored, const GroupedHeads& shape, const kernels::RowGrid& grid,
                       const SelectedStep& step) {
    if (step.cached() && !fits_grid(step, grid)) return;
    std::vector<TensorType> types = {TensorType(dtype, {Symbol::tokens, shape.heads, shape.head_dim}),
                                     compressed_rows(step, stored, shape.kv_heads, shape.head_dim, grid),
                                     compressed_rows(step, stored, shape.kv_heads, shape.value_dim, grid)};
    step.append_sequences(types);
    cases.push_back(named_case(std::make_shared<ops::CompressedAttention>(kernels::CompressedAttentionAttrs{
                                   shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim,
                                   1.0f / static_cast<float>(shape.head_dim), grid, step.source()}),
                               std::move(types), step.symbols()));
  };
  constexpr GroupedHeads kShapes[] = {{4, 2, 8, 8}, {1, 1, 16, 16}, {3, 1, 7, 33}, {6, 2, 24, 17}};
  for (const GroupedHeads& shape : kShapes)
    for (const kernels::RowGrid& grid : kGrids) {
      for (const DType dtype : {DType::f32, DType::bf16})
        for (const SelectedStep& step : kDirectSteps) add(dtype, dtype, shape, grid, step);
      for (const DType stored : {DType::f32, DType::bf16, DType::f16})
        for (const SelectedStep& step : kGridSteps) add(DType::f32, stored, shape, grid, step);
    }
  // More rows than a chunk of keys has.
  add(DType::f32, DType::f32, kShapes[0], {2, 2}, {140, 1});
  add(DType::f32, DType::f32, kShapes[0], {2, 2}, {3, 1, 16, 9});
  return cases;
}

std::vector<Workload> select_blocks() {
  std::vector<Workload> cases;
  struct Choice {
    int64_t blocks_of, top_n, first, local;  // blocks_of: strides of a block
  };
  const auto add = [&](DType dtype, DType stored, const GroupedHeads& shape, const kernels::RowGrid& grid,
                       const Choice& choice, const SelectedStep& step) {
    if (step.cached() && !fits_grid(step, grid)) return;
    std::vector<TensorType> types = {TensorType(dtype, {Symbol::tokens, shape.heads, shape.head_dim}),
                                     compressed_rows(step, stored, shape.kv_heads, shape.head_dim, grid)};
    step.append_sequences(types);
    cases.push_back(
        named_case(std::make_shared<ops::SelectBlocks>(kernels::SelectBlocksAttrs{
                       shape.heads, shape.kv_heads, shape.head_dim, 1.0f / static_cast<float>(shape.head_dim), grid,
                       choice.blocks_of * grid.stride, choice.top_n, choice.first, choice.local, step.source()}),
                   std::move(types), step.symbols()));
  };
  constexpr GroupedHeads kShapes[] = {{4, 2, 8, 8}, {1, 1, 16, 16}, {6, 2, 33, 33}};
  constexpr Choice kChoices[] = {{2, 3, 1, 2}, {1, 5, 1, 1}, {4, 4, 0, 1}, {3, 40, 1, 2}};
  for (const GroupedHeads& shape : kShapes)
    for (const kernels::RowGrid& grid : kGrids)
      for (const Choice& choice : kChoices) {
        for (const DType dtype : {DType::f32, DType::bf16})
          for (const SelectedStep& step : kDirectSteps) add(dtype, dtype, shape, grid, choice, step);
        for (const DType stored : {DType::f32, DType::bf16, DType::f16})
          for (const SelectedStep& step : kGridSteps) add(DType::f32, stored, shape, grid, choice, step);
      }
  add(DType::f32, DType::f32, kShapes[0], {2, 2}, kChoices[0], {140, 1});
  return cases;
}

// select_keys over rows of several tokens.
std::vector<Workload> select_rows_of_tokens() {
  std::vector<Workload> cases;
  const auto add = [&](DType dtype, DType stored, int64_t stride, int64_t top_k, const SelectedStep& step) {
    const kernels::RowGrid grid{stride, stride};
    if (step.cached() && !fits_grid(step, grid)) return;
    std::vector<TensorType> types = {TensorType(dtype, {Symbol::tokens, 4, 20}),
                                     compressed_rows(step, stored, 1, 20, grid),
                                     TensorType(DType::f32, {Symbol::tokens, 4})};
    step.append_sequences(types);
    const kernels::SelectKeysAttrs attrs{4, 20, top_k, 0.05f, step.source(), stride};
    cases.push_back(named_case(std::make_shared<ops::SelectKeys>(attrs), std::move(types), step.symbols()));
  };
  for (const int64_t stride : {2, 4})
    for (const int64_t top_k : {1, 5, 64}) {
      for (const DType dtype : {DType::f32, DType::bf16})
        for (const SelectedStep& step : kDirectSteps) add(dtype, dtype, stride, top_k, step);
      for (const DType stored : {DType::f32, DType::bf16, DType::f16})
        for (const SelectedStep& step : kGridSteps) add(DType::f32, stored, stride, top_k, step);
      add(DType::f32, DType::f32, stride, top_k, {330, 1});  // more rows than a chunk of keys has
    }
  return cases;
}

std::vector<Workload> pool_keys() {
  std::vector<Workload> cases;
  const auto add = [&](DType dtype, int64_t width, int64_t stride, int64_t parts, const SelectedStep& step) {
    const kernels::PoolKeysAttrs attrs{width, stride, parts, step.source()};
    std::vector<TensorType> types = {step.keys(dtype, 1, attrs.columns()), step.keys(dtype, 1, attrs.columns()),
                                     TensorType(DType::f32, {stride, attrs.columns()})};
    step.append_sequences(types);
    if (step.cached()) types.emplace_back(DType::i64, std::initializer_list<Dim>{Symbol::tokens});
    cases.push_back(named_case(std::make_shared<ops::PoolKeys>(attrs), std::move(types), step.symbols()));
  };
  for (const int64_t stride : {1, 4, 7})
    for (const int64_t parts : {1, 2})
      for (const int64_t width : {1, 8, 33}) {
        for (const DType dtype : {DType::f32, DType::bf16})
          for (const SelectedStep& step : kDirectSteps) add(dtype, width, stride, parts, step);
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
          for (const SelectedStep& step : kGridSteps) add(dtype, width, stride, parts, step);
      }
  return cases;
}

std::vector<Workload> pooled_attention() {
  struct Shape {
    int64_t heads, width, window, stride, selected;
  };
  std::vector<Workload> cases;
  const auto add = [&](DType dtype, const WeightType& stored, DType stored_rows, const Shape& shape,
                       const SelectedStep& step) {
    const kernels::RowGrid grid{shape.stride, shape.stride};
    if (step.cached() && !fits_grid(step, grid)) return;
    const kernels::PooledAttentionAttrs attrs{.heads = shape.heads,
                                              .width = shape.width,
                                              .scale = 1.0f / static_cast<float>(shape.width),
                                              .window = shape.window,
                                              .stride = shape.stride,
                                              .selected = shape.selected,
                                              .source = step.source()};
    std::vector<TensorType> types = {
        TensorType(dtype, {Symbol::tokens, shape.heads, shape.width}), step.keys(stored, 1, shape.width),
        compressed_rows(step, stored_rows, 1, shape.width, grid), TensorType(DType::f32, {shape.heads})};
    step.append_sequences(types);
    if (step.cached())
      types.emplace_back(DType::i32, std::initializer_list<Dim>{Symbol::sequences, Symbol::max_blocks});
    if (shape.selected > 0)
      types.emplace_back(DType::i32, std::initializer_list<Dim>{Symbol::tokens, 1, shape.selected});
    cases.push_back(named_case(std::make_shared<ops::PooledAttention>(attrs), std::move(types), step.symbols()));
  };
  // Windows below a chunk of keys and above; rows of one token and of several; all rows and chosen ones; one head.
  constexpr Shape kShapes[] = {
      {4, 8, 5, 4, 0}, {1, 33, 70, 2, 0}, {3, 20, 1, 1, 0}, {5, 17, 9, 4, 3}, {2, 24, 66, 2, 40}};
  for (const Shape& shape : kShapes) {
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const SelectedStep& step : kDirectSteps) add(dtype, dtype, dtype, shape, step);
    for (const WeightType& stored :
         {WeightType(DType::f32), WeightType(DType::bf16), WeightType(DType::f16),
          WeightType{DType::f32, &RowEncoding::int8()}, WeightType{DType::f32, &RowEncoding::fp8_e4m3()}})
      for (const DType rows : {DType::f32, DType::bf16})
        for (const SelectedStep& step : kGridSteps) add(DType::f32, stored, rows, shape, step);
  }
  return cases;
}

}  // namespace

std::vector<Workload> selected_cases(std::string_view op) {
  if (op == "select_keys") {
    std::vector<Workload> cases = select_keys();
    for (Workload& row : select_rows_of_tokens()) cases.push_back(std::move(row));
    return cases;
  }
  if (op == "pool_keys") return pool_keys();
  if (op == "pooled_attention") return pooled_attention();
  if (op == "selected_attention") return selected_attention();
  if (op == "compress_keys") return compress_keys();
  if (op == "compressed_attention") return compressed_attention();
  if (op == "select_blocks") return select_blocks();
  return {};
}

}  // namespace eadem::test
