// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/linear/cuda_matmul.h"

#include <algorithm>
#include <array>

#include "eadem/core/lookups.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/linear/cublas_lt.h"

namespace eadem {

namespace {

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::f32: return CUDA_R_32F;
    case DType::bf16: return CUDA_R_16BF;
    case DType::f16: return CUDA_R_16F;
    default: EADEM_UNREACHABLE("no cuBLASLt product of {}", dtype_name(dtype));
  }
}

cublasStatus_t destroy_desc(cublasLtMatmulDesc_t desc) { return cublas_lt().MatmulDescDestroy(desc); }
cublasStatus_t destroy_layout(cublasLtMatrixLayout_t layout) { return cublas_lt().MatrixLayoutDestroy(layout); }
cublasStatus_t destroy_preference(cublasLtMatmulPreference_t preference) {
  return cublas_lt().MatmulPreferenceDestroy(preference);
}
using MatmulDesc = CudaHandle<cublasLtMatmulDesc_t, destroy_desc>;
using MatrixLayout = CudaHandle<cublasLtMatrixLayout_t, destroy_layout>;
using Preference = CudaHandle<cublasLtMatmulPreference_t, destroy_preference>;

MatrixLayout make_layout(cudaDataType_t type, int64_t rows, int64_t cols) {  // column-major, dense
  cublasLtMatrixLayout_t layout = nullptr;
  EADEM_CUBLAS_CALL(
      cublas_lt().MatrixLayoutCreate(&layout, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), rows));
  return MatrixLayout(layout);
}

void set_pitch(const MatrixLayout& layout, int64_t pitch) {
  EADEM_CUBLAS_CALL(
      cublas_lt().MatrixLayoutSetAttribute(layout.get(), CUBLASLT_MATRIX_LAYOUT_LD, &pitch, sizeof(pitch)));
}

// Sets the number of rows of a dense matrix.
void set_height(const MatrixLayout& layout, int64_t rows) {
  const uint64_t value = static_cast<uint64_t>(rows);
  EADEM_CUBLAS_CALL(
      cublas_lt().MatrixLayoutSetAttribute(layout.get(), CUBLASLT_MATRIX_LAYOUT_ROWS, &value, sizeof(value)));
  set_pitch(layout, rows);
}

void set_columns(const MatrixLayout& layout, int64_t columns) {
  const uint64_t value = static_cast<uint64_t>(columns);
  EADEM_CUBLAS_CALL(
      cublas_lt().MatrixLayoutSetAttribute(layout.get(), CUBLASLT_MATRIX_LAYOUT_COLS, &value, sizeof(value)));
}

// 8-bit operands come with the terms of a sum beside each other.
bool is_transposed_gradient(const CudaMatmulProblem& problem) {
  return problem.form == MatmulForm::weight_gradient && problem.e4m3;
}

std::string_view operands_name(const CudaMatmulProblem& problem) {
  return problem.e4m3 ? "8-bit floats" : dtype_name(problem.operands);
}

// Whether one algorithm has to take every number of rows.
bool needs_one_algorithm(const CudaMatmulProblem& problem) {
  return problem.form == MatmulForm::product && !problem.one_scale;
}

// The width of a row of y.
int64_t y_width(const CudaMatmulProblem& problem) {
  return problem.form == MatmulForm::product ? problem.out : problem.in;
}

template <typename T>
void set(const MatmulDesc& desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  EADEM_CUBLAS_CALL(cublas_lt().MatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)));
}

template <typename T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  EADEM_CUBLAS_CALL(cublas_lt().MatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)));
}

template <typename T>
T get(const cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  T value{};
  size_t written = 0;
  EADEM_CUBLAS_CALL(cublas_lt().MatmulAlgoConfigGetAttribute(&algo, attribute, &value, sizeof(value), &written));
  return value;
}

void set_scales(const MatmulDesc& desc, const void* weight_scales, const void* x_scales) {
  set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, weight_scales);
  set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x_scales);
}

}  // namespace

// cuBLASLt is column-major. In its terms `weight` is [in, out], `x` is [in, rows] and y^T = weight^T x is [out, rows];
// the gradients are y^T = weight x, [in, rows], and y^T += weight x^T, [in, out]; from transposed operands that is
// y^T += weight^T x with weight [rows, in] and x [rows, out].
struct CudaMatmul::Plan {
  CudaMatmulProblem problem;
  int64_t rows = 0;  // upper end of the range of rows; 0: any number
  MatmulDesc desc;
  MatrixLayout weight, x, y;
  bool chosen = false;                       // an algorithm was searched for
  std::optional<cublasLtMatmulAlgo_t> algo;  // empty if none passed the test
  double tested_microseconds = 0;            // what the test returned for it
  // Gradients: the algorithm is the best for this number of rows, and the other one takes any.
  int64_t chosen_rows = 0;
  // The one that fastest_plan found for exactly chosen_rows. Its bits at other numbers of rows were not compared.
  std::optional<cublasLtMatmulAlgo_t> fastest;
  std::optional<cublasLtMatmulAlgo_t> any_rows;
};

CudaMatmul::CudaMatmul(Buffer workspace) : workspace_(std::move(workspace)) {
  EADEM_CUBLAS_CALL(cublas_lt().Create(&handle_));
}

CudaMatmul::~CudaMatmul() {
  plans_.clear();
  (void)cublas_lt().Destroy(handle_);
}

size_t CudaMatmul::range_of(int64_t rows) {
  size_t range = 0;
  while (range + 1 < kRowRanges.size() && rows > kRowRanges[range]) ++range;
  return range;
}

CudaMatmul::Plan& CudaMatmul::plan_for(const CudaMatmulProblem& problem, int64_t rows) {
  count_lookup();
  for (const std::unique_ptr<Plan>& plan : plans_)
    if (plan->problem == problem && plan->rows == rows) return *plan;

  auto plan = std::make_unique<Plan>();
  plan->problem = problem;
  plan->rows = rows;
  const bool is_product = problem.form == MatmulForm::product;
  const bool is_weight_gradient = problem.form == MatmulForm::weight_gradient;
  const bool is_transposed = is_transposed_gradient(problem);
  // CUBLAS_COMPUTE_32F never rounds f32 operands to TF32.
  cublasLtMatmulDesc_t desc = nullptr;
  EADEM_CUBLAS_CALL(cublas_lt().MatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  plan->desc.reset(desc);
  set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, is_product || is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, is_weight_gradient && !is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (problem.bias) {
    set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(problem.result));
  }
  if (problem.one_scale) set_scales(plan->desc, workspace_.data(), workspace_.data());  // the search wants some
#if CUBLAS_VERSION >= 120900
  if (problem.e4m3 && !problem.one_scale) {
    // A scale for each row. Never "fast" sums, which keep fewer bits.
    constexpr auto kRowScales = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    set(plan->desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, kRowScales);
    set(plan->desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, kRowScales);
    set_scales(plan->desc, workspace_.data(), workspace_.data());  // the search wants some
  }
#endif
  const cudaDataType_t operands = problem.e4m3 ? CUDA_R_8F_E4M3 : cuda_type(problem.operands);
  const cudaDataType_t x_type = problem.x_is_e5m2 ? CUDA_R_8F_E5M2 : operands;
  if (is_transposed) {
    plan->weight = make_layout(operands, kHeuristicRows, problem.in);
    plan->x = make_layout(x_type, kHeuristicRows, problem.out);
  } else {
    plan->weight = make_layout(operands, problem.in, is_weight_gradient ? kHeuristicRows : problem.out);
    plan->x = make_layout(x_type, is_product ? problem.in : problem.out, kHeuristicRows);
  }
  plan->y = make_layout(cuda_type(problem.result), y_width(problem), is_weight_gradient ? problem.out : kHeuristicRows);
  plans_.push_back(std::move(plan));
  return *plans_.back();
}

void CudaMatmul::set_rows(const Plan& plan, int64_t rows) {
  if (is_transposed_gradient(plan.problem)) {
    set_height(plan.x, rows);
    set_height(plan.weight, rows);
    return;
  }
  set_columns(plan.x, rows);
  set_columns(plan.problem.form == MatmulForm::weight_gradient ? plan.weight : plan.y, rows);
}

// Lists the library's algorithms for `rows` rows, best first. Split-K and other reductions across blocks are left out,
// because their order of additions would depend on the number of rows or on scheduling.
std::vector<cublasLtMatmulAlgo_t> CudaMatmul::algorithms(Plan& plan, int64_t rows) {
  if (plan.problem.e4m3 && !plan.problem.one_scale && CUBLAS_VERSION < 120900) return {};  // it has no scales for rows
  cublasLtMatmulPreference_t created = nullptr;
  EADEM_CUBLAS_CALL(cublas_lt().MatmulPreferenceCreate(&created));
  const Preference preference(created);
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace_.size_bytes()));
  const uint32_t in_alignment = kAlignment;
  const uint32_t out_alignment = static_cast<uint32_t>(row_alignment(y_width(plan.problem), plan.problem.result));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, in_alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, in_alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_alignment);

  constexpr int kMaxAnswers = 32;
  std::array<cublasLtMatmulHeuristicResult_t, kMaxAnswers> answers{};
  int num_answers = 0;
  set_rows(plan, rows);
  const cublasStatus_t status =
      cublas_lt().MatmulAlgoGetHeuristic(handle_, plan.desc.get(), plan.weight.get(), plan.x.get(), plan.y.get(),
                                         plan.y.get(), preference.get(), kMaxAnswers, answers.data(), &num_answers);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};  // 8-bit floats with some results and biases
  EADEM_CUBLAS_CALL(status);
  std::vector<cublasLtMatmulAlgo_t> result;
  for (int i = 0; i < num_answers; ++i) {
    const cublasLtMatmulHeuristicResult_t& answer = answers[static_cast<size_t>(i)];
    if (answer.state != CUBLAS_STATUS_SUCCESS) continue;
    const int32_t split_k = get<int32_t>(answer.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
    if (split_k != 0 && split_k != 1) continue;
    if (get<uint32_t>(answer.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) != CUBLASLT_REDUCTION_SCHEME_NONE) continue;
    result.push_back(answer.algo);
  }
  return result;
}

bool CudaMatmul::takes(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, int64_t rows) const {
  set_rows(plan, rows);
  cublasLtMatmulHeuristicResult_t checked{};
  const cublasStatus_t status = cublas_lt().MatmulAlgoCheck(handle_, plan.desc.get(), plan.weight.get(), plan.x.get(),
                                                            plan.y.get(), plan.y.get(), &algorithm, &checked);
  return status == CUBLAS_STATUS_SUCCESS && checked.workspaceSize <= static_cast<size_t>(workspace_.size_bytes());
}

std::vector<cublasLtMatmulAlgo_t> CudaMatmul::choose_first(Plan& plan, int64_t rows) {
  const CudaMatmulProblem& problem = plan.problem;
  std::vector<cublasLtMatmulAlgo_t> offered = algorithms(plan, rows);
  // Of a small gradient with a long sum the library may offer split-K alone. Algorithms for a shorter sum serve as
  // well.
  for (int64_t fewer = rows / 4; offered.empty() && problem.one_scale && fewer >= 64; fewer /= 4) {
    offered = algorithms(plan, fewer / 16 * 16);
    std::erase_if(offered, [&](const cublasLtMatmulAlgo_t& algorithm) { return !takes(plan, algorithm, rows); });
  }
  const auto found = std::find_if(offered.begin(), offered.end(), [&](const cublasLtMatmulAlgo_t& algorithm) {
    constexpr int64_t kRows[] = {1, 2, 7, 64, 65, 1000, 8192};
    const int64_t multiple = is_transposed_gradient(problem) ? 16 : 1;
    return std::all_of(std::begin(kRows), std::end(kRows),
                       [&](int64_t other) { return takes(plan, algorithm, other * multiple); });
  });
  const bool needs_one = needs_one_algorithm(problem);
  if (offered.empty() || (needs_one && found == offered.end()))
    throw DeviceError(
        "cuBLASLt {} has no algorithm without split-K for {} [{}, {}] to {}{} at any number of rows ({} were offered)",
        cublas_lt().GetVersion(), operands_name(problem), problem.out, problem.in, dtype_name(problem.result),
        problem.bias ? " with bias" : "", offered.size());
  plan.algo = needs_one ? *found : offered.front();
  if (found != offered.end()) plan.any_rows = *found;
  plan.chosen_rows = rows;
  plan.chosen = true;
  return offered;
}

std::optional<cublasLtMatmulAlgo_t> CudaMatmul::fastest_of(Plan& plan, std::vector<cublasLtMatmulAlgo_t> offered,
                                                           int64_t rows, Test test, cudaStream_t stream) {
  constexpr size_t kMostTested = 8;
  if (offered.size() > kMostTested) offered.resize(kMostTested);
  std::optional<cublasLtMatmulAlgo_t> fastest;
  for (const cublasLtMatmulAlgo_t& algorithm : offered) {
    const std::optional<double> microseconds =
        test(rows, [&](const CudaMatmulCall& tested) { launch(plan, algorithm, tested, stream); });
    if (!microseconds || (fastest && plan.tested_microseconds <= *microseconds)) continue;
    plan.tested_microseconds = *microseconds;
    fastest = algorithm;
  }
  return fastest;
}

const CudaMatmul::Plan& CudaMatmul::plan(const CudaMatmulProblem& problem, int64_t rows) {
  Plan& plan = plan_for(problem, 0);
  if (!plan.chosen) choose_first(plan, rows);
  return plan;
}

const CudaMatmul::Plan& CudaMatmul::fastest_plan(const CudaMatmulProblem& problem, int64_t rows, Test test,
                                                 cudaStream_t stream) {
  EADEM_CHECK(!needs_one_algorithm(problem), "of a product that needs one algorithm");
  Plan& plan = plan_for(problem, 0);
  if (!plan.chosen) plan.fastest = fastest_of(plan, choose_first(plan, rows), rows, test, stream);
  return plan;
}

CudaMatmul::ExactPlans CudaMatmul::exact_plans(const CudaMatmulProblem& problem, int64_t most_rows, Test test,
                                               cudaStream_t stream) {
  ExactPlans result{};
  for (size_t range = 0; range <= range_of(most_rows); ++range) {
    const int64_t rows = kRowRanges[range];
    Plan& plan = plan_for(problem, rows);
    if (!plan.chosen) {
      plan.algo = fastest_of(plan, algorithms(plan, rows), rows, test, stream);
      plan.chosen = true;
    }
    if (plan.algo) result[range] = &plan;
  }
  return result;
}

double CudaMatmul::tested_microseconds(const Plan& plan) { return plan.tested_microseconds; }

void CudaMatmul::run(const Plan& plan, const CudaMatmulCall& call, cudaStream_t stream) {
  if (plan.fastest && call.rows == plan.chosen_rows) return launch(plan, *plan.fastest, call, stream);
  if (needs_one_algorithm(plan.problem) || call.rows == 0 || call.rows == plan.chosen_rows ||
      takes(plan, *plan.algo, call.rows))
    return launch(plan, *plan.algo, call, stream);
  if (!plan.any_rows)
    throw DeviceError("cuBLASLt {} has no algorithm for a product of {} rows, or its gradient, {} [{}, {}]",
                      cublas_lt().GetVersion(), call.rows, operands_name(plan.problem), plan.problem.out,
                      plan.problem.in);
  launch(plan, *plan.any_rows, call, stream);
}

void CudaMatmul::launch(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const CudaMatmulCall& call,
                        cudaStream_t stream) {
  const CudaMatmulProblem& problem = plan.problem;
  EADEM_CHECK(problem.bias == (call.bias != nullptr), "bias {} but pointer {}", problem.bias, call.bias);
  if (call.rows == 0) return;
  const auto check_alignment = [](const char* name, const void* address, int64_t alignment) {
    EADEM_CHECK(reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(alignment) == 0,
                "{} at {} is not aligned to {} bytes", name, address, alignment);
  };
  const int64_t out_alignment = row_alignment(y_width(problem), problem.result);
  check_alignment("x", call.x, kAlignment);
  check_alignment("weight", call.weight, kAlignment);
  check_alignment("bias", call.bias, kAlignment);
  check_alignment("y", call.y, out_alignment);
  set_rows(plan, call.rows);
  if (call.weight_pitch > 0) {
    EADEM_CHECK(
        is_transposed_gradient(problem) && call.weight_pitch >= call.rows && call.weight_pitch % kAlignment == 0,
        "rows of {} codes, {} apart", call.rows, call.weight_pitch);
    set_pitch(plan.weight, call.weight_pitch);
  }
  if (problem.bias) set(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, call.bias);
  if (problem.e4m3) {
    check_alignment("x_scales", call.x_scales, kAlignment);
    check_alignment("weight_scales", call.weight_scales, kAlignment);
    set_scales(plan.desc, call.weight_scales, call.x_scales);
  }
  // With beta 0 the old values of y are not read.
  const float alpha = 1.0f, beta = problem.form == MatmulForm::weight_gradient ? 1.0f : 0.0f;
  EADEM_CUBLAS_CALL(cublas_lt().Matmul(handle_, plan.desc.get(), &alpha, call.weight, plan.weight.get(), call.x,
                                       plan.x.get(), &beta, call.y, plan.y.get(), call.y, plan.y.get(), &algorithm,
                                       workspace_.data(), static_cast<size_t>(workspace_.size_bytes()), stream));
}

}  // namespace eadem
