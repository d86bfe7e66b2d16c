// SPDX-License-Identifier: Apache-2.0
//
// The attributes of functions that use the tiles of AMX, and the configuration of tiles. Only sources for x86 include
// this.
#pragma once

#include <cstdint>

#define EADEM_TILES __attribute__((target("amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512bf16")))
// The compiler does not know that tile intrinsics read and write memory.
#define EADEM_TILE_BARRIER asm volatile("" ::: "memory")

namespace eadem::kernels::cpu {

// Lines of 64 bytes, as many as `lines` says of each of eight tiles.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {};
};

}  // namespace eadem::kernels::cpu
