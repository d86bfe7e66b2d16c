// SPDX-License-Identifier: Apache-2.0
//
// cuda_fp8_tensor of linear_cross_entropy: the loss of an LM head whose products multiply 8-bit floats with one scale
// each, in chunks of rows.
//
//   all passes   logits = x weight^T               e4m3, e4m3, to f32
//   backward     dx = dlogits weight               e5m2, e4m3
//                dweight += dlogits^T x            e5m2, e4m3, added in f32
//
// A row of logits is read once: its loss and the codes of its gradient are made in one sweep. Another kernel turns the
// codes of a chunk for dweight, whose operands lie along the rows (fp8_tensor.cc). Turned codes are kept for several
// chunks, a byte for each logit, so that dweight is read and written once for all of them.
#include <algorithm>

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/linear/fp8_tensor.h"
#include "eadem/kernels/cuda/linear/logit_chunks.h"
#include "eadem/kernels/cuda/linear/product_test.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/training/cross_entropy.h"

namespace eadem::kernels::cuda {

namespace {

struct HeadPort {
  enum Input { x, weight, labels, lse, dloss };
  enum Output { dx, dweight, loss };
};

// The encoding of x and the weight; null if the weight has another.
const Fp8TensorEncoding* encoding_of_head(const KernelRequest& request) {
  const Fp8TensorEncoding* weight = Fp8TensorEncoding::of(request.inputs[HeadPort::weight].encoding);
  return weight != nullptr && weight->kind() == Fp8TensorEncoding::Kind::e4m3 ? weight : nullptr;
}

Requirements head_requirements(const KernelRequest& request) {
  constexpr int64_t kMultiple = Fp8TensorEncoding::kRowMultiple;
  const TensorType &x = request.inputs[HeadPort::x], &weight = request.inputs[HeadPort::weight];
  const MatmulInput input = request.attrs.get<LinearCrossEntropyAttrs>().matmul_input;
  Requirements requirements(request, {HeadPort::x, HeadPort::weight});
  requirements.hopper()
      .require(encoding_of_head(request) != nullptr,
               fmt::format("takes a weight in e4m3 with one scale; it is {}", to_string(weight)))
      .require(x.encoding == nullptr || x.encoding == weight.encoding,
               fmt::format("x is {}; the weight is {}", to_string(x), to_string(weight)))
      .dtype("x", x, kActivationDTypes)
      .dtype("labels", request.inputs[HeadPort::labels], {DType::i32})
      .require(input == MatmulInput::int8,
               fmt::format("rounds operands to 8-bit floats; matmul_input is {}", matmul_input_name(input)))
      .at_most("the vocabulary", weight.fixed(0), kMaxSampleVocab)
      .require(weight.fixed(0) % kMultiple == 0 && weight.fixed(1) % kMultiple == 0,
               fmt::format("sides of the weight have to be multiples of {} (it is {})", kMultiple, to_string(weight)));
  return requirements;
}

Estimate head_estimate() {
  constexpr double kShare = 2.0;  // of the bf16 rate, by the nominal rates
  return {.flops_share = kShare, .reason = "chunks of rows, 8-bit floats"};
}

Verdict can_lose_in_8_bits(const KernelRequest& request) { return head_requirements(request).verdict(head_estimate()); }

Verdict can_differentiate_in_8_bits(const KernelRequest& request) {
  return head_requirements(request)
      .require(request.attrs.get<LinearCrossEntropyAttrs>().dlogits_in_e5m2, "multiplies gradients of logits in e5m2")
      .dtype("dloss", request.inputs[HeadPort::dloss], {DType::f32})
      .dtype("dx", request.outputs[HeadPort::dx], kActivationDTypes)
      .dtype("dweight", request.outputs[HeadPort::dweight], {DType::f32})
      .verdict(head_estimate());
}

const Encoding* wanted_by_head(const KernelRequest& request, int input) {
  return input == HeadPort::x ? encoding_of_head(request) : nullptr;
}

const uint8_t* codes_of(const TensorView& encoded) { return static_cast<const uint8_t*>(encoded.plane(0)); }
const uint8_t* transposed_codes_of(const TensorView& encoded) { return static_cast<const uint8_t*>(encoded.plane(1)); }
const float* scale_of_codes(const TensorView& encoded) { return static_cast<const float*>(encoded.plane(2)); }

// The product that makes the logits of a chunk, at the beginning of scratch.
struct HeadLogits {
  HeadLogits(CudaDevice& device, const KernelRequest& request)
      : vocab(request.inputs[HeadPort::weight].fixed(0)),
        hidden(request.inputs[HeadPort::weight].fixed(1)),
        most_rows(logit_chunk_rows(vocab, request.inputs[HeadPort::x].dim(0).bind(request.bounds))),
        plan(&fastest_plan(device, {.in = hidden, .out = vocab, .result = DType::f32, .e4m3 = true, .one_scale = true},
                           most_rows)) {}

  int64_t bytes() const { return scratch_multiple(most_rows * vocab * static_cast<int64_t>(sizeof(float))); }

  void make(const KernelCall& call, int64_t row, int64_t rows) const {
    const TensorView &x = call.inputs[HeadPort::x], &weight = call.inputs[HeadPort::weight];
    cuda_device(call).matmul().run(*plan,
                                   {.x = codes_of(x) + row * hidden,
                                    .weight = codes_of(weight),
                                    .y = call.scratch.data,
                                    .rows = rows,
                                    .x_scales = scale_of_codes(x),
                                    .weight_scales = scale_of_codes(weight)},
                                   stream_of(call));
  }
  // Rows of the logits with their labels.
  CrossEntropyParams rows_of(const KernelCall& call, int64_t row, int64_t rows) const {
    return {.logits = call.scratch.data,
            .labels = elements<const int32_t>(call.inputs[HeadPort::labels]) + row,
            .rows = rows,
            .vocab = vocab,
            .dtype = DType::f32};
  }

  int64_t vocab, hidden, most_rows;
  const CudaMatmul::Plan* plan;
};

PlanPtr prepare_loss_in_8_bits(const KernelRequest& request, Context& context) {
  const HeadLogits logits(static_cast<CudaDevice&>(context.device), request);
  return make_plan(
      [logits](const KernelCall& call) {
        const int64_t tokens = call.inputs[HeadPort::x].shape[0];
        for (int64_t row = 0; row < tokens; row += logits.most_rows) {
          const int64_t rows = std::min(logits.most_rows, tokens - row);
          logits.make(call, row, rows);
          CrossEntropyParams loss = logits.rows_of(call, row, rows);
          loss.loss = elements<float>(call.outputs[0]) + row;
          loss.lse = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) + row : nullptr;
          EADEM_CUDA_CALL(launch_cross_entropy(loss, stream_of(call)));
        }
      },
      logits.bytes());
}

// The products of the backward pass. Scratch holds the logits of a chunk, the codes of their gradient, the transposed
// codes of a group of chunks, and the scale of all codes.
struct HeadGradients {
  HeadGradients(CudaDevice& device, const KernelRequest& request)
      : logits(device, request),
        group_rows(rows_of_group(logits, request.inputs[HeadPort::x].dim(0).bind(request.bounds))),
        codes_begin(logits.bytes()),
        transposed_begin(codes_begin + scratch_multiple(logits.most_rows * logits.vocab)),
        scale_begin(transposed_begin + scratch_multiple(group_rows * logits.vocab)) {
    // dx is a product of dlogits with the transposed weight.
    if (const TensorType& type = request.outputs[HeadPort::dx]; !is_unconnected(type))
      dx = &fastest_plan(device,
                         {.in = logits.vocab,
                          .out = logits.hidden,
                          .result = type.dtype,
                          .e4m3 = true,
                          .one_scale = true,
                          .x_is_e5m2 = true},
                         logits.most_rows);
    if (!is_unconnected(request.outputs[HeadPort::dweight]))
      dweight = &fastest_plan(device,
                              {.in = logits.hidden,
                               .out = logits.vocab,
                               .result = DType::f32,
                               .form = MatmulForm::weight_gradient,
                               .e4m3 = true,
                               .one_scale = true,
                               .x_is_e5m2 = true},
                              group_rows);
  }

  // Whole chunks whose codes are 2 GB at most, and one at least; padded if it is all rows.
  static int64_t rows_of_group(const HeadLogits& logits, int64_t tokens) {
    constexpr int64_t kMostCodes = int64_t{1} << 31;
    const int64_t chunks = std::max<int64_t>(kMostCodes / (logits.most_rows * logits.vocab), 1);
    return Fp8TensorEncoding::padded_rows(std::min(chunks * logits.most_rows, std::max<int64_t>(tokens, 1)));
  }

  int64_t scratch_bytes() const { return scale_begin + scratch_multiple(sizeof(float)); }

  void run(const KernelCall& call) const {
    CudaDevice& device = cuda_device(call);
    const TensorView &x = call.inputs[HeadPort::x], &weight = call.inputs[HeadPort::weight];
    const int64_t tokens = x.shape[0];
    auto* scratch = static_cast<uint8_t*>(call.scratch.data);
    uint8_t *codes = scratch + codes_begin, *transposed = scratch + transposed_begin;
    auto* scale = reinterpret_cast<float*>(scratch + scale_begin);
    const auto* dloss = elements<const float>(call.inputs[HeadPort::dloss]);
    auto* loss = call.outputs.size() > HeadPort::loss ? elements<float>(call.outputs[HeadPort::loss]) : nullptr;
    const TensorView& dx_view = call.outputs[HeadPort::dx];
    auto* dx_rows = static_cast<std::byte*>(elements(dx_view));

    EADEM_CUDA_CALL(launch_e5m2_scale({.x = dloss, .size = tokens, .scale = scale}, device.stream()));
    void* const dweight_sum = elements(call.outputs[HeadPort::dweight]);
    for (int64_t group = 0; group < tokens; group += group_rows) {
      const int64_t group_end = std::min(group + group_rows, tokens),
                    pitch = Fp8TensorEncoding::padded_rows(group_end - group);
      for (int64_t row = group; row < group_end; row += logits.most_rows) {
        const int64_t rows = std::min(logits.most_rows, group_end - row);
        logits.make(call, row, rows);
        // A forward pass, if there was one, has left lse; it is made again, with the same bits.
        CrossEntropyParams lost = logits.rows_of(call, row, rows);
        lost.loss = loss == nullptr ? nullptr : loss + row;
        lost.dloss = dloss + row;
        EADEM_CUDA_CALL(launch_cross_entropy_codes({.loss = lost, .scale = scale, .codes = codes}, device.stream()));
        if (dx_rows != nullptr)
          device.matmul().run(*dx,
                              {.x = codes,
                               .weight = transposed_codes_of(weight),
                               .y = dx_rows + row * logits.hidden * static_cast<int64_t>(dtype_size(dx_view.dtype)),
                               .rows = rows,
                               .x_scales = scale,
                               .weight_scales = scale_of_codes(weight)},
                              device.stream());
        if (dweight_sum != nullptr)
          EADEM_CUDA_CALL(launch_transpose_codes({.codes = codes,
                                                  .transposed = transposed + row - group,
                                                  .rows = rows,
                                                  .columns = logits.vocab,
                                                  .pitch = pitch},
                                                 device.stream()));
      }
      // Added rows are zeros.
      if (dweight_sum != nullptr)
        device.matmul().run(*dweight,
                            {.x = transposed,
                             .weight = transposed_codes_of(x) + group,
                             .y = dweight_sum,
                             .rows = pitch,
                             .x_scales = scale,
                             .weight_scales = scale_of_codes(x),
                             .weight_pitch = Fp8TensorEncoding::padded_rows(tokens)},
                            device.stream());
    }
  }

  HeadLogits logits;
  int64_t group_rows, codes_begin, transposed_begin, scale_begin;
  const CudaMatmul::Plan *dx = nullptr, *dweight = nullptr;
};

PlanPtr prepare_gradients_in_8_bits(const KernelRequest& request, Context& context) {
  const HeadGradients gradients(static_cast<CudaDevice&>(context.device), request);
  return make_plan([gradients](const KernelCall& call) { gradients.run(call); }, gradients.scratch_bytes());
}

constexpr Kernel kHeadInference{.name = "cuda_fp8_tensor",
                                .pass = Pass::inference,
                                .can_handle = can_lose_in_8_bits,
                                .prepare = prepare_loss_in_8_bits,
                                .alignment_bytes = CudaMatmul::kAlignment,
                                .wanted_encoding = wanted_by_head};
constexpr Kernel kHeadForward = in_forward(kHeadInference);
constexpr Kernel kHeadBackward{.name = "cuda_fp8_tensor",
                               .pass = Pass::backward,
                               .can_handle = can_differentiate_in_8_bits,
                               .prepare = prepare_gradients_in_8_bits,
                               .alignment_bytes = CudaMatmul::kAlignment,
                               .wanted_encoding = wanted_by_head};

}  // namespace

KernelList fp8_cross_entropy_kernels() { return {&kHeadInference, &kHeadForward, &kHeadBackward}; }

}  // namespace eadem::kernels::cuda
