// SPDX-License-Identifier: Apache-2.0
//
// A test of cuBLASLt's algorithms for a problem, on random operands: whether their bits are those expected, and how
// long they take.
#pragma once

#include <optional>

#include "eadem/kernels/cuda/cuda_device.h"

namespace eadem::kernels::cuda {

class ProductTest {
 public:
  // Allocates bytes_of(problem, rows) and a little more. Throws OutOfMemory.
  ProductTest(CudaDevice& device, const CudaMatmulProblem& problem, int64_t rows);
  static int64_t bytes_of(const CudaMatmulProblem& problem, int64_t rows);

  // The call whose y, zeros before, receives the bits that are expected.
  const CudaMatmulCall& expected() const { return expected_call_; }
  // Returns the time of `product` in microseconds if it gives these bits, or nothing if any bit differs.
  std::optional<double> time(CudaMatmul::Product product);
  // The mean of three times.
  double microseconds(FunctionRef<void()> run);

 private:
  CudaDevice& device_;
  Buffer x_, weight_, bias_, x_scales_, weight_scales_, expected_, y_, count_;
  Buffer flushed_;  // few rows read a weight that no cache has
  int64_t y_bytes_;
  CudaMatmulCall expected_call_, call_;
};

// The plan of a gradient, or of a product of codes with one scale. For exactly `rows` rows it has the fastest of the
// algorithms that give the bits of the library's first choice; for other numbers of rows, for small products, and where
// a test would take more than half of the free memory, it has that first choice. So bits do not depend on times. Throws
// as CudaMatmul::plan.
const CudaMatmul::Plan& fastest_plan(CudaDevice& device, const CudaMatmulProblem& problem, int64_t rows);

}  // namespace eadem::kernels::cuda
