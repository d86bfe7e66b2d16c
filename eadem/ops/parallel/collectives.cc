// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/parallel/collectives.h"

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

std::string Collective::attrs_text() const { return fmt::format("over={}", mesh_axis_name(attrs_.over)); }

Sharding Collective::wanted_sharding(std::span<const TensorType> in, int port) const {
  return in[static_cast<size_t>(port)].sharding;
}

Cost Collective::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                      const SymbolValues& symbols) const {
  if (pass == Pass::backward) return {};
  return {0, traffic_bytes(in, out, symbols)};
}

void Collective::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (!in.empty() && !out.empty()) out[0].data = in[0].data;
}

TensorType Collective::with_extent(const TensorType& type, int dim, int64_t extent) {
  TensorType result(type.dtype, type.dims());
  result.dim(dim) = extent;
  return result;
}

void Collective::expect_sharding(const TensorType& x, Sharding expected) const {
  if (!(x.sharding == expected))
    throw InvalidArgument("{}: 'x' is {}; expected {}", name_, to_string(x.sharding), to_string(expected));
}

void Collective::expect_extent(const TensorType& x, int dim, int64_t extent) const {
  if (dim < 0 || dim >= x.rank())
    throw InvalidArgument("{}: 'x' is {}; it has no dimension {}", name_, to_string(x), dim);
  expect_dim(name_, "x", x, dim, Dim(extent), fmt::format("rank {} of {}", attrs_.rank, attrs_.ranks));
}

// --- all_reduce

std::vector<TensorType> AllReduce::infer_types(std::span<const TensorType> in) const {
  expect_dtype(name_, "x", in[0], kActivations);
  expect_plain(name_, "x", in[0]);
  return {plain_type(in[0].dtype, in[0].dims())};
}

std::vector<Sharding> AllReduce::infer_sharding(std::span<const TensorType> in) const {
  expect_sharding(in[0], Sharding::partial());
  return {Sharding::replicated()};
}

double AllReduce::wire_bytes(std::span<const TensorType> in, const SymbolValues& symbols) const {
  return 2.0 * (attrs_.ranks - 1) / attrs_.ranks * static_cast<double>(in[0].size_bytes(symbols));
}

std::vector<Workload> AllReduce::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "all_reduce"),
                      std::make_shared<AllReduce>(),
                      {TensorType(model.dtype, {Symbol::tokens, model.hidden})},
                      symbols_of(step)});
  return rows;
}

// --- all_gather

std::vector<TensorType> AllGather::infer_types(std::span<const TensorType> in) const {
  expect_plain(name_, "x", in[0]);
  expect_extent(in[0], attrs_.dim, own_extent());
  return {with_extent(in[0], attrs_.dim, attrs_.whole)};
}

std::vector<Sharding> AllGather::infer_sharding(std::span<const TensorType> in) const {
  expect_sharding(in[0], Sharding::along(attrs_.dim));
  return {Sharding::replicated()};
}

// Backward reads and writes a part.
Cost AllGather::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                     const SymbolValues& symbols) const {
  if (pass != Pass::backward) return Collective::cost(pass, in, out, symbols);
  return {0, 2 * static_cast<double>(in[0].size_bytes(symbols))};
}

double AllGather::wire_bytes(std::span<const TensorType> in, const SymbolValues& symbols) const {
  return static_cast<double>(attrs_.ranks - 1) * static_cast<double>(in[0].size_bytes(symbols));
}

std::vector<Workload> AllGather::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "all_gather logits"),
                      std::make_shared<AllGather>(kernels::CollectiveAttrs{.dim = 1, .whole = model.vocab}),
                      {TensorType(DType::f32, {Symbol::logit_rows, model.vocab})},
                      symbols_of(step)});
  return rows;
}

// --- reduce_scatter

std::vector<TensorType> ReduceScatter::infer_types(std::span<const TensorType> in) const {
  expect_dtype(name_, "x", in[0], kActivations);
  expect_plain(name_, "x", in[0]);
  expect_extent(in[0], attrs_.dim, attrs_.whole);
  return {with_extent(in[0], attrs_.dim, own_extent())};
}

std::vector<Sharding> ReduceScatter::infer_sharding(std::span<const TensorType> in) const {
  expect_sharding(in[0], Sharding::partial());
  return {Sharding::along(attrs_.dim)};
}

double ReduceScatter::wire_bytes(std::span<const TensorType> in, const SymbolValues& symbols) const {
  return (attrs_.ranks - 1.0) / attrs_.ranks * static_cast<double>(in[0].size_bytes(symbols));
}

// --- all_to_all

AllToAll::AllToAll(const kernels::CollectiveAttrs& attrs) : Collective("all_to_all", attrs) {
  if (attrs.whole % attrs.ranks != 0)
    throw InvalidArgument("all_to_all: dimension {} of {} does not divide into {} ranks", attrs.dim, attrs.whole,
                          attrs.ranks);
  if (attrs.dim == attrs.other_dim)
    throw InvalidArgument("all_to_all: dimension {} is divided before and after", attrs.dim);
}

std::vector<TensorType> AllToAll::infer_types(std::span<const TensorType> in) const {
  expect_plain(name_, "x", in[0]);
  expect_extent(in[0], attrs_.dim, own_extent());
  if (attrs_.other_dim < 0 || attrs_.other_dim >= in[0].rank())
    throw InvalidArgument("all_to_all: 'x' is {}; it has no dimension {}", to_string(in[0]), attrs_.other_dim);
  const int64_t other = in[0].fixed(attrs_.other_dim);
  if (other % attrs_.ranks != 0)
    throw InvalidArgument("all_to_all: 'x' is {}; dimension {} does not divide into {} ranks", to_string(in[0]),
                          attrs_.other_dim, attrs_.ranks);
  return {with_extent(with_extent(in[0], attrs_.dim, attrs_.whole), attrs_.other_dim, other / attrs_.ranks)};
}

std::vector<Sharding> AllToAll::infer_sharding(std::span<const TensorType> in) const {
  expect_sharding(in[0], Sharding::along(attrs_.dim));
  return {Sharding::along(attrs_.other_dim)};
}

double AllToAll::wire_bytes(std::span<const TensorType> in, const SymbolValues& symbols) const {
  return (attrs_.ranks - 1.0) / attrs_.ranks * static_cast<double>(in[0].size_bytes(symbols));
}

// --- broadcast

std::vector<TensorType> Broadcast::infer_types(std::span<const TensorType> in) const {
  expect_plain(name_, "x", in[0]);
  return {plain_type(in[0].dtype, in[0].dims())};
}

std::vector<Sharding> Broadcast::infer_sharding(std::span<const TensorType> in) const {
  expect_sharding(in[0], Sharding::replicated());
  return {Sharding::replicated()};
}

double Broadcast::wire_bytes(std::span<const TensorType> in, const SymbolValues& symbols) const {
  return attrs_.ranks == 1 ? 0 : static_cast<double>(in[0].size_bytes(symbols));
}

// --- send and recv

std::vector<TensorType> Send::infer_types(std::span<const TensorType> in) const {
  expect_plain(name_, "x", in[0]);
  return {};
}

double Send::wire_bytes(std::span<const TensorType> in, const SymbolValues& symbols) const {
  return static_cast<double>(in[0].size_bytes(symbols));
}

std::vector<TensorType> Recv::infer_types(std::span<const TensorType> /*in*/) const {
  return {plain_type(type_.dtype, type_.dims())};
}

}  // namespace eadem::ops
