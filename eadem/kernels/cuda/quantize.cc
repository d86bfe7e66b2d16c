// SPDX-License-Identifier: Apache-2.0
//
// quantize, for products of 8-bit codes:
//   cuda_rows    rows of activations to RowEncoding::fp8_e4m3
//   cuda_chunks  rows of activations to Int8Chunks, for K-quants
//   cuda_blocks  weights to Fp8Encoding's e4m3 with scales for blocks of 128 x 128
//   cuda_tensor  rows and weights to Fp8TensorEncoding, current or delayed; also what gated activations make of two
//                matrices, and their gradients
#include "eadem/kernels/quantize.h"

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/fp8_tensor.h"
#include "eadem/kernels/cuda/linear/int8_chunks.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/fusions.h"

namespace eadem::kernels::cuda {

namespace {

Verdict can_quantize(const KernelRequest& request) {
  const Encoding* to = request.attrs.get<QuantizeAttrs>().to;
  return Requirements(request, {}, {0})
      .dtype("x", request.inputs[0], kActivationDTypes)
      .require(to == &RowEncoding::fp8_e4m3(), fmt::format("rounds to fp8_e4m3; {} is wanted", to->name()))
      .require(request.inputs[0].fixed(1) % 8 == 0, "rows have to be a multiple of 8")
      .verdict({.reason = "a block for each row"});
}

Verdict can_quantize_blocks(const KernelRequest& request) {
  const Encoding* to = request.attrs.get<QuantizeAttrs>().to;
  const Fp8Encoding* fp8 = Fp8Encoding::of(to);
  return Requirements(request, {}, {0})
      .dtype("x", request.inputs[0], kActivationDTypes)
      .require(fp8 != nullptr && fp8->format() == Fp8Format{Fp8Format::Kind::e4m3, kFp8Multiple, kFp8Multiple},
               fmt::format("rounds to fp8_e4m3_block128; {} is wanted", to->name()))
      .require(request.inputs[0].fixed(1) % 8 == 0, "rows have to be a multiple of 8")
      .verdict({.reason = "a block of threads for each block"});
}

Verdict can_quantize_chunks(const KernelRequest& request) {
  const Encoding* to = request.attrs.get<QuantizeAttrs>().to;
  return Requirements(request, {}, {0})
      .dtype("x", request.inputs[0], kActivationDTypes)
      .require(to == &Int8Chunks::instance(), fmt::format("rounds to int8_chunks; {} is wanted", to->name()))
      .verdict({.reason = "a warp for each chunk"});
}

void run_quantize_chunks(const KernelCall& call) {
  const TensorView& x = call.inputs[0];
  EADEM_CUDA_CALL(launch_quantize_chunks({.x = elements(x), .to = int8_chunk_planes(call.outputs[0]), .dtype = x.dtype},
                                         stream_of(call)));
}

Verdict can_quantize_tensor(const KernelRequest& request) {
  const Encoding* to = request.attrs.get<QuantizeAttrs>().to;
  return Requirements(request, {}, {0})
      .hopper()
      .dtype("x", request.inputs[0], kActivationDTypes)
      .require(Fp8TensorEncoding::of(to) != nullptr,
               fmt::format("rounds to 8-bit floats with one scale; {} is wanted", to->name()))
      .require(request.inputs[0].fixed(1) % Fp8TensorEncoding::kRowMultiple == 0,
               fmt::format("rows have to be a multiple of {}", Fp8TensorEncoding::kRowMultiple))
      .require(request.inputs[0].over(MeshAxis::tp).kind != Sharding::Kind::sharded,
               "ranks of tp have a part each, and would have to tell each other their largest magnitudes")
      .verdict({.reason = "a block of threads for each 128 x 128 values"});
}

// A forward pass leaves what the backward pass reads: the transposed codes, and what it saw. `parts`: number `index` of
// scratch.
TensorCodes tensor_codes(const KernelCall& call, const TensorView& codes, const TensorView& scaling, bool is_forward,
                         int index = 0) {
  float* const state = elements<float>(scaling);
  return {.codes = static_cast<uint8_t*>(codes.plane(0)),
          .transposed = is_forward ? static_cast<uint8_t*>(codes.plane(1)) : nullptr,
          .scale = static_cast<float*>(codes.plane(2)),
          .scaling = state,
          .records = is_forward && state != nullptr,
          .parts = static_cast<uint32_t*>(call.scratch.data) + index * kTensorParts};
}
constexpr int64_t kPartsBytes = kTensorParts * static_cast<int64_t>(sizeof(uint32_t));

PlanPtr prepare_quantize_tensor(const KernelRequest& request, Context&) {
  return make_plan(
      [&to = *Fp8TensorEncoding::of(request.attrs.get<QuantizeAttrs>().to),
       is_forward = request.pass == Pass::forward](const KernelCall& call) {
        const TensorView& x = call.inputs[0];
        EADEM_CUDA_CALL(launch_quantize_tensor(
            {.x = elements(x),
             .to = tensor_codes(call, call.outputs[0], to.is_delayed() ? call.inputs[1] : TensorView(), is_forward),
             .rows = x.shape[0],
             .columns = x.shape[1],
             .dtype = x.dtype,
             .is_e5m2 = to.kind() == Fp8Format::Kind::e5m2},
            stream_of(call)));
      },
      kPartsBytes);
}

// gated_activation_quantize and gated_gradients_quantize, whose inputs are `num_values` matrices and states.
Verdict can_make_gated_codes(const KernelRequest& request, size_t num_values) {
  const Encoding* to = request.attrs.get<GatedQuantizeAttrs>().to;
  const TensorType& gate = request.inputs[0];
  Requirements requirements(request, {}, {0, num_values == 3 ? size_t{2} : size_t{0}});
  requirements.hopper().dtype("gate", gate, kActivationDTypes);
  for (size_t i = 1; i < num_values; ++i) requirements.same_dtype("an input", request.inputs[i], "gate", gate);
  return requirements
      .require(Fp8TensorEncoding::of(to) != nullptr,
               fmt::format("rounds to 8-bit floats with one scale; {} is wanted", to->name()))
      .require(gate.fixed(1) % Fp8TensorEncoding::kRowMultiple == 0,
               fmt::format("rows have to be a multiple of {}", Fp8TensorEncoding::kRowMultiple))
      .require(gate.over(MeshAxis::tp).kind != Sharding::Kind::sharded,
               "ranks of tp have a part each, and would have to tell each other their largest magnitudes")
      .verdict({.reason = "a block of threads for each 128 x 128 values"});
}
Verdict can_gate_in_codes(const KernelRequest& request) { return can_make_gated_codes(request, 2); }
Verdict can_make_gradients_in_codes(const KernelRequest& request) { return can_make_gated_codes(request, 3); }

GatedCodesParams gated_codes_params(const KernelCall& call, const GatedQuantizeAttrs& attrs) {
  const TensorView& gate = call.inputs[0];
  return {.gate = elements(gate),
          .up = elements(call.inputs[1]),
          .dy = nullptr,
          .to = {},
          .rows = gate.shape[0],
          .columns = gate.shape[1],
          .dtype = gate.dtype,
          .kind = attrs.kind,
          .is_e5m2 = static_cast<const Fp8TensorEncoding*>(attrs.to)->kind() == Fp8Format::Kind::e5m2};
}

PlanPtr prepare_gate_in_codes(const KernelRequest& request, Context&) {
  return make_plan(
      [attrs = request.attrs.get<GatedQuantizeAttrs>()](const KernelCall& call) {
        GatedCodesParams params = gated_codes_params(call, attrs);
        params.to[0] = tensor_codes(call, call.outputs[0], call.inputs[2], true);
        EADEM_CUDA_CALL(launch_gated_codes(params, stream_of(call)));
      },
      kPartsBytes);
}

PlanPtr prepare_gradients_in_codes(const KernelRequest& request, Context&) {
  return make_plan(
      [attrs = request.attrs.get<GatedQuantizeAttrs>()](const KernelCall& call) {
        GatedCodesParams params = gated_codes_params(call, attrs);
        params.dy = elements(call.inputs[2]);
        for (const int i : {0, 1})
          params.to[i] = tensor_codes(call, call.outputs[static_cast<size_t>(2 * i)],
                                      call.inputs[static_cast<size_t>(3 + i)], true, i);
        EADEM_CUDA_CALL(launch_gated_codes(params, stream_of(call)));
      },
      2 * kPartsBytes);
}

template <typename Params, cudaError_t (*kLaunch)(const Params& params, cudaStream_t stream)>
void run_quantize(const KernelCall& call) {
  const TensorView &x = call.inputs[0], &y = call.outputs[0];
  EADEM_CUDA_CALL(kLaunch({.x = elements(x),
                           .codes = static_cast<uint8_t*>(y.plane(0)),
                           .scales = static_cast<float*>(y.plane(1)),
                           .rows = x.shape[0],
                           .columns = x.shape[1],
                           .dtype = x.dtype},
                          stream_of(call)));
}

constexpr Kernel kQuantizeBlocks{.name = "cuda_blocks",
                                 .pass = Pass::inference,
                                 .can_handle = can_quantize_blocks,
                                 .prepare = prepare_nothing<run_quantize<QuantizeBlocksParams, launch_quantize_blocks>>,
                                 .alignment_bytes = 32};
constexpr Kernel kQuantize{.name = "cuda_rows",
                           .pass = Pass::inference,
                           .can_handle = can_quantize,
                           .prepare = prepare_nothing<run_quantize<QuantizeRowsParams, launch_quantize_rows>>,
                           .alignment_bytes = 32};
constexpr Kernel kQuantizeChunks{.name = "cuda_chunks",
                                 .pass = Pass::inference,
                                 .can_handle = can_quantize_chunks,
                                 .prepare = prepare_nothing<run_quantize_chunks>,
                                 .alignment_bytes = 32};

constexpr Kernel kQuantizeTensor{.name = "cuda_tensor",
                                 .pass = Pass::inference,
                                 .can_handle = can_quantize_tensor,
                                 .prepare = prepare_quantize_tensor,
                                 .alignment_bytes = 32};

constexpr Kernel kGateInCodes{.name = "cuda_tensor",
                              .pass = Pass::forward,
                              .can_handle = can_gate_in_codes,
                              .prepare = prepare_gate_in_codes,
                              .alignment_bytes = 32};
constexpr Kernel kGradientsInCodes{.name = "cuda_tensor",
                                   .pass = Pass::forward,
                                   .can_handle = can_make_gradients_in_codes,
                                   .prepare = prepare_gradients_in_codes,
                                   .alignment_bytes = 32};
constexpr Kernel kQuantizeTensorForward = in_forward(kQuantizeTensor);
constexpr Kernel kQuantizeForward = in_forward(kQuantize), kQuantizeBlocksForward = in_forward(kQuantizeBlocks);

}  // namespace

KernelList gated_activation_quantize_kernels() { return {&kGateInCodes}; }
KernelList gated_gradients_quantize_kernels() { return {&kGradientsInCodes}; }
KernelList quantize_kernels() {
  return {&kQuantize,       &kQuantizeForward, &kQuantizeBlocks,       &kQuantizeBlocksForward,
          &kQuantizeChunks, &kQuantizeTensor,  &kQuantizeTensorForward};
}

}  // namespace eadem::kernels::cuda
