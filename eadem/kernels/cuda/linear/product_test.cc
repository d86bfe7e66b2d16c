// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/linear/product_test.h"

#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

struct Sizes {  // in elements
  int64_t x, weight, y;
};
Sizes sizes_of(const CudaMatmulProblem& problem, int64_t rows) {
  const int64_t weight = problem.out * problem.in;
  switch (problem.form) {
    case MatmulForm::product: return {rows * problem.in, weight, rows * problem.out};
    case MatmulForm::input_gradient: return {rows * problem.out, weight, rows * problem.in};
    case MatmulForm::weight_gradient: break;
  }
  return {rows * problem.out, rows * problem.in, weight};
}

int64_t operand_bytes(const CudaMatmulProblem& problem) {
  return problem.e4m3 ? 1 : static_cast<int64_t>(dtype_size(problem.operands));
}

Buffer random_values(CudaDevice& device, DType dtype, int64_t size, uint64_t seed) {
  Buffer buffer = device.allocate(size * static_cast<int64_t>(dtype_size(dtype)));
  EADEM_CUDA_CALL(launch_fill_test_values(buffer.data(), dtype, size, seed, device.stream()));
  return buffer;
}

Buffer random_operand(CudaDevice& device, const CudaMatmulProblem& problem, bool is_e5m2, int64_t size, uint64_t seed) {
  if (!problem.e4m3) return random_values(device, problem.operands, size, seed);
  Buffer buffer = device.allocate(size);
  EADEM_CUDA_CALL(launch_fill_test_codes(static_cast<uint8_t*>(buffer.data()), size,
                                         is_e5m2 ? kE5m2TestCodes : kE4m3TestCodes, seed, device.stream()));
  return buffer;
}

}  // namespace

int64_t ProductTest::bytes_of(const CudaMatmulProblem& problem, int64_t rows) {
  const Sizes sizes = sizes_of(problem, rows);
  return (sizes.x + sizes.weight) * operand_bytes(problem) +
         2 * sizes.y * static_cast<int64_t>(dtype_size(problem.result));
}

ProductTest::ProductTest(CudaDevice& device, const CudaMatmulProblem& problem, int64_t rows) : device_(device) {
  const Sizes sizes = sizes_of(problem, rows);
  y_bytes_ = sizes.y * static_cast<int64_t>(dtype_size(problem.result));
  x_ = random_operand(device, problem, problem.x_is_e5m2, sizes.x, 1);
  weight_ = random_operand(device, problem, false, sizes.weight, 2);
  if (problem.bias) bias_ = random_values(device, problem.result, problem.out, 3);
  if (problem.e4m3) {
    x_scales_ = random_values(device, DType::f32, problem.one_scale ? 1 : rows, 4);
    weight_scales_ = random_values(device, DType::f32, problem.one_scale ? 1 : problem.out, 5);
  }
  expected_ = device.allocate(y_bytes_), y_ = device.allocate(y_bytes_);
  device.fill_zero(expected_.data(), y_bytes_);
  count_ = device.allocate(sizeof(uint32_t));
  if (rows <= kLinearStreamMaxTokens) flushed_ = device.allocate(int64_t{128} << 20);  // more than any L2 cache
  expected_call_ = {.x = x_.data(),
                    .weight = weight_.data(),
                    .bias = bias_.data(),
                    .y = expected_.data(),
                    .rows = rows,
                    .x_scales = static_cast<const float*>(x_scales_.data()),
                    .weight_scales = static_cast<const float*>(weight_scales_.data())};
  call_ = expected_call_;
  call_.y = y_.data();
}

std::optional<double> ProductTest::time(CudaMatmul::Product product) {
  device_.fill_zero(count_.data(), sizeof(uint32_t));
  device_.fill_zero(y_.data(), y_bytes_);
  product(call_);
  EADEM_CUDA_CALL(launch_count_unequal(expected_.data(), y_.data(), y_bytes_, static_cast<uint32_t*>(count_.data()),
                                       device_.stream()));
  uint32_t unequal = 0;
  device_.copy_to_host(&unequal, count_.data(), sizeof(unequal));
  if (unequal != 0) return std::nullopt;
  return microseconds([&] { product(call_); });
}

double ProductTest::microseconds(FunctionRef<void()> run) {
  constexpr int kRepeat = 3;
  const auto make_event = [] {
    cudaEvent_t event = nullptr;
    EADEM_CUDA_CALL(cudaEventCreate(&event));
    return CudaHandle<cudaEvent_t, cudaEventDestroy>(event);
  };
  const auto begin = make_event(), end = make_event();
  double total = 0;
  for (int i = 0; i < kRepeat; ++i) {
    if (flushed_.data() != nullptr) device_.fill_zero(flushed_.data(), flushed_.size_bytes());
    EADEM_CUDA_CALL(cudaEventRecord(begin.get(), device_.stream()));
    run();
    EADEM_CUDA_CALL(cudaEventRecord(end.get(), device_.stream()));
    EADEM_CUDA_CALL(cudaEventSynchronize(end.get()));
    float milliseconds = 0.0f;
    EADEM_CUDA_CALL(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
    total += 1e3 * static_cast<double>(milliseconds);
  }
  return total / kRepeat;
}

const CudaMatmul::Plan& fastest_plan(CudaDevice& device, const CudaMatmulProblem& problem, int64_t rows) {
  // A test takes a few milliseconds, which is not saved where a product takes microseconds. It leaves half of the free
  // memory to others.
  constexpr double kLeastTerms = 1 << 30;
  const double terms = static_cast<double>(rows) * static_cast<double>(problem.in) * static_cast<double>(problem.out);
  if (terms < kLeastTerms || ProductTest::bytes_of(problem, rows) > device.memory().free_bytes / 2)
    return device.matmul().plan(problem, rows);
  std::optional<ProductTest> test;
  return device.matmul().fastest_plan(
      problem, rows,
      [&](int64_t, CudaMatmul::Product product) {
        if (!test) {
          test.emplace(device, problem, rows);
          product(test->expected());
        }
        return test->time(product);
      },
      device.stream());
}

}  // namespace eadem::kernels::cuda
