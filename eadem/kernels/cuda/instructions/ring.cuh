// SPDX-License-Identifier: Apache-2.0
//
// Rings of stages in shared memory (sm_90): some threads fill stages, others read them.
#pragma once

#include <cstdint>

#include "eadem/kernels/cuda/instructions/mma.cuh"

namespace eadem::kernels::cuda {

// Barriers of a ring, by address, one for each stage. A reader waits for `full`, who fills waits for `empty`.
struct Ring {
  uint32_t full, empty;

  __device__ uint32_t full_at(int stage) const { return full + static_cast<uint32_t>(stage) * kBarrierBytes; }
  __device__ uint32_t empty_at(int stage) const { return empty + static_cast<uint32_t>(stage) * kBarrierBytes; }
};

// A place in a ring, and the parity of the phase that its barriers are in.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  // `by`: at most kStages.
  __device__ void advance(int by = 1) {
    stage += by;
    if (stage >= kStages) stage -= kStages, parity ^= 1;
  }
};

}  // namespace eadem::kernels::cuda
