// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/attention/attention_gradients.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int kColumns = 64;

constexpr int kDeltaRows = 4;  // of a thread: their loads do not wait for each other

// A row is that of a token and a head. `lanes`, a power of two, share one, each with kWidth columns at a time, which it
// loads together if rows are aligned to that: bits do not depend on it.
template <typename T, int kWidth, bool kAligned>
__global__ void __launch_bounds__(kThreads) attention_delta(AttentionBackwardParams p, int lanes, int64_t turns) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t i = thread; i < turns; i += int64_t{gridDim.x} * kThreads) p.turns[i] = 0;

  const int64_t rows = p.forward.tokens * p.forward.heads, head_dim = p.forward.head_dim;
  const int64_t first = int64_t{blockIdx.x} * (kThreads / lanes) * kDeltaRows + threadIdx.x / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const auto row_at = [&](int r) { return first + int64_t{r} * (kThreads / lanes); };
  const auto columns_at = [](const T* p) {
    if constexpr (kAligned) {
      return vector_at<T, kWidth>(p);
    } else {
      float values[kWidth];
      for (int i = 0; i < kWidth; ++i) values[i] = load(p + i);
      return narrowed<T>(values);
    }
  };
  float sums[kDeltaRows] = {};
  for (int64_t d = lane * kWidth; d < head_dim; d += lanes * kWidth) {
    Vector<T, kWidth> y[kDeltaRows] = {}, dy[kDeltaRows] = {};
#pragma unroll
    for (int r = 0; r < kDeltaRows; ++r) {
      if (row_at(r) >= rows) continue;
      y[r] = columns_at(static_cast<const T*>(p.forward.y) + row_at(r) * head_dim + d);
      dy[r] = columns_at(static_cast<const T*>(p.dy) + row_at(r) * head_dim + d);
    }
#pragma unroll
    for (int r = 0; r < kDeltaRows; ++r) {
      float left[kWidth], right[kWidth];
      widen(left, dy[r]);
      widen(right, y[r]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[r] += left[i] * right[i];
    }
  }
#pragma unroll
  for (int r = 0; r < kDeltaRows; ++r) {
    for (int other = lanes / 2; other > 0; other /= 2) sums[r] += __shfl_xor_sync(kAllLanes, sums[r], other);
    if (lane == 0 && row_at(r) < rows) p.delta[row_at(r)] = sums[r];
  }
}

// One block per row: a key and key head (kKeys), whose columns are the queries that see it, or a query and head, whose
// columns are the keys. A warp computes one score at a time; a thread owns the elements threadIdx.x + i * kThreads.
template <typename T, int kDims, bool kKeys>
__global__ void __launch_bounds__(kThreads, 4) attention_gradient_rows(AttentionBackwardParams b) {
  __shared__ float first[kDims * kThreads], second[kDims * kThreads];  // the row of k and v, or of q and dy
  __shared__ float weights[kColumns], slopes[kColumns];                // p and ds of a chunk of columns
  allow_next_kernel();
  wait_for_earlier_kernels();
  const AttentionParams& p = b.forward;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int32_t row_heads = kKeys ? p.kv_heads : p.heads, column_heads = kKeys ? p.heads : p.kv_heads;
  const int32_t group = p.heads / p.kv_heads, row_head = static_cast<int32_t>(blockIdx.x % row_heads);
  GradientTile tile;
  if (!find_gradient_tile(tile, p, 1, static_cast<int32_t>(blockIdx.x / row_heads))) return;

  const T* row_first = static_cast<const T*>(kKeys ? p.k : p.q);
  const T* row_second = static_cast<const T*>(kKeys ? p.v : b.dy);
  const T* column_first = static_cast<const T*>(kKeys ? p.q : p.k);
  const T* column_second = static_cast<const T*>(kKeys ? b.dy : p.v);
  const int64_t offset = (int64_t{tile.first_token + tile.row} * row_heads + row_head) * p.head_dim;
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) {
    first[d] = load(row_first + offset + d);
    second[d] = load(row_second + offset + d);
  }
  __syncthreads();

  const int32_t begin = kKeys ? tile.row : p.window > 0 ? max(tile.row - p.window + 1, 0) : 0;
  const int32_t end = !kKeys ? tile.row + 1 : p.window > 0 ? min(tile.row + p.window, tile.tokens) : tile.tokens;
  float first_sum[kDims] = {}, second_sum[kDims] = {};
  for (int32_t member = 0; member < (kKeys ? group : 1); ++member) {
    const int32_t column_head = kKeys ? row_head * group + member : row_head / group;
    const auto offset_of = [&](int32_t column) {
      return (int64_t{tile.first_token + column} * column_heads + column_head) * p.head_dim;
    };
    for (int32_t chunk = begin; chunk < end; chunk += kColumns) {
      const int columns = min(kColumns, end - chunk);
      for (int i = warp; i < columns; i += kWarps) {
        const T* other_first = column_first + offset_of(chunk + i);
        const T* other_second = column_second + offset_of(chunk + i);
        float s = 0.0f, dp = 0.0f;
        for (int d = lane; d < p.head_dim; d += kWarp) {
          s += first[d] * load(other_first + d);
          dp += second[d] * load(other_second + d);
        }
        s = warp_reduce(s, Sum{}), dp = warp_reduce(dp, Sum{});
        const int64_t query =
            int64_t{tile.first_token + (kKeys ? chunk + i : tile.row)} * p.heads + (kKeys ? column_head : row_head);
        if (lane == 0) {
          weights[i] = expf(p.scale * s - p.lse[query]);
          slopes[i] = weights[i] * (dp - b.delta[query]);
        }
      }
      __syncthreads();
      for (int i = 0; i < columns; ++i) {
        const int64_t column = offset_of(chunk + i);
#pragma unroll
        for (int n = 0; n < kDims; ++n) {
          const int d = static_cast<int>(threadIdx.x) + n * kThreads;
          if (d >= p.head_dim) continue;
          first_sum[n] += slopes[i] * load(column_first + column + d);
          if constexpr (kKeys) second_sum[n] += weights[i] * load(column_second + column + d);
        }
      }
      __syncthreads();  // the next chunk overwrites the weights
    }
  }
  T* first_gradient = static_cast<T*>(kKeys ? b.dk : b.dq);
  T* second_gradient = static_cast<T*>(kKeys ? b.dv : nullptr);
#pragma unroll
  for (int n = 0; n < kDims; ++n) {
    const int d = static_cast<int>(threadIdx.x) + n * kThreads;
    if (d >= p.head_dim) continue;
    if (first_gradient != nullptr) store(first_gradient + offset + d, p.scale * first_sum[n]);
    if (second_gradient != nullptr) store(second_gradient + offset + d, second_sum[n]);
  }
}

template <typename T, int kDims>
cudaError_t launch_rows(const AttentionBackwardParams& b, cudaStream_t stream) {
  const auto blocks = [&](int32_t heads) { return dim3(static_cast<unsigned>(b.forward.tokens * heads)); };
  if (b.dq != nullptr) {
    const cudaError_t error =
        launch_overlapped(attention_gradient_rows<T, kDims, false>, blocks(b.forward.heads), kThreads, 0, stream, b);
    if (error != cudaSuccess) return error;
  }
  if (b.dk == nullptr && b.dv == nullptr) return cudaSuccess;
  return launch_overlapped(attention_gradient_rows<T, kDims, true>, blocks(b.forward.kv_heads), kThreads, 0, stream, b);
}

}  // namespace

cudaError_t launch_attention_delta(const AttentionBackwardParams& b, int64_t turns, cudaStream_t stream) {
  const AttentionParams& p = b.forward;
  return with_f32_or_bf16(p.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kVectorBytes = 16, kVector = kVectorBytes / static_cast<int>(sizeof(T));
    const auto launch = [&](auto* kernel, int width) {
      int lanes = 1;
      while (lanes < kWarp && lanes * width < p.head_dim) lanes *= 2;
      const dim3 grid(static_cast<unsigned>(ceil_div(p.tokens * p.heads, kThreads / lanes * kDeltaRows)));
      return launch_overlapped(kernel, grid, kThreads, 0, stream, b, lanes, turns);
    };
    if (p.head_dim % kVector != 0) return launch(attention_delta<T, 1, true>, 1);
    const bool is_aligned = (reinterpret_cast<uintptr_t>(p.y) | reinterpret_cast<uintptr_t>(b.dy)) % kVectorBytes == 0;
    return is_aligned ? launch(attention_delta<T, kVector, true>, kVector)
                      : launch(attention_delta<T, kVector, false>, kVector);
  });
}

cudaError_t launch_attention_backward(const AttentionBackwardParams& b, cudaStream_t stream) {
  const AttentionParams& p = b.forward;
  if (p.tokens * p.heads == 0 || p.head_dim == 0 || p.sequences == 0) return cudaSuccess;
  const cudaError_t error = launch_attention_delta(b, 0, stream);
  if (error != cudaSuccess) return error;
  static_assert(kMaxHeadDim == 4 * kThreads);
  return with_f32_or_bf16(p.dtype, [&](auto element) {
    using T = decltype(element);
    if (p.head_dim <= kThreads) return launch_rows<T, 1>(b, stream);
    if (p.head_dim <= 2 * kThreads) return launch_rows<T, 2>(b, stream);
    return p.head_dim <= kMaxHeadDim ? launch_rows<T, 4>(b, stream) : cudaErrorInvalidValue;
  });
}

}  // namespace eadem::kernels::cuda
