// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

enum In { kLogits, kRows, kPenalties };

Verdict can_sample(const KernelRequest& request) {
  return Requirements(request)
      .dtype("logits", request.inputs[kLogits], {DType::f32})
      .require(request.inputs[kLogits].fixed(1) > 0, "the vocabulary is empty")
      .at_most("vocab", request.inputs[kLogits].fixed(1), kMaxSampleVocab)
      .verdict();
}

void run_sample(const KernelCall& call) {
  const TensorView& logits = call.inputs[kLogits];
  EADEM_CUDA_CALL(launch_sample({.logits = elements<const float>(logits),
                                 .row_settings = static_cast<const SampleRow*>(elements(call.inputs[kRows])),
                                 .penalties = elements<const int32_t>(call.inputs[kPenalties]),
                                 .replaced = static_cast<float*>(call.scratch.data),
                                 .token = elements<int32_t>(call.outputs[0]),
                                 .logprob = elements<float>(call.outputs[1]),
                                 .top_token = elements<int32_t>(call.outputs[2]),
                                 .top_logprob = elements<float>(call.outputs[3]),
                                 .rows = logits.shape[0],
                                 .vocab = static_cast<int32_t>(logits.shape[1])},
                                stream_of(call)));
}

// Scratch has one float for each penalized logit.
PlanPtr prepare_sample(const KernelRequest& request, Context&) {
  return make_plan(run_sample,
                   static_cast<int64_t>(sizeof(float)) * request.inputs[kPenalties].dim(0).bind(request.bounds));
}

constexpr Kernel kSample{.name = "cuda_bisect",
                         .pass = Pass::inference,
                         .can_handle = can_sample,
                         .prepare = prepare_sample,
                         .alignment_bytes = alignof(SampleRow)};

}  // namespace

KernelList sample_kernels() { return {&kSample}; }

}  // namespace eadem::kernels::cuda
