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

// Of mul and gated_activation.
Verdict can_differentiate_pair(const KernelRequest& request) {
  Requirements requirements(request);
  requirements.dtype("first input", request.inputs[0], kActivationDTypes);
  for (size_t i : {1, 2}) requirements.same_dtype("an input", request.inputs[i], "first input", request.inputs[0]);
  for (const TensorType& output : request.outputs)
    requirements.same_dtype("a gradient", output, "first input", request.inputs[0]);
  return requirements.verdict();
}

BinaryGradientParams binary_gradient_params(const KernelCall& call) {
  const TensorView& dy = call.inputs[2];
  return {.a = elements(call.inputs[0]),
          .b = elements(call.inputs[1]),
          .dy = elements(dy),
          .da = elements(call.outputs[0]),
          .db = elements(call.outputs[1]),
          .size = dy.num_elements(),
          .dtype = dy.dtype};
}

void run_mul_backward(const KernelCall& call) {
  EADEM_CUDA_CALL(launch_mul_backward(binary_gradient_params(call), stream_of(call)));
}

PlanPtr prepare_gated_activation_backward(const KernelRequest& request, Context&) {
  return make_plan([kind = request.attrs.get<ActivationAttrs>().kind](const KernelCall& call) {
    EADEM_CUDA_CALL(launch_gated_activation_backward(binary_gradient_params(call), kind, stream_of(call)));
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

PlanPtr prepare_activation_backward(const KernelRequest& request, Context&) {
  return make_plan([kind = request.attrs.get<ActivationAttrs>().kind](const KernelCall& call) {
    EADEM_CUDA_CALL(launch_activation_backward(binary_params(call), kind, stream_of(call)));
  });
}

PlanPtr prepare_scale(const KernelRequest& request, Context&) {
  return make_plan([attrs = request.attrs.get<ScaleAttrs>()](const KernelCall& call) {
    EADEM_CUDA_CALL(launch_scale(unary_params(call), attrs, stream_of(call)));
  });
}

PlanPtr prepare_scale_backward(const KernelRequest& request, Context&) {
  return make_plan([attrs = request.attrs.get<ScaleAttrs>()](const KernelCall& call) {
    EADEM_CUDA_CALL(launch_scale_backward(binary_params(call), attrs, stream_of(call)));
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
constexpr Kernel kMulForward = in_forward(kMul);
constexpr Kernel kMulBackward{"cuda_elements", Pass::backward, can_differentiate_pair,
                              prepare_nothing<run_mul_backward>};
constexpr Kernel kGatedActivation{"cuda_elements", Pass::inference, can_combine, prepare_gated_activation};
constexpr Kernel kGatedActivationForward = in_forward(kGatedActivation);
constexpr Kernel kGatedActivationBackward{"cuda_elements", Pass::backward, can_differentiate_pair,
                                          prepare_gated_activation_backward};
constexpr Kernel kActivation{"cuda_elements", Pass::inference, can_activate, prepare_activation};
constexpr Kernel kActivationForward = in_forward(kActivation);
constexpr Kernel kActivationBackward{"cuda_elements", Pass::backward, can_combine, prepare_activation_backward};
constexpr Kernel kScale{"cuda_elements", Pass::inference, can_activate, prepare_scale};
constexpr Kernel kScaleForward = in_forward(kScale);
constexpr Kernel kScaleBackward{"cuda_elements", Pass::backward, can_combine, prepare_scale_backward};
constexpr Kernel kCast{"cuda_elements", Pass::inference, can_cast, prepare_nothing<run_cast>};
constexpr Kernel kCastForward = in_forward(kCast);
constexpr Kernel kCastBackward{"cuda_elements", Pass::backward, can_cast, prepare_nothing<run_cast>};

}  // namespace

KernelList add_kernels() { return {&kAdd}; }
KernelList mul_kernels() { return {&kMul, &kMulForward, &kMulBackward}; }
KernelList gated_activation_kernels() {
  return {&kGatedActivation, &kGatedActivationForward, &kGatedActivationBackward};
}
KernelList activation_kernels() { return {&kActivation, &kActivationForward, &kActivationBackward}; }
KernelList scale_kernels() { return {&kScale, &kScaleForward, &kScaleBackward}; }
KernelList cast_kernels() { return {&kCast, &kCastForward, &kCastBackward}; }

}  // namespace eadem::kernels::cuda
