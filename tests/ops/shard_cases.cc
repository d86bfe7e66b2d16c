// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/shard_cases.h"

#include "eadem/ops/all_ops.h"
#include "tests/ops/op_cases.h"

namespace eadem::test {

namespace {

using ops::Workload;

SymbolValues tokens_of(int64_t tokens) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = tokens;
  return symbols;
}

std::vector<Workload> cut_columns() {
  std::vector<Workload> cases;
  for (DType dtype : {DType::f32, DType::bf16})
    for (const std::vector<int64_t>& widths : {std::vector<int64_t>{1, 1}, {7, 3, 4, 4, 3, 7}, {256, 64}, {9000, 300}})
      for (int64_t tokens : {0, 1, 5, 40}) {
        int64_t columns = 0;
        for (int64_t width : widths) columns += width;
        cases.push_back(named_case(std::make_shared<ops::CutColumns>(kernels::CutColumnsAttrs{widths}),
                                   {TensorType(dtype, {Symbol::tokens, columns})}, tokens_of(tokens)));
      }
  return cases;
}

// Around the 512 elements that are added at a time, on one thread and on several.
std::vector<Workload> shard_sum() {
  std::vector<Workload> cases;
  for (DType dtype : {DType::f32, DType::bf16})
    for (const std::vector<int>& counts : {std::vector<int>{2}, {3}, {2, 4}, {2, 4, 3}, {2, 3, 5, 7}})
      for (const auto& [tokens, hidden] :
           {std::pair<int64_t, int64_t>{0, 8}, {1, 1}, {1, 511}, {2, 256}, {3, 171}, {33, 300}}) {
        const VirtualShards shards = VirtualShards::of(420, counts);
        cases.push_back(named_case(std::make_shared<ops::ShardSum>(kernels::ShardSumAttrs{
                                       .owners = {{0, shards.size()}}, .tree = shards.tree, .out_dtype = dtype}),
                                   std::vector<TensorType>(static_cast<size_t>(shards.size()),
                                                           TensorType(DType::f32, {Symbol::tokens, hidden})),
                                   tokens_of(tokens)));
      }
  return cases;
}

}  // namespace

std::vector<Workload> shard_cases(std::string_view op) {
  if (op == "cut_columns") return cut_columns();
  if (op == "shard_sum") return shard_sum();
  return {};
}

}  // namespace eadem::test
