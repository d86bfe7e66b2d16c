// SPDX-License-Identifier: Apache-2.0
//
// rms_norm, the fusions add_rms_norm, rms_norm_quantize and add_rms_norm_quantize, and softmax. Each row is computed by
// one block.
#include <algorithm>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/int8_chunks.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/fusions.h"
#include "eadem/kernels/rms_norm.h"

namespace eadem::kernels::cuda {

namespace {

Verdict can_normalize(const KernelRequest& request) {
  return Requirements(request)
      .dtype("x", request.inputs[0], kActivationDTypes)
      .dtype("weight", request.inputs[1], kActivationDTypes)
      .require(request.inputs[1].rank() == 1, "there is a weight for each group")
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
                                     .inv_rms = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr,
                                     .rows = x.shape.num_rows(),
                                     .hidden = x.shape.back(),
                                     .eps = eps,
                                     .dtype = x.dtype,
                                     .weight_dtype = weight.dtype},
                                    stream_of(call)));
  });
}

// The last input is dy; that of add_rms_norm has dsum before it.
enum NormGradientInput { kX, kWeight, kInvRms, kDsum };

Verdict can_differentiate(const KernelRequest& request) {
  Requirements requirements(request);
  requirements.dtype("x", request.inputs[kX], kActivationDTypes)
      .dtype("weight", request.inputs[kWeight], kActivationDTypes)
      .require(request.inputs[kWeight].rank() == 1, "there is a weight for each group");
  for (size_t i = kDsum; i < request.inputs.size(); ++i)
    requirements.same_dtype("the gradient of an output", request.inputs[i], "x", request.inputs[kX]);
  return requirements.same_dtype("dx", request.outputs[0], "x", request.inputs[kX])
      .dtype("dweight", request.outputs[1], {DType::f32})
      .verdict();
}

PlanPtr prepare_rms_norm_backward(const KernelRequest& request, Context&) {
  const TensorType& x = request.inputs[kX];
  const int64_t most_rows = x.num_elements(request.bounds) / std::max<int64_t>(request.inputs[kWeight].fixed(0), 1);
  const int64_t parts = (most_rows + kNormRowsOfPart - 1) / kNormRowsOfPart;
  const bool adds = request.inputs.size() > kDsum + 1;
  return make_plan(
      [adds](const KernelCall& call) {
        const TensorView &x = call.inputs[kX], &weight = call.inputs[kWeight];
        EADEM_CUDA_CALL(launch_rms_norm_backward({.x = elements(x),
                                                  .weight = elements(weight),
                                                  .inv_rms = elements<const float>(call.inputs[kInvRms]),
                                                  .dy = elements(call.inputs.back()),
                                                  .dsum = adds ? elements(call.inputs[kDsum]) : nullptr,
                                                  .dx = elements(call.outputs[0]),
                                                  .dweight = elements<float>(call.outputs[1]),
                                                  .parts = static_cast<float*>(call.scratch.data),
                                                  .rows = x.shape.num_rows(),
                                                  .hidden = x.shape.back(),
                                                  .dtype = x.dtype,
                                                  .weight_dtype = weight.dtype},
                                                 stream_of(call)));
      },
      parts * request.inputs[kWeight].fixed(0) * static_cast<int64_t>(sizeof(float)));
}

Verdict can_add_and_normalize(const KernelRequest& request) {
  return Requirements(request)
      .dtype("a", request.inputs[0], kActivationDTypes)
      .same_dtype("b", request.inputs[1], "a", request.inputs[0])
      .dtype("weight", request.inputs[2], kActivationDTypes)
      .require(request.inputs[2].rank() == 1, "there is a weight for each group")
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
                                     .inv_rms = call.outputs.size() > 2 ? elements<float>(call.outputs[2]) : nullptr,
                                     .rows = a.shape.num_rows(),
                                     .hidden = a.shape.back(),
                                     .eps = eps,
                                     .dtype = a.dtype,
                                     .weight_dtype = weight.dtype},
                                    stream_of(call)));
  });
}

// The norm of x, or of a + b, whose rows are rounded to 8 bits as the separate ops would round them.
template <bool kAdds>
Verdict can_normalize_and_quantize(const KernelRequest& request) {
  constexpr size_t kNormWeight = kAdds ? 2 : 1, kRounded = kAdds ? 1 : 0;
  const Encoding* to = request.attrs.get<RmsNormQuantizeAttrs>().to;
  const TensorType &x = request.inputs[0], &weight = request.inputs[kNormWeight];
  Requirements requirements(request, {}, {kRounded});
  requirements.dtype("x", x, kActivationDTypes)
      .dtype("weight", weight, kActivationDTypes)
      .require(weight.rank() == 1, "there is a weight for each group")
      .require(to == &RowEncoding::fp8_e4m3() || to == &Int8Chunks::instance(),
               fmt::format("rounds to fp8_e4m3 or int8_chunks; {} is wanted", to->name()))
      .require(weight.fixed(0) % 8 == 0, "rows have to be a multiple of 8")
      .at_most("hidden", weight.fixed(0), kMostQuantizedNormColumns);
  if (kAdds) requirements.same_dtype("b", request.inputs[1], "a", x).same_dtype("sum", request.outputs[0], "a", x);
  return requirements.verdict();
}

template <bool kAdds>
PlanPtr prepare_norm_quantize(const KernelRequest& request, Context&) {
  return make_plan([eps = request.attrs.get<RmsNormQuantizeAttrs>().norm.eps](const KernelCall& call) {
    const TensorView &x = call.inputs[0], &weight = call.inputs[kAdds ? 2 : 1], &y = call.outputs[kAdds ? 1 : 0];
    const bool chunks = y.encoding == &Int8Chunks::instance();
    EADEM_CUDA_CALL(launch_rms_norm({.x = elements(x),
                                     .add = kAdds ? elements(call.inputs[1]) : nullptr,
                                     .sum = kAdds ? elements(call.outputs[0]) : nullptr,
                                     .weight = elements(weight),
                                     .y = nullptr,
                                     .inv_rms = nullptr,
                                     .rows = x.shape.num_rows(),
                                     .hidden = x.shape.back(),
                                     .eps = eps,
                                     .dtype = x.dtype,
                                     .weight_dtype = weight.dtype,
                                     .codes = chunks ? nullptr : static_cast<uint8_t*>(y.plane(0)),
                                     .scales = chunks ? nullptr : static_cast<float*>(y.plane(1)),
                                     .chunks = chunks ? int8_chunk_planes(y) : Int8ChunkPlanes{}},
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
constexpr Kernel kRmsNormForward = in_forward(kRmsNorm);
constexpr Kernel kRmsNormBackward{.name = "cuda_rows",
                                  .pass = Pass::backward,
                                  .can_handle = can_differentiate,
                                  .prepare = prepare_rms_norm_backward,
                                  .alignment_bytes = 32};
constexpr Kernel kAddRmsNorm{.name = "cuda_rows",
                             .pass = Pass::inference,
                             .can_handle = can_add_and_normalize,
                             .prepare = prepare_add_rms_norm,
                             .alignment_bytes = 32};
constexpr Kernel kAddRmsNormForward = in_forward(kAddRmsNorm);
template <bool kAdds>
constexpr Kernel kNormQuantize{.name = "cuda_rows",
                               .pass = Pass::inference,
                               .can_handle = can_normalize_and_quantize<kAdds>,
                               .prepare = prepare_norm_quantize<kAdds>,
                               .alignment_bytes = 32};
constexpr Kernel kSoftmax{"cuda_rows", Pass::inference, can_softmax, prepare_nothing<run_softmax>};

}  // namespace

KernelList rms_norm_kernels() { return {&kRmsNorm, &kRmsNormForward, &kRmsNormBackward}; }
KernelList add_rms_norm_kernels() { return {&kAddRmsNorm, &kAddRmsNormForward, &kRmsNormBackward}; }
KernelList rms_norm_quantize_kernels() { return {&kNormQuantize<false>}; }
KernelList add_rms_norm_quantize_kernels() { return {&kNormQuantize<true>}; }
KernelList softmax_kernels() { return {&kSoftmax}; }

}  // namespace eadem::kernels::cuda
