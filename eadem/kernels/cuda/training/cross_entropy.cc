// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/training/cross_entropy.h"

#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

Verdict can_lose(const KernelRequest& request) {
  return Requirements(request)
      .dtype("logits", request.inputs[0], kActivationDTypes)
      .dtype("labels", request.inputs[1], {DType::i32})
      .dtype("loss", request.outputs[0], {DType::f32})
      .at_most("the vocabulary", request.inputs[0].fixed(1), kMaxSampleVocab)
      .verdict();
}

void run_cross_entropy(const KernelCall& call) {
  const TensorView& logits = call.inputs[0];
  EADEM_CUDA_CALL(launch_cross_entropy({.logits = elements(logits),
                                        .labels = elements<const int32_t>(call.inputs[1]),
                                        .loss = elements<float>(call.outputs[0]),
                                        .lse = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr,
                                        .rows = logits.shape[0],
                                        .vocab = logits.shape[1],
                                        .dtype = logits.dtype},
                                       stream_of(call)));
}

Verdict can_differentiate_loss(const KernelRequest& request) {
  return Requirements(request)
      .dtype("logits", request.inputs[0], kActivationDTypes)
      .dtype("labels", request.inputs[1], {DType::i32})
      .dtype("lse", request.inputs[2], {DType::f32})
      .dtype("dloss", request.inputs[3], {DType::f32})
      .require(!request.attrs.get<CrossEntropyAttrs>().dlogits_in_e5m2, kPlainGradients)
      .same_dtype("dlogits", request.outputs[0], "logits", request.inputs[0])
      .verdict();
}

void run_cross_entropy_backward(const KernelCall& call) {
  const TensorView &logits = call.inputs[0], &dlogits = call.outputs[0];
  EADEM_CUDA_CALL(launch_cross_entropy_backward({.logits = elements(logits),
                                                 .labels = elements<const int32_t>(call.inputs[1]),
                                                 .lse = elements<const float>(call.inputs[2]),
                                                 .dloss = elements<const float>(call.inputs[3]),
                                                 .dlogits = elements(dlogits),
                                                 .rows = logits.shape[0],
                                                 .vocab = logits.shape[1],
                                                 .dtype = logits.dtype,
                                                 .result_dtype = dlogits.dtype},
                                                stream_of(call)));
}

constexpr Kernel kInference{"cuda_row_clusters", Pass::inference, can_lose, prepare_nothing<run_cross_entropy>};
constexpr Kernel kForward = in_forward(kInference);
constexpr Kernel kBackward{"cuda_elements", Pass::backward, can_differentiate_loss,
                           prepare_nothing<run_cross_entropy_backward>};

}  // namespace

KernelList cross_entropy_kernels() { return {&kInference, &kForward, &kBackward}; }

}  // namespace eadem::kernels::cuda
