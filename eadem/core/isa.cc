// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/isa.h"

#include <algorithm>
#include <string>

#include "eadem/core/error.h"

namespace eadem {

namespace {
constexpr Isa kAll[] = {Isa::scalar, Isa::sse4, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::neon};
}  // namespace

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::scalar: return "scalar";
    case Isa::sse4: return "sse4";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::avx512_vnni: return "avx512_vnni";
    case Isa::neon: return "neon";
  }
  return "?";
}

int isa_lanes(Isa isa) {
  switch (isa) {
    case Isa::scalar: return 1;
    case Isa::sse4:
    case Isa::neon: return 4;
    case Isa::avx2: return 8;
    case Isa::avx512:
    case Isa::avx512_vnni: return 16;
  }
  return 1;
}

std::vector<Isa> available_isas() {
#if defined(__x86_64__)
  std::vector<Isa> result;
  // The features that Highway's target of the same name uses, beyond the one that names it.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    if (__builtin_cpu_supports("avx512vnni")) result.push_back(Isa::avx512_vnni);
    result.push_back(Isa::avx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    result.push_back(Isa::avx2);
  if (__builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3")) result.push_back(Isa::sse4);
  result.push_back(Isa::scalar);
  return result;
#elif defined(__aarch64__)
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
  const bool known = std::any_of(std::begin(kAll), std::end(kAll), [&](Isa isa) { return isa_name(isa) == name; });
  if (known) throw Unsupported("instruction set '{}' is not available here; available: {}", name, listed);
  throw InvalidArgument("unknown instruction set '{}'; available here: {}", name, listed);
}

}  // namespace eadem
