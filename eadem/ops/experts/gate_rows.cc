// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/experts/gate_rows.h"

#include <cmath>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

AttrsRef GateRows::attrs() const {
  static constexpr kernels::NoAttrs kNone;
  return AttrsRef(kNone);
}

std::vector<TensorType> GateRows::infer_types(std::span<const TensorType> in) const {
  for (int port : {0, 1}) {
    const TensorType& type = in[static_cast<size_t>(port)];
    const std::string_view port_name = port == 0 ? "x" : "gate";
    expect_rank(name(), port_name, type, 2);
    expect_dtype(name(), port_name, type, kActivations);
    expect_plain(name(), port_name, type);
  }
  expect_dim(name(), "gate", in[1], 0, in[0].dim(0), "rows of 'x'");
  const int64_t hidden = in[0].fixed(1), gates = in[1].fixed(1);
  if (gates <= 0 || hidden % gates != 0)
    throw InvalidArgument("gate_rows: 'gate' is {} but 'x' is {}; expected gates that divide the columns",
                          to_string(in[1]), to_string(in[0]));
  return {plain_type(in[0].dtype, in[0].dims())};
}

Cost GateRows::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                    const SymbolValues& symbols) const {
  return {(pass == Pass::backward ? 3 : 1) * static_cast<double>(in[0].num_elements(symbols)),
          traffic_bytes(*this, pass, in, out, symbols)};
}

void GateRows::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto gates = static_cast<size_t>(in[1].shape[1]);
  const auto rows = static_cast<size_t>(in[0].shape[0]) * gates, hidden = static_cast<size_t>(in[0].shape[1]) / gates;
  for (size_t t = 0; t < rows; ++t) {
    const double s = 1 / (1 + std::exp(-in[1].data[t]));
    double sum = 0;
    for (size_t i = t * hidden; i < (t + 1) * hidden; ++i) {
      if (pass == Pass::backward) sum += in[2].data[i] * in[0].data[i];
      if (!out[0].data.empty()) out[0].data[i] = s * in[pass == Pass::backward ? 2 : 0].data[i];
    }
    if (pass == Pass::backward && !out[1].data.empty()) out[1].data[t] = sum * s * (1 - s);
  }
}

std::vector<Workload> GateRows::workloads() {
  std::vector<Workload> rows;
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back(
          {workload_name(model.name, step, "gate_rows"),
           std::make_shared<GateRows>(),
           {TensorType(model.dtype, {Symbol::tokens, model.hidden}), TensorType(model.dtype, {Symbol::tokens, 1})},
           symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
