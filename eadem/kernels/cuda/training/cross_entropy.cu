// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/training/cross_entropy.cuh"

namespace eadem::kernels::cuda {

namespace {

struct NoGradient {
  static constexpr bool kTakesRegisters = true;
  template <typename Logits>
  __device__ void operator()(const Logits&, const RowLoss&) const {}
};

// dlogits may be the logits.
template <typename R>
struct PlainGradient {
  static constexpr bool kTakesRegisters = sizeof(R) < 4;
  R* dlogits;  // [rows, vocab]

  template <typename Logits>
  __device__ void operator()(const Logits& logits, const RowLoss& loss) const {
    R* to = dlogits + loss.row * loss.vocab;
    if constexpr (Logits::kInRegisters)
      logits.store_gradient(to, loss, [](R(&results)[4], const float(&gradients)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) store(&results[k], gradients[k]);
      });
    else
      logits.each([&](int32_t i, float logit) { store(to + i, loss.gradient_of(logit, i == loss.label)); });
  }
};

constexpr int kThreads = 256, kElementsOfThread = 8;
constexpr int64_t kElementsOfBlock = kThreads * kElementsOfThread;

// One block per row and kElementsOfBlock columns. `dlogits` may be `logits`.
template <typename T, typename R>
__global__ void __launch_bounds__(kThreads) cross_entropy_gradient(CrossEntropyBackwardParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t r = blockIdx.y;
  const T* logits = static_cast<const T*>(p.logits) + r * p.vocab;  // [vocab]
  R* dlogits = static_cast<R*>(p.dlogits) + r * p.vocab;            // [vocab]
  const int32_t label = p.labels[r];
  const float lse = p.lse[r], dloss = p.dloss[r];
#pragma unroll
  for (int n = 0; n < kElementsOfThread; ++n) {
    const int64_t i = blockIdx.x * kElementsOfBlock + n * kThreads + threadIdx.x;
    if (i >= p.vocab) return;
    store(dlogits + i, label < 0 ? 0.0f : gradient_of_logit(load(logits + i), lse, dloss, i == label));
  }
}

}  // namespace

cudaError_t launch_cross_entropy(const CrossEntropyParams& p, cudaStream_t stream) {
  return with_f32_or_bf16(p.dtype, [&](auto logits) {
    using T = decltype(logits);
    if (p.dlogits == nullptr) return launch_rows<T>(p, NoGradient(), stream);
    return with_f32_or_bf16(p.result_dtype, [&](auto dlogits) {
      using R = decltype(dlogits);
      return launch_rows<T>(p, PlainGradient<R>{static_cast<R*>(p.dlogits)}, stream);
    });
  });
}

cudaError_t launch_cross_entropy_backward(const CrossEntropyBackwardParams& p, cudaStream_t stream) {
  constexpr int64_t kMostRows = 65535;  // of a grid
  return with_f32_or_bf16(p.dtype, [&](auto logits) {
    return with_f32_or_bf16(p.result_dtype, [&](auto dlogits) {
      using T = decltype(logits);
      using R = decltype(dlogits);
      CrossEntropyBackwardParams part = p;
      for (int64_t row = 0; row < p.rows && p.vocab > 0; row += kMostRows) {
        part.logits = static_cast<const T*>(p.logits) + row * p.vocab;
        part.dlogits = static_cast<R*>(p.dlogits) + row * p.vocab;
        part.labels = p.labels + row, part.lse = p.lse + row, part.dloss = p.dloss + row;
        const dim3 grid(static_cast<unsigned>(ceil_div(p.vocab, kElementsOfBlock)),
                        static_cast<unsigned>(p.rows - row < kMostRows ? p.rows - row : kMostRows));
        const cudaError_t error = launch_overlapped(cross_entropy_gradient<T, R>, grid, kThreads, 0, stream, part);
        if (error != cudaSuccess) return error;
      }
      return cudaSuccess;
    });
  });
}

}  // namespace eadem::kernels::cuda
