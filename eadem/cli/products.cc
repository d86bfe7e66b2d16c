// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/products.h"

#include "eadem/core/encodings/fp8_encoding.h"

namespace eadem::cli {

double Products::seconds(const MachineRates& rates, double rows) const {
  const auto or_f32 = [&](double rate) { return rate > 0 ? rate : rates.f32_flops_per_second; };
  return 2.0 * rows *
         (f32 / rates.f32_flops_per_second + bf16 / or_f32(rates.bf16_flops_per_second) +
          int8 / or_f32(rates.int8_ops_per_second));
}

ModelProducts products_of(const pipeline::Graph& graph) {
  ModelProducts products;
  for (const pipeline::Node& node : graph.nodes()) {
    if (node.op->name() == "embedding") continue;
    Products& part = node.scope == "lm_head" ? products.head : products.decoder;
    for (pipeline::ValueId id : node.inputs) {
      if (id == pipeline::kNoValue || graph.value(id).kind != pipeline::Value::Kind::parameter) continue;
      const TensorType& type = graph.value(id).type;
      if (type.rank() != 2) continue;
      const bool plain = type.encoding == nullptr, widened = Fp8Encoding::of(type.encoding) != nullptr;
      double& elements = !plain && !widened ? part.int8 : plain && type.dtype == DType::bf16 ? part.bf16 : part.f32;
      elements += static_cast<double>(type.num_elements({}));
    }
  }
  return products;
}

}  // namespace eadem::cli
