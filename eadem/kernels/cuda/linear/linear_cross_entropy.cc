// SPDX-License-Identifier: Apache-2.0
//
// The loss of the LM head, in chunks of rows whose logits are stored for a moment only. Logits have the bits of linear,
// and losses those of cross_entropy; their gradient is rounded to the dtype of x before it is multiplied.
#include <optional>

#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/exact_product.h"
#include "eadem/kernels/cuda/linear/logit_chunks.h"
#include "eadem/kernels/cuda/linear/product_test.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/linear.h"
#include "eadem/kernels/training/cross_entropy.h"

namespace eadem::kernels::cuda {

namespace {

enum Input { kX, kWeight, kLabels, kLse, kDloss };
enum Output { kDx, kDweight, kLoss };

Requirements common(const KernelRequest& request) {
  const TensorType &x = request.inputs[kX], &weight = request.inputs[kWeight];
  const int64_t elements = CudaMatmul::kAlignment / static_cast<int64_t>(dtype_size(x.dtype));
  return Requirements(request)
      .dtype("x", x, kActivationDTypes)
      .same_dtype("weight", weight, "x", x)
      .dtype("labels", request.inputs[kLabels], {DType::i32})
      .at_most("the vocabulary", weight.fixed(0), kMaxSampleVocab)
      .require(weight.fixed(0) % elements == 0 && weight.fixed(1) % elements == 0,
               fmt::format("the weight is {} x {}, which are no multiples of {} bytes", weight.fixed(0),
                           weight.fixed(1), CudaMatmul::kAlignment));
}

Verdict can_lose(const KernelRequest& request) { return common(request).verdict({.reason = "chunks of rows"}); }

Verdict can_differentiate(const KernelRequest& request) {
  return common(request)
      .require(is_unconnected(request.inputs[kLse]) == (request.outputs.size() > kLoss),
               "either a forward pass has made lse, or the loss is made here")
      .dtype("dloss", request.inputs[kDloss], {DType::f32})
      .require(!request.attrs.get<LinearCrossEntropyAttrs>().dlogits_in_e5m2, kPlainGradients)
      .same_dtype("dx", request.outputs[kDx], "x", request.inputs[kX])
      .dtype("dweight", request.outputs[kDweight], {DType::f32})
      .verdict({.reason = "chunks of rows"});
}

// The logits of a chunk, by the product that linear would use.
class Logits {
 public:
  Logits(CudaDevice& device, const KernelRequest& request)
      : device_(&device),
        vocab_(request.inputs[kWeight].fixed(0)),
        hidden_(request.inputs[kWeight].fixed(1)),
        dtype_(request.inputs[kX].dtype),
        most_rows_(logit_chunk_rows(vocab_, request.inputs[kX].dim(0).bind(request.bounds))) {
    const TensorType inputs[] = {TensorType(dtype_, {most_rows_, hidden_}), request.inputs[kWeight],
                                 unconnected_port()};
    const TensorType outputs[] = {TensorType(DType::f32, {most_rows_, vocab_})};
    KernelRequest linear = request;
    linear.op = "linear";
    linear.inputs = inputs;
    linear.outputs = outputs;
    if (takes_stream(linear))
      exact_.emplace(device, linear);
    else
      plan_ = &device.matmul().plan(matmul_problem(linear));
  }

  int64_t most_rows() const { return most_rows_; }
  int64_t vocab() const { return vocab_; }
  int64_t hidden() const { return hidden_; }
  DType dtype() const { return dtype_; }
  int64_t bytes() const { return scratch_multiple(most_rows_ * vocab_ * static_cast<int64_t>(sizeof(float))); }
  const void* row_of(const void* x, int64_t row) const {
    return static_cast<const char*>(x) + row * hidden_ * static_cast<int64_t>(dtype_size(dtype_));
  }

  void make(const void* x, const void* weight, int64_t rows, float* logits) const {
    const LinearParams params{.x = x,
                              .weight = weight,
                              .bias = nullptr,
                              .y = logits,
                              .tokens = rows,
                              .in = hidden_,
                              .out = vocab_,
                              .x_dtype = dtype_,
                              .weight_dtype = dtype_,
                              .bias_dtype = DType::f32,
                              .y_dtype = DType::f32};
    if (exact_)
      exact_->run(params, nullptr);
    else
      device_->matmul().run(*plan_, matmul_call(params), device_->stream());
  }

 private:
  CudaDevice* device_;
  int64_t vocab_, hidden_;
  DType dtype_;
  int64_t most_rows_;
  std::optional<ExactProduct> exact_;
  const CudaMatmul::Plan* plan_ = nullptr;  // else; the one that linear's kernel "cublaslt" has
};

PlanPtr prepare_loss(const KernelRequest& request, Context& context) {
  const Logits product(static_cast<CudaDevice&>(context.device), request);
  return make_plan(
      [product](const KernelCall& call) {
        const TensorView& x = call.inputs[kX];
        const int32_t* labels = elements<const int32_t>(call.inputs[kLabels]);
        float* loss = elements<float>(call.outputs[0]);
        float* lse = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr;
        float* logits = static_cast<float*>(call.scratch.data);
        for (int64_t row = 0; row < x.shape[0]; row += product.most_rows()) {
          const int64_t rows = std::min(product.most_rows(), x.shape[0] - row);
          product.make(product.row_of(elements(x), row), elements(call.inputs[kWeight]), rows, logits);
          EADEM_CUDA_CALL(launch_cross_entropy({.logits = logits,
                                                .labels = labels + row,
                                                .loss = loss + row,
                                                .lse = lse == nullptr ? nullptr : lse + row,
                                                .rows = rows,
                                                .vocab = product.vocab(),
                                                .dtype = DType::f32},
                                               stream_of(call)));
        }
      },
      product.bytes());
}

// What the backward pass multiplies: the gradient of a chunk's logits with the weight, and with x.
struct Gradients {
  Gradients(CudaDevice& device, const KernelRequest& request) : logits(device, request) {
    CudaMatmulProblem problem{.in = logits.hidden(),
                              .out = logits.vocab(),
                              .operands = logits.dtype(),
                              .result = logits.dtype(),
                              .form = MatmulForm::input_gradient};
    if (!is_unconnected(request.outputs[kDx])) dx = &fastest_plan(device, problem, logits.most_rows());
    problem.result = DType::f32, problem.form = MatmulForm::weight_gradient;
    if (!is_unconnected(request.outputs[kDweight])) dweight = &fastest_plan(device, problem, logits.most_rows());
  }

  Logits logits;
  const CudaMatmul::Plan *dx = nullptr, *dweight = nullptr;
};

void run_gradients(const Gradients& gradients, const KernelCall& call) {
  const Logits& product = gradients.logits;
  CudaDevice& device = cuda_device(call);
  const TensorView& x = call.inputs[kX];
  const void* weight = elements(call.inputs[kWeight]);
  const int32_t* labels = elements<const int32_t>(call.inputs[kLabels]);
  const float *lse = elements<const float>(call.inputs[kLse]), *dloss = elements<const float>(call.inputs[kDloss]);
  void *dx = elements(call.outputs[kDx]), *dweight = elements(call.outputs[kDweight]);
  float* loss = call.outputs.size() > kLoss ? elements<float>(call.outputs[kLoss]) : nullptr;
  float* logits = static_cast<float*>(call.scratch.data);
  // In f32 the gradient of the logits overwrites them.
  void* dlogits = product.dtype() == DType::f32
                      ? call.scratch.data
                      : static_cast<void*>(static_cast<char*>(call.scratch.data) + product.bytes());
  for (int64_t row = 0; row < x.shape[0]; row += product.most_rows()) {
    const int64_t rows = std::min(product.most_rows(), x.shape[0] - row);
    const void* x_rows = product.row_of(elements(x), row);
    product.make(x_rows, weight, rows, logits);
    if (loss != nullptr)
      EADEM_CUDA_CALL(launch_cross_entropy({.logits = logits,
                                            .labels = labels + row,
                                            .loss = loss + row,
                                            .lse = nullptr,
                                            .rows = rows,
                                            .vocab = product.vocab(),
                                            .dtype = DType::f32,
                                            .dloss = dloss + row,
                                            .dlogits = dlogits,
                                            .result_dtype = product.dtype()},
                                           device.stream()));
    else
      EADEM_CUDA_CALL(launch_cross_entropy_backward({.logits = logits,
                                                     .labels = labels + row,
                                                     .lse = lse + row,
                                                     .dloss = dloss + row,
                                                     .dlogits = dlogits,
                                                     .rows = rows,
                                                     .vocab = product.vocab(),
                                                     .dtype = DType::f32,
                                                     .result_dtype = product.dtype()},
                                                    device.stream()));
    if (dx != nullptr)
      device.matmul().run(
          *gradients.dx,
          {.x = dlogits, .weight = weight, .y = const_cast<void*>(product.row_of(dx, row)), .rows = rows},
          device.stream());
    if (dweight != nullptr)
      device.matmul().run(*gradients.dweight, {.x = dlogits, .weight = x_rows, .y = dweight, .rows = rows},
                          device.stream());
  }
}

PlanPtr prepare_gradients(const KernelRequest& request, Context& context) {
  const Gradients gradients(static_cast<CudaDevice&>(context.device), request);
  const int64_t logits_bytes = gradients.logits.bytes();
  return make_plan(
      [gradients](const KernelCall& call) { run_gradients(gradients, call); },
      gradients.logits.dtype() == DType::f32 ? logits_bytes : logits_bytes + scratch_multiple(logits_bytes / 2));
}

constexpr Kernel kInference{.name = "cuda_row_chunks",
                            .pass = Pass::inference,
                            .can_handle = can_lose,
                            .prepare = prepare_loss,
                            .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kForward = in_forward(kInference);
constexpr Kernel kBackward{.name = "cuda_row_chunks",
                           .pass = Pass::backward,
                           .can_handle = can_differentiate,
                           .prepare = prepare_gradients,
                           .alignment_bytes = CudaMatmul::kAlignment};

}  // namespace

KernelList linear_cross_entropy_kernels() {
  KernelList kernels = {&kInference, &kForward, &kBackward};
  const KernelList more = fp8_cross_entropy_kernels();
  kernels.insert(kernels.end(), more.begin(), more.end());
  return kernels;
}

}  // namespace eadem::kernels::cuda
