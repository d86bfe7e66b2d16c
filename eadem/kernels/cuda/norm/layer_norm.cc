// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/layer_norm.h"

#include <algorithm>

#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

Verdict can_normalize(const KernelRequest& request) {
  return Requirements(request)
      .dtype("x", request.inputs[0], kActivationDTypes)
      .dtype("weight", request.inputs[1], kStorageDTypes)
      .same_dtype("bias", request.inputs[2], "weight", request.inputs[1])
      .same_dtype("y", request.outputs[0], "x", request.inputs[0])
      .verdict();
}

PlanPtr prepare_layer_norm(const KernelRequest& request, Context&) {
  return make_plan([eps = request.attrs.get<LayerNormAttrs>().eps](const KernelCall& call) {
    const TensorView &x = call.inputs[0], &weight = call.inputs[1];
    const bool saves = call.outputs.size() > 1;
    EADEM_CUDA_CALL(launch_layer_norm({.x = elements(x),
                                       .weight = elements(weight),
                                       .bias = elements(call.inputs[2]),
                                       .y = elements(call.outputs[0]),
                                       .mean = saves ? elements<float>(call.outputs[1]) : nullptr,
                                       .inv_std = saves ? elements<float>(call.outputs[2]) : nullptr,
                                       .rows = x.shape.num_rows(),
                                       .hidden = x.shape.back(),
                                       .eps = eps,
                                       .dtype = x.dtype,
                                       .weight_dtype = weight.dtype},
                                      stream_of(call)));
  });
}

enum GradientInput { kX, kWeight, kMean, kInvStd, kDy };

Verdict can_differentiate(const KernelRequest& request) {
  return Requirements(request)
      .dtype("x", request.inputs[kX], kActivationDTypes)
      .dtype("weight", request.inputs[kWeight], kStorageDTypes)
      .same_dtype("dy", request.inputs[kDy], "x", request.inputs[kX])
      .same_dtype("dx", request.outputs[0], "x", request.inputs[kX])
      .dtype("dweight", request.outputs[1], {DType::f32})
      .dtype("dbias", request.outputs[2], {DType::f32})
      .verdict();
}

PlanPtr prepare_layer_norm_backward(const KernelRequest& request, Context&) {
  const int64_t hidden = request.inputs[kWeight].fixed(0);
  const int64_t most_rows = request.inputs[kX].num_elements(request.bounds) / std::max<int64_t>(hidden, 1);
  const int64_t parts = (most_rows + kNormRowsOfPart - 1) / kNormRowsOfPart;
  return make_plan(
      [](const KernelCall& call) {
        const TensorView &x = call.inputs[kX], &weight = call.inputs[kWeight];
        EADEM_CUDA_CALL(launch_layer_norm_backward({.x = elements(x),
                                                    .weight = elements(weight),
                                                    .mean = elements<const float>(call.inputs[kMean]),
                                                    .inv_std = elements<const float>(call.inputs[kInvStd]),
                                                    .dy = elements(call.inputs[kDy]),
                                                    .dx = elements(call.outputs[0]),
                                                    .dweight = elements<float>(call.outputs[1]),
                                                    .dbias = elements<float>(call.outputs[2]),
                                                    .parts = static_cast<float*>(call.scratch.data),
                                                    .rows = x.shape.num_rows(),
                                                    .hidden = x.shape.back(),
                                                    .dtype = x.dtype,
                                                    .weight_dtype = weight.dtype},
                                                   stream_of(call)));
      },
      2 * parts * hidden * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kLayerNorm{"cuda_rows", Pass::inference, can_normalize, prepare_layer_norm};
constexpr Kernel kLayerNormForward = in_forward(kLayerNorm);
constexpr Kernel kLayerNormBackward{"cuda_rows", Pass::backward, can_differentiate, prepare_layer_norm_backward};

}  // namespace

KernelList layer_norm_kernels() { return {&kLayerNorm, &kLayerNormForward, &kLayerNormBackward}; }

}  // namespace eadem::kernels::cuda
