// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/elementwise.h"

#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

Verdict can_combine(const KernelRequest& request) {
  return Requirements(request)
      .dtype("first input", request.inputs[0], kActivationDTypes)
      .same_dtype("second input", request.inputs[1], "first input", request.inputs[0])
      .same_dtype("y", request.outputs[0], "first input", request.inputs[0])
      .verdict();
}

BinaryParams binary_params(const KernelCall& call) {
  const TensorView &a = call.inputs[0], &b = call.inputs[1], &y = call.outputs[0];
  return {.a = elements(a), .b = elements(b), .y = elements(y), .size = y.num_elements(), .dtype = y.dtype};
}

void run_add(const KernelCall& call) { EADEM_CUDA_CALL(launch_add(binary_params(call), stream_of(call))); }
void run_mul(const KernelCall& call) { EADEM_CUDA_CALL(launch_mul(binary_params(call), stream_of(call))); }
PlanPtr prepare_gated_activation(const KernelRequest& request, Context&) {
  return make_plan([kind = request.attrs.get<ActivationAttrs>().kind](const KernelCall& call) {
    EADEM_CUDA_CALL(launch_gated_activation(binary_params(call), kind, stream_of(call)));
  });
}

UnaryParams unary_params(const KernelCall& call) {
  const TensorView &x = call.inputs[0], &y = call.outputs[0];
  return {.x = elements(x), .y = elements(y), .size = y.num_elements(), .x_dtype = x.dtype, .y_dtype = y.dtype};
}

Verdict can_activate(const KernelRequest& request) {
  return Requirements(request)
      .dtype("x", request.inputs[0], kActivationDTypes)
      .same_dtype("y", request.outputs[0], "x", request.inputs[0])
      .verdict();
}

PlanPtr prepare_activation(const KernelRequest& request, Context&) {
  return make_plan([kind = request.attrs.get<ActivationAttrs>().kind](const KernelCall& call) {
    EADEM_CUDA_CALL(launch_activation(unary_params(call), kind, stream_of(call)));
  });
}

Verdict can_cast(const KernelRequest& request) {
  return Requirements(request)
      .dtype("x", request.inputs[0], kStorageDTypes)
      .dtype("y", request.outputs[0], kStorageDTypes)
      .verdict();
}

void run_cast(const KernelCall& call) { EADEM_CUDA_CALL(launch_cast(unary_params(call), stream_of(call))); }

constexpr Kernel kAdd{"cuda_elements", Pass::inference, can_combine, prepare_nothing<run_add>};
constexpr Kernel kMul{"cuda_elements", Pass::inference, can_combine, prepare_nothing<run_mul>};
constexpr Kernel kGatedActivation{"cuda_elements", Pass::inference, can_combine, prepare_gated_activation};
constexpr Kernel kActivation{"cuda_elements", Pass::inference, can_activate, prepare_activation};
constexpr Kernel kCast{"cuda_elements", Pass::inference, can_cast, prepare_nothing<run_cast>};

}  // namespace

KernelList add_kernels() { return {&kAdd}; }
KernelList mul_kernels() { return {&kMul}; }
KernelList gated_activation_kernels() { return {&kGatedActivation}; }
KernelList activation_kernels() { return {&kActivation}; }
KernelList cast_kernels() { return {&kCast}; }

}  // namespace eadem::kernels::cuda
