// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/experts/clamped_swiglu.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

ClampedSwiglu::ClampedSwiglu(const kernels::ClampedSwigluAttrs& attrs) : attrs_(attrs) {
  if (!(attrs.limit > 0) || !std::isfinite(attrs.limit) || !std::isfinite(attrs.alpha) || !std::isfinite(attrs.offset))
    throw InvalidArgument("clamped_swiglu: limit is {}, alpha {}, offset {}; expected finite numbers, limit above 0",
                          attrs.limit, attrs.alpha, attrs.offset);
}

void ClampedSwiglu::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const double limit = attrs_.limit, alpha = attrs_.alpha;
  for (size_t i = 0; i < in[0].data.size(); ++i) {
    const double gate = in[0].data[i], up = in[1].data[i];
    const double g = std::min(gate, limit), u = std::clamp(up, -limit, limit) + attrs_.offset;
    const double s = 1 / (1 + std::exp(-alpha * g));
    if (pass != Pass::backward) {
      out[0].data[i] = u * g * s;
      continue;
    }
    const double dy = in[2].data[i];
    if (!out[0].data.empty()) out[0].data[i] = gate <= limit ? dy * u * s * (1 + alpha * g * (1 - s)) : 0;
    if (!out[1].data.empty()) out[1].data[i] = std::fabs(up) <= limit ? dy * g * s : 0;
  }
}

std::vector<Workload> ClampedSwiglu::workloads() {
  std::vector<Workload> rows;
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes()) {
      const TensorType type(model.dtype, {model.top_k * Dim(Symbol::tokens), model.ffn});
      rows.push_back({workload_name(model.name, step, "clamped_swiglu"),
                      std::make_shared<ClampedSwiglu>(kernels::ClampedSwigluAttrs{}),
                      {type, type},
                      symbols_of(step)});
    }
  return rows;
}

}  // namespace eadem::ops
