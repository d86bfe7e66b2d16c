// SPDX-License-Identifier: Apache-2.0
//
// Bulk copies from shared to global memory (sm_90), which store or add, and turns that give additions an order. One
// thread begins copies and waits for them. What threads wrote to shared memory needs fence_shared_for_async first.
#pragma once

#include <cstdint>

#include "eadem/kernels/cuda/instructions/mma.cuh"

namespace eadem::kernels::cuda {

// Copies `bytes` bytes, a multiple of 16, between addresses aligned to 16.
__device__ inline void store_bulk_async(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
// The same, and adds to the f32 values that are there.
__device__ inline void add_bulk_async(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit_bulk() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all committed copies have read shared memory; until they are complete.
__device__ inline void wait_for_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void wait_for_bulk() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Waits until `turns` in global memory is `turn`, which is when whoever had the turn before has called end_turn.
// Copies that begin afterwards come after those that were complete then.
__device__ inline void wait_for_turn(const int32_t* turns, int32_t turn) {
  int32_t now = 0;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turns) : "memory");
  } while (now != turn);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ inline void end_turn(int32_t* turns, int32_t turn) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turns), "r"(turn + 1) : "memory");
}

}  // namespace eadem::kernels::cuda
