// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/machine/isa.h"

#include <algorithm>
#include <string>

#include "eadem/core/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace eadem {

namespace {
constexpr Isa kAllIsas[] = {Isa::scalar,      Isa::sse4, Isa::avx2, Isa::avx512,      Isa::avx512_vnni,
                            Isa::avx512_bf16, Isa::amx,  Isa::neon, Isa::neon_dotprod};

#if defined(__x86_64__)
// Whether the processor has tiles of bytes and of bf16, and the system keeps their state for this process: it does for
// one that asks, in the threads that run and in those that start later.
[[maybe_unused]] bool may_use_tiles() {
  static const bool result = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kBf16Tiles = 1u << 22, kTiles = 1u << 24, kInt8Tiles = 1u << 25;  // leaf 7, subleaf 0, edx
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (~d & (kBf16Tiles | kTiles | kInt8Tiles)) != 0) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return result;
}

// Whether dot products of bf16 are slower than products of f32: vdpbf16ps does twice as many of them a cycle on AMD's
// processors (Zen 4 and later), and half as many on Intel's (docs/performance.md). The vendor, and not a measurement,
// decides, so that the same machine always chooses the same chain of additions.
[[maybe_unused]] bool has_slow_bf16_dots() {
  static const bool result = __builtin_cpu_is("intel") != 0;
  return result;
}
#endif

}  // namespace

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::scalar: return "scalar";
    case Isa::sse4: return "sse4";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::avx512_vnni: return "avx512_vnni";
    case Isa::avx512_bf16: return "avx512_bf16";
    case Isa::amx: return "amx";
    case Isa::neon: return "neon";
    case Isa::neon_dotprod: return "neon_dotprod";
  }
  return "?";
}

int isa_lanes(Isa isa) {
  switch (isa) {
    case Isa::scalar: return 1;
    case Isa::sse4:
    case Isa::neon:
    case Isa::neon_dotprod: return 4;
    case Isa::avx2: return 8;
    case Isa::avx512:
    case Isa::avx512_vnni:
    case Isa::avx512_bf16:
    case Isa::amx: return 16;
  }
  return 1;
}

std::vector<Isa> available_isas() {
#if defined(__x86_64__)
  std::vector<Isa> result;
  // The features that Highway's target of the same name uses, beyond the one that names it.
#if !defined(EADEM_WITHOUT_AVX3)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    if (__builtin_cpu_supports("avx512vnni")) {
      const bool has_bf16_dots = __builtin_cpu_supports("avx512bf16");
      if (has_bf16_dots && may_use_tiles()) result.push_back(Isa::amx);
      if (has_bf16_dots && !has_slow_bf16_dots()) result.push_back(Isa::avx512_bf16);
      result.push_back(Isa::avx512_vnni);
      if (has_bf16_dots && has_slow_bf16_dots()) result.push_back(Isa::avx512_bf16);
    }
    result.push_back(Isa::avx512);
  }
#endif
#if !defined(EADEM_WITHOUT_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    result.push_back(Isa::avx2);
#endif
#if !defined(EADEM_WITHOUT_SSE4)
  if (__builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3")) result.push_back(Isa::sse4);
#endif
  result.push_back(Isa::scalar);
  return result;
#elif defined(__aarch64__)
  if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) return {Isa::neon_dotprod, Isa::neon};
  return {Isa::neon};
#else
  return {Isa::scalar};
#endif
}

Isa isa_from_name(std::string_view name) {
  const std::vector<Isa> available = available_isas();
  std::string listed;
  for (Isa isa : available) {
    if (isa_name(isa) == name) return isa;
    listed += (listed.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  const bool known =
      std::any_of(std::begin(kAllIsas), std::end(kAllIsas), [&](Isa isa) { return isa_name(isa) == name; });
  if (known) throw Unsupported("instruction set '{}' is not available here; available: {}", name, listed);
  throw InvalidArgument("unknown instruction set '{}'; available here: {}", name, listed);
}

}  // namespace eadem
