// SPDX-License-Identifier: Apache-2.0
//
// A matrix rounded to 8-bit floats with one scale, with the bits of Fp8TensorEncoding, along its rows and transposed. x
// is read once for its scale and once for its codes; with a scale from earlier steps, once. Kernels that read such a
// weight do not wait for earlier kernels, so these do not allow the next kernel to begin before they have ended.
#include <algorithm>

#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/linear/fp8_tensor.cuh"
#include "eadem/kernels/cuda/linear/fp8_tensor.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256, kWidth = 8;
constexpr int kSide = 128;  // of a tile; its codes are 16 KB
constexpr int kRowThreads = kSide / kWidth, kRowsAtOnce = kThreads / kRowThreads, kTurns = kSide / kRowsAtOnce;

// Neighbouring values as they are in memory.
template <typename T>
struct alignas(16) Kept {
  T values[kWidth];
};

template <int kSize>
__device__ uint32_t largest_bits(uint32_t largest, const float (&values)[kSize]) {
#pragma unroll
  for (int n = 0; n < kSize; ++n) largest = max(largest, __float_as_uint(values[n]) & 0x7fffffffu);
  return largest;
}

__device__ bool has_scale(const QuantizeTensorParams& p) { return p.scaling != nullptr && p.scaling[0] > 0.0f; }

int parts_of(int64_t values) {
  constexpr int64_t kPart = int64_t{kThreads} * kWidth * 8;
  return static_cast<int>(std::min<int64_t>(ceil_div(values, kPart), kTensorParts));
}

// parts[block]: the largest magnitude of its values as an integer. Nothing where the scale is given.
template <typename T>
__global__ void __launch_bounds__(kThreads) find_largest(QuantizeTensorParams p) {
  wait_for_earlier_kernels();
  if (has_scale(p)) return;
  const T* x = static_cast<const T*>(p.x);
  const int64_t size = p.rows * p.columns, stride = int64_t{gridDim.x} * kThreads * kWidth;
  uint32_t largest = 0;
  int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  // Four loads come before the first is used.
  for (; i + 3 * stride < size; i += 4 * stride) {
    float values[4][kWidth];
#pragma unroll
    for (int v = 0; v < 4; ++v) load_vector(values[v], x + i + v * stride);
#pragma unroll
    for (int v = 0; v < 4; ++v) largest = largest_bits(largest, values[v]);
  }
  for (; i < size; i += stride) {
    float values[kWidth];
    load_vector(values, x + i);
    largest = largest_bits(largest, values);
  }
  const uint32_t most = block_max(largest);
  if (threadIdx.x == 0) p.parts[blockIdx.x] = most;
}

// Words of four codes of a row: tile[row % 4][row / 4][column / 4], so that neither writing by rows nor reading by
// columns meets a bank twice.
constexpr int kWords = kSide / 4, kPitch = kWords + 1, kPlane = kWords * kPitch + 1;
using Tile = uint32_t[4 * kPlane];

__device__ uint32_t* word_of(Tile& tile, int row, int column) {
  return tile + row % 4 * kPlane + row / 4 * kPitch + column / 4;
}

__host__ __device__ int64_t padded(int64_t rows) { return ceil_div(rows, int64_t{16}) * 16; }

// Writes the tile that begins at (row, column) of a matrix [rows, columns] to the transposed one, whose rows are
// `pitch` codes apart, four rows of four codes at a time. All threads have filled the tile, with zeros beyond the
// matrix.
__device__ void store_transposed(uint8_t* transposed, int64_t pitch, const Tile& tile, int64_t row, int64_t column,
                                 int64_t rows, int64_t columns) {
#pragma unroll
  for (int turn = 0; turn < kWords * kWords / kThreads; ++turn) {
    const int i = static_cast<int>(threadIdx.x) + turn * kThreads, in_row = i % kWords, in_column = i / kWords;
    uint32_t w[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) w[n] = tile[n * kPlane + in_row * kPitch + in_column];
    // Bytes 0 and 1, then 2 and 3, of two rows side by side.
    const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140),
                   high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
    const uint32_t out[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                             __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
    if (row + in_row * 4 >= padded(rows) || column + in_column * 4 >= columns) continue;
#pragma unroll
    for (int n = 0; n < 4; ++n)
      *reinterpret_cast<uint32_t*>(transposed + (column + in_column * 4 + n) * pitch + row + in_row * 4) = out[n];
  }
}

// A block of threads has a tile. parts: those of find_largest.
template <typename T, bool kE5m2>
__global__ void __launch_bounds__(kThreads) quantize_tile(QuantizeTensorParams p, int num_parts) {
  __shared__ Tile tile;
  const int64_t row = int64_t{blockIdx.y} * kSide, column = int64_t{blockIdx.x} * kSide;
  const int own_row = static_cast<int>(threadIdx.x) / kRowThreads,
            own_column = static_cast<int>(threadIdx.x) % kRowThreads * kWidth;
  const T* x = static_cast<const T*>(p.x);
  wait_for_earlier_kernels();

  // 1. Load, and find the scale meanwhile.
  Kept<T> kept[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t from = row + own_row + turn * kRowsAtOnce;
    if (from < p.rows && column + own_column < p.columns)
      kept[turn] = *reinterpret_cast<const Kept<T>*>(x + from * p.columns + column + own_column);
  }
  uint32_t most = 0;
  if (has_scale(p)) {
    most = __float_as_uint(p.scaling[0]);
  } else {
    for (int i = threadIdx.x; i < num_parts; i += kThreads) most = max(most, p.parts[i]);
    most = block_max(most);
  }
  const float scale = scale_of<kE5m2>(most);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.scale = scale;
  const Divisor divided(scale);
  // Four times the largest; a scale so large that this overflows is divided by as it is.
  const float limit = scale > 0.0f && scale < 0x1p100f ? scale * (4 * kLargestCode<kE5m2>) : INFINITY;

  // 2. Round.
  uint32_t seen = 0;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int in_tile = own_row + turn * kRowsAtOnce;
    uint32_t words[2] = {0, 0};
    if (row + in_tile < p.rows && column + own_column < p.columns) {
      float values[kWidth];
#pragma unroll
      for (int n = 0; n < kWidth; ++n) values[n] = load(&kept[turn].values[n]);
      seen = largest_bits(seen, values);
#pragma unroll
      for (int n = 0; n < kWidth; n += 2)
        words[n / 4] |=
            codes_of<kE5m2>(quotient_of(values[n], limit, divided), quotient_of(values[n + 1], limit, divided))
            << (n % 4 * 8);
      *reinterpret_cast<uint2*>(p.codes + (row + in_tile) * p.columns + column + own_column) =
          make_uint2(words[0], words[1]);
    }
    uint32_t* to = word_of(tile, in_tile, own_column);
    to[0] = words[0], to[1] = words[1];
  }
  if (p.records) {
    const uint32_t largest = block_max(seen);
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<uint32_t*>(p.scaling) + 1, largest < kInfinity ? largest : kNan);
  }
  if (p.transposed == nullptr) return;
  __syncthreads();
  store_transposed(p.transposed, padded(p.rows), tile, row, column, p.rows, p.columns);
}

// A block of threads has a tile.
__global__ void __launch_bounds__(kThreads) transpose_tile(TransposeCodesParams p) {
  constexpr int kCodes = 16, kRowThreads = kSide / kCodes, kRowsAtOnce = kThreads / kRowThreads;
  __shared__ Tile tile;
  const int64_t row = int64_t{blockIdx.y} * kSide, column = int64_t{blockIdx.x} * kSide;
  const int own_row = static_cast<int>(threadIdx.x) / kRowThreads,
            own_column = static_cast<int>(threadIdx.x) % kRowThreads * kCodes;
  wait_for_earlier_kernels();
#pragma unroll
  for (int turn = 0; turn < kSide / kRowsAtOnce; ++turn) {
    const int in_tile = own_row + turn * kRowsAtOnce;
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (row + in_tile < p.rows && column + own_column < p.columns)
      codes = *reinterpret_cast<const uint4*>(p.codes + (row + in_tile) * p.columns + column + own_column);
    uint32_t* to = word_of(tile, in_tile, own_column);
    to[0] = codes.x, to[1] = codes.y, to[2] = codes.z, to[3] = codes.w;
  }
  __syncthreads();
  store_transposed(p.transposed, p.pitch, tile, row, column, p.rows, p.columns);
}

// By one block.
__global__ void __launch_bounds__(kThreads) find_scale(ScaleParams p) {
  wait_for_earlier_kernels();
  uint32_t largest = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < p.size; i += kThreads)
    largest = max(largest, __float_as_uint(p.x[i]) & 0x7fffffffu);
  const uint32_t most = block_max(largest);
  if (threadIdx.x == 0) *p.scale = scale_of<true>(most);
}

template <typename T, bool kE5m2>
cudaError_t launch_tiles(const QuantizeTensorParams& p, int num_parts, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.columns, int64_t{kSide})),
                  static_cast<unsigned>(ceil_div(p.rows, int64_t{kSide})));
  return launch_overlapped(quantize_tile<T, kE5m2>, grid, kThreads, 0, stream, p, num_parts);
}

}  // namespace

cudaError_t launch_transpose_codes(const TransposeCodesParams& p, cudaStream_t stream) {
  if (p.columns % 16 != 0 || p.pitch % 16 != 0 || p.pitch < padded(p.rows)) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.columns, int64_t{kSide})),
                  static_cast<unsigned>(ceil_div(p.rows, int64_t{kSide})));
  return launch_overlapped(transpose_tile, grid, kThreads, 0, stream, p);
}

cudaError_t launch_e5m2_scale(const ScaleParams& p, cudaStream_t stream) {
  return launch_overlapped(find_scale, dim3(1), kThreads, 0, stream, p);
}

cudaError_t launch_quantize_tensor(const QuantizeTensorParams& p, cudaStream_t stream) {
  if (p.columns % (2 * kWidth) != 0 || (p.records && p.scaling == nullptr)) return cudaErrorInvalidValue;
  // A product with no rows reads no scale.
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    const int num_parts = parts_of(p.rows * p.columns);
    const cudaError_t error =
        launch_overlapped(find_largest<T>, dim3(static_cast<unsigned>(num_parts)), kThreads, 0, stream, p);
    if (error != cudaSuccess) return error;
    return p.is_e5m2 ? launch_tiles<T, true>(p, num_parts, stream) : launch_tiles<T, false>(p, num_parts, stream);
  });
}

}  // namespace eadem::kernels::cuda
