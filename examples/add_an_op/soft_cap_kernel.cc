// SPDX-License-Identifier: Apache-2.0
#include "soft_cap_kernel.h"

#include <cmath>

#include "eadem/core/device/cpu_device.h"
#include "soft_cap.h"

namespace example {

using namespace eadem;
using namespace eadem::kernels;

namespace {

constexpr int64_t kGrain = 4096;  // elements a thread should get at least

Verdict can_handle(const KernelRequest& request) {
  return accept(request, {.flops_share = 0.1, .reason = "one element at a time"});
}

// out[i] = fn(i) for every element, on the device's threads.
template <typename Fn>
void for_each_element(const KernelCall& call, Fn&& fn) {
  float* out = call.outputs[0].as<float>();
  static_cast<CpuDevice&>(call.context->device)
      .pool()
      .parallel_ranges(call.outputs[0].num_elements(), kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) out[i] = fn(i);
      });
}

PlanPtr prepare_forward(const KernelRequest& request, Context&) {
  const float cap = request.attrs.get<SoftCapAttrs>().cap;
  return make_plan([cap](const KernelCall& call) {
    const float* x = call.inputs[0].as<float>();
    for_each_element(call, [&](int64_t i) { return cap * std::tanh(x[i] / cap); });
  });
}

PlanPtr prepare_backward(const KernelRequest& request, Context&) {
  const float cap = request.attrs.get<SoftCapAttrs>().cap;
  return make_plan([cap](const KernelCall& call) {
    const float* y = call.inputs[0].as<float>();
    const float* dy = call.inputs[1].as<float>();
    for_each_element(call, [&](int64_t i) { return dy[i] * (1.0f - y[i] / cap * (y[i] / cap)); });
  });
}

constexpr Kernel kForward{"cpu_plain", Pass::forward, can_handle, prepare_forward};
constexpr Kernel kInference{"cpu_plain", Pass::inference, can_handle, prepare_forward};
constexpr Kernel kBackward{"cpu_plain", Pass::backward, can_handle, prepare_backward};

}  // namespace

KernelList soft_cap_kernels() { return {&kForward, &kInference, &kBackward}; }

}  // namespace example
