// SPDX-License-Identifier: Apache-2.0
//
// quantize, to the encodings that the products of linear read.
#include "eadem/kernels/quantize.h"

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/row_rounder.h"

namespace eadem::kernels::cpu {

namespace {

Verdict can_quantize(const KernelRequest& r) {
  const std::string refusal = RowRounder::refusal_of(r.attrs.get<QuantizeAttrs>().to, cpu_device(r));
  return Requirements(r).f32("x", r.inputs[0]).require(refusal.empty(), refusal).verdict();
}

PlanPtr prepare_quantize(const KernelRequest& r, Context&) {
  return make_plan([rounder = RowRounder(r.attrs.get<QuantizeAttrs>().to, cpu_device(r))](const KernelCall& call) {
    const TensorView& x = call.inputs[0];
    const RoundedSource source{elements<const float>(x), x.shape[1], x.shape[1]};
    cpu_device(call).pool().parallel_ranges(x.shape[0], rows_per_thread(x.shape[1]), [&](int64_t begin, int64_t end) {
      rounder.round(call.outputs[0], source, begin, end);
    });
  });
}

constexpr Kernel kQuantizeForward{"cpu_rows", Pass::forward, can_quantize, prepare_quantize};
constexpr Kernel kQuantizeInference{"cpu_rows", Pass::inference, can_quantize, prepare_quantize};

}  // namespace

KernelList quantize_kernels() { return {&kQuantizeForward, &kQuantizeInference}; }

}  // namespace eadem::kernels::cpu
