// SPDX-License-Identifier: Apache-2.0
//
// Matrix products through cuBLASLt: y = x weight^T (+ bias) (+ residual), all row-major.
//
// Descriptors and the algorithm of a problem are made at its first use and kept, so that later calls neither
// allocate nor search. The problem does not include the number of rows: the algorithm is chosen once, for
// kHeuristicRows rows, without split-K, and serves every number of rows, so that a row's bits do not depend on the rows
// beside it.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "eadem/core/dtype.h"
#include "eadem/core/tensor.h"

namespace eadem {

struct CudaMatmulProblem {
  int64_t in = 0;
  int64_t out = 0;
  DType operands = DType::f32;  // of x and weight: f32 (computed in f32, never TF32), bf16 or f16 (f32 accumulation)
  DType result = DType::f32;    // of y, bias and residual
  bool bias = false;
  friend bool operator==(const CudaMatmulProblem&, const CudaMatmulProblem&) = default;
};

struct CudaMatmulCall {
  const void* x = nullptr;         // [rows, in]
  const void* weight = nullptr;    // [out, in]
  const void* bias = nullptr;      // [out], or null
  const void* residual = nullptr;  // [rows, out], or null
  void* y = nullptr;               // [rows, out]; may be `residual`
  int64_t rows = 0;
};

class CudaMatmul {
 public:
  // Takes the workspace that algorithms may use.
  explicit CudaMatmul(Buffer workspace);
  ~CudaMatmul();

  // A row of x and weight is a multiple of kAlignment bytes. x, weight and bias begin at multiples of kAlignment bytes,
  // y and residual at multiples of row_alignment. Throws DeviceError.
  void run(const CudaMatmulProblem& problem, const CudaMatmulCall& call, cudaStream_t stream);

  static constexpr int64_t kHeuristicRows = 64;
  static constexpr int64_t kAlignment = 16;

  // The alignment, up to kAlignment, that every row of `width` elements has in a matrix that begins at a multiple of
  // kAlignment.
  static constexpr int64_t row_alignment(int64_t width, DType dtype) {
    int64_t alignment = kAlignment;
    while (width * static_cast<int64_t>(dtype_size(dtype)) % alignment != 0) alignment /= 2;
    return alignment;
  }

 private:
  struct Plan;

  Plan& plan_for(const CudaMatmulProblem& problem);

  Buffer workspace_;
  cublasLtHandle_t handle_ = nullptr;
  std::vector<std::unique_ptr<Plan>> plans_;  // a handful per model: searched in order
};

}  // namespace eadem
