// SPDX-License-Identifier: Apache-2.0
//
// Rows on their way to the ranks of their experts and back, as programs on 1 to 4 ranks, against loops over the rows of
// all ranks. Seven experts divide by none of 2, 3 and 4; some are chosen by nobody, and some ranks have no token or get
// no row.
#include <gtest/gtest.h>

#include <numeric>

#include "eadem/distributed/thread_communicator.h"
#include "eadem/ops/parallel/expert_exchange.h"
#include "eadem/pipeline/program.h"
#include "tests/support/refusal.h"

namespace eadem::pipeline {
namespace {

using distributed::run_mesh;
using kernels::ExpertExchangeAttrs;
using test::refusal;

constexpr int64_t kExperts = 7, kHidden = 3;

// Which experts a token chooses; `some`: the pairs of every other token are of no expert.
enum class Choice { spread, first_expert, last_experts, some };

struct Case {
  int ranks;
  int64_t top_k;
  Choice choice;
  std::vector<int64_t> tokens;  // of each rank
  bool same_tokens = false;

  ExpertExchangeAttrs attrs(int rank) const {
    return {.ranks = ranks, .rank = rank, .experts = kExperts, .top_k = top_k, .same_tokens = same_tokens};
  }
  int64_t most_tokens() const { return *std::max_element(tokens.begin(), tokens.end()); }
  int64_t tokens_of(int rank) const { return tokens[static_cast<size_t>(rank)]; }
  // Ranks with the same tokens have those of rank 0.
  int seed(int rank) const { return same_tokens ? 0 : rank; }
};

// The rows of a rank in the order of experts: where those of each begin.
std::vector<int32_t> offsets_of(const Case& c, int rank) {
  std::vector<int32_t> counts(kExperts, 0);
  for (int64_t t = 0; t < c.tokens_of(rank); ++t)
    for (int64_t j = 0; j < c.top_k; ++j) {
      if (c.choice == Choice::some && t % 2 == 1) continue;
      const int64_t expert = c.choice == Choice::spread || c.choice == Choice::some
                                 ? (t * 3 + 2 * c.seed(rank) + 2 * j) % kExperts
                             : c.choice == Choice::first_expert ? j
                                                                : kExperts - 1 - j;
      ++counts[static_cast<size_t>(expert)];
    }
  std::vector<int32_t> offsets = {0};
  for (int32_t count : counts) offsets.push_back(offsets.back() + count);
  return offsets;
}

// A number that tells the rank, the row and the column; halves below 128, so that bf16 holds it.
float value_at(int rank, int64_t row, int64_t column) {
  const auto value = static_cast<float>(rank * 25 + row);
  return column == 0 ? value : column == 1 ? -value : value + 0.5f;
}

std::vector<float> rows_of_rank(const Case& c, int rank, int64_t rows) {
  std::vector<float> values;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t h = 0; h < kHidden; ++h) values.push_back(value_at(c.seed(rank), row, h));
  return values;
}

// What a rank's experts get: the rank and the row there of every row, by expert, then by rank.
struct Arrivals {
  std::vector<std::pair<int, int64_t>> from;
  std::vector<int32_t> own = {0};
  std::vector<std::vector<int32_t>> counts;  // [ranks][own experts]
};

Arrivals arrivals_of(const Case& c, int rank) {
  const PartRange experts = part_of(kExperts, c.ranks, rank);
  Arrivals result;
  result.counts.assign(static_cast<size_t>(c.ranks), {});
  for (int64_t e = experts.begin; e < experts.begin + experts.size; ++e) {
    for (int source = 0; source < c.ranks; ++source) {
      const std::vector<int32_t> offsets = offsets_of(c, source);
      const auto expert = static_cast<size_t>(e);
      const bool comes = !c.same_tokens || source == rank;
      for (int32_t row = offsets[expert]; comes && row < offsets[expert + 1]; ++row)
        result.from.emplace_back(source, row);
      result.counts[static_cast<size_t>(source)].push_back(comes ? offsets[expert + 1] - offsets[expert] : 0);
    }
    result.own.push_back(static_cast<int32_t>(result.from.size()));
  }
  return result;
}

std::vector<float> read(const Program& program, std::string_view name) {
  const TensorView y = program.view(program.output(name));
  std::vector<float> result;
  for (int64_t i = 0; i < y.num_elements(); ++i)
    result.push_back(y.dtype == DType::f32    ? y.as<float>()[i]
                     : y.dtype == DType::bf16 ? y.as<bf16_t>()[i].to_float()
                                              : static_cast<float>(y.as<int32_t>()[i]));
  return result;
}

void set(Program& program, std::string_view name, DType dtype, const std::vector<float>& values) {
  std::vector<bf16_t> narrow;
  for (float value : values) narrow.push_back(bf16_t::from_float(value));
  if (dtype == DType::f32)
    program.set_input(program.input(name), values.data(), static_cast<int64_t>(values.size() * sizeof(float)));
  else
    program.set_input(program.input(name), narrow.data(), static_cast<int64_t>(narrow.size() * sizeof(bf16_t)));
}
void set(Program& program, std::string_view name, const std::vector<int32_t>& values) {
  program.set_input(program.input(name), values.data(), static_cast<int64_t>(values.size() * sizeof(int32_t)));
}

SymbolValues symbols_of(const Case& c, int64_t tokens) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = tokens;
  symbols[kernels::rank_tokens()] = c.most_tokens();
  return symbols;
}

std::vector<float> first_rows(std::vector<float> values, size_t rows) {
  values.resize(rows * kHidden);
  return values;
}

std::unique_ptr<Program> compile(Graph graph, const Case& c, const Mesh& mesh, Mode mode) {
  const auto device = open_device("cpu", {.num_threads = 1});
  Environment environment{.device = device, .mesh = mesh, .mode = mode};
  environment.bounds = symbols_of(c, c.most_tokens());
  if (mode == Mode::training) environment.input_gradients = {"x"};
  auto program = std::make_unique<Program>(std::move(graph), environment, std::make_shared<ParameterStore>(device));
  program->require_complete();
  return program;
}

// There and back: what arrives, in which order, and that it returns to where it was.
void check_rows(const Case& c, DType dtype) {
  run_mesh({.ep = c.ranks}, [&](const Mesh& mesh) {
    const int rank = mesh.rank(MeshAxis::ep);
    Graph graph;
    const ValueId x = graph.add_input("x", TensorType(dtype, {c.top_k * Dim(Symbol::tokens), kHidden})),
                  offsets = graph.add_input("offsets", TensorType(DType::i32, {kExperts + 1}));
    const std::vector<ValueId> sent = graph.add(std::make_shared<ops::ExpertDispatch>(c.attrs(rank)), {x, offsets});
    graph.mark_output("y", sent[0]);
    graph.mark_output("own", sent[1]);
    graph.mark_output("counts", sent[2]);
    graph.mark_output("back",
                      graph.add1(std::make_shared<ops::ExpertCombine>(c.attrs(rank)), {sent[0], offsets, sent[2]}));
    const auto program = compile(std::move(graph), c, mesh, Mode::inference);
    const int64_t rows = c.top_k * c.tokens_of(rank);
    set(*program, "x", dtype, rows_of_rank(c, rank, rows));
    set(*program, "offsets", offsets_of(c, rank));
    program->run(symbols_of(c, c.tokens_of(rank)));

    const Arrivals expected = arrivals_of(c, rank);
    std::vector<float> y;
    for (const auto& [source, row] : expected.from)
      for (int64_t h = 0; h < kHidden; ++h) y.push_back(value_at(c.seed(source), row, h));
    EXPECT_EQ(first_rows(read(*program, "y"), expected.from.size()), y);
    EXPECT_EQ(read(*program, "own"), std::vector<float>(expected.own.begin(), expected.own.end()));
    const std::vector<float> counts = read(*program, "counts");
    const size_t most = counts.size() / static_cast<size_t>(c.ranks);
    for (size_t source = 0; source < static_cast<size_t>(c.ranks); ++source)
      for (size_t e = 0; e < most; ++e) {
        const std::vector<int32_t>& own = expected.counts[source];
        EXPECT_EQ(counts[source * most + e], static_cast<float>(e < own.size() ? own[e] : 0));
      }
    std::vector<float> back = rows_of_rank(c, rank, rows);
    std::fill(back.begin() + offsets_of(c, rank).back() * kHidden, back.end(), 0.0f);
    EXPECT_EQ(read(*program, "back"), back);
  });
}

// A gradient takes the way of its row backwards: of dispatch from the expert to the token, of combine the other way.
void check_gradients(const Case& c) {
  run_mesh({.ep = c.ranks}, [&](const Mesh& mesh) {
    const int rank = mesh.rank(MeshAxis::ep);
    const SymbolValues symbols = symbols_of(c, c.tokens_of(rank));
    const int64_t rows = c.top_k * c.tokens_of(rank);
    const Arrivals arrivals = arrivals_of(c, rank);
    std::vector<int32_t> counts;
    {
      Graph graph;
      const ValueId x = graph.add_input("x", TensorType(DType::f32, {c.top_k * Dim(Symbol::tokens), kHidden})),
                    offsets = graph.add_input("offsets", TensorType(DType::i32, {kExperts + 1}));
      const std::vector<ValueId> sent = graph.add(std::make_shared<ops::ExpertDispatch>(c.attrs(rank)), {x, offsets});
      graph.mark_output("y", sent[0]);
      const auto program = compile(std::move(graph), c, mesh, Mode::training);
      set(*program, "x", DType::f32, rows_of_rank(c, rank, rows));
      set(*program, "offsets", offsets_of(c, rank));
      program->run_forward(symbols);
      // The gradient of a row tells the rank of its expert and its place there.
      const int64_t places = program->view(program->output("y")).shape[0];
      std::vector<float> dy(static_cast<size_t>(places * kHidden));
      for (size_t i = 0; i < dy.size(); ++i)
        dy[i] =
            static_cast<float>(rank * 1000 + static_cast<int>(i) / kHidden) + 0.25f * static_cast<float>(i % kHidden);
      set(*program, "d.y", DType::f32, dy);
      program->run_backward(symbols);
      std::vector<float> dx(static_cast<size_t>(rows * kHidden));
      for (int other = 0; other < c.ranks; ++other) {
        const Arrivals there = arrivals_of(c, other);
        for (size_t place = 0; place < there.from.size(); ++place)
          for (int64_t h = 0; there.from[place].first == rank && h < kHidden; ++h)
            dx[static_cast<size_t>(there.from[place].second * kHidden + h)] =
                static_cast<float>(other * 1000 + static_cast<int>(place)) + 0.25f * static_cast<float>(h);
      }
      EXPECT_EQ(read(*program, "d.x"), dx);
    }
    const auto most = static_cast<size_t>(part_of(kExperts, c.ranks, 0).size);
    for (const std::vector<int32_t>& own : arrivals.counts) {
      counts.insert(counts.end(), own.begin(), own.end());
      counts.insert(counts.end(), most - own.size(), 0);
    }
    Graph graph;
    const auto divided = [&](TensorType type) {
      if (c.ranks > 1) type.set_over(MeshAxis::ep, Sharding::along(0));
      return type;
    };
    const Dim places = c.ranks * c.attrs(rank).most_rows() * Dim(kernels::rank_tokens());
    const ValueId x = graph.add_input("x", divided(TensorType(DType::f32, {places, kHidden}))),
                  offsets = graph.add_input("offsets", TensorType(DType::i32, {kExperts + 1})),
                  came = graph.add_input(
                      "counts", divided(TensorType(DType::i32, {int64_t{c.ranks}, static_cast<int64_t>(most)})));
    graph.mark_output("y", graph.add1(std::make_shared<ops::ExpertCombine>(c.attrs(rank)), {x, offsets, came}));
    const auto program = compile(std::move(graph), c, mesh, Mode::training);
    set(*program, "x", DType::f32, std::vector<float>(static_cast<size_t>(places.bind(symbols) * kHidden), 0.0f));
    set(*program, "offsets", offsets_of(c, rank));
    set(*program, "counts", counts);
    program->run_forward(symbols);
    set(*program, "d.y", DType::f32, rows_of_rank(c, rank, rows));
    program->run_backward(symbols);
    std::vector<float> dx;
    for (const auto& [source, row] : arrivals.from)
      for (int64_t h = 0; h < kHidden; ++h) dx.push_back(value_at(source, row, h));
    EXPECT_EQ(first_rows(read(*program, "d.x"), arrivals.from.size()), dx);
  });
}

std::string text_of(const Case& c) {
  return fmt::format("{} ranks, top_k {}, choice {}, tokens {}", c.ranks, c.top_k, static_cast<int>(c.choice),
                     fmt::join(c.tokens, " "));
}

TEST(ExpertExchange, RowsOfEachRanksOwnTokens) {
  for (int ranks : {1, 2, 3, 4})
    for (int64_t top_k : {1, 3})
      for (Choice choice : {Choice::spread, Choice::first_expert, Choice::last_experts, Choice::some})
        for (const std::vector<int64_t>& pattern : {std::vector<int64_t>{5, 5, 5, 5}, {3, 0, 7, 1}, {0, 4, 0, 0}}) {
          const Case c{ranks, top_k, choice, {pattern.begin(), pattern.begin() + ranks}};
          SCOPED_TRACE(text_of(c));
          check_rows(c, DType::f32);
          check_gradients(c);
          if (choice == Choice::spread) check_rows(c, DType::bf16);
        }
}

TEST(ExpertExchange, RowsOfTokensThatAllRanksHave) {
  for (int ranks : {1, 2, 3, 4})
    for (int64_t top_k : {1, 3})
      for (Choice choice : {Choice::spread, Choice::first_expert, Choice::last_experts, Choice::some})
        for (int64_t tokens : {0, 1, 5}) {
          const Case c{ranks, top_k, choice, std::vector<int64_t>(static_cast<size_t>(ranks), tokens), true};
          SCOPED_TRACE(text_of(c));
          check_rows(c, DType::f32);
          check_rows(c, DType::bf16);
        }
}

TEST(ExpertExchange, TypesAndRefusals) {
  const ExpertExchangeAttrs attrs{.ranks = 3, .rank = 1, .experts = 7, .top_k = 4};
  const ops::ExpertDispatch dispatch(attrs);
  const ops::ExpertCombine combine(attrs);
  const TensorType x(DType::bf16, {4 * Dim(Symbol::tokens), 5}), offsets(DType::i32, {8});
  const std::vector<TensorType> sent = dispatch.infer_types(std::vector{x, offsets});
  // Two of seven experts: a token has at most two rows here, of each rank.
  EXPECT_EQ(to_string(sent[0]), "bf16 [6*rank_tokens, 5]");
  EXPECT_EQ(sent[1], TensorType(DType::i32, {3}));
  EXPECT_EQ(sent[2], TensorType(DType::i32, {3, 3})) << "rank 0 has three";
  EXPECT_EQ(combine.infer_types(std::vector{sent[0], offsets, sent[2]})[0], x);
  ExpertExchangeAttrs same = attrs;
  same.same_tokens = true;
  EXPECT_EQ(to_string(ops::ExpertDispatch(same).infer_types(std::vector{x, offsets})[0]), "bf16 [2*tokens, 5]");
  EXPECT_FALSE(ops::ExpertDispatch(same).has_backward());
  EXPECT_HAS(refusal([&] {
               dispatch.infer_types(std::vector{TensorType(DType::f32, {2 * Dim(Symbol::tokens), 5}), offsets});
             }),
             "expert_dispatch: 'x' is f32 [2*tokens, 5]");
  EXPECT_HAS(refusal([&] {
               dispatch.infer_types(std::vector{x, TensorType(DType::i32, {7})});
             }),
             "'offsets' is i32 [7]");
  EXPECT_HAS(refusal([&] { combine.infer_types(std::vector{x, offsets, sent[2]}); }), "expert_combine: 'x'");
  EXPECT_HAS(refusal([&] { combine.infer_sharding(std::vector{x, offsets, sent[2]}); }), "expected sharded(0)");
  EXPECT_HAS(refusal([] { const ops::ExpertDispatch none({.ranks = 3, .rank = 2, .experts = 2}); }), "2 experts");
  EXPECT_HAS(refusal([] { const ops::ExpertDispatch many({.experts = 2, .top_k = 0}); }), "top_k is 0");
  // docs/parallelism.md: bytes that one rank sends of 10 tokens, rows of 10 bytes.
  SymbolValues symbols;
  symbols[Symbol::tokens] = 10;
  symbols[kernels::rank_tokens()] = 10;
  EXPECT_DOUBLE_EQ(dispatch.wire_bytes(std::vector{x, offsets}, symbols), 2.0 / 3 * (400 + 36));
  EXPECT_DOUBLE_EQ(combine.wire_bytes(std::vector{sent[0], offsets, sent[2]}, symbols), 2.0 / 3 * 400);
  EXPECT_EQ(ops::ExpertDispatch(same).wire_bytes(std::vector{x, offsets}, symbols), 0);
  EXPECT_DOUBLE_EQ(ops::ExpertCombine(same).wire_bytes(std::vector{sent[0], offsets, sent[2]}, symbols), 2.0 / 3 * 400);
}

}  // namespace
}  // namespace eadem::pipeline
