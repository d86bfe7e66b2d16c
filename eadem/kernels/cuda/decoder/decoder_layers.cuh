// SPDX-License-Identifier: Apache-2.0
//
// The persistent kernel: layers of a decoder for one token in one launch, by a block of threads on each multiprocessor,
// whose warps have roles. Between kernels that are launched one after another, the memory waits: for the launch, for
// norms and rounding, for attention. Here weights arrive all the time.
//
//   copy warp      copies weights, keys and values into a ring, in the order in which they are multiplied (ring.cuh)
//   product warps  norms, codes of activations, products, attention (products.cuh, attention.cuh)
//   sum warps      rows of products; with weights in e4m3, codes of what the product down reads (rows.cuh)
//   round warps    codes of what the product down reads, merging of splits (rows.cuh)
//
// Blocks give each other values through words in memory (exchange.cuh). The bits are those of the separate kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "eadem/kernels/cuda/decoder/products.cuh"
#include "eadem/kernels/cuda/decoder/rows.cuh"

namespace eadem::kernels::cuda::decoder {
namespace {

// W: the weights.
template <typename W>
__global__ void __launch_bounds__(kThreads, 1) decoder_layers(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<SharedOf<W>*>(memory + Ring<W>::kBytes);
  const int thread = static_cast<int>(threadIdx.x);
  const Place at(p, s, memory);
  if (thread == 0) {
    init_barriers<W>(s);
    s.window = p.narrow;
    s.position = *p.kv_length - 1;
  }
  // The next launch uses the other counters.
  if (at.sm == 0 && thread < kCounters)
    p.counters[static_cast<int>(at.counters == p.counters) * kCounters * kCounterStride + thread * kCounterStride] = 0;
  __syncthreads();
  if (at.warp == kThreads / kWarp - 1) {
    CopyWarp<W>(at).run();
  } else if (at.warp >= kProductWarps + kSumWarps) {
    RoundWarps<W>(at).run();
  } else if (at.warp >= kProductWarps) {
    SumWarps<W>(at).run();
  } else {
    ProductWarps<W>(at).run();
  }
}

// A kernel for one type of weights.
struct Variant {
  const void* kernel = nullptr;
  int shared_bytes = 0, part_bytes = 0, most_window = 0;
};
// The parts that the memory brings to all multiprocessors in so many seconds. What is on its way for longer waits in a
// queue, and what else is asked for waits behind it; of less the memory does not give all that it could.
uint32_t window_of(double seconds, double bytes_per_second, const Variant& variant) {
  const double parts = seconds * bytes_per_second / (kSms * variant.part_bytes);
  return static_cast<uint32_t>(std::clamp<int64_t>(std::lround(parts), 1, variant.most_window));
}

template <typename W>
Variant variant_of() {
  constexpr int kBytes = Ring<W>::kBytes + static_cast<int>(sizeof(SharedOf<W>));
  static_assert(kBytes <= 227 * 1024 && Ring<W>::kBytes % alignof(SharedOf<W>) == 0);
  return {reinterpret_cast<const void*>(decoder_layers<W>), kBytes, W::kSlotBytes / kSlotParts, W::kMostWindow};
}
template <typename Scale>
Variant groups_variant(bool has_zeros) {
  return has_zeros ? variant_of<Groups<Scale, true>>() : variant_of<Groups<Scale, false>>();
}
template <typename W, bool kTaken>
Variant variant_if() {
  if constexpr (kTaken)
    return variant_of<W>();
  else
    return {};
}
// No kernel, if there is none for these weights.
Variant variant_of(const DecoderLayersParams& params) {
  const IntegerCodes codes = params.layers[0].q.codes;
  if (codes == IntegerCodes::none && params.layers[0].q.scales != nullptr) return variant_of<Floats>();
  if (codes == IntegerCodes::none) return variant_if<Bf16, kTakesBf16>();
  if (codes != IntegerCodes::groups) return variant_of<KQuants>();
  return params.scale_type == FragmentLayout::Scale::f16 ? groups_variant<f16_t>(params.has_zeros)
                                                         : groups_variant<bf16_t>(params.has_zeros);
}

// Divides an exchange buffer into aligned parts. With null as its memory it counts bytes only.
struct Room {
  uint8_t* memory;
  int64_t bytes = 0;

  template <typename T>
  T* take(int64_t count) {
    T* result = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return result;
  }
};

// Points p at the parts of an exchange buffer at `memory` for `splits` splits, and returns the buffer's size in bytes.
int64_t place_exchange(Params& p, void* memory, int64_t splits) {
  Room room{static_cast<uint8_t*>(memory)};
  p.launches = room.take<uint32_t>(1);
  p.counters = room.take<uint32_t>(2 * kCounters * kCounterStride);
  p.x_words = room.take<uint64_t>(kRowWords);
  p.x_middle = room.take<uint64_t>(kRowWords);
  p.qkv = room.take<uint64_t>(kQkvWords);
  p.attended = room.take<uint64_t>(kRowWords);
  p.h = room.take<uint64_t>(kFfnWords);
  p.maxima = room.take<uint64_t>(splits * kMaximaWords);
  p.parts = room.take<uint64_t>(splits * kPartWords);
  return room.bytes;
}

// `rows` becomes the matrix of all `weights`, whose rows have `columns` bytes.
cudaError_t set_rows(WeightRows& rows, std::span<const void* const> weights, int64_t columns, int64_t most_rows) {
  const auto [first, last] = std::minmax_element(weights.begin(), weights.end(), std::less<>());
  rows.base = static_cast<const uint8_t*>(*first);
  rows.base -= reinterpret_cast<uintptr_t>(rows.base) % kPanelRowBytes;
  const int64_t bytes = static_cast<const uint8_t*>(*last) - rows.base + most_rows * columns;
  return make_code_rows_map(rows.map, rows.base, bytes / columns + 1, columns, kTileRows, kRowBoxPanels);
}
cudaError_t set_rows(Params& p) {
  const int64_t bytes = p.layers[0].of.q.scales != nullptr ? 1 : 2;  // of e4m3 or bf16
  std::vector<const void*> weights, down;
  for (int i = 0; i < p.num_layers; ++i) {
    const DecoderLayerParams& of = p.layers[i].of;
    for (const DecoderWeight& weight : {of.q, of.k, of.v, of.o, of.gate, of.up}) weights.push_back(weight.blocks);
    down.push_back(of.down.blocks);
  }
  if (const cudaError_t error = set_rows(p.rows, weights, kHidden * bytes, kFfn); error != cudaSuccess) return error;
  return set_rows(p.down_rows, down, kFfn * bytes, kHidden);
}

// launch.h's functions for kShape.
int64_t exchange_bytes(int64_t splits) {
  Params p;
  return place_exchange(p, nullptr, splits);
}
cudaError_t launch_layers(const DecoderLayersParams& params, cudaStream_t stream) {
  Params p;
  p.x = static_cast<const __nv_bfloat16*>(params.x);
  p.y = static_cast<__nv_bfloat16*>(params.y);
  p.table = params.table;
  p.slot = params.slots;
  p.kv_length = params.kv_length;
  p.block_table = params.block_table;
  p.num_layers = params.num_layers;
  p.block_size = static_cast<int>(params.block_size);
  const Variant variant = variant_of(params);
  if (variant.kernel == nullptr) return cudaErrorInvalidValue;
  p.narrow = window_of(1.2e-6, params.bytes_per_second, variant);
  p.wide = window_of(1.75e-6, params.bytes_per_second, variant);
  p.eps = params.eps;
  p.mlp_eps = params.mlp_eps;
  p.score_factor = params.scale * kLog2E;
  place_exchange(p, params.exchange, params.max_splits);
  for (int i = 0; i < params.num_layers; ++i) {
    Layer& layer = p.layers[i];
    layer.of = params.layers[i];
    for (const auto& [map, rows] :
         {std::pair(&layer.k_map, layer.of.cache_k), std::pair(&layer.v_map, layer.of.cache_v)})
      if (const cudaError_t error =
              make_panel_map(*map, rows, params.cache_rows, kHeadDim, kBoxKeys, kRowBytes / kPanelRowBytes);
          error != cudaSuccess)
        return error;
  }
  if (p.layers[0].of.q.codes == IntegerCodes::none)
    if (const cudaError_t error = set_rows(p); error != cudaSuccess) return error;
  if (const cudaError_t error =
          cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, variant.shared_bytes);
      error != cudaSuccess)
    return error;
  void* args[] = {&p};
  // Cooperative, so that all blocks run at once or none does.
  return cudaLaunchCooperativeKernel(variant.kernel, dim3(kSms), dim3(kThreads), args,
                                     static_cast<size_t>(variant.shared_bytes), stream);
}

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
