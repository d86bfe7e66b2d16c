// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/cuda/library_products.h"

#include "eadem/kernels/cuda/linear/cublas_lt.h"

namespace eadem {

namespace {

constexpr int kMostAlgorithms = 64;

cublasLtMatrixLayout_t layout_of(int64_t rows, int64_t columns) {  // column-major, dense
  cublasLtMatrixLayout_t layout = nullptr;
  EADEM_CUBLAS_CALL(cublas_lt().MatrixLayoutCreate(&layout, CUDA_R_16BF, static_cast<uint64_t>(rows),
                                                   static_cast<uint64_t>(columns), rows));
  return layout;
}

}  // namespace

struct LibraryProduct::State {
  CudaDevice& device;
  Buffer workspace;
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, y = nullptr;
  std::vector<cublasLtMatmulAlgo_t> algorithms = {};

  ~State() {
    for (cublasLtMatrixLayout_t layout : {weight, x, y})
      if (layout != nullptr) (void)cublas_lt().MatrixLayoutDestroy(layout);
    if (desc != nullptr) (void)cublas_lt().MatmulDescDestroy(desc);
    if (handle != nullptr) (void)cublas_lt().Destroy(handle);
  }
};

// In the library's terms, which are column-major: y^T [out, rows] = (weight^T [in, out])^T x^T [in, rows].
LibraryProduct::LibraryProduct(CudaDevice& device, int64_t rows, int64_t in, int64_t out, int64_t workspace_bytes)
    : state_(new State{device, device.allocate(workspace_bytes)}) {
  State& s = *state_;
  EADEM_CUBLAS_CALL(cublas_lt().Create(&s.handle));
  EADEM_CUBLAS_CALL(cublas_lt().MatmulDescCreate(&s.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  EADEM_CUBLAS_CALL(
      cublas_lt().MatmulDescSetAttribute(s.desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)));
  s.weight = layout_of(in, out), s.x = layout_of(in, rows), s.y = layout_of(out, rows);
  cublasLtMatmulPreference_t preference = nullptr;
  EADEM_CUBLAS_CALL(cublas_lt().MatmulPreferenceCreate(&preference));
  const auto bytes = static_cast<uint64_t>(workspace_bytes);
  EADEM_CUBLAS_CALL(cublas_lt().MatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                             &bytes, sizeof(bytes)));
  std::vector<cublasLtMatmulHeuristicResult_t> found(kMostAlgorithms);
  int count = 0;
  const cublasStatus_t status = cublas_lt().MatmulAlgoGetHeuristic(s.handle, s.desc, s.weight, s.x, s.y, s.y,
                                                                   preference, kMostAlgorithms, found.data(), &count);
  (void)cublas_lt().MatmulPreferenceDestroy(preference);
  EADEM_CUBLAS_CALL(status);
  for (int i = 0; i < count; ++i)
    if (found[static_cast<size_t>(i)].state == CUBLAS_STATUS_SUCCESS)
      s.algorithms.push_back(found[static_cast<size_t>(i)].algo);
}

LibraryProduct::~LibraryProduct() = default;

size_t LibraryProduct::algorithms() const { return state_->algorithms.size(); }

bool LibraryProduct::splits_k(size_t algorithm) const {
  int splits = 1;
  size_t written = 0;
  EADEM_CUBLAS_CALL(cublas_lt().MatmulAlgoConfigGetAttribute(
      &state_->algorithms[algorithm], CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof(splits), &written));
  return splits != 1;
}

void LibraryProduct::run(size_t algorithm, void* y, const void* x, const void* weight) const {
  const State& s = *state_;
  const float one = 1.0f, zero = 0.0f;
  EADEM_CUBLAS_CALL(cublas_lt().Matmul(s.handle, s.desc, &one, weight, s.weight, x, s.x, &zero, y, s.y, y, s.y,
                                       &s.algorithms[algorithm], s.workspace.data(),
                                       static_cast<size_t>(s.workspace.size_bytes()), s.device.stream()));
}

}  // namespace eadem
