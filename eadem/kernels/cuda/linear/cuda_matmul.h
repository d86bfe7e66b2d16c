// SPDX-License-Identifier: Apache-2.0
//
// Matrix products through cuBLASLt, all row-major: a linear layer and its gradients.
//
// The descriptors and the algorithm of a problem are a plan, which is made when a program compiles and kept for later
// programs; running it neither allocates nor searches. No algorithm splits k. There are two ways to choose one:
//   plan         chooses once, for kHeuristicRows or the rows that the caller names, and uses that for every number.
//                (Gradients of other numbers of rows may take another one, as may products whose operands have one
//                scale: their bits depend on the step anyway.)
//   exact_plans  chooses for each range of rows (kRowRanges) the fastest of those whose bits the caller finds equal to
//                its own kernel's. fastest_plan does so for one number of rows, where `plan` may take any algorithm.
// With either, a row's bits do not depend on the rows beside it.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "eadem/core/dtype.h"
#include "eadem/core/function_ref.h"
#include "eadem/core/tensor.h"

namespace eadem {

// x is the operand whose rows are counted, `weight` the other one; names are those of the product.
enum class MatmulForm : uint8_t {
  product,          // y [rows, out] = x [rows, in] weight [out, in]^T (+ bias)
  input_gradient,   // y [rows, in] = x [rows, out] weight [out, in]:  x is dy
  weight_gradient,  // y [out, in] += x [rows, out]^T weight [rows, in]:  x is dy, weight is x
};

struct CudaMatmulProblem {
  int64_t in = 0;
  int64_t out = 0;
  DType operands = DType::f32;  // dtype of x and weight: f32 (never as TF32), bf16 or f16; sums are f32
  DType result = DType::f32;    // dtype of y and bias
  bool bias = false;
  MatmulForm form = MatmulForm::product;
  // x and weight are codes of e4m3, each row with an f32 scale; `operands` does not count. Only of products.
  bool e4m3 = false;
  // With e4m3: each has one f32 scale instead. Then also of weight gradients, whose operands come transposed: x
  // [out, rows], weight [in, rows], with rows a multiple of 16. The codes of x may be e5m2.
  bool one_scale = false;
  bool x_is_e5m2 = false;
  friend bool operator==(const CudaMatmulProblem&, const CudaMatmulProblem&) = default;
};

struct CudaMatmulCall {  // shapes: MatmulForm
  const void* x = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;  // [out], or null
  void* y = nullptr;
  int64_t rows = 0;
  const float* x_scales = nullptr;       // [rows], with e4m3; [1] with one_scale
  const float* weight_scales = nullptr;  // [out], with e4m3; [1] with one_scale
  // The pitch in elements of a `weight` that comes transposed, a multiple of 16; 0 means `rows`.
  int64_t weight_pitch = 0;
};

class CudaMatmul {
 public:
  // `workspace` is the memory that algorithms may use.
  explicit CudaMatmul(Buffer workspace);
  ~CudaMatmul();

  static constexpr int64_t kHeuristicRows = 64;
  // Upper ends of the ranges of rows of exact plans. More rows than the last one belong to the last range.
  static constexpr std::array<int64_t, 8> kRowRanges = {64, 128, 256, 512, 1024, 2048, 4096, 8192};
  static size_t range_of(int64_t rows);
  static constexpr int64_t kAlignment = 16;

  // A problem with an algorithm. It lives as long as this object.
  struct Plan;
  // The plan of a problem for any number of rows, chosen for `rows` of them; searched for once. Throws DeviceError.
  const Plan& plan(const CudaMatmulProblem& problem, int64_t rows = kHeuristicRows);

  // The caller's test of an algorithm. It calls `product` any number of times, on the device's stream, and returns
  // nothing if any bit differs from what the caller wants, or if a kernel of the caller's is an alternative and is as
  // fast. Else it returns the time of one product of `rows` rows in microseconds, less that of the alternative.
  using Product = FunctionRef<void(const CudaMatmulCall& call)>;
  using Test = FunctionRef<std::optional<double>(int64_t rows, Product product)>;
  // The plan of each range of rows, null where no algorithm passed the test.
  using ExactPlans = std::array<const Plan*, kRowRanges.size()>;
  // Returns the plan of a gradient, or of a product with one scale, whose algorithm for exactly `rows` rows is the
  // fastest that passes the test; other numbers of rows take the library's first choice, which is tested first. Throws
  // DeviceError.
  const Plan& fastest_plan(const CudaMatmulProblem& problem, int64_t rows, Test test, cudaStream_t stream);
  // The plans of the ranges that `most_rows` rows reach into. `test` is called for ranges that no earlier call asked
  // for. Throws DeviceError.
  ExactPlans exact_plans(const CudaMatmulProblem& problem, int64_t most_rows, Test test, cudaStream_t stream);
  // The microseconds that the caller's test returned for the algorithm of an exact plan.
  static double tested_microseconds(const Plan& plan);

  // Computes one product. Rows of x and weight are a multiple of kAlignment bytes. x, weight and bias begin at
  // multiples of kAlignment bytes, y at a multiple of row_alignment. Throws DeviceError.
  void run(const Plan& plan, const CudaMatmulCall& call, cudaStream_t stream);

  // The alignment, at most kAlignment, of every row of `width` elements in a matrix that begins at a multiple of
  // kAlignment.
  static constexpr int64_t row_alignment(int64_t width, DType dtype) {
    int64_t alignment = kAlignment;
    while (width * static_cast<int64_t>(dtype_size(dtype)) % alignment != 0) alignment /= 2;
    return alignment;
  }

 private:
  // Returns the plan of a problem for `rows` rows (0: any number of rows). A new plan has no algorithm yet.
  Plan& plan_for(const CudaMatmulProblem& problem, int64_t rows);
  // Sets the number of rows in a plan's layouts.
  static void set_rows(const Plan& plan, int64_t rows);
  std::vector<cublasLtMatmulAlgo_t> algorithms(Plan& plan, int64_t rows);
  // Chooses by the library's order; returns what it offered.
  std::vector<cublasLtMatmulAlgo_t> choose_first(Plan& plan, int64_t rows);
  // Returns the fastest of the algorithms that pass the test, and notes its time in the plan; nothing if none passes.
  std::optional<cublasLtMatmulAlgo_t> fastest_of(Plan& plan, std::vector<cublasLtMatmulAlgo_t> offered, int64_t rows,
                                                 Test test, cudaStream_t stream);
  // Whether the algorithm computes the problem for `rows` rows.
  bool takes(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, int64_t rows) const;
  void launch(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const CudaMatmulCall& call, cudaStream_t stream);

  Buffer workspace_;
  cublasLtHandle_t handle_ = nullptr;
  std::vector<std::unique_ptr<Plan>> plans_;  // a handful per model: searched in order
};

}  // namespace eadem
