// SPDX-License-Identifier: Apache-2.0
//
// A matrix rounded to 8-bit floats with one scale, with the bits of Fp8TensorEncoding, along its rows and transposed.
// It is read, or made of other matrices, once for its scale and once for its codes; with a scale from earlier steps,
// once. Kernels that read such a weight do not wait for earlier kernels, so these do not allow the next kernel to begin
// before they have ended.
#include <algorithm>

#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/linear/fp8_tensor.cuh"
#include "eadem/kernels/cuda/linear/fp8_tensor.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256, kWidth = 8;
constexpr int kSide = 128;  // of a tile; its codes are 16 KB
constexpr int kRowThreads = kSide / kWidth, kRowsAtOnce = kThreads / kRowThreads, kTurns = kSide / kRowsAtOnce;

template <typename T>
using Kept = Vector<T, kWidth>;
template <typename T>
__device__ Kept<T> kept_at(const T* p) {
  return vector_at<T, kWidth>(p);
}
// Values as they are once they have been stored.
template <typename T>
__device__ void round_to(float (&values)[kWidth]) {
  widen(values, narrowed<T>(values));
}

// A source makes the values that a kernel rounds: kWidth neighbours in each of kOutputs matrices, from what it loads.
// A thread begins kAtOnce loads together. At least kBlocks blocks share a multiprocessor.
template <typename T>
struct PlainValues {
  static constexpr int kOutputs = 1, kAtOnce = kTurns, kBlocks = sizeof(T) == 2 ? 3 : 2;
  using Loaded = Kept<T>;
  const T* x;

  __device__ Loaded load_at(int64_t i) const { return kept_at(x + i); }
  __device__ void make(float (&values)[1][kWidth], const Loaded& loaded) const { widen(values[0], loaded); }
};

template <typename T, ActivationKind kKind>
struct GatedValues {
  static constexpr int kOutputs = 1, kAtOnce = 2, kBlocks = 3;
  struct Loaded {
    Kept<T> gate, up;
  };
  const T *gate, *up;

  __device__ Loaded load_at(int64_t i) const { return {kept_at(gate + i), kept_at(up + i)}; }
  __device__ void make(float (&values)[1][kWidth], const Loaded& loaded) const {
    float factors[kWidth];
    widen(values[0], loaded.gate);
    widen(factors, loaded.up);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) values[0][n] = activate(kKind, values[0][n]) * factors[n];
    round_to<T>(values[0]);
  }
};

template <typename T, ActivationKind kKind>
struct GatedGradientValues {
  static constexpr int kOutputs = 2, kAtOnce = 2, kBlocks = sizeof(T) == 2 ? 3 : 2;
  struct Loaded {
    Kept<T> gate, up, dy;
  };
  const T *gate, *up, *dy;

  __device__ Loaded load_at(int64_t i) const { return {kept_at(gate + i), kept_at(up + i), kept_at(dy + i)}; }
  __device__ void make(float (&values)[2][kWidth], const Loaded& loaded) const {
    float gates[kWidth], ups[kWidth], dys[kWidth];
    widen(gates, loaded.gate);
    widen(ups, loaded.up);
    widen(dys, loaded.dy);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) {
      values[0][n] = dys[n] * ups[n] * activation_slope(kKind, gates[n]);
      values[1][n] = dys[n] * activate(kKind, gates[n]);
    }
    round_to<T>(values[0]);
    round_to<T>(values[1]);
  }
};

template <int kOutputs>
struct Targets {
  TensorCodes to[kOutputs];
  int64_t rows, columns;
};

template <int kSize>
__device__ uint32_t largest_bits(uint32_t largest, const float (&values)[kSize]) {
#pragma unroll
  for (int n = 0; n < kSize; ++n) largest = max(largest, __float_as_uint(values[n]) & 0x7fffffffu);
  return largest;
}

__device__ bool has_scale(const TensorCodes& to) { return to.scaling != nullptr && to.scaling[0] > 0.0f; }

int parts_of(int64_t values) {
  constexpr int64_t kPart = int64_t{kThreads} * kWidth * 8;
  return static_cast<int>(std::min<int64_t>(ceil_div(values, kPart), kTensorParts));
}

// parts[block]: the largest magnitude of its values as an integer. Nothing where the scales are given. (Without a bound
// on blocks, ptxas 13.0 spills two registers of one kind of activation.)
template <typename Source>
__global__ void __launch_bounds__(kThreads, 2) find_largest(Source source, Targets<Source::kOutputs> targets) {
  constexpr int kOutputs = Source::kOutputs, kLoads = kOutputs == 1 ? 4 : 1;  // before the first is used
  wait_for_earlier_kernels();
  bool all_have = true;
  for (const TensorCodes& to : targets.to) all_have = all_have && has_scale(to);
  if (all_have) return;
  const int64_t size = targets.rows * targets.columns, stride = int64_t{gridDim.x} * kThreads * kWidth;
  uint32_t largest[kOutputs] = {};
  const auto take = [&](const typename Source::Loaded& loaded) {
    float values[kOutputs][kWidth];
    source.make(values, loaded);
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) largest[o] = largest_bits(largest[o], values[o]);
  };
  int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  for (; i + (kLoads - 1) * stride < size; i += kLoads * stride) {
    typename Source::Loaded loaded[kLoads];
#pragma unroll
    for (int v = 0; v < kLoads; ++v) loaded[v] = source.load_at(i + v * stride);
#pragma unroll
    for (int v = 0; v < kLoads; ++v) take(loaded[v]);
  }
  for (; i < size; i += stride) take(source.load_at(i));
  for (int o = 0; o < kOutputs; ++o) {
    const uint32_t most = block_max(largest[o]);
    if (threadIdx.x == 0) targets.to[o].parts[blockIdx.x] = most;
  }
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
template <typename Source, bool kE5m2>
__global__ void __launch_bounds__(kThreads, Source::kBlocks)
    quantize_tile(Source source, Targets<Source::kOutputs> targets, int num_parts) {
  constexpr int kOutputs = Source::kOutputs, kAtOnce = Source::kAtOnce;
  __shared__ Tile tiles[kOutputs];
  const int64_t row = int64_t{blockIdx.y} * kSide, column = int64_t{blockIdx.x} * kSide, columns = targets.columns;
  const int own_row = static_cast<int>(threadIdx.x) / kRowThreads,
            own_column = static_cast<int>(threadIdx.x) % kRowThreads * kWidth;
  const auto is_inside = [&](int in_tile) { return row + in_tile < targets.rows && column + own_column < columns; };
  const auto place_of = [&](int in_tile) { return (row + in_tile) * columns + column + own_column; };
  wait_for_earlier_kernels();

  // 1. Load, and find the scales meanwhile.
  typename Source::Loaded loaded[kAtOnce];
  const auto load_turns = [&](int first) {
#pragma unroll
    for (int turn = 0; turn < kAtOnce; ++turn) {
      const int in_tile = own_row + (first + turn) * kRowsAtOnce;
      if (is_inside(in_tile)) loaded[turn] = source.load_at(place_of(in_tile));
    }
  };
  load_turns(0);
  Rounder<kE5m2> rounders[kOutputs];
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    const TensorCodes& to = targets.to[o];
    uint32_t most = 0;
    if (has_scale(to)) {
      most = __float_as_uint(to.scaling[0]);
    } else {
      for (int i = threadIdx.x; i < num_parts; i += kThreads) most = max(most, to.parts[i]);
      most = block_max(most);
    }
    const float scale = scale_of<kE5m2>(most);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *to.scale = scale;
    rounders[o] = Rounder<kE5m2>(scale);
  }

  // 2. Round.
  uint32_t seen[kOutputs] = {};
#pragma unroll 1
  for (int first = 0; first < kTurns; first += kAtOnce) {
    if (first > 0) load_turns(first);
#pragma unroll
    for (int turn = 0; turn < kAtOnce; ++turn) {
      const int in_tile = own_row + (first + turn) * kRowsAtOnce;
      uint32_t words[kOutputs][kWidth / 4] = {};
      if (is_inside(in_tile)) {
        float values[kOutputs][kWidth];
        source.make(values, loaded[turn]);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
          const uint32_t largest = largest_bits(0, values[o]);
          seen[o] = max(seen[o], largest);
          rounders[o].round(words[o], values[o], largest);
          *reinterpret_cast<uint2*>(targets.to[o].codes + place_of(in_tile)) = make_uint2(words[o][0], words[o][1]);
        }
      }
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        uint32_t* to = word_of(tiles[o], in_tile, own_column);
        to[0] = words[o][0], to[1] = words[o][1];
      }
    }
  }
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    if (!targets.to[o].records) continue;
    const uint32_t largest = block_max(seen[o]);
    if (threadIdx.x == 0)
      atomicMax(reinterpret_cast<uint32_t*>(targets.to[o].scaling) + 1, largest < kInfinity ? largest : kNan);
  }
  __syncthreads();
#pragma unroll
  for (int o = 0; o < kOutputs; ++o)
    if (targets.to[o].transposed != nullptr)
      store_transposed(targets.to[o].transposed, padded(targets.rows), tiles[o], row, column, targets.rows, columns);
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

template <typename Source>
cudaError_t launch_tiles(const Source& source, const Targets<Source::kOutputs>& targets, bool is_e5m2,
                         cudaStream_t stream) {
  if (targets.columns % (2 * kWidth) != 0) return cudaErrorInvalidValue;
  for (const TensorCodes& to : targets.to)
    if (to.records && to.scaling == nullptr) return cudaErrorInvalidValue;
  // A product with no rows reads no scale.
  if (targets.rows == 0 || targets.columns == 0) return cudaSuccess;
  const int num_parts = parts_of(targets.rows * targets.columns);
  const cudaError_t error = launch_overlapped(find_largest<Source>, dim3(static_cast<unsigned>(num_parts)), kThreads, 0,
                                              stream, source, targets);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(ceil_div(targets.columns, int64_t{kSide})),
                  static_cast<unsigned>(ceil_div(targets.rows, int64_t{kSide})));
  return is_e5m2
             ? launch_overlapped(quantize_tile<Source, true>, grid, kThreads, 0, stream, source, targets, num_parts)
             : launch_overlapped(quantize_tile<Source, false>, grid, kThreads, 0, stream, source, targets, num_parts);
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
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    return launch_tiles(PlainValues<T>{static_cast<const T*>(p.x)}, Targets<1>{{p.to}, p.rows, p.columns}, p.is_e5m2,
                        stream);
  });
}

cudaError_t launch_gated_codes(const GatedCodesParams& p, cudaStream_t stream) {
  return launch_for_activation(p.kind, [&](auto kind) {
    return with_f32_or_bf16(p.dtype, [&](auto x) {
      using T = decltype(x);
      constexpr ActivationKind kKind = decltype(kind)::value;
      const auto *gate = static_cast<const T*>(p.gate), *up = static_cast<const T*>(p.up),
                 *dy = static_cast<const T*>(p.dy);
      if (dy == nullptr)
        return launch_tiles(GatedValues<T, kKind>{gate, up}, Targets<1>{{p.to[0]}, p.rows, p.columns}, p.is_e5m2,
                            stream);
      return launch_tiles(GatedGradientValues<T, kKind>{gate, up, dy},
                          Targets<2>{{p.to[0], p.to[1]}, p.rows, p.columns}, p.is_e5m2, stream);
    });
  });
}

}  // namespace eadem::kernels::cuda
