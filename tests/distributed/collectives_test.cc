// SPDX-License-Identifier: Apache-2.0
//
// The collectives as ops: graphs of one collective run as programs on 1 to 4 ranks, and give what a loop over the whole
// tensor gives. Parts are uneven where the extent does not divide.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>

#include "eadem/distributed/thread_communicator.h"
#include "eadem/ops/parallel/collectives.h"
#include "eadem/ops/parallel/virtual_shards.h"
#include "eadem/pipeline/program.h"
#include "tests/support/refusal.h"

namespace eadem::pipeline {
namespace {

using distributed::run_mesh;

constexpr int64_t kTokens = 3;

bool mentions(const std::string& text, std::initializer_list<std::string_view> parts) {
  for (std::string_view part : parts)
    if (text.find(part) == std::string::npos) return false;
  return true;
}

// The whole tensor [tokens, 2, extent, 3] of small integers, which sums of ranks keep exact in bf16 too.
std::vector<float> whole_values(int64_t outer, int64_t extent, int64_t inner, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<float> values(static_cast<size_t>(outer * extent * inner));
  for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 33) - 16);
  return values;
}

// The range [begin, begin + size) of the middle dimension.
std::vector<float> cut(const std::vector<float>& whole, int64_t outer, int64_t extent, int64_t inner, PartRange range) {
  std::vector<float> part;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t e = range.begin; e < range.begin + range.size; ++e)
      for (int64_t i = 0; i < inner; ++i) part.push_back(whole[static_cast<size_t>((o * extent + e) * inner + i)]);
  return part;
}

// Runs a graph of one op on this rank; values go in and come out as f32.
std::vector<float> run_op(const Mesh& mesh, const ops::OpPtr& op, const TensorType& type,
                          const std::vector<float>& values) {
  Graph graph;
  const ValueId x = graph.add_input("x", type);
  graph.mark_output("y", graph.add1(op, {x}));
  const auto device = open_device("cpu", {.num_threads = 1});
  Environment environment{.device = device, .mesh = mesh};
  environment.bounds[Symbol::tokens] = kTokens;
  Program program(std::move(graph), environment, std::make_shared<ParameterStore>(device));
  program.require_complete();
  std::vector<bf16_t> narrow;
  for (float value : values) narrow.push_back(bf16_t::from_float(value));
  if (type.dtype == DType::f32)
    program.set_input(program.input("x"), values.data(), static_cast<int64_t>(values.size() * sizeof(float)));
  else
    program.set_input(program.input("x"), narrow.data(), static_cast<int64_t>(narrow.size() * sizeof(bf16_t)));
  program.run(environment.bounds);
  const TensorView y = program.view(program.output("y"));
  std::vector<float> result;
  for (int64_t i = 0; i < y.num_elements(); ++i)
    result.push_back(y.dtype == DType::f32 ? y.as<float>()[i] : y.as<bf16_t>()[i].to_float());
  return result;
}

class CollectiveOps : public testing::TestWithParam<std::tuple<int, int64_t, DType>> {
 protected:
  int ranks_ = std::get<0>(GetParam());
  int64_t extent_ = std::get<1>(GetParam());
  DType dtype_ = std::get<2>(GetParam());

  kernels::CollectiveAttrs attrs(int rank, int dim) const {
    return {.ranks = ranks_, .rank = rank, .dim = dim, .whole = extent_};
  }
  TensorType type(std::initializer_list<Dim> dims, Sharding sharding) const {
    TensorType result(dtype_, dims);
    result.sharding = sharding;
    return result;
  }
};

TEST_P(CollectiveOps, AllGatherOfALaterDimension) {
  const auto whole = whole_values(kTokens * 2, extent_, 3, 1);
  run_mesh({.tp = ranks_}, [&](const Mesh& mesh) {
    const int rank = mesh.rank(MeshAxis::tp);
    const PartRange part = part_of(extent_, ranks_, rank);
    const auto y =
        run_op(mesh, std::make_shared<ops::AllGather>(attrs(rank, 2)),
               type({Symbol::tokens, 2, part.size, 3}, Sharding::along(2)), cut(whole, kTokens * 2, extent_, 3, part));
    EXPECT_EQ(y, whole);
  });
}

TEST_P(CollectiveOps, AllGatherOfTheFirstDimension) {
  const auto whole = whole_values(1, extent_, 5, 2);
  run_mesh({.tp = ranks_}, [&](const Mesh& mesh) {
    const int rank = mesh.rank(MeshAxis::tp);
    const PartRange part = part_of(extent_, ranks_, rank);
    EXPECT_EQ(run_op(mesh, std::make_shared<ops::AllGather>(attrs(rank, 0)), type({part.size, 5}, Sharding::along(0)),
                     cut(whole, 1, extent_, 5, part)),
              whole);
  });
}

TEST_P(CollectiveOps, ReduceScatter) {
  for (int64_t outer : {int64_t{1}, int64_t{4}}) {
    std::vector<float> sum(static_cast<size_t>(outer * extent_ * 2), 0.0f);
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto part = whole_values(outer, extent_, 2, 10 + rank);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    run_mesh({.tp = ranks_}, [&](const Mesh& mesh) {
      const int rank = mesh.rank(MeshAxis::tp);
      EXPECT_EQ(run_op(mesh, std::make_shared<ops::ReduceScatter>(attrs(rank, 1)),
                       type({outer, extent_, 2}, Sharding::partial()), whole_values(outer, extent_, 2, 10 + rank)),
                cut(sum, outer, extent_, 2, part_of(extent_, ranks_, rank)));
    });
  }
}

TEST_P(CollectiveOps, AllReduce) {
  std::vector<float> sum(static_cast<size_t>(kTokens * extent_), 0.0f);
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto part = whole_values(kTokens, extent_, 1, 20 + rank);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
  }
  run_mesh({.tp = ranks_}, [&](const Mesh& mesh) {
    EXPECT_EQ(run_op(mesh, std::make_shared<ops::AllReduce>(MeshAxis::tp, ranks_),
                     type({Symbol::tokens, extent_}, Sharding::partial()),
                     whole_values(kTokens, extent_, 1, 20 + mesh.rank(MeshAxis::tp))),
              sum);
  });
}

TEST_P(CollectiveOps, AllToAllMovesTheDivisionToAnotherDimension) {
  if (extent_ % ranks_ != 0) {
    EXPECT_TRUE(mentions(test::refusal([&] { const ops::AllToAll op(attrs(0, 1)); }),
                         {"InvalidArgument", "does not divide", std::to_string(ranks_)}));
    return;
  }
  // [extent, other]: divided along 0 before and along 1 after.
  const int64_t other = 2 * ranks_;
  const auto whole = whole_values(extent_, other, 1, 3);
  run_mesh({.tp = ranks_}, [&](const Mesh& mesh) {
    const int rank = mesh.rank(MeshAxis::tp);
    kernels::CollectiveAttrs to = attrs(rank, 0);
    to.other_dim = 1;
    EXPECT_EQ(run_op(mesh, std::make_shared<ops::AllToAll>(to), type({extent_ / ranks_, other}, Sharding::along(0)),
                     cut(whole, 1, extent_, other, part_of(extent_, ranks_, rank))),
              cut(whole, extent_, other, 1, part_of(other, ranks_, rank)));
  });
}

// A rank's part of a gradient that every rank has.
TEST_P(CollectiveOps, TheGradientOfAllGatherIsAPart) {
  if (dtype_ != DType::f32) return;  // as gradients are
  const auto whole = whole_values(kTokens * 2, extent_, 3, 1), gradient = whole_values(kTokens * 2, extent_, 3, 2);
  run_mesh({.tp = ranks_}, [&](const Mesh& mesh) {
    const int rank = mesh.rank(MeshAxis::tp);
    const PartRange part = part_of(extent_, ranks_, rank);
    Graph graph;
    const ValueId x = graph.add_input("x", type({Symbol::tokens, 2, part.size, 3}, Sharding::along(2)));
    graph.mark_output("y", graph.add1(std::make_shared<ops::AllGather>(attrs(rank, 2)), {x}));
    const auto device = open_device("cpu", {.num_threads = 1});
    Environment environment{.device = device, .mesh = mesh, .mode = Mode::training, .input_gradients = {"x"}};
    environment.bounds[Symbol::tokens] = kTokens;
    Program program(std::move(graph), environment, std::make_shared<ParameterStore>(device));
    program.require_complete();
    const auto set = [&](const char* name, const std::vector<float>& values) {
      program.set_input(program.input(name), values.data(), static_cast<int64_t>(values.size() * sizeof(float)));
    };
    set("x", cut(whole, kTokens * 2, extent_, 3, part));
    set("d.y", gradient);
    program.run(environment.bounds);
    const auto read = [&](const char* name) {
      const TensorView view = program.view(program.output(name));
      return std::vector<float>(view.as<float>(), view.as<float>() + view.num_elements());
    };
    EXPECT_EQ(read("y"), whole);
    EXPECT_EQ(read("d.x"), cut(gradient, kTokens * 2, extent_, 3, part));
  });
}

TEST_P(CollectiveOps, Broadcast) {
  run_mesh({.tp = ranks_}, [&](const Mesh& mesh) {
    const int root = ranks_ - 1;
    EXPECT_EQ(
        run_op(mesh, std::make_shared<ops::Broadcast>(MeshAxis::tp, ranks_, root),
               type({extent_, 2}, Sharding::replicated()), whole_values(1, extent_, 2, 30 + mesh.rank(MeshAxis::tp))),
        whole_values(1, extent_, 2, 30 + root));
  });
}

// Terms of very different sizes, so that another order would round otherwise; the tree is that of four shards and more.
TEST(ShardSum, EveryNumberOfRanksAddsInOneOrder) {
  constexpr int64_t kHidden = 700;
  const VirtualShards shards = VirtualShards::of(24, std::array{2, 4, 3});
  std::mt19937 random(7);
  std::vector<std::vector<float>> terms(static_cast<size_t>(shards.size()));
  for (std::vector<float>& term : terms)
    for (int64_t i = 0; i < kTokens * kHidden; ++i)
      term.push_back(std::ldexp(static_cast<float>(random()) - 0x1p31f, static_cast<int>(random() % 12) - 40));
  for (const DType dtype : {DType::f32, DType::bf16}) {
    std::vector<float> expected, from_the_left;
    for (size_t i = 0; i < terms[0].size(); ++i) {
      const auto at = [&](size_t shard) { return terms[shard][i]; };
      const float left = at(0) + (at(1) + at(2)), right = (at(3) + at(4)) + at(5), sum = left + right;
      expected.push_back(dtype == DType::f32 ? sum : bf16_t::from_float(sum).to_float());
      from_the_left.push_back(((((at(0) + at(1)) + at(2)) + at(3)) + at(4)) + at(5));
    }
    if (dtype == DType::f32) {
      EXPECT_NE(expected, from_the_left) << "else any order would do";
    }
    for (const int ranks : {1, 2, 3, 4})
      run_mesh({.tp = ranks}, [&](const Mesh& mesh) {
        kernels::ShardSumAttrs attrs{.rank = mesh.rank(MeshAxis::tp), .tree = shards.tree, .out_dtype = dtype};
        for (int rank = 0; rank < ranks; ++rank) attrs.owners.push_back(shards.within(part_of(24, ranks, rank)));
        TensorType type(DType::f32, {Symbol::tokens, kHidden});
        if (ranks > 1) type.sharding = Sharding::partial();
        Graph graph;
        std::vector<ValueId> partials;
        for (int shard = attrs.own().begin; shard < attrs.own().end; ++shard)
          partials.push_back(graph.add_input(fmt::format("x{}", shard), type));
        graph.mark_output("y", graph.add1(std::make_shared<ops::ShardSum>(attrs), partials));
        const auto device = open_device("cpu", {.num_threads = 2});
        Environment environment{.device = device, .mesh = mesh};
        environment.bounds[Symbol::tokens] = kTokens + 2;
        Program program(std::move(graph), environment, std::make_shared<ParameterStore>(device));
        program.require_complete();
        for (int shard = attrs.own().begin; shard < attrs.own().end; ++shard) {
          const std::vector<float>& term = terms[static_cast<size_t>(shard)];
          program.set_input(program.input(fmt::format("x{}", shard)), term.data(),
                            static_cast<int64_t>(term.size() * sizeof(float)));
        }
        SymbolValues symbols = environment.bounds;
        symbols[Symbol::tokens] = kTokens;
        program.run(symbols);
        const TensorView y = program.view(program.output("y"));
        std::vector<float> result;
        for (int64_t i = 0; i < y.num_elements(); ++i)
          result.push_back(y.dtype == DType::f32 ? y.as<float>()[i] : y.as<bf16_t>()[i].to_float());
        EXPECT_EQ(result, expected) << "rank " << attrs.rank << " of " << ranks;
      });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CollectiveOps,
                         testing::Combine(testing::Values(1, 2, 3, 4), testing::Values(4, 7, 12, 131),
                                          testing::Values(DType::f32, DType::bf16)));

TEST(CollectiveTypes, RefuseWhatTheyCannotMean) {
  const auto divided = [](int axis) {
    TensorType type(DType::f32, {4, 6});
    type.sharding = Sharding::along(axis);
    return type;
  };
  const ops::AllGather gather({.ranks = 2, .rank = 0, .dim = 1, .whole = 12});
  EXPECT_EQ(gather.infer_types(std::vector{divided(1)})[0], TensorType(DType::f32, {4, 12}));
  EXPECT_TRUE(mentions(test::refusal([&] {
                         gather.infer_types(std::vector{TensorType(DType::f32, {4, 5})});
                       }),
                       {"all_gather", "[4, 5]", "6"}));
  EXPECT_TRUE(mentions(test::refusal([&] { gather.infer_sharding(std::vector{divided(0)}); }),
                       {"all_gather", "sharded(0)", "sharded(1)"}));
  const ops::ReduceScatter scatter({.ranks = 2, .rank = 0, .dim = 1, .whole = 6});
  EXPECT_TRUE(mentions(test::refusal([&] { scatter.infer_sharding(std::vector{divided(1)}); }),
                       {"reduce_scatter", "sharded(1)", "partial"}));
  const ops::Broadcast broadcast(MeshAxis::tp, 2, 0);
  EXPECT_TRUE(mentions(test::refusal([&] { broadcast.infer_sharding(std::vector{divided(1)}); }),
                       {"broadcast", "sharded(1)", "replicated"}));
}

TEST(CollectiveTypes, BytesOnTheWire) {
  const TensorType type(DType::f32, {100});
  SymbolValues none;
  EXPECT_EQ(ops::AllReduce(MeshAxis::tp, 4).wire_bytes(std::vector{type}, none), 600);
  EXPECT_EQ(ops::AllGather({.ranks = 4, .whole = 400}).wire_bytes(std::vector{type}, none), 1200);
  EXPECT_EQ(ops::ReduceScatter({.ranks = 4, .whole = 100}).wire_bytes(std::vector{type}, none), 300);
  EXPECT_EQ(ops::Send(MeshAxis::pp, 1).wire_bytes(std::vector{type}, none), 400);
}

}  // namespace
}  // namespace eadem::pipeline
