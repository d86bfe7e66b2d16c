// SPDX-License-Identifier: Apache-2.0
//
// Matrix products through cuBLASLt: y = x weight^T (+ bias), all row-major.
//
// Descriptors and the algorithm of a problem are made at its first use and kept, so that later calls neither allocate
// nor search. No algorithm splits k. There are two ways to choose an algorithm:
//   run        chooses once, for kHeuristicRows rows, and uses that for every number of rows.
//   run_exact  chooses for each range of rows (kRowRanges) the fastest of those whose bits the caller finds equal to
//              its own kernel's.
// With either, a row's bits do not depend on the rows beside it.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <vector>

#include "eadem/core/dtype.h"
#include "eadem/core/function_ref.h"
#include "eadem/core/tensor.h"

namespace eadem {

struct CudaMatmulProblem {
  int64_t in = 0;
  int64_t out = 0;
  DType operands = DType::f32;  // dtype of x and weight: f32 (never as TF32), bf16 or f16; sums are f32
  DType result = DType::f32;    // dtype of y and bias
  bool bias = false;
  friend bool operator==(const CudaMatmulProblem&, const CudaMatmulProblem&) = default;
};

struct CudaMatmulCall {
  const void* x = nullptr;       // [rows, in]
  const void* weight = nullptr;  // [out, in]
  const void* bias = nullptr;    // [out], or null
  void* y = nullptr;             // [rows, out]
  int64_t rows = 0;
};

class CudaMatmul {
 public:
  // `workspace` is the memory that algorithms may use.
  explicit CudaMatmul(Buffer workspace);
  ~CudaMatmul();

  // Computes one product. Rows of x and weight are a multiple of kAlignment bytes. x, weight and bias begin at
  // multiples of kAlignment bytes, y at a multiple of row_alignment. Throws DeviceError.
  void run(const CudaMatmulProblem& problem, const CudaMatmulCall& call, cudaStream_t stream);

  // The caller's test of an algorithm. It calls `product` any number of times and returns the time of one product of
  // `rows` rows in microseconds, or nothing if any bit differs from the caller's own kernel.
  using Product = FunctionRef<void(const CudaMatmulCall& call)>;
  using Test = FunctionRef<std::optional<double>(int64_t rows, Product product)>;
  // Computes the product if an algorithm passes `test`, which is called only at the first call for a range of rows. If
  // none passes, returns false without computing anything. Alignment and errors are as for `run`.
  bool run_exact(const CudaMatmulProblem& problem, const CudaMatmulCall& call, Test test, cudaStream_t stream);

  static constexpr int64_t kHeuristicRows = 64;
  // Upper ends of the ranges of rows of run_exact. More rows than the last one belong to the last range.
  static constexpr int64_t kRowRanges[] = {128, 256, 512, 1024, 2048, 4096, 8192};
  static constexpr int64_t kAlignment = 16;

  // The alignment, at most kAlignment, of every row of `width` elements in a matrix that begins at a multiple of
  // kAlignment.
  static constexpr int64_t row_alignment(int64_t width, DType dtype) {
    int64_t alignment = kAlignment;
    while (width * static_cast<int64_t>(dtype_size(dtype)) % alignment != 0) alignment /= 2;
    return alignment;
  }

 private:
  struct Plan;

  // Returns the plan of a problem for `rows` rows (0: any number of rows). A new plan has no algorithm yet.
  Plan& plan_for(const CudaMatmulProblem& problem, int64_t rows);
  std::vector<cublasLtMatmulAlgo_t> algorithms(Plan& plan, int64_t rows);
  void launch(Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const CudaMatmulCall& call, cudaStream_t stream);

  Buffer workspace_;
  cublasLtHandle_t handle_ = nullptr;
  std::vector<std::unique_ptr<Plan>> plans_;  // a handful per model: searched in order
};

}  // namespace eadem
