// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/linear/exact_product.h"

#include <algorithm>
#include <optional>
#include <type_traits>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/cuda/linear/fragment_blocks.h"
#include "eadem/kernels/cuda/linear/int8_chunks.h"
#include "eadem/kernels/cuda/linear/product_test.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

bool takes_stream(const KernelRequest& request) {
  const TensorType &x = request.inputs[0], &weight = request.inputs[1];
  return runs_hopper_kernels(request) && x.dtype == DType::bf16 &&
         (weight.dtype == DType::bf16 || weight.encoding != nullptr) && weight.fixed(1) % kLinearStreamMultiple == 0;
}

std::string stream_requirement(const KernelRequest& request) {
  return fmt::format("x has to be bf16 (is {}), weight bf16 or encoded (is {}), its rows a multiple of {} (are {})",
                     dtype_name(request.inputs[0].dtype),
                     WeightType(request.inputs[1].dtype, request.inputs[1].encoding).name(), kLinearStreamMultiple,
                     request.inputs[1].fixed(1));
}

bool takes_fp8_stream(const KernelRequest& request) {
  const TensorType &x = request.inputs[0], &weight = request.inputs[1];
  const Fp8Encoding* fp8 = Fp8Encoding::of(weight.encoding);
  return runs_hopper_kernels(request) &&
         (x.encoding == &RowEncoding::fp8_e4m3() || (x.encoding == nullptr && x.dtype == DType::bf16)) &&
         fp8 != nullptr && fp8->format().kind == Fp8Format::Kind::e4m3 && weight.fixed(1) % kFp8Multiple == 0;
}

IntegerCodes integer_codes(const KernelRequest& request) {
  const TensorType &x = request.inputs[0], &weight = request.inputs[1];
  const FragmentBlocks* blocks = FragmentBlocks::of(weight.encoding);
  const bool runs = runs_hopper_kernels(request) &&
                    (x.encoding == &Int8Chunks::instance() || (x.encoding == nullptr && x.dtype == DType::bf16)) &&
                    blocks != nullptr && weight.fixed(1) % kIntegerChunk == 0;
  return runs ? integer_codes_of(blocks->layout()) : IntegerCodes::none;
}

CudaMatmulProblem matmul_problem(const KernelRequest& request) {
  const TensorType &x = request.inputs[0], &weight = request.inputs[1];
  const bool bias = request.op == "linear" && !is_unconnected(request.inputs[2]);
  return {.in = weight.fixed(1),
          .out = weight.fixed(0),
          .operands = x.dtype,
          .result = request.outputs[0].dtype,
          .bias = bias,
          .e4m3 = x.encoding != nullptr};
}

CudaMatmulCall matmul_call(const LinearParams& p) {
  return {.x = p.x,
          .weight = p.weight,
          .bias = p.bias,
          .y = p.y,
          .rows = p.tokens,
          .x_scales = p.x_scales,
          .weight_scales = p.weight_scales};
}

const FragmentLayout* layout_of(const TensorType& weight) {
  return weight.encoding == nullptr ? nullptr : &FragmentBlocks::of(weight.encoding)->layout();
}

void stream_products(CudaDevice& device, const LinearStreamParams& p,
                     const std::array<const FragmentLayout*, kMostLinearStreamParts>& layouts,
                     const FragmentLayout* up_layout) {
  PackedStreamParams packed{.product = p, .layouts = {}, .up_layout = {}};
  for (size_t i = 0; i < layouts.size(); ++i)
    if (layouts[i] != nullptr) packed.layouts[i] = *layouts[i];
  if (up_layout != nullptr) packed.up_layout = *up_layout;
  if (p.x_chunks.sums != nullptr) {
    EADEM_CUDA_CALL(p.tokens > kIntegerStreamMaxTokens ? launch_integer_tiles(packed, device.stream())
                                                       : launch_integer_stream(packed, device.stream()));
    return;
  }
  if (p.x_scales != nullptr) {
    EADEM_CUDA_CALL(p.tokens > kLinearStreamMaxTokens ? launch_fp8_tiles(p, device.stream())
                                                      : launch_fp8_stream(p, device.stream()));
    return;
  }
  if (layouts[0] == nullptr) {
    EADEM_CUDA_CALL(launch_linear_stream(p, device.stream()));
    return;
  }
  EADEM_CUDA_CALL(launch_packed_stream(packed, device.stream()));
}

namespace {

// Computes any number of rows by the kernels of this backend. `layout`: of the weight, or null.
void compute_rows(CudaDevice& device, const LinearParams& p, const FragmentLayout* layout) {
  const auto row_of = [](auto* matrix, int64_t row, int64_t row_bytes) -> decltype(matrix) {
    if (matrix == nullptr) return nullptr;
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(matrix)>>, const char, char>;
    return static_cast<Byte*>(matrix) + row * row_bytes;
  };
  const auto size_of = [](DType dtype) { return static_cast<int64_t>(dtype_size(dtype)); };
  const bool is_rounded = p.x_scales != nullptr;
  const int64_t at_once = is_rounded ? p.tokens : kLinearStreamMaxTokens;
  for (int64_t row = 0; row < p.tokens; row += at_once)
    stream_products(
        device,
        {.x = row_of(p.x, row, p.in * size_of(p.x_dtype)),
         .up = nullptr,
         .parts = {{p.weight, p.bias, row_of(p.y, row, p.out * size_of(p.y_dtype)), p.out, p.weight_scales}},
         .tokens = std::min(at_once, p.tokens - row),
         .in = p.in,
         .multiprocessors = device.multiprocessors(),
         .y_dtype = p.y_dtype,
         .activation = {},
         .x_scales = p.x_scales,
         .scaling = p.weight_scaling,
         .x_chunks = p.x_chunks},
        {layout});
}

// As many rows as a test has memory for, and `rows` at most.
int64_t tested_rows_of(const CudaMatmulProblem& problem, int64_t rows) {
  constexpr int64_t kTestBytes = int64_t{512} << 20;
  const int64_t row_bytes = ProductTest::bytes_of(problem, 1) - ProductTest::bytes_of(problem, 0);
  return std::clamp<int64_t>(kTestBytes / row_bytes, kLinearStreamMaxTokens, rows);
}

LinearParams linear_params(const CudaMatmulProblem& problem, const CudaMatmulCall& call) {
  return {.x = call.x,
          .weight = call.weight,
          .bias = call.bias,
          .y = call.y,
          .tokens = call.rows,
          .in = problem.in,
          .out = problem.out,
          .x_dtype = problem.operands,
          .weight_dtype = problem.operands,
          .bias_dtype = problem.result,
          .y_dtype = problem.result,
          .x_scales = call.x_scales,
          .weight_scales = call.weight_scales};
}

// A decoded weight may take this much, which the head of a large vocabulary exceeds; it has few rows to compute.
constexpr int64_t kMostDecodedBytes = int64_t{512} << 20;
int64_t ceil_multiple(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Returns the scaling of a weight; `rows` if it has no scales.
WeightScaling scaling_of(const Encoding* encoding) {
  const Fp8Encoding* fp8 = Fp8Encoding::of(encoding);
  if (fp8 == nullptr || fp8->format().block_rows == 1) return WeightScaling::rows;
  return fp8->format().block_rows == 0 ? WeightScaling::matrix : WeightScaling::blocks;
}

}  // namespace

ExactProduct::ExactProduct(CudaDevice& device, const KernelRequest& request)
    : device_(&device),
      integers_(request.inputs[0].encoding == &Int8Chunks::instance()),
      // Beside codes of 8-bit floats, such weights are not packed.
      layout_(request.inputs[0].encoding != nullptr && !integers_ ? nullptr : layout_of(request.inputs[1])),
      scaling_(scaling_of(request.inputs[1].encoding)) {
  const CudaMatmulProblem problem = matmul_problem(request);
  const int64_t row_bytes = problem.out * static_cast<int64_t>(dtype_size(problem.result));
  const int64_t most_rows = request.inputs[0].dim(0).bind(request.bounds);
  const int64_t most_streamed = layout_ == nullptr ? kLinearStreamLeast : kLinearStreamMaxTokens;
  if (integers_ || most_rows <= most_streamed || row_bytes % CudaMatmul::kAlignment != 0) return;
  if (problem.e4m3 && scaling_ != WeightScaling::rows) return;  // the library has no such scales
  if (layout_ != nullptr) {
    const int64_t decoded_bytes = ceil_multiple(problem.out * problem.in * 2, kScratchAlignment);
    if (decoded_bytes > kMostDecodedBytes) return;
    scratch_bytes_ = decoded_bytes;
  }
  std::optional<ProductTest> test;
  int64_t tested_rows = 0;
  double own = 0;  // microseconds of the kernels of this backend, where they are an alternative
  plans_ = device.matmul().exact_plans(
      problem, most_rows,
      [&](int64_t rows, CudaMatmul::Product product) {
        if (rows != tested_rows) {
          test.reset();  // frees its memory first
          test.emplace(device, problem, tested_rows_of(problem, rows));
          tested_rows = rows;
          const LinearParams params = linear_params(problem, test->expected());
          compute_rows(device, params, nullptr);
          if (rows <= kLinearStreamMaxTokens) own = test->microseconds([&] { compute_rows(device, params, nullptr); });
        }
        const std::optional<double> time = test->time(product);
        if (rows > kLinearStreamMaxTokens || !time) return time;
        return *time < own ? std::optional(*time - own) : std::nullopt;
      },
      device.stream());
  if (most_streamed < kLinearStreamMaxTokens && plans_[0] != nullptr)
    saved_microseconds_ = -CudaMatmul::tested_microseconds(*plans_[0]);
}

void ExactProduct::run(LinearParams p, void* scratch) const {
  p.weight_scaling = scaling_;
  const bool may_stream = p.tokens <= (layout_ == nullptr ? kLinearStreamLeast : kLinearStreamMaxTokens);
  const CudaMatmul::Plan* plan = may_stream ? nullptr : plans_[CudaMatmul::range_of(p.tokens)];
  if (plan == nullptr) {
    compute_rows(*device_, p, layout_);
    return;
  }
  if (layout_ != nullptr) {
    EADEM_CUDA_CALL(launch_unpack_blocks(*layout_, p.weight, scratch, p.out, p.in, device_->stream()));
    p.weight = scratch;
  }
  device_->matmul().run(*plan, matmul_call(p), device_->stream());
}

}  // namespace eadem::kernels::cuda
