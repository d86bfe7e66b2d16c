// SPDX-License-Identifier: Apache-2.0
//
// linear and the fusion linear_gated_activation, whose results have the bits of the separate ops. A row's bits do not
// depend on the rows beside it:
//   cuda_mma_chain  bf16 x bf16 on Hopper. Up to 64 rows stream the weight (linear_stream.cu); more rows go through
//                   those algorithms of cuBLASLt that gave the same bits in a test at their first use, else through
//                   linear_stream again, 64 rows at a time
//   cublaslt        other shapes and f32, by one algorithm for any number of rows
//   cuda_tiles      any mix of element types, f32 FMA
#include "eadem/kernels/linear.h"

#include <algorithm>
#include <optional>

#include "eadem/kernels/backends.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/fusions.h"

namespace eadem::kernels::cuda {

namespace {

// The shares of the device's bf16 rate that f32 products reach in cuBLASLt (67 of 989 TFLOP/s on an H100) and in the
// tiles.
constexpr double kF32Share = 0.08;
constexpr double kTilesShare = 0.01;

double product_flops(const KernelRequest& request) {
  return 2.0 * elements_of(request, request.inputs[0]) * static_cast<double>(request.inputs[1].fixed(0));
}

Requirements common(const KernelRequest& request) {
  return Requirements(request)
      .dtype("x", request.inputs[0], kActivationDTypes)
      .dtype("weight", request.inputs[1], kStorageDTypes)
      .dtype("bias", request.inputs[2], kStorageDTypes)
      .dtype("y", request.outputs[0], kActivationDTypes)
      .require(request.inputs[1].fixed(1) > 0, "the sum has no terms");
}

// Whether linear_stream accepts the request. cuda_mma_chain and cublaslt use this to divide the products between them.
bool takes_stream(const KernelRequest& request) {
  const TensorType &x = request.inputs[0], &weight = request.inputs[1];
  return request.device->type() == DeviceType::cuda &&
         static_cast<const CudaDevice*>(request.device)->compute_capability() >= 90 && x.dtype == DType::bf16 &&
         weight.dtype == DType::bf16 && weight.fixed(1) % kLinearStreamMultiple == 0;
}

Verdict can_use_mma_chain(const KernelRequest& request) {
  return common(request)
      .require(takes_stream(request),
               fmt::format("x and weight have to be bf16, rows of weight a multiple of {}, the device Hopper or newer",
                           kLinearStreamMultiple))
      .same_dtype("bias", request.inputs[2], "y", request.outputs[0])
      .at_cost(product_flops(request));
}

Verdict can_use_cublaslt(const KernelRequest& request) {
  const TensorType &x = request.inputs[0], &weight = request.inputs[1], &y = request.outputs[0];
  const double share = x.dtype == DType::f32 ? kF32Share : 1.0;
  const int64_t row_bytes = weight.fixed(1) * static_cast<int64_t>(dtype_size(weight.dtype));
  return common(request)
      .same_dtype("weight", weight, "x", x)
      .same_dtype("bias", request.inputs[2], "y", y)  // the epilogue adds bias before the only rounding
      .require(x.dtype != DType::f32 || y.dtype == DType::f32, "x is f32 and y is bf16; cuBLASLt gives f32 from f32")
      .require(row_bytes % CudaMatmul::kAlignment == 0,
               fmt::format("a row of weight is {} bytes, not a multiple of {}", row_bytes, CudaMatmul::kAlignment))
      .require(!takes_stream(request), "cuda_mma_chain uses it where it has the same bits")
      .at_cost(product_flops(request) / share);
}

// Tiles never cost less than cuBLASLt: weights are read once per 64 rows, and a partial tile is computed whole.
Verdict can_use_tiles(const KernelRequest& request) {
  Verdict verdict = common(request).at_cost(product_flops(request) / kTilesShare);
  verdict.cost_us *= 2.0;
  return verdict;
}

LinearParams linear_params(const KernelCall& call) {
  const TensorView &x = call.inputs[0], &weight = call.inputs[1], &bias = call.inputs[2], &y = call.outputs[0];
  return {.x = elements(x),
          .weight = elements(weight),
          .bias = elements(bias),
          .y = elements(y),
          .tokens = x.shape[0],
          .in = x.shape[1],
          .out = weight.shape[0],
          .x_dtype = x.dtype,
          .weight_dtype = weight.dtype,
          .bias_dtype = bias.dtype,
          .y_dtype = y.dtype};
}

CudaMatmulProblem matmul_problem(const LinearParams& p) {
  return {.in = p.in, .out = p.out, .operands = p.x_dtype, .result = p.y_dtype, .bias = p.bias != nullptr};
}

void run_cublaslt(const KernelCall& call) {
  const LinearParams p = linear_params(call);
  CudaDevice& device = cuda_device(call);
  device.matmul().run(matmul_problem(p), {.x = p.x, .weight = p.weight, .bias = p.bias, .y = p.y, .rows = p.tokens},
                      device.stream());
}

void run_tiles(const KernelCall& call) { EADEM_CUDA_CALL(launch_linear_tiles(linear_params(call), stream_of(call))); }

// Computes the mma.sync chain for any number of rows, 64 at a time.
void stream_rows(CudaDevice& device, const LinearParams& p) {
  const auto row_of = [](auto* matrix, int64_t row, int64_t width, DType dtype) -> decltype(matrix) {
    if (matrix == nullptr) return nullptr;
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(matrix)>>, const char, char>;
    return static_cast<Byte*>(matrix) + row * width * static_cast<int64_t>(dtype_size(dtype));
  };
  for (int64_t row = 0; row < p.tokens; row += kLinearStreamMaxTokens)
    EADEM_CUDA_CALL(launch_linear_stream({.x = row_of(p.x, row, p.in, p.x_dtype),
                                          .weight = p.weight,
                                          .up = nullptr,
                                          .bias = p.bias,
                                          .y = row_of(p.y, row, p.out, p.y_dtype),
                                          .tokens = std::min(kLinearStreamMaxTokens, p.tokens - row),
                                          .in = p.in,
                                          .out = p.out,
                                          .multiprocessors = device.multiprocessors(),
                                          .y_dtype = p.y_dtype,
                                          .activation = {}},
                                         device.stream()));
}

// Returns the time of `product` in microseconds if it gives the bits of linear_stream for this weight, or nothing if
// any bit differs. There are `rows` rows of random test values, or as many as fit kTestBytes.
std::optional<double> tested_product(CudaDevice& device, const LinearParams& p, int64_t rows,
                                     CudaMatmul::Product product) {
  constexpr int64_t kTestBytes = int64_t{512} << 20;
  const int64_t x_row = p.in * 2, y_row = p.out * static_cast<int64_t>(dtype_size(p.y_dtype));
  rows = std::clamp<int64_t>(kTestBytes / (x_row + 2 * y_row), kLinearStreamMaxTokens, rows);
  const cudaStream_t stream = device.stream();
  const Buffer x = device.allocate(rows * x_row);
  const Buffer expected = device.allocate(rows * y_row), y = device.allocate(rows * y_row);
  const Buffer count = device.allocate(sizeof(uint32_t));
  EADEM_CUDA_CALL(launch_fill_test_values(x.data(), p.x_dtype, rows * p.in, 1, stream));
  device.fill_zero(count.data(), sizeof(uint32_t));
  device.fill_zero(y.data(), rows * y_row);

  LinearParams test = p;
  test.x = x.data(), test.y = expected.data(), test.tokens = rows;
  stream_rows(device, test);
  const CudaMatmulCall call{.x = test.x, .weight = p.weight, .bias = p.bias, .y = y.data(), .rows = rows};
  product(call);
  EADEM_CUDA_CALL(
      launch_count_unequal(expected.data(), y.data(), rows * y_row, static_cast<uint32_t*>(count.data()), stream));
  uint32_t unequal = 0;
  device.copy_to_host(&unequal, count.data(), sizeof(unequal));
  if (unequal != 0) return std::nullopt;

  constexpr int kRepeat = 3;
  const auto make_event = [] {
    cudaEvent_t event = nullptr;
    EADEM_CUDA_CALL(cudaEventCreate(&event));
    return CudaHandle<cudaEvent_t, cudaEventDestroy>(event);
  };
  const auto begin = make_event(), end = make_event();
  EADEM_CUDA_CALL(cudaEventRecord(begin.get(), stream));
  for (int i = 0; i < kRepeat; ++i) product(call);
  EADEM_CUDA_CALL(cudaEventRecord(end.get(), stream));
  EADEM_CUDA_CALL(cudaEventSynchronize(end.get()));
  float milliseconds = 0.0f;
  EADEM_CUDA_CALL(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
  return 1e3 * static_cast<double>(milliseconds) / kRepeat;
}

void multiply(CudaDevice& device, const LinearParams& p) {
  const int64_t row_bytes = p.out * static_cast<int64_t>(dtype_size(p.y_dtype));
  if (p.tokens > kLinearStreamMaxTokens && row_bytes % CudaMatmul::kAlignment == 0 &&
      device.matmul().run_exact(
          matmul_problem(p), {.x = p.x, .weight = p.weight, .bias = p.bias, .y = p.y, .rows = p.tokens},
          [&](int64_t rows, CudaMatmul::Product product) { return tested_product(device, p, rows, product); },
          device.stream()))
    return;
  stream_rows(device, p);
}

void run_mma_chain(const KernelCall& call) { multiply(cuda_device(call), linear_params(call)); }

// --- linear_gated_activation: few rows take one pass over both weights; more rows take two products and the
// activation.

Verdict can_gate(const KernelRequest& request) {
  const TensorType &x = request.inputs[0], &gate = request.inputs[1], &up = request.inputs[2];
  return Requirements(request)
      .dtype("y", request.outputs[0], {DType::bf16})
      .same_dtype("up_weight", up, "gate_weight", gate)
      .require(
          takes_stream(request),
          fmt::format("x and weights have to be bf16, rows of weights a multiple of {}, the device Hopper or newer",
                      kLinearStreamMultiple))
      .at_cost(4.0 * elements_of(request, x) * static_cast<double>(gate.fixed(0)));
}

int64_t gated_scratch_bytes(const KernelRequest& request) {
  const int64_t tokens = request.inputs[0].dim(0).bind(request.bounds);
  return tokens <= kLinearStreamMaxTokens ? 0 : tokens * request.inputs[1].fixed(0) * 2;
}

void run_gated(const KernelCall& call) {
  const TensorView &x = call.inputs[0], &gate = call.inputs[1], &up = call.inputs[2], &y = call.outputs[0];
  const auto& attrs = call.attrs.get<LinearGatedActivationAttrs>();
  CudaDevice& device = cuda_device(call);
  if (x.shape[0] <= kLinearStreamMaxTokens) {
    EADEM_CUDA_CALL(launch_linear_stream({.x = elements(x),
                                          .weight = elements(gate),
                                          .up = elements(up),
                                          .bias = nullptr,
                                          .y = elements(y),
                                          .tokens = x.shape[0],
                                          .in = x.shape[1],
                                          .out = gate.shape[0],
                                          .multiprocessors = device.multiprocessors(),
                                          .y_dtype = y.dtype,
                                          .activation = attrs.kind},
                                         device.stream()));
    return;
  }
  LinearParams p{.x = elements(x),
                 .weight = elements(gate),
                 .bias = nullptr,
                 .y = elements(y),
                 .tokens = x.shape[0],
                 .in = x.shape[1],
                 .out = gate.shape[0],
                 .x_dtype = x.dtype,
                 .weight_dtype = gate.dtype,
                 .bias_dtype = y.dtype,
                 .y_dtype = y.dtype};
  multiply(device, p);
  p.weight = elements(up), p.y = call.scratch.data;
  multiply(device, p);
  EADEM_CUDA_CALL(launch_gated_activation(
      {.a = elements(y), .b = call.scratch.data, .y = elements(y), .size = p.tokens * p.out, .dtype = y.dtype},
      attrs.kind, device.stream()));
}

constexpr Kernel kMmaChain{.name = "cuda_mma_chain",
                           .pass = Pass::inference,
                           .can_handle = can_use_mma_chain,
                           .run = run_mma_chain,
                           .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kCublasLt{.name = "cublaslt",
                           .pass = Pass::inference,
                           .can_handle = can_use_cublaslt,
                           .run = run_cublaslt,
                           .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kTiles{"cuda_tiles", Pass::inference, can_use_tiles, run_tiles};
constexpr Kernel kGated{.name = "cuda_mma_chain",
                        .pass = Pass::inference,
                        .can_handle = can_gate,
                        .run = run_gated,
                        .scratch_bytes = gated_scratch_bytes,
                        .alignment_bytes = CudaMatmul::kAlignment};

}  // namespace

KernelList linear_kernels() { return {&kMmaChain, &kCublasLt, &kTiles}; }
KernelList linear_gated_activation_kernels() { return {&kGated}; }

}  // namespace eadem::kernels::cuda
