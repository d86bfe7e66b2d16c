// SPDX-License-Identifier: Apache-2.0
//
// The persistent kernel: all layers in one launch, by a block of threads on each multiprocessor, whose warps have
// roles.
#include "benchmarks/cuda/persistent/layers.h"

#include "benchmarks/cuda/persistent/exchange.cuh"
#include "benchmarks/cuda/persistent/products.cuh"
#include "benchmarks/cuda/persistent/ring.cuh"
#include "benchmarks/cuda/persistent/rows.cuh"

namespace eadem::persistent {
namespace {

template <Mode kMode>
__global__ void __launch_bounds__(kThreads, 1) run_layers(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    init_barriers(s);
    s.window = static_cast<uint32_t>(p.narrow);
  }
  if (threadIdx.x < kHeadDim / 2) s.rope[threadIdx.x] = p.rope[threadIdx.x];
  __syncthreads();
  const Place at(p, s);
  if (at.warp == kThreads / 32 - 1) {
    if (at.lane == 0) CopyWarp<kMode>(at).run();
  } else if constexpr (kMode == Mode::weights_alone) {
    if (at.warp < kProductWarps) ProductWarps(at).drain();
  } else if (at.warp >= kProductWarps + kSumWarps) {
    RoundWarps(at).run();
  } else if (at.warp >= kProductWarps) {
    SumWarps(at).run();
  } else {
    ProductWarps(at).run();
  }
}

template <Mode kMode>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(run_layers<kMode>);
  constexpr int kBytes = static_cast<int>(sizeof(Shared));
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess)
    return error;
  void* args[] = {const_cast<Params*>(&p)};
  // Cooperative, so that all blocks run at once or none does.
  return cudaLaunchCooperativeKernel(kernel, dim3(kSms), dim3(kThreads), args, kBytes, stream);
}

}  // namespace

cudaError_t describe_cache(Params& p, int layers) {
  return kernels::cuda::make_panel_map(p.cache_map, p.cache, int64_t{layers} * 2 * kKvHeads * kKeys, kHeadDim,
                                       kPartKeys, kHeadDim / 64);
}

cudaError_t clear_counters(const Params& p, cudaStream_t stream) {
  return cudaMemsetAsync(p.counters, 0, size_t{kCounters} * kCounterStride * sizeof(uint32_t), stream);
}

cudaError_t launch_layers(const Params& p, Mode mode, cudaStream_t stream) {
  switch (mode) {
    case Mode::whole: return launch<Mode::whole>(p, stream);
    case Mode::weights_alone: return launch<Mode::weights_alone>(p, stream);
    case Mode::chain_alone: return launch<Mode::chain_alone>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace eadem::persistent
