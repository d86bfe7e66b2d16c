// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/backends.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

enum In { kLogits, kTemperature, kTopK, kTopP, kMinP, kSeed, kPosition };

Verdict can_sample(const KernelRequest& request) {
  return Requirements(request)
      .dtype("logits", request.inputs[kLogits], {DType::f32})
      .require(request.inputs[kLogits].fixed(1) > 0, "the vocabulary is empty")
      .at_most("vocab", request.inputs[kLogits].fixed(1), kMaxSampleVocab)
      .at_cost(0);
}

void run_sample(const KernelCall& call) {
  const TensorView& logits = call.inputs[kLogits];
  EADEM_CUDA_CALL(launch_sample({.logits = elements<const float>(logits),
                                 .temperature = elements<const float>(call.inputs[kTemperature]),
                                 .top_k = elements<const int32_t>(call.inputs[kTopK]),
                                 .top_p = elements<const float>(call.inputs[kTopP]),
                                 .min_p = elements<const float>(call.inputs[kMinP]),
                                 .seed = elements<const int64_t>(call.inputs[kSeed]),
                                 .position = elements<const int64_t>(call.inputs[kPosition]),
                                 .token = elements<int32_t>(call.outputs[0]),
                                 .logprob = elements<float>(call.outputs[1]),
                                 .rows = logits.shape[0],
                                 .vocab = static_cast<int32_t>(logits.shape[1])},
                                stream_of(call)));
}

constexpr Kernel kSample{"cuda_bisect", Pass::inference, can_sample, run_sample};

}  // namespace

KernelList sample_kernels() { return {&kSample}; }

}  // namespace eadem::kernels::cuda
