// SPDX-License-Identifier: Apache-2.0
//
// Philox4x32-10, a counter-based random generator: the numbers are a pure function of key and counter, so a draw
// does not depend on which draws came before it, on which thread, or on which device.
// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
#pragma once

#include <array>
#include <cstdint>

// This header is also compiled by device compilers.
#if defined(__CUDACC__)
#define EADEM_HOST_DEVICE __host__ __device__
#else
#define EADEM_HOST_DEVICE
#endif

namespace eadem {

struct PhiloxBlock {
  uint32_t words[4];
};

EADEM_HOST_DEVICE constexpr PhiloxBlock philox4x32(uint64_t key, uint64_t counter, uint64_t stream = 0) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Uniform in [0, 1), 24 bits: exact in f32.
EADEM_HOST_DEVICE constexpr float uniform_float(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

}  // namespace eadem
