// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

// y[r, :] = scale * x[rows[r], :]. One block per row.
template <typename X, typename Y>
__global__ void gather_rows(const X* x,           // [any, hidden]
                            const int32_t* rows,  // [gridDim.x]
                            Y* y,                 // [gridDim.x, hidden]
                            int64_t hidden, float scale) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const X* from = x + rows[blockIdx.x] * hidden;
  Y* to = y + blockIdx.x * hidden;
  for (int64_t i = threadIdx.x; i < hidden; i += kThreads) store(to + i, scale * load(from + i));
}

}  // namespace

cudaError_t launch_embedding(const EmbeddingParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.hidden == 0) return cudaSuccess;
  return with_float_type(p.table_dtype, [&](auto x) {
    return with_float_type(p.y_dtype, [&](auto y) {
      using X = decltype(x);
      using Y = decltype(y);
      return launch_overlapped(gather_rows<X, Y>, dim3(static_cast<unsigned>(p.tokens)), kThreads, 0, stream,
                               static_cast<const X*>(p.table), p.ids, static_cast<Y*>(p.y), p.hidden, p.scale);
    });
  });
}

cudaError_t launch_select_rows(const SelectRowsParams& p, cudaStream_t stream) {
  if (p.num_rows == 0 || p.hidden == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    return launch_overlapped(gather_rows<T, T>, dim3(static_cast<unsigned>(p.num_rows)), kThreads, 0, stream,
                             static_cast<const T*>(p.x), p.rows, static_cast<T*>(p.y), p.hidden, 1.0f);
  });
}

}  // namespace eadem::kernels::cuda
