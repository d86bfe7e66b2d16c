// SPDX-License-Identifier: Apache-2.0
//
// rms_norm, the fusion add_rms_norm, and softmax. Each row is computed by one block.
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/rms_norm.h"

namespace eadem::kernels::cuda {

namespace {

Verdict can_normalize(const KernelRequest& request) {
  return Requirements(request)
      .dtype("x", request.inputs[0], kActivationDTypes)
      .dtype("weight", request.inputs[1], kActivationDTypes)
      .same_dtype("y", request.outputs[0], "x", request.inputs[0])
      .verdict();
}

PlanPtr prepare_rms_norm(const KernelRequest& request, Context&) {
  return make_plan([eps = request.attrs.get<RmsNormAttrs>().eps](const KernelCall& call) {
    const TensorView &x = call.inputs[0], &weight = call.inputs[1], &y = call.outputs[0];
    EADEM_CUDA_CALL(launch_rms_norm({.x = elements(x),
                                     .add = nullptr,
                                     .sum = nullptr,
                                     .weight = elements(weight),
                                     .y = elements(y),
                                     .rows = x.shape.num_rows(),
                                     .hidden = x.shape.back(),
                                     .eps = eps,
                                     .dtype = x.dtype,
                                     .weight_dtype = weight.dtype},
                                    stream_of(call)));
  });
}

Verdict can_add_and_normalize(const KernelRequest& request) {
  return Requirements(request)
      .dtype("a", request.inputs[0], kActivationDTypes)
      .same_dtype("b", request.inputs[1], "a", request.inputs[0])
      .dtype("weight", request.inputs[2], kActivationDTypes)
      .same_dtype("sum", request.outputs[0], "a", request.inputs[0])
      .same_dtype("y", request.outputs[1], "a", request.inputs[0])
      .verdict();
}

PlanPtr prepare_add_rms_norm(const KernelRequest& request, Context&) {
  return make_plan([eps = request.attrs.get<RmsNormAttrs>().eps](const KernelCall& call) {
    const TensorView &a = call.inputs[0], &b = call.inputs[1], &weight = call.inputs[2];
    const TensorView &sum = call.outputs[0], &y = call.outputs[1];
    EADEM_CUDA_CALL(launch_rms_norm({.x = elements(a),
                                     .add = elements(b),
                                     .sum = elements(sum),
                                     .weight = elements(weight),
                                     .y = elements(y),
                                     .rows = a.shape.num_rows(),
                                     .hidden = a.shape.back(),
                                     .eps = eps,
                                     .dtype = a.dtype,
                                     .weight_dtype = weight.dtype},
                                    stream_of(call)));
  });
}

Verdict can_softmax(const KernelRequest& request) {
  return Requirements(request)
      .dtype("x", request.inputs[0], {DType::f32})
      .dtype("y", request.outputs[0], {DType::f32})
      .verdict();
}

void run_softmax(const KernelCall& call) {
  const TensorView &x = call.inputs[0], &y = call.outputs[0];
  EADEM_CUDA_CALL(launch_softmax(
      {.x = elements<const float>(x), .y = elements<float>(y), .rows = x.shape.num_rows(), .n = x.shape.back()},
      stream_of(call)));
}

constexpr Kernel kRmsNorm{.name = "cuda_rows",
                          .pass = Pass::inference,
                          .can_handle = can_normalize,
                          .prepare = prepare_rms_norm,
                          .alignment_bytes = 32};
constexpr Kernel kAddRmsNorm{.name = "cuda_rows",
                             .pass = Pass::inference,
                             .can_handle = can_add_and_normalize,
                             .prepare = prepare_add_rms_norm,
                             .alignment_bytes = 32};
constexpr Kernel kSoftmax{"cuda_rows", Pass::inference, can_softmax, prepare_nothing<run_softmax>};

}  // namespace

KernelList rms_norm_kernels() { return {&kRmsNorm}; }
KernelList add_rms_norm_kernels() { return {&kAddRmsNorm}; }
KernelList softmax_kernels() { return {&kSoftmax}; }

}  // namespace eadem::kernels::cuda
