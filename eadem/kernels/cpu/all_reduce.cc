// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/all_reduce.h"

#include <cstring>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

namespace eadem::kernels::cpu {

namespace {

Verdict can_all_reduce(const KernelRequest& r) {
  return Requirements(r)
      .one_of("x", r.inputs[0], {DType::f32, DType::bf16})
      .one_of("y", r.outputs[0], {r.inputs[0].dtype})
      .verdict();
}

PlanPtr prepare_all_reduce(const KernelRequest&, Context& context) {
  return make_plan([&communicator = context.communicator](const KernelCall& call) {
    const TensorView& x = call.inputs[0];
    const TensorView& y = call.outputs[0];
    EADEM_CHECK(x.is_contiguous() && y.is_contiguous(), "all_reduce of {} into {}", to_string(x), to_string(y));
    if (y.data != x.data) std::memcpy(y.data, x.data, static_cast<size_t>(x.size_bytes()));
    communicator.all_reduce_sum(call.context->device, y);
  });
}

constexpr Kernel kForward{"cpu_communicator", Pass::forward, can_all_reduce, prepare_all_reduce};
constexpr Kernel kInference{"cpu_communicator", Pass::inference, can_all_reduce, prepare_all_reduce};

}  // namespace

KernelList all_reduce_kernels() { return {&kForward, &kInference}; }

}  // namespace eadem::kernels::cpu
