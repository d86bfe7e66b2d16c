// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/bench/products.h"

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/ops/parallel/expert_exchange.h"

namespace eadem::cli {

double Products::seconds(const MachineRates& rates, double rows) const {
  const auto or_f32 = [&](double rate) { return rate > 0 ? rate : rates.f32_flops_per_second; };
  const double dots = or_f32(rates.int8_ops_per_second);
  return 2.0 * rows *
         (f32 / rates.f32_flops_per_second + bf16 / or_f32(rates.bf16_flops_per_second) + int8 / dots +
          int8_rows / (rates.int8_tile_ops_per_second > 0 ? rates.int8_tile_ops_per_second : dots));
}

namespace {

// Returns the sum in which a weight is counted.
double& elements_of(Products& products, const TensorType& weight) {
  if (weight.encoding == nullptr) return weight.dtype == DType::bf16 ? products.bf16 : products.f32;
  const Encoding* matrix = matrix_encoding(weight.encoding);
  if (Fp8Encoding::of(matrix) != nullptr) return products.f32;
  const GroupEncoding* groups = GroupEncoding::of(matrix);
  return groups != nullptr && groups->format().group_size == 0 ? products.int8_rows : products.int8;
}

}  // namespace

double rows_per_token(const pipeline::Graph& graph, const pipeline::Node& node) {
  if (node.op->name() == "grouped_linear")
    for (const pipeline::Node& other : graph.nodes())
      if (const auto* dispatch = dynamic_cast<const ops::ExpertDispatch*>(other.op.get());
          dispatch != nullptr && other.outputs[1] == node.inputs[2])
        return dispatch->rows_per_token();
  return static_cast<double>(graph.value(node.inputs[0]).type.dim(0).factor);
}

ModelProducts products_of(const pipeline::Graph& graph) {
  ModelProducts products;
  for (const pipeline::Node& node : graph.nodes()) {
    if (node.op->name() == "embedding") continue;
    Products& part = node.scope == "lm_head" ? products.head : products.decoder;
    for (pipeline::ValueId id : node.inputs) {
      if (id == pipeline::kNoValue || graph.value(id).kind != pipeline::Value::Kind::parameter) continue;
      const TensorType& type = graph.value(id).type;
      if (type.rank() == 2) elements_of(part, type) += static_cast<double>(type.num_elements({}));
      if (type.rank() == 3)
        elements_of(part, type) += rows_per_token(graph, node) * static_cast<double>(type.fixed(1) * type.fixed(2));
    }
  }
  return products;
}

}  // namespace eadem::cli
