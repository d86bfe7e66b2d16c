// SPDX-License-Identifier: Apache-2.0
//
// Dispatch on the instruction set of a CpuDevice. Highway compiles a source once per target; a table has the copies of
// an exported function. Highway's own dispatch picks the slot by a process-wide choice. Ours is per device, so that one
// process can run every instruction set of the machine (tests do), and nothing global is written. Plans dispatch when a
// program compiles and keep the function. Only Highway's headers are used: loading its library costs a process 2 ms,
// in which it measures the clock.
#pragma once

#include <hwy/highway.h>

#include <bit>
#include <cstddef>
#include <cstdint>

#include "eadem/core/error.h"
#include "eadem/core/lookups.h"
#include "eadem/core/machine/isa.h"

namespace eadem::kernels::cpu {

// The slot of a Highway dispatch table that holds the code for `isa`.
constexpr size_t isa_slot(Isa isa) {
  if constexpr ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0) return 0;  // one target in this build: a table of one
#if HWY_ARCH_X86
  // Slot 0 is Highway's own, slot 1 + i the target of bit i below the highest, the last one the scalar fallback.
  int64_t target = 0;
  switch (isa) {
    case Isa::amx:
    case Isa::avx512_bf16:
    case Isa::avx512_vnni:  // compiled as AVX3; the few kernels that use its instructions ask for it themselves
    case Isa::avx512: target = HWY_AVX3; break;
    case Isa::avx2: target = HWY_AVX2; break;
    case Isa::sse4: target = HWY_SSE4; break;
    case Isa::scalar:
    case Isa::neon:
    case Isa::neon_dotprod: return HWY_MAX_DYNAMIC_TARGETS + 1;
  }
  return static_cast<size_t>(std::countr_zero(static_cast<uint64_t>(HWY_CHOSEN_TARGET_SHIFT(target))));
#else
  return isa == Isa::scalar ? HWY_MAX_DYNAMIC_TARGETS + 1 : 0;
#endif
}

inline size_t counted_isa_slot(Isa isa) {
  count_lookup();
  return isa_slot(isa);
}

}  // namespace eadem::kernels::cpu

// Defines the table of the copies of `FUNCTION`, where HWY_ONCE holds and in the namespace around HWY_NAMESPACE.
#if HWY_IDE || ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0)
#define EADEM_CPU_EXPORT HWY_EXPORT
#else
#define EADEM_CPU_EXPORT(FUNCTION)                                                         \
  static constexpr decltype(&HWY_STATIC_DISPATCH(FUNCTION)) HWY_DISPATCH_TABLE(            \
      FUNCTION)[HWY_MAX_DYNAMIC_TARGETS + 2] = {nullptr, HWY_CHOOSE_TARGET_LIST(FUNCTION), \
                                                HWY_CHOOSE_FALLBACK(FUNCTION)}
#endif

// The copy of `FUNCTION`, which EADEM_CPU_EXPORT has named, that is compiled for `isa`.
#define EADEM_CPU_DISPATCH(FUNCTION, isa) (HWY_DISPATCH_TABLE(FUNCTION)[::eadem::kernels::cpu::counted_isa_slot(isa)])
