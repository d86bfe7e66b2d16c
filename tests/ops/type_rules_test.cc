// SPDX-License-Identifier: Apache-2.0
//
// Type and sharding rules: what each op makes of good types, and that bad ones are refused with the port and both
// values.
#include <gtest/gtest.h>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/sample.h"
#include "eadem/ops/all_ops.h"
#include "tests/support/refusal.h"

namespace eadem::ops {
namespace {

constexpr DType kF = DType::f32, kB = DType::bf16, kH = DType::f16, kI = DType::i32;
constexpr Symbol kT = Symbol::tokens;

std::vector<TensorType> infer(const Op& op, const std::vector<TensorType>& in) { return op.infer_types(in); }

#define EXPECT_REFUSED(expression, ...)                                                              \
  do {                                                                                               \
    const std::string message = test::refusal([&] { (void)(expression); });                          \
    EXPECT_TRUE(message.starts_with("InvalidArgument: ")) << "it says: " << message;                 \
    for (const char* part : {__VA_ARGS__})                                                           \
      EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message; \
  } while (false)

TensorType with(TensorType type, Sharding sharding) {
  type.sharding = sharding;
  return type;
}
const Sharding kWhole = Sharding::replicated(), kPartial = Sharding::partial();

TEST(TypeRules, Embedding) {
  const Embedding op({kB, 100});
  EXPECT_EQ(infer(op, {TensorType(kF, {100, 8}), TensorType(kI, {kT})})[0], TensorType(kB, {kT, 8}));
  EXPECT_REFUSED(infer(op, {TensorType(kF, {99, 8}), TensorType(kI, {kT})}), "embedding: 'table'", "[99, 8]", "100");
  EXPECT_REFUSED(infer(op, {TensorType(kF, {100, 8}), TensorType(DType::i64, {kT})}), "'ids' is i64", "expected i32");
  EXPECT_REFUSED(infer(op, {TensorType(kI, {100, 8}), TensorType(kI, {kT})}), "'table' is i32", "f32 or bf16 or f16");
  EXPECT_REFUSED(Embedding({kI, 100}), "out_dtype is i32");
  EXPECT_REFUSED(Embedding({kF, 0}), "vocab is 0");
  const auto rule = [&](Sharding table) {
    return op.infer_sharding(std::vector{with(TensorType(kF, {50, 8}), table), TensorType(kI, {kT})})[0];
  };
  EXPECT_EQ(rule(Sharding::along(0)), kPartial) << "zeros for the words of other ranks";
  EXPECT_EQ(rule(kWhole), kWhole);
  EXPECT_REFUSED(rule(Sharding::along(1)), "'table'", "sharded(1)", "expected replicated or sharded(0)");
}

TEST(TypeRules, VirtualShards) {
  const CutColumns cut({{3, 5}});
  const TensorType x(kB, {kT, 8}), partial(kF, {kT, 6});
  EXPECT_EQ(infer(cut, {x}), (std::vector{TensorType(kB, {kT, 3}), TensorType(kB, {kT, 5})}));
  EXPECT_REFUSED(infer(cut, {TensorType(kF, {kT, 7})}), "cut_columns: 'x'", "sum of the widths", "8");
  EXPECT_REFUSED(CutColumns({{8}}), "1 widths", "at least two");
  EXPECT_REFUSED(CutColumns({{8, 0}}), "widths[1] is 0");
  for (const Sharding& whole : {kWhole, Sharding::along(0), Sharding::along(1)})
    EXPECT_EQ(cut.infer_sharding(std::vector{with(x, whole)}), std::vector(2, whole));
  EXPECT_REFUSED(cut.infer_sharding(std::vector{with(x, kPartial)}), "'x' is partial");

  const SumTree three({0, 0});
  const ShardSum alone({.owners = {{0, 3}}, .tree = three, .out_dtype = kB});
  EXPECT_EQ(infer(alone, {partial, partial, partial})[0], TensorType(kB, {kT, 6}));
  EXPECT_REFUSED(infer(alone, {partial, partial, TensorType(kF, {kT, 7})}), "'partial2'", "partial0");
  EXPECT_REFUSED(infer(alone, {partial, TensorType(kB, {kT, 6}), partial}), "'partial1' is bf16", "expected f32");
  EXPECT_EQ(alone.infer_sharding(std::vector(3, partial))[0], kWhole);
  const ShardSum second({.rank = 1, .owners = {{0, 1}, {1, 3}}, .tree = three});
  EXPECT_EQ(second.inputs().size(), 2u);
  EXPECT_EQ(second.infer_sharding(std::vector(2, with(partial, kPartial)))[0], kWhole);
  EXPECT_REFUSED(second.infer_sharding(std::vector(2, partial)), "'partial0' is replicated", "partial on 2 ranks");
  EXPECT_REFUSED(ShardSum({.rank = 2, .owners = {{0, 1}, {1, 3}}, .tree = three}), "rank 2 of 2");
  EXPECT_REFUSED(ShardSum({.owners = {{0, 1}, {2, 3}}, .tree = three}), "rank 1 owns the shards from 2 to 3", "from 1");
  EXPECT_REFUSED(ShardSum({.owners = {{0, 1}, {1, 2}}, .tree = three}), "own 2 shards of 3");
}

TEST(TypeRules, ShortConvolution) {
  const ShortConvolution op({4, true}), cached({4, true, true});
  const TensorType x(kB, {kT, 6}), weight(kF, {4, 6}), bias(kF, {6}), start(kI, {Dim(Symbol::sequences, 1)}),
      slots(kI, {Symbol::sequences}), state(kF, {5, 3, 6});
  EXPECT_EQ(infer(op, {x, weight, bias, start})[0], TensorType(kB, {kT, 6}));
  EXPECT_EQ(infer(cached, {x, weight, kernels::unconnected_port(), start, slots, state})[1], state);
  EXPECT_REFUSED(infer(op, {x, TensorType(kF, {3, 6}), bias, start}), "'weight'", "[3, 6]", "attribute taps");
  EXPECT_REFUSED(infer(op, {x, TensorType(kB, {4, 6}), bias, start}), "'weight' is bf16", "expected f32");
  EXPECT_REFUSED(infer(op, {x, weight, TensorType(kF, {5}), start}), "'bias'", "channels of 'x'");
  EXPECT_REFUSED(infer(cached, {x, weight, bias, start, slots, TensorType(kF, {5, 4, 6})}), "'state'", "expected 3");
  EXPECT_REFUSED(infer(cached, {x, weight, bias, start, slots, TensorType(kB, {5, 3, 6})}), "'state' is bf16");
  EXPECT_REFUSED(infer(cached, {x, weight, bias, slots, slots, state}), "'query_start'", "sequences of 'state_slots'");
  EXPECT_REFUSED(ShortConvolution({1}), "taps is 1; expected 2 to 8");
  EXPECT_REFUSED(ShortConvolution({9}), "taps is 9");
  const auto rule = [&](Sharding a, Sharding w, Sharding s) {
    return cached.infer_sharding(
        std::vector{with(x, a), with(weight, w), kernels::unconnected_port(), start, slots, with(state, s)});
  };
  EXPECT_EQ(rule(Sharding::along(1), Sharding::along(1), Sharding::along(2))[0], Sharding::along(1));
  EXPECT_REFUSED(rule(Sharding::along(1), kWhole, Sharding::along(2)), "'weight'", "channels divided alike");
  EXPECT_REFUSED(rule(kPartial, kWhole, kWhole), "'x'", "expected replicated or sharded(1)");
}

TEST(TypeRules, GatedDeltaRule) {
  kernels::GatedDeltaRuleAttrs attrs{.key_heads = 2, .value_heads = 4, .key_dim = 3, .value_dim = 5};
  const GatedDeltaRule op(attrs);
  const TensorType q(kF, {kT, 2, 3}), v(kF, {kT, 4, 5}), a(kF, {kT, 4}), heads(kF, {4}),
      start(kI, {Dim(Symbol::sequences, 1)}), slots(kI, {Symbol::sequences}), state(kF, {7, 4, attrs.state_floats()});
  EXPECT_EQ(infer(op, {q, q, v, a, a, heads, heads, start})[0], v);
  EXPECT_REFUSED(infer(op, {q, v, v, a, a, heads, heads, start}), "'k'", "the attributes");
  EXPECT_REFUSED(infer(op, {q, q, TensorType(kB, {kT, 4, 5}), a, a, heads, heads, start}), "'v' is bf16");
  EXPECT_REFUSED(infer(op, {q, q, v, a, a, TensorType(kB, {4}), heads, start}), "'a_log' is bf16", "expected f32");
  attrs.channel_decay = true;
  EXPECT_REFUSED(infer(GatedDeltaRule(attrs), {q, q, v, a, a, heads, heads, start}), "'a'", "expected 12");
  attrs.channel_decay = false;
  attrs.cached = true;
  const GatedDeltaRule cached(attrs);
  EXPECT_EQ(infer(cached, {q, q, v, a, a, heads, heads, start, slots, state})[1], state);
  EXPECT_REFUSED(infer(cached, {q, q, v, a, a, heads, heads, start, slots, TensorType(kF, {7, 4, 15})}), "'state'",
                 "expected 64");
  EXPECT_REFUSED(GatedDeltaRule({.key_heads = 3, .value_heads = 4, .key_dim = 1, .value_dim = 1}), "value_heads is 4");
  EXPECT_REFUSED(GatedDeltaRule({.key_heads = 1, .value_heads = 4, .key_dim = 0, .value_dim = 1}), "key_dim is 0");
  const auto rule = [&](Sharding s, Sharding p) {
    const TensorType own = with(a, s);
    return cached.infer_sharding(std::vector{with(q, s), with(q, s), with(v, s), own, own, with(heads, p),
                                             with(heads, p), start, slots, with(state, s)});
  };
  EXPECT_EQ(rule(Sharding::along(1), Sharding::along(0))[0], Sharding::along(1));
  EXPECT_REFUSED(rule(Sharding::along(1), kWhole), "'a_log'", "heads divided alike");
}

TEST(TypeRules, LatentAttention) {
  const TensorType x(kF, {kT, 3, 5}), weight(kH, {3, 4, 5}), row(kF, {kT, 1, 28}), cache(kB, {4, 1, 16, 28}),
      slots(DType::i64, {kT});
  EXPECT_EQ(infer(HeadLinear({kB}), {x, weight})[0], TensorType(kB, {kT, 3, 4}));
  EXPECT_REFUSED(infer(HeadLinear({kF}), {x, TensorType(kF, {2, 4, 5})}), "head_linear: 'weight'", "expected 3",
                 "heads of 'x'");
  EXPECT_REFUSED(infer(HeadLinear({kF}), {x, TensorType(kF, {3, 4, 6})}), "expected 5", "last dimension of 'x'");
  EXPECT_REFUSED(HeadLinear({kI}), "out_dtype is i32");
  const auto rule = [&](Sharding a, Sharding b) {
    return HeadLinear({kF}).infer_sharding(std::vector{with(x, a), with(weight, b)})[0];
  };
  EXPECT_EQ(rule(Sharding::along(1), Sharding::along(0)), Sharding::along(1)) << "every rank has its heads";
  EXPECT_REFUSED(rule(kWhole, Sharding::along(0)), "head_linear: 'x' is replicated", "sharded(0)");

  EXPECT_EQ(infer(SplitColumns({2}), {x}), (std::vector{TensorType(kF, {kT, 3, 2}), TensorType(kF, {kT, 3, 3})}));
  EXPECT_REFUSED(infer(SplitColumns({5}), {x}), "split_columns: 'x'", "more than 5 columns");
  EXPECT_REFUSED(SplitColumns({0}), "first is 0");
  EXPECT_REFUSED(SplitColumns({2}).infer_sharding(std::vector{with(x, Sharding::along(2))}), "not along columns");
  EXPECT_EQ(infer(ConcatColumns({5}), {x, TensorType(kF, {kT, 3, 2})})[0], TensorType(kF, {kT, 3, 7}));
  EXPECT_REFUSED(infer(ConcatColumns({5}), {x, TensorType(kF, {kT, 2, 2})}), "concat_columns: 'second'");
  EXPECT_REFUSED(infer(ConcatColumns({4}), {x, x}), "concat_columns: 'first'", "attribute first");

  EXPECT_EQ(infer(LatentAppend(), {row, slots, cache})[0], cache);
  EXPECT_REFUSED(infer(LatentAppend(), {row, slots, TensorType(kB, {4, 1, 16, 27})}), "latent_append: 'cache'",
                 "width of 'rows'");
  // The first 20 columns of a key are its value. No other width than that of values or of keys will do.
  const Attention attention({3, 1, 28, 1.0f, 0, kernels::KvSource::cached, 20});
  const TensorType q(kF, {kT, 3, 28}), start(kI, {Dim(Symbol::sequences, 1)}), length(kI, {Symbol::sequences}),
      table(kI, {Symbol::sequences, Symbol::max_blocks});
  EXPECT_EQ(infer(attention, {q, cache, cache, start, length, table})[0], TensorType(kF, {kT, 3, 20}));
  EXPECT_REFUSED(infer(attention, {q, cache, TensorType(kB, {4, 1, 16, 24}), start, length, table}), "attention: 'v'",
                 "value_dim");
}

TEST(TypeRules, LatentAttentionInForms) {
  const LatentAttention attention({.heads = 3, .latent_dim = 20, .nope_dim = 5, .rope_dim = 8, .value_dim = 6});
  const TensorType q(kF, {kT, 3, 13}), rows(kB, {4, 1, 16, 28}), k_b(kH, {3, 20, 5}), v_b(kF, {3, 6, 20}),
      start(kI, {Dim(Symbol::sequences, 1)}), length(kI, {Symbol::sequences}),
      table(kI, {Symbol::sequences, Symbol::max_blocks});
  EXPECT_EQ(infer(attention, {q, rows, k_b, v_b, start, length, table, length})[0], TensorType(kF, {kT, 3, 6}));
  EXPECT_REFUSED(infer(attention, {TensorType(kF, {kT, 3, 28}), rows, k_b, v_b, start, length, table, length}),
                 "latent_attention: 'q'", "nope_dim + rope_dim");
  EXPECT_REFUSED(infer(attention, {q, TensorType(kB, {4, 2, 16, 28}), k_b, v_b, start, length, table, length}),
                 "'rows'", "one row for all heads");
  EXPECT_REFUSED(infer(attention, {q, rows, TensorType(kH, {3, 5, 20}), v_b, start, length, table, length}), "'k_b'",
                 "latent_dim");
  EXPECT_REFUSED(infer(attention, {q, rows, k_b, TensorType(kF, {3, 20, 6}), start, length, table, length}), "'v_b'",
                 "value_dim");
  EXPECT_REFUSED(infer(attention, {q, rows, k_b, v_b, start, length, table, start}), "'prompt_length'", "sequences");
  EXPECT_REFUSED(LatentAttention({.heads = 3, .latent_dim = 20, .nope_dim = 0, .rope_dim = 8, .value_dim = 6}),
                 "nope_dim 0");
  const auto rule = [&](Sharding heads, Sharding matrices) {
    return attention.infer_sharding(
        std::vector{with(q, heads), rows, with(k_b, matrices), with(v_b, matrices), start, length, table, length})[0];
  };
  EXPECT_EQ(rule(Sharding::along(1), Sharding::along(0)), Sharding::along(1)) << "every rank has its heads";
  EXPECT_EQ(rule(kWhole, kWhole), kWhole);
  EXPECT_REFUSED(rule(kWhole, Sharding::along(0)), "'k_b'", "divided alike");
}

TEST(TypeRules, SelectedAttention) {
  const TensorType start(kI, {Dim(Symbol::sequences, 1)}), length(kI, {Symbol::sequences}),
      none = kernels::unconnected_port(), table(kI, {Symbol::sequences, Symbol::max_blocks});
  const SelectKeys select({.heads = 3, .head_dim = 8, .top_k = 5});
  const TensorType q(kF, {kT, 3, 8}), k(kF, {kT, 1, 8}), weights(kF, {kT, 3}), selection(kI, {kT, 1, 5});
  EXPECT_EQ(infer(select, {q, k, weights, start, length, none})[0], selection);
  EXPECT_TRUE(select.differentiable_inputs().empty()) << "nothing is trained through a choice";
  EXPECT_REFUSED(infer(select, {q, q, weights, start, length, none}), "select_keys: 'k'", "expected 1");
  EXPECT_REFUSED(infer(select, {q, k, q, start, length, none}), "select_keys: 'weights'");
  EXPECT_REFUSED(infer(select, {q, k, weights, start, length, table}), "'block_table'", "direct keys");
  EXPECT_REFUSED(SelectKeys({.heads = 3, .head_dim = 8, .top_k = 0}), "top_k 0");
  const auto choice = [&](Sharding heads) {
    return select.infer_sharding(std::vector{with(q, heads), k, weights, start, length, none})[0];
  };
  EXPECT_EQ(choice(kWhole), kWhole);
  EXPECT_REFUSED(choice(Sharding::along(1)), "'q'", "the same choice");

  const SelectedAttention attention({.heads = 3, .kv_heads = 1, .head_dim = 8, .value_dim = 6});
  EXPECT_EQ(infer(attention, {q, k, k, selection, start, length, none})[0], TensorType(kF, {kT, 3, 6}));
  EXPECT_REFUSED(infer(attention, {q, k, TensorType(kF, {kT, 1, 7}), selection, start, length, none}), "'v'",
                 "value_dim");
  EXPECT_REFUSED(infer(attention, {q, k, k, TensorType(kI, {kT, 3, 5}), start, length, none}),
                 "selected_attention: 'selection'", "kv_heads");
  EXPECT_REFUSED(SelectedAttention({.heads = 3, .kv_heads = 2, .head_dim = 8, .value_dim = 6}), "kv_heads is 2");
  const auto rule = [&](Sharding heads, Sharding keys) {
    return attention.infer_sharding(
        std::vector{with(q, heads), with(k, keys), with(k, keys), with(selection, keys), start, length, none})[0];
  };
  EXPECT_EQ(rule(Sharding::along(1), kWhole), Sharding::along(1)) << "one head of keys, whole on every rank";
  EXPECT_EQ(rule(Sharding::along(1), Sharding::along(1)), Sharding::along(1));
  EXPECT_REFUSED(rule(kWhole, Sharding::along(1)), "'k'", "divided alike");
}

TEST(TypeRules, CompressedAttention) {
  const TensorType start(kI, {Dim(Symbol::sequences, 1)}), length(kI, {Symbol::sequences}),
      none = kernels::unconnected_port(), table(kI, {Symbol::sequences, Symbol::max_blocks}), slots(DType::i64, {kT});
  const kernels::RowGrid grid{4, 2};
  const TensorType x(kF, {kT, 2, 8}), weight(kF, {2, 4}), position(kF, {2, 4, 8}), cache(kB, {5, 2, 16, 8}),
      rows(kB, {5, 2, 8, 8});
  const CompressKeys direct({.heads = 2, .width = 8, .grid = grid}),
      cached({.heads = 2, .width = 8, .grid = grid, .source = kernels::KvSource::cached});
  EXPECT_EQ(infer(direct, {x, weight, position, start, length, none})[0], x);
  EXPECT_EQ(infer(direct, {x, none, none, start, length, none})[0], x);
  EXPECT_EQ(infer(cached, {cache, weight, position, start, length, table, slots, rows})[0], rows);
  EXPECT_REFUSED(infer(direct, {x, TensorType(kF, {2, 3}), none, start, length, none}), "compress_keys: 'weight'",
                 "length");
  EXPECT_REFUSED(infer(cached, {cache, none, none, start, length, table, slots, cache}), "compress_keys: 'rows'",
                 "a row for each stride");
  EXPECT_REFUSED(CompressKeys({.heads = 2, .width = 8, .grid = {5, 2}}), "length is 5", "stride is 2");
  const auto compressed = [&](Sharding heads, Sharding parameter) {
    return direct.infer_sharding(
        std::vector{with(x, heads), with(weight, parameter), with(position, parameter), start, length, none})[0];
  };
  EXPECT_EQ(compressed(Sharding::along(1), Sharding::along(0)), Sharding::along(1));
  EXPECT_REFUSED(compressed(Sharding::along(1), kWhole), "'weight'", "divided by heads");

  const TensorType q(kF, {kT, 4, 8}), v(kF, {kT, 2, 6});
  const CompressedAttention attention({.heads = 4, .kv_heads = 2, .head_dim = 8, .value_dim = 6, .grid = grid});
  EXPECT_EQ(infer(attention, {q, x, v, start, length, none})[0], TensorType(kF, {kT, 4, 6}));
  EXPECT_REFUSED(infer(attention, {q, x, x, start, length, none}), "compressed_attention: 'v'", "value_dim");
  EXPECT_REFUSED(infer(attention, {q, x, v, start, length, table}), "'block_table'", "direct keys");
  EXPECT_REFUSED(CompressedAttention({.heads = 4, .kv_heads = 3, .head_dim = 8, .value_dim = 6, .grid = grid}),
                 "kv_heads is 3");
  const auto divided = [&](Sharding heads, Sharding keys) {
    return attention.infer_sharding(std::vector{with(q, heads), with(x, keys), with(v, keys), start, length, none})[0];
  };
  EXPECT_EQ(divided(Sharding::along(1), Sharding::along(1)), Sharding::along(1));
  EXPECT_REFUSED(divided(Sharding::along(1), kWhole), "'k'", "divided alike");

  const SelectBlocks select({.heads = 4, .kv_heads = 2, .head_dim = 8, .grid = grid, .span = 4, .top_n = 5});
  EXPECT_EQ(infer(select, {q, x, start, length, none})[0], TensorType(kI, {kT, 2, 5}));
  EXPECT_TRUE(select.differentiable_inputs().empty()) << "nothing is trained through a choice";
  EXPECT_REFUSED(infer(select, {q, v, start, length, none}), "select_blocks: 'k'", "head_dim");
  EXPECT_REFUSED(SelectBlocks({.heads = 4, .kv_heads = 2, .head_dim = 8, .grid = grid, .span = 3, .top_n = 5}),
                 "span is 3", "stride 2");
  EXPECT_REFUSED(SelectBlocks({.heads = 4, .kv_heads = 2, .head_dim = 8, .grid = grid, .span = 4, .top_n = 2}),
                 "top_n 2");
}

TEST(TypeRules, TensorParallel) {
  const TensorType x(kB, {kT, 8}), bias(kF, {8});
  EXPECT_EQ(infer(AddBias(), {x, bias})[0], x);
  EXPECT_REFUSED(infer(AddBias(), {x, TensorType(kF, {7})}), "add_bias: 'bias' is f32 [7]", "expected 8");
  EXPECT_REFUSED(AddBias().infer_sharding(std::vector{with(x, kPartial), bias}), "'x'", "added once");
  EXPECT_EQ(AddBias().wanted_sharding(std::vector{with(x, kPartial), bias}, 0), kWhole);

  const SelectHeads select({.heads = 2, .own_heads = 2, .first_query = 2, .run = 1, .group = 3});
  EXPECT_EQ(infer(select, {TensorType(kB, {kT, 2, 8})})[0], TensorType(kB, {kT, 2, 8}));
  EXPECT_EQ(select.infer_sharding(std::vector{TensorType(kB, {kT, 2, 8})})[0], Sharding::along(1));
  EXPECT_REFUSED(infer(select, {TensorType(kB, {kT, 3, 8})}), "select_heads: 'x'", "expected 2");
  EXPECT_REFUSED(SelectHeads({.heads = 2, .own_heads = 3, .first_query = 4, .run = 1, .group = 3}), "3 heads of 2");

  const TensorType part(kF, {kT, 50}), labels(kI, {kT}), states(kF, {kT, 6});
  EXPECT_EQ(infer(SoftmaxState({50}), {part, labels})[0], TensorType(kF, {kT, 3}));
  EXPECT_EQ(SoftmaxState({50}).infer_sharding(std::vector{with(part, Sharding::along(1)), labels})[0],
            Sharding::along(1));
  EXPECT_REFUSED(SoftmaxState({50}).infer_sharding(std::vector{part, labels}), "'logits'", "expected sharded(1)");
  const ParallelCrossEntropy loss({50}, 2);
  EXPECT_EQ(infer(loss, {part, labels, states})[0], TensorType(kF, {kT}));
  EXPECT_REFUSED(infer(loss, {part, labels, TensorType(kF, {kT, 9})}), "'states'", "expected 6");
  EXPECT_EQ(loss.wanted_sharding(std::vector{part, labels, with(states, Sharding::along(1))}, 2), kWhole);
  EXPECT_EQ(Sample().wanted_sharding(std::vector{with(part, Sharding::along(1))}, 0), kWhole);

  const GradNorm of_parts(2, true), of_whole(1);
  const TensorType grad(kF, {3, 4}), own = with(grad, Sharding::along(1));
  EXPECT_EQ(of_parts.infer_sharding(std::vector{own, own})[0], Sharding::along(0));
  EXPECT_REFUSED(of_parts.infer_sharding(std::vector{own, grad}), "'grad1'", "expected a part");
  EXPECT_EQ(of_parts.infer_sharding(std::vector{grad, grad})[0], kWhole) << "parts over another axis";
  EXPECT_EQ(of_whole.wanted_sharding(std::vector{own}, 0), kWhole);
  EXPECT_REFUSED(of_whole.infer_sharding(std::vector{own}), "whole gradients");
}

TEST(TypeRules, Linear) {
  const Linear plain({false, kB}), biased({true, kF});
  const TensorType x(kF, {kT, 8}), weight(kB, {6, 8}), bias(kF, {6}), none = kernels::unconnected_port();
  EXPECT_EQ(infer(plain, {x, weight, none})[0], TensorType(kB, {kT, 6}));
  EXPECT_EQ(infer(biased, {x, weight, bias})[0], TensorType(kF, {kT, 6}));
  EXPECT_REFUSED(infer(plain, {x, TensorType(kB, {6, 9}), none}), "linear: 'weight' is bf16 [6, 9]", "expected 8",
                 "'x'");
  EXPECT_REFUSED(infer(plain, {x, weight, bias}), "'bias' is f32 [6]", "bias=false");
  EXPECT_REFUSED(infer(biased, {x, weight, none}), "'bias' is not connected");
  EXPECT_REFUSED(infer(biased, {x, weight, TensorType(kF, {5})}), "'bias' is f32 [5]", "expected 6");
  EXPECT_REFUSED(infer(plain, {TensorType(kH, {kT, 8}), weight, none}), "'x' is f16", "f32 or bf16");
  EXPECT_REFUSED(infer(plain, {TensorType(kF, {kT, 2, 8}), weight, none}), "'x' is f32 [tokens, 2, 8]",
                 "expected 2 dimensions");
  EXPECT_REFUSED(Linear({false, kI}), "out_dtype is i32");
}

TEST(TypeRules, LinearSharding) {
  const TensorType x(kF, {kT, 8}), weight(kF, {6, 8}), bias(kF, {6}), none = kernels::unconnected_port();
  const auto rule = [&](Sharding sx, Sharding sw, std::optional<Sharding> sb = {}) {
    return Linear({sb.has_value(), kF})
        .infer_sharding(std::vector{with(x, sx), with(weight, sw), sb ? with(bias, *sb) : none})[0];
  };
  EXPECT_EQ(rule(kWhole, kWhole), kWhole);
  EXPECT_EQ(rule(kWhole, Sharding::along(0)), Sharding::along(1));
  EXPECT_EQ(rule(kWhole, Sharding::along(0), Sharding::along(0)), Sharding::along(1));
  EXPECT_EQ(rule(Sharding::along(1), Sharding::along(1)), kPartial);
  EXPECT_REFUSED(rule(kWhole, Sharding::along(0), kWhole), "'bias' is replicated", "sharded(0)");
  EXPECT_REFUSED(rule(Sharding::along(1), Sharding::along(1), kWhole), "every rank would add the bias");
  EXPECT_REFUSED(rule(Sharding::along(1), kWhole), "'x' is sharded(1)", "'weight' is replicated");
  EXPECT_REFUSED(rule(kWhole, Sharding::along(1)), "'x' is replicated", "'weight' is sharded(1)");
  EXPECT_REFUSED(rule(kPartial, kWhole), "'x' is partial");
}

TEST(TypeRules, OutputsCarryNoShardingOfTheirOwn) {
  const TensorType x = with(TensorType(kF, {kT, 8}), Sharding::along(0));
  EXPECT_EQ(infer(Mul(), {x, x})[0].sharding, kWhole) << "infer_sharding says how they are divided";
}

TEST(TypeRules, RmsNorm) {
  const RmsNorm op({1e-5f});
  EXPECT_EQ(infer(op, {TensorType(kB, {kT, 4, 8}), TensorType(kF, {8})})[0], TensorType(kB, {kT, 4, 8}));
  EXPECT_EQ(op.extra_types(std::vector{TensorType(kB, {kT, 4, 8}), TensorType(kF, {8})})[0], TensorType(kF, {kT, 4}));
  EXPECT_REFUSED(infer(op, {TensorType(kF, {kT, 8}), TensorType(kB, {8})}), "'weight' is bf16");
  EXPECT_REFUSED(infer(op, {TensorType(kF, {kT, 8}), TensorType(kF, {7})}), "'weight' is f32 [7]", "expected 8");
  EXPECT_EQ(op.wanted_dtype(std::vector{TensorType(kF, {kT, 8}), TensorType(kB, {8})}, 1), kF);
  EXPECT_EQ(op.wanted_dtype(std::vector{TensorType(kB, {kT, 8}), TensorType(kB, {8})}, 1), kB);
  EXPECT_REFUSED(RmsNorm({-1.0f}), "eps is -1");
  const TensorType weight(kF, {8});
  EXPECT_EQ(op.infer_sharding(std::vector{with(TensorType(kF, {kT, 4, 8}), Sharding::along(1)), weight})[0],
            Sharding::along(1));
  EXPECT_REFUSED(op.infer_sharding(std::vector{with(TensorType(kF, {kT, 8}), Sharding::along(1)), weight}), "'x'",
                 "sharded(1)", "last axis");
  EXPECT_REFUSED(op.infer_sharding(std::vector{with(TensorType(kF, {kT, 8}), kPartial), weight}), "partial");
  // The weights of groups are divided as the groups are.
  const TensorType groups(kF, {4, 8}), x = with(TensorType(kF, {kT, 4, 8}), Sharding::along(1));
  EXPECT_EQ(op.infer_sharding(std::vector{x, with(groups, Sharding::along(0))})[0], Sharding::along(1));
  EXPECT_REFUSED(op.infer_sharding(std::vector{x, groups}), "'weight'", "the groups divided alike");
  EXPECT_REFUSED(op.infer_sharding(std::vector{TensorType(kF, {kT, 4, 8}), with(groups, Sharding::along(0))}),
                 "'weight'");
}

// Heads of every port that has them, and groups with them.
TEST(TypeRules, StateSpaceScanSharding) {
  const StateSpaceScan op({.cached = true});
  const auto types = [](bool divided) {
    const auto along = [&](TensorType type, int axis) { return divided ? with(type, Sharding::along(axis)) : type; };
    const TensorType shared = along(TensorType(kF, {kT, 2, 5}), 1), each = along(TensorType(kF, {4}), 0);
    return std::vector{along(TensorType(kF, {kT, 4, 3}), 1),
                       along(TensorType(kF, {kT, 4}), 1),
                       shared,
                       shared,
                       each,
                       each,
                       each,
                       TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
                       TensorType(DType::i32, {Symbol::sequences}),
                       along(TensorType(kF, {3, 4, 5, 3}), 1)};
  };
  for (const bool divided : {false, true}) {
    const Sharding expected = divided ? Sharding::along(1) : Sharding::replicated();
    EXPECT_EQ(op.infer_sharding(types(divided)), (std::vector{expected, expected}));
    for (const size_t port : std::vector<size_t>{0, 1, 2, 3, 4, 5, 6, 9}) {
      std::vector<TensorType> other = types(divided);
      other[port] = types(!divided)[port];
      EXPECT_REFUSED(op.infer_sharding(other), "the heads divided alike");
    }
  }
  std::vector<TensorType> parts = types(true);
  parts[0] = with(parts[0], kPartial);
  EXPECT_REFUSED(op.infer_sharding(parts), "'x'", "sharded(1), its heads");
}

TEST(TypeRules, Elementwise) {
  const TensorType x(kB, {kT, 8});
  EXPECT_EQ(infer(Add(), {x, x})[0], x);
  EXPECT_REFUSED(infer(Add(), {x, TensorType(kB, {kT, 9})}), "add: 'b' is bf16 [tokens, 9]", "'a' is bf16 [tokens, 8]");
  EXPECT_REFUSED(infer(Mul(), {x, TensorType(kF, {kT, 8})}), "mul: 'b' is f32", "expected bf16");
  EXPECT_REFUSED(infer(GatedActivation({}), {x, TensorType(kF, {kT, 8})}), "gated_activation: 'up'");
  EXPECT_REFUSED(infer(Activation({}), {TensorType(kH, {kT, 8})}), "activation: 'x' is f16");
  EXPECT_EQ(Add().wanted_dtype(std::vector{x, TensorType(kF, {kT, 8})}, 1), kB);
  EXPECT_EQ(Add().wanted_dtype(std::vector{TensorType(kH, {kT, 8}), x}, 0), kF);
  EXPECT_EQ(infer(Cast({kH}), {x})[0], TensorType(kH, {kT, 8}));
  EXPECT_REFUSED(Cast({kI}), "target is i32");
  EXPECT_REFUSED(infer(Cast({kF}), {TensorType(kI, {kT})}), "cast: 'x' is i32");
  const TensorType part = with(x, Sharding::along(1));
  EXPECT_EQ(Add().infer_sharding(std::vector{part, part})[0], Sharding::along(1));
  EXPECT_REFUSED(Add().infer_sharding(std::vector{part, x}), "'b' is replicated", "expected sharded(1)");
  EXPECT_REFUSED(Add().infer_sharding(std::vector{with(x, kPartial), with(x, kPartial)}), "all_reduce must come first");
}

TEST(TypeRules, PooledAttention) {
  const TensorType x(kF, {kT, 1, 16}), start(kI, {Dim(Symbol::sequences, 1)}), length(kI, {Symbol::sequences}),
      table(kI, {Symbol::sequences, Symbol::max_blocks}), slots(DType::i64, {kT}), none = kernels::unconnected_port();
  const TensorType cache(kF, {6, 1, 8, 16}), position(kF, {4, 16});
  const PoolKeys direct({.width = 8, .stride = 4, .parts = 2}),
      cached({.width = 8, .stride = 4, .parts = 2, .source = kernels::KvSource::cached});
  EXPECT_EQ(infer(direct, {x, x, position, start, length, none})[0], TensorType(kF, {kT, 1, 8}));
  EXPECT_EQ(infer(cached, {cache, cache, position, start, length, table, slots})[0], TensorType(kF, {kT, 1, 8}));
  EXPECT_REFUSED(infer(direct, {x, x, TensorType(kF, {3, 16}), start, length, none}), "pool_keys: 'position'",
                 "attribute stride");
  EXPECT_REFUSED(PoolKeys({.width = 8, .stride = 0}), "stride 0");
  EXPECT_REFUSED(PoolKeys({.width = 8, .stride = 4, .parts = 3}), "parts is 3");

  const TensorType q(kF, {kT, 3, 8}), k(kF, {kT, 1, 8}), sinks(kF, {3}), keys(kF, {6, 1, 8, 8}), rows(kF, {6, 1, 2, 8}),
      selection(kI, {kT, 1, 5});
  const kernels::PooledAttentionAttrs attrs{.heads = 3, .width = 8, .window = 4, .stride = 4};
  kernels::PooledAttentionAttrs selected = attrs;
  selected.selected = 5, selected.source = kernels::KvSource::cached;
  EXPECT_EQ(infer(PooledAttention(attrs), {q, k, k, sinks, start, length, none})[0], q);
  const PooledAttention chosen(selected);
  EXPECT_EQ(infer(chosen, {q, keys, rows, sinks, start, length, table, table, selection})[0], q);
  EXPECT_REFUSED(infer(chosen, {q, keys, rows, TensorType(kF, {2}), start, length, table, table, selection}),
                 "pooled_attention: 'sinks'", "attribute heads");
  EXPECT_REFUSED(infer(chosen, {q, keys, rows, sinks, start, length, table, table, TensorType(kI, {kT, 1, 4})}),
                 "pooled_attention: 'selection'", "attribute selected");
  selected.window = 0;
  EXPECT_REFUSED(PooledAttention(selected), "window 0");

  EXPECT_REFUSED(infer(LatentAppend({.stride = 4, .block_size = 9}), {k, slots, keys}), "latent_append: 'cache'",
                 "attributes block_size and stride");
  EXPECT_REFUSED(LatentAppend({.stride = 4}), "block_size 0");
  EXPECT_REFUSED(SelectKeys({.heads = 3, .head_dim = 8, .top_k = 5, .stride = 0}), "stride is 0");
  EXPECT_REFUSED(RopeTable({.stride = 0}), "stride is 0");
}

TEST(TypeRules, Streams) {
  const TensorType x(kF, {kT, 3, 8}), y(kF, {kT, 8}), weights(kF, {kT, 15});
  const StreamWeights op({.streams = 3});
  EXPECT_EQ(infer(op, {weights, TensorType(kF, {15}), TensorType(kF, {3})})[0], weights);
  EXPECT_REFUSED(infer(op, {weights, TensorType(kF, {15}), TensorType(kF, {1})}), "stream_weights: 'scale'");
  EXPECT_REFUSED(StreamWeights({.streams = 0}), "streams is 0");
  EXPECT_EQ(infer(CollapseStreams(), {x, weights})[0], y);
  EXPECT_REFUSED(infer(CollapseStreams(), {x, TensorType(kF, {kT, 2})}), "a weight for each stream");
  EXPECT_EQ(infer(ExpandStreams(), {x, y, weights})[0], x);
  EXPECT_REFUSED(infer(ExpandStreams(), {x, y, TensorType(kF, {kT, 3})}), "expand_streams: 'weights'",
                 "streams of 'x'");
}

TEST(TypeRules, ExpertsByToken) {
  const TensorType logits(kF, {kT, 5}), table(kF, {7, 2}), ids(kI, {kT}), none = kernels::unconnected_port();
  const kernels::RouteAttrs attrs{
      .top_k = 2, .scoring = kernels::RouteAttrs::Scoring::sigmoid, .renormalize = true, .by_token = true};
  EXPECT_EQ(infer(Route(attrs), {logits, none, table, ids})[0], TensorType(kI, {kT, 2}));
  EXPECT_REFUSED(infer(Route(attrs), {logits, TensorType(kF, {5}), table, ids}), "route: 'bias'");
  EXPECT_REFUSED(infer(Route(attrs), {logits, none, TensorType(kF, {7, 3}), ids}), "route: 'table'");
  EXPECT_REFUSED(Route({.top_k = 2, .by_token = true}), "softmax");
}

TEST(TypeRules, Rope) {
  EXPECT_EQ(infer(RopeTable({}), {TensorType(kI, {kT}), TensorType(kF, {4})})[0], TensorType(kF, {kT, 8}));
  EXPECT_REFUSED(infer(RopeTable({}), {TensorType(kI, {kT}), TensorType(kB, {4})}), "'inv_freq' is bf16");
  const Rope op({kernels::RopeStyle::rotate_half, 8});
  const TensorType x(kB, {kT, 3, 10}), table(kF, {kT, 8});
  EXPECT_EQ(infer(op, {x, table})[0], x);
  EXPECT_REFUSED(infer(op, {TensorType(kB, {kT, 3, 6}), table}), "'x' is bf16 [tokens, 3, 6]", "rotary_dim 8");
  EXPECT_REFUSED(infer(op, {x, TensorType(kF, {kT, 6})}), "'table' is f32 [tokens, 6]", "expected 8");
  EXPECT_REFUSED(Rope({kernels::RopeStyle::interleaved, 7}), "rotary_dim is 7", "even");
  EXPECT_EQ(op.infer_sharding(std::vector{with(x, Sharding::along(1)), table})[0], Sharding::along(1));
  EXPECT_REFUSED(op.infer_sharding(std::vector{with(x, Sharding::along(2)), table}), "sharded(2)");
}

TEST(TypeRules, ScaleByPosition) {
  const ScaleByPosition op({0.1f, 8192, true});
  const TensorType x(kB, {kT, 3, 10}), positions(kI, {kT});
  EXPECT_EQ(infer(op, {x, positions})[0], x);
  EXPECT_REFUSED(infer(op, {TensorType(kB, {kT, 30}), positions}), "'x' is bf16 [tokens, 30]");
  EXPECT_REFUSED(infer(op, {x, TensorType(kF, {kT})}), "'positions' is f32");
  EXPECT_REFUSED(ScaleByPosition({0.1f, 0, true}), "length is 0");
  EXPECT_REFUSED(ScaleByPosition({HUGE_VALF, 1, true}), "rate is inf");
  EXPECT_EQ(op.infer_sharding(std::vector{with(x, Sharding::along(1)), positions})[0], Sharding::along(1));
  EXPECT_REFUSED(op.infer_sharding(std::vector{with(x, Sharding::along(2)), positions}), "sharded(2)");
}

TEST(TypeRules, Attention) {
  using kernels::KvSource;
  const Attention direct({4, 2, 8, 1, 0, KvSource::direct}), cached({4, 2, 8, 1, 0, KvSource::cached});
  const TensorType q(kF, {kT, 4, 8}), kv(kF, {kT, 2, 8}), cache(kH, {20, 2, 16, 8}),
      none = kernels::unconnected_port(), start(kI, {Dim(Symbol::sequences, 1)}), length(kI, {Symbol::sequences}),
      table(kI, {Symbol::sequences, Symbol::max_blocks});
  EXPECT_EQ(infer(direct, {q, kv, kv, start, length, none})[0], q);
  EXPECT_EQ(infer(cached, {q, cache, cache, start, length, table})[0], q);
  EXPECT_TRUE(direct.has_backward());
  EXPECT_FALSE(cached.has_backward());
  EXPECT_REFUSED(infer(direct, {TensorType(kF, {kT, 3, 8}), kv, kv, start, length, none}), "'q'", "expected 4",
                 "heads");
  EXPECT_REFUSED(infer(direct, {q, TensorType(kB, {kT, 2, 8}), kv, start, length, none}), "'k' is bf16",
                 "expected f32");
  EXPECT_REFUSED(infer(direct, {q, kv, kv, length, length, none}), "'query_start'", "sequences+1");
  EXPECT_REFUSED(infer(direct, {q, kv, kv, start, length, table}), "'block_table'", "direct");
  EXPECT_REFUSED(infer(cached, {q, cache, cache, start, length, none}), "'block_table' is not connected");
  EXPECT_REFUSED(infer(cached, {q, kv, kv, start, length, table}), "'k'", "expected 4 dimensions");
  EXPECT_REFUSED(infer(cached, {q, cache, TensorType(kH, {21, 2, 16, 8}), start, length, table}), "'v'", "same shape");
  const auto stored = [&](const Encoding& encoding) { return TensorType(kF, {20, 2, 16, 8}, &encoding); };
  const TensorType codes = stored(RowEncoding::int8());
  EXPECT_EQ(infer(cached, {q, codes, codes, start, length, table})[0], q);
  EXPECT_REFUSED(infer(cached, {q, codes, stored(RowEncoding::fp8_e4m3()), start, length, table}), "'v' is fp8_e4m3",
                 "'k' is int8");
  EXPECT_REFUSED(infer(cached, {q, codes, stored(*BlockEncoding::find("q8_0")), start, length, table}), "'v' is q8_0",
                 "expected plain values, int8 or fp8_e4m3");
  EXPECT_REFUSED(infer(direct, {q, TensorType(kF, {kT, 2, 8}, &RowEncoding::int8()), kv, start, length, none}), "'k'",
                 "expected plain values");
  const Attention wide({4, 2, 8, 1, 0, KvSource::cached, 12});
  const TensorType values(kH, {20, 2, 16, 12});
  EXPECT_EQ(infer(wide, {q, cache, values, start, length, table})[0], TensorType(kF, {kT, 4, 12}));
  EXPECT_REFUSED(infer(wide, {q, cache, cache, start, length, table}), "'v'", "expected 12", "value_dim");
  EXPECT_REFUSED(Attention({4, 2, 8, 1, 0, KvSource::cached, -1}), "value_dim is -1");
  EXPECT_REFUSED(Attention({4, 2, 8, 1, 0, KvSource::cached, 0, -1.0f}), "softcap is -1");
  const Attention sinks({4, 2, 8, 1, 0, KvSource::direct, 0, 0.0f, true});
  EXPECT_EQ(infer(sinks, {q, kv, kv, start, length, none, TensorType(kF, {4})})[0], q);
  EXPECT_REFUSED(infer(sinks, {q, kv, kv, start, length, none, TensorType(kF, {5})}), "'sinks'", "expected 4");
  EXPECT_REFUSED(infer(sinks, {q, kv, kv, start, length, none, TensorType(kB, {4})}), "'sinks' is bf16");
  EXPECT_REFUSED(Attention({7, 2, 8, 1, 0, KvSource::direct}), "heads is 7", "kv_heads is 2");
  EXPECT_REFUSED(Attention({4, 2, 8, 1, -1, KvSource::direct}), "window is -1");
  EXPECT_REFUSED(Attention({4, 2, 8, 1, 0, KvSource::direct, 0, 0.0f, false, -1}), "chunk is -1");
  EXPECT_REFUSED(Attention({4, 2, 8, 1, 0, KvSource::direct, 0, 0.0f, false, 0, MatmulInput::f32, -1}),
                 "sharing is -1");
  EXPECT_REFUSED(Attention({4, 2, 8, 1, 5, KvSource::direct, 0, 0.0f, false, 7}), "chunk is 7 and window 5");
  const auto part = [](const TensorType& type) { return with(type, Sharding::along(1)); };
  EXPECT_EQ(cached.infer_sharding(std::vector{part(q), part(cache), part(cache), start, length, table})[0],
            Sharding::along(1));
  EXPECT_REFUSED(cached.infer_sharding(std::vector{part(q), cache, cache, start, length, table}), "'k' is replicated",
                 "'q' is sharded(1)");
}

TEST(TypeRules, SoftmaxCrossEntropySample) {
  EXPECT_EQ(infer(Softmax(), {TensorType(kF, {kT, 8})})[0], TensorType(kF, {kT, 8}));
  EXPECT_REFUSED(infer(Softmax(), {TensorType(kB, {kT, 8})}), "softmax: 'x' is bf16", "expected f32");
  EXPECT_EQ(Softmax().wanted_dtype(std::vector{TensorType(kB, {kT, 8})}, 0), kF);
  EXPECT_EQ(infer(CrossEntropy(), {TensorType(kB, {kT, 8}), TensorType(kI, {kT})})[0], TensorType(kF, {kT}));
  EXPECT_REFUSED(infer(CrossEntropy(), {TensorType(kB, {kT, 8}), TensorType(kI, {Symbol::logit_rows})}), "'labels'",
                 "expected tokens");
  EXPECT_REFUSED(CrossEntropy().infer_sharding(
                     std::vector{with(TensorType(kB, {kT, 8}), Sharding::along(1)), TensorType(kI, {kT})}),
                 "divided vocabulary");
  const Dim n = Symbol::logit_rows;
  std::vector<TensorType> in = {TensorType(kF, {n, 8}), TensorType(kI, {n, kernels::kSampleRowWords}),
                                TensorType(kI, {Symbol::penalties, 2})};
  EXPECT_EQ(infer(Sample(), in)[0], TensorType(kI, {n}));
  in[1] = TensorType(kI, {n, 5});
  EXPECT_REFUSED(infer(Sample(), in), "'rows' is i32 [logit_rows, 5]", "words of a SampleRow");
}

TEST(TypeRules, CachesAndRows) {
  const TensorType kv(kF, {kT, 2, 8}), slots(DType::i64, {kT}), cache(kB, {10, 2, 16, 8});
  const std::vector<TensorType> out = infer(KvAppend(), {kv, kv, slots, cache, cache});
  EXPECT_EQ(out[0], cache);
  const TensorType codes(kF, {10, 2, 16, 8}, &RowEncoding::fp8_e4m3());
  EXPECT_EQ(infer(KvAppend(), {kv, kv, slots, codes, codes})[0], codes);
  EXPECT_REFUSED(infer(KvAppend(), {kv, kv, slots, codes, TensorType(kF, {10, 2, 16, 8}, &RowEncoding::int8())}),
                 "'cache_v' is int8", "'cache_k' is fp8_e4m3");
  EXPECT_EQ(KvAppend().inference_alias(1), 4);
  EXPECT_REFUSED(infer(KvAppend(), {kv, kv, TensorType(kI, {kT}), cache, cache}), "'slots' is i32", "expected i64");
  EXPECT_REFUSED(infer(KvAppend(), {kv, kv, slots, TensorType(kB, {10, 3, 16, 8}), cache}), "'cache_k'", "expected 2");
  EXPECT_REFUSED(KvAppend().infer_sharding(
                     std::vector{with(kv, Sharding::along(1)), with(kv, Sharding::along(1)), slots, cache, cache}),
                 "'cache_k' is replicated");
  EXPECT_EQ(infer(SelectRows(), {TensorType(kB, {kT, 8}), TensorType(kI, {Symbol::logit_rows})})[0],
            TensorType(kB, {Symbol::logit_rows, 8}));
}

TEST(TypeRules, AllReduce) {
  const TensorType x(kB, {kT, 8});
  EXPECT_EQ(infer(AllReduce(), {x})[0], x);
  EXPECT_EQ(AllReduce().infer_sharding(std::vector{with(x, kPartial)})[0], kWhole);
  EXPECT_REFUSED(AllReduce().infer_sharding(std::vector{x}), "'x' is replicated", "expected partial");
}

TEST(TypeRules, Reshape) {
  const Reshape split({4, 8}), merge({32});
  const TensorType flat(kB, {kT, 32}), heads(kB, {kT, 4, 8});
  EXPECT_EQ(infer(split, {flat})[0], heads);
  EXPECT_EQ(infer(merge, {heads})[0], flat);
  EXPECT_REFUSED(infer(split, {TensorType(kB, {kT, 33})}), "'x' is bf16 [tokens, 33]", "33 elements", "expected 32");
  EXPECT_EQ(split.infer_sharding(std::vector{with(flat, Sharding::along(1))})[0], Sharding::along(1));
  EXPECT_REFUSED(merge.infer_sharding(std::vector{with(heads, Sharding::along(2))}), "sharded(2)");
  EXPECT_TRUE(split.is_view());
  EXPECT_EQ(split.inference_alias(0), 0);
  // k rows a token, and one row of all k again.
  const Dim rows = 4 * Dim(Symbol::tokens);
  const Reshape spread(rows, {8}), gather(Symbol::tokens, {32});
  const TensorType many(kB, {rows, 8});
  EXPECT_EQ(infer(spread, {flat})[0], many);
  EXPECT_EQ(infer(gather, {many})[0], flat);
  EXPECT_REFUSED(infer(spread, {TensorType(kB, {kT, 33})}), "33*tokens elements",
                 "expected 32*tokens for [4*tokens, 8]");
  EXPECT_REFUSED(infer(spread, {TensorType(kB, {Symbol::sequences, 32})}), "32*sequences", "32*tokens");
  EXPECT_REFUSED(spread.infer_sharding(std::vector{with(flat, Sharding::along(1))}), "sharded(1)");
}

TEST(TypeRules, Optimizer) {
  const TensorType p(kF, {3, 4}), one(kF, {1}), hyper(kF, {8}), none = kernels::unconnected_port();
  EXPECT_EQ(infer(GradNorm(2), {p, hyper})[0], one);
  EXPECT_REFUSED(infer(GradNorm(2), {p, TensorType(kB, {3})}), "'grad1' is bf16");
  EXPECT_REFUSED(GradNorm(0), "0 inputs");
  EXPECT_EQ(infer(AdamW({}), {p, one, hyper, p, p, p, p.with_dtype(kB)})[3], p.with_dtype(kB));
  EXPECT_TRUE(kernels::is_unconnected(infer(AdamW({}), {p, one, hyper, p, p, p, none})[3]));
  EXPECT_REFUSED(infer(AdamW({}), {p, one, hyper, p, TensorType(kF, {4, 3}), p, none}), "'m' is f32 [4, 3]", "[3, 4]");
  EXPECT_REFUSED(infer(AdamW({}), {p, one, TensorType(kF, {7}), p, p, p, none}), "'hyper' is f32 [7]", "expected 8");
  EXPECT_EQ(AdamW({}).inference_alias(3), 6);
  const TensorType part = with(p, Sharding::along(0));
  EXPECT_EQ(AdamW({}).infer_sharding(std::vector{part, one, hyper, part, part, part, none})[0], Sharding::along(0));
  EXPECT_REFUSED(AdamW({}).infer_sharding(std::vector{part, one, hyper, p, part, part, none}),
                 "'master' is replicated");
}

TEST(TypeRules, DerivedBackwardTypes) {
  const Linear op({true, kB});
  const std::vector<TensorType> in = {TensorType(kB, {kT, 8}), TensorType(kB, {6, 8}), TensorType(kB, {6})};
  const std::vector<TensorType> out = op.infer_types(in), expected_in = {in[0], in[1], out[0]};
  EXPECT_EQ(op.backward_input_types(in, out), expected_in);
  const std::vector<TensorType> expected_out = {in[0], TensorType(kF, {6, 8}), TensorType(kF, {6})};
  EXPECT_EQ(op.backward_output_types(in), expected_out) << "parameter gradients are f32";
}

}  // namespace
}  // namespace eadem::ops
