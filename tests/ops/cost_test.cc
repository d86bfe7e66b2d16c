// SPDX-License-Identifier: Apache-2.0
//
// Op::cost: operations that ops state are compared with a count.
#include <gtest/gtest.h>

#include <algorithm>

#include "eadem/ops/all_ops.h"

namespace eadem::ops {
namespace {

// One token of each sequence is generated, so that nothing is made of the cached rows; two tokens are of prompts.
TEST(Cost, LatentAttentionCountsTheFormOfTheStep) {
  constexpr int64_t kHeads = 3, kLatent = 20, kNope = 10, kRope = 8, kValue = 12, kKeys = 64;
  const LatentAttention op({kHeads, kLatent, kNope, kRope, kValue});
  const TensorType q(DType::f32, {Symbol::tokens, kHeads, kNope + kRope}),
      rows(DType::f32, {kKeys / 16, 1, 16, kLatent + kRope}), k_b(DType::f32, {kHeads, kLatent, kNope}),
      v_b(DType::f32, {kHeads, kValue, kLatent}), lengths(DType::i32, {Symbol::sequences});
  const std::vector<TensorType> in = {q,
                                      rows,
                                      k_b,
                                      v_b,
                                      TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
                                      lengths,
                                      TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks}),
                                      lengths};
  const auto flops = [&](int64_t tokens, int64_t sequences) {
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    symbols[Symbol::sequences] = sequences;
    symbols[Symbol::max_blocks] = kKeys / 16;
    return op.cost(Pass::inference, in, op.infer_types(in), symbols).flops;
  };
  constexpr double kMatrices = 2.0 * kLatent * (kNope + kValue);
  EXPECT_EQ(flops(1, 1), kHeads * (kMatrices + kKeys * (2.0 * (kLatent + kRope + kLatent) + 13)));
  EXPECT_EQ(flops(5, 5), 5 * flops(1, 1));
  EXPECT_EQ(flops(2, 1), kHeads * (kKeys * kMatrices + (2 * kKeys - 1) * (2.0 * (kNope + kRope + kValue) + 13)));
}

// The cost of attention is a closed form. It equals a count query by query, and takes no longer for long sequences.
TEST(Cost, AttentionCountsPairsOfQueriesAndKeys) {
  // One head of one value: 4 operations for the products of a pair and 13 for its share of the softmax.
  const auto pairs = [](int64_t tokens, int64_t sequences, int64_t cache, int64_t window, int64_t chunk = 0) {
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    symbols[Symbol::sequences] = sequences;
    symbols[Symbol::max_blocks] = 1;
    const bool cached = cache > 0;
    using kernels::KvSource;
    const Attention op({1, 1, 1, 1, window, cached ? KvSource::cached : KvSource::direct, 0, 0.0f, false, chunk});
    const TensorType x(DType::f32, {Symbol::tokens, 1, 1}),
        keys = cached ? TensorType(DType::f32, {Symbol::sequences, 1, cache, 1}) : x;
    const TensorType table(DType::i32, {Symbol::sequences, Symbol::max_blocks});
    const std::vector<TensorType> in = {x,
                                        keys,
                                        keys,
                                        TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
                                        TensorType(DType::i32, {Symbol::sequences}),
                                        cached ? table : kernels::unconnected_port()};
    return op.cost(Pass::forward, in, std::vector{x}, symbols).flops / 17;
  };
  for (int64_t tokens : {1, 2, 7, 64})
    for (int64_t cache : {0, 64, 100})
      for (int64_t window : {0, 1, 3, 63, 64, 65, 200}) {
        double expected = 0;
        const int64_t before = cache > 0 ? cache - tokens : 0;
        for (int64_t i = 0; i < tokens; ++i) {
          const int64_t visible = before + i + 1;
          expected += static_cast<double>(window > 0 ? std::min(visible, window) : visible);
        }
        EXPECT_EQ(pairs(tokens, 1, cache, window), expected) << tokens << " " << cache << " " << window;
        EXPECT_EQ(pairs(3 * tokens, 3, cache, window), 3 * expected) << tokens << " " << cache << " " << window;
      }
  for (int64_t tokens : {1, 2, 7, 64})
    for (int64_t cache : {0, 64, 100})
      for (int64_t chunk : {1, 3, 63, 64, 65, 200}) {
        double expected = 0;
        for (int64_t i = 0; i < tokens; ++i)
          expected += static_cast<double>(((cache > 0 ? cache - tokens : 0) + i) % chunk + 1);
        EXPECT_EQ(pairs(tokens, 1, cache, 0, chunk), expected) << tokens << " " << cache << ", chunks of " << chunk;
        EXPECT_EQ(pairs(3 * tokens, 3, cache, 0, chunk), 3 * expected) << tokens << " " << cache;
      }
  const double many = 0x1p46;  // query by query: weeks
  EXPECT_EQ(pairs(int64_t{1} << 46, 1, 0, 0), many * (many + 1) / 2);
}

}  // namespace
}  // namespace eadem::ops
