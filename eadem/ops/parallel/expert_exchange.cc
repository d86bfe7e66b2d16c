// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/parallel/expert_exchange.h"

#include <algorithm>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::ExpertExchangeAttrs;

ExpertExchange::ExpertExchange(std::string_view name, const ExpertExchangeAttrs& attrs) : name_(name), attrs_(attrs) {
  if (attrs.ranks < 1 || attrs.rank < 0 || attrs.rank >= attrs.ranks || attrs.experts < attrs.ranks)
    throw InvalidArgument("{}: rank {} of {} has none of {} experts", name, attrs.rank, attrs.ranks, attrs.experts);
  if (attrs.top_k < 1) throw InvalidArgument("{}: top_k is {}; expected at least 1", name, attrs.top_k);
}

std::string ExpertExchange::attrs_text() const {
  const PartRange own = attrs_.own_experts();
  return fmt::format("over={} experts={}..{} of {}{}", mesh_axis_name(attrs_.over), own.begin, own.begin + own.size - 1,
                     attrs_.experts, attrs_.same_tokens ? " same_tokens" : "");
}

Dim ExpertExchange::places() const {
  if (attrs_.same_tokens) return attrs_.most_rows() * Dim(Symbol::tokens);
  return attrs_.ranks * attrs_.most_rows() * Dim(kernels::rank_tokens());
}

void ExpertExchange::expect_offsets(const TensorType& offsets) const {
  expect_rank(name_, "offsets", offsets, 1);
  expect_dtype(name_, "offsets", offsets, kI32);
  expect_dim(name_, "offsets", offsets, 0, attrs_.experts + 1, "experts of all ranks, and one");
}

Cost ExpertExchange::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                          const SymbolValues& symbols) const {
  return {0, traffic_bytes(*this, pass, in, out, symbols)};
}

// --- expert_dispatch

std::vector<TensorType> ExpertDispatch::infer_types(std::span<const TensorType> in) const {
  expect_rank(name_, "x", in[0], 2);
  expect_plain(name_, "x", in[0]);
  expect_dim(name_, "x", in[0], 0, pairs(), "pairs of a token and an expert");
  expect_offsets(in[1]);
  return {TensorType(in[0].dtype, {places(), in[0].dim(1)}), TensorType(DType::i32, {attrs_.own_experts().size + 1}),
          counts_type()};
}

std::vector<Sharding> ExpertDispatch::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name_, "x", in[0], "rows of all experts");
  expect_replicated(name_, "offsets", in[1], "rows of all experts");
  return std::vector<Sharding>(3, attrs_.ranks == 1 ? Sharding::replicated() : Sharding::along(0));
}

namespace {

// The first rows that `offsets` speaks of; 0 for those behind them.
std::vector<double> rows_of_experts(const RefTensor& rows, const RefTensor& offsets) {
  std::vector<double> result = rows.data;
  const auto end = static_cast<int64_t>(offsets.data.back()) * rows.shape[1];
  std::fill(result.begin() + end, result.end(), 0.0);
  return result;
}

}  // namespace

void ExpertDispatch::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  EADEM_CHECK(attrs_.ranks == 1, "the reference of {} ranks", attrs_.ranks);
  if (pass == Pass::backward) {
    if (!out[0].data.empty()) out[0].data = rows_of_experts(in[2], in[0]);
    return;
  }
  out[0].data = in[0].data;
  out[1].data = in[1].data;
  for (size_t e = 0; e < out[2].data.size(); ++e) out[2].data[e] = in[1].data[e + 1] - in[1].data[e];
}

double ExpertDispatch::wire_bytes(std::span<const TensorType> in, const SymbolValues& symbols) const {
  if (attrs_.same_tokens) return 0;
  const double others = static_cast<double>(attrs_.ranks - 1) / attrs_.ranks;
  return others * (static_cast<double>(in[0].size_bytes(symbols)) + static_cast<double>(counts_type().size_bytes({})));
}

// As on one rank, which has all experts.
std::vector<Workload> ExpertDispatch::workloads() {
  std::vector<Workload> rows;
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model.name, step, "expert_dispatch"),
                      std::make_shared<ExpertDispatch>(
                          ExpertExchangeAttrs{.experts = model.experts, .top_k = model.top_k, .same_tokens = true}),
                      {TensorType(model.dtype, {model.top_k * Dim(Symbol::tokens), model.hidden}),
                       TensorType(DType::i32, {model.experts + 1})},
                      symbols_of(step)});
  return rows;
}

// --- expert_combine

std::vector<TensorType> ExpertCombine::infer_types(std::span<const TensorType> in) const {
  expect_rank(name_, "x", in[0], 2);
  expect_plain(name_, "x", in[0]);
  expect_dim(name_, "x", in[0], 0, places(), "rows that this rank's experts may get");
  expect_offsets(in[1]);
  expect_dtype(name_, "counts", in[2], kI32);
  expect_same_dims(name_, "counts", in[2], counts_type(), "the counts of expert_dispatch");
  return {TensorType(in[0].dtype, {pairs(), in[0].dim(1)})};
}

std::vector<Sharding> ExpertCombine::infer_sharding(std::span<const TensorType> in) const {
  const Sharding expected = attrs_.ranks == 1 ? Sharding::replicated() : Sharding::along(0);
  if (!(in[0].sharding == expected))
    throw InvalidArgument("{}: 'x' is {}; expected {}", name_, to_string(in[0].sharding), to_string(expected));
  expect_replicated(name_, "offsets", in[1], "rows of all experts");
  return {Sharding::replicated()};
}

void ExpertCombine::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  EADEM_CHECK(attrs_.ranks == 1, "the reference of {} ranks", attrs_.ranks);
  if (out[0].data.empty()) return;
  out[0].data = pass == Pass::backward ? in[2].data : rows_of_experts(in[0], in[1]);
}

double ExpertCombine::wire_bytes(std::span<const TensorType> in, const SymbolValues& symbols) const {
  const double row = static_cast<double>(in[0].fixed(1)) * static_cast<double>(dtype_size(in[0].dtype));
  const double rows = static_cast<double>(pairs().bind(symbols)) / attrs_.ranks;  // that this rank's experts made
  // Of the same tokens every other rank gets all of them.
  return (attrs_.ranks - 1) * row * rows;
}

// As on one rank, which has all experts.
std::vector<Workload> ExpertCombine::workloads() {
  std::vector<Workload> rows;
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back(
          {workload_name(model.name, step, "expert_combine"),
           std::make_shared<ExpertCombine>(
               ExpertExchangeAttrs{.experts = model.experts, .top_k = model.top_k, .same_tokens = true}),
           {TensorType(model.dtype, {model.top_k * Dim(Symbol::tokens), model.hidden}),
            TensorType(DType::i32, {model.experts + 1}), TensorType(DType::i32, {int64_t{1}, model.experts})},
           symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
