// SPDX-License-Identifier: Apache-2.0
//
// Measures the processor: how fast its threads move memory, how many operations they finish, and how long it takes to
// start them. Speeds are reported against these limits. Every figure is the best pass within about `seconds`, to
// show what the machine can do.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "eadem/core/machine/isa.h"
#include "eadem/core/machine/thread_pool.h"

namespace eadem {

// Bytes of the cache of that level (1, 2 or 3), one of it, as the system reports it; 0 when it does not.
int64_t cache_bytes(int level);
// Bytes of the last-level cache; 0 when the system does not report it.
int64_t last_level_cache_bytes();

// --- Memory

enum class MemoryPass : uint8_t {
  read,          // one stream a thread, in order
  read_streams,  // four streams a thread, each with a prefetch ahead
  copy,          // b[i] = a[i]: counts what the program reads and writes, not the lines a store fetches first
  triad,         // a[i] = b[i] + s * c[i], f32; counted likewise
};
std::string_view memory_pass_name(MemoryPass pass);

// Bytes per second of that pass with the widest loads and stores there are. Each thread has its own part of
// `working_set_bytes` (all arrays together), which small ones go over again and again. `huge_pages` asks for pages of
// 2 MiB. Throws OutOfMemory.
double measured_memory_rate(ThreadPool& pool, MemoryPass pass, int64_t working_set_bytes, double seconds = 0.15,
                            bool huge_pages = true);

// The better of both ways to read. `buffer_bytes` should be larger than the caches. Throws OutOfMemory.
double measured_read_bandwidth(ThreadPool& pool, int64_t buffer_bytes, double seconds = 0.15);

// A buffer for measured_read_bandwidth: twice the last-level cache, between 128 MiB and 1 GiB.
int64_t probe_buffer_bytes();

// --- Arithmetic

// Instructions that multiply and add. A product and its sum are two operations.
enum class Arithmetic : uint8_t {
  f32,       // fused multiply-add; a product and a sum where there is none
  int8,      // 8-bit dot products into 32 bits: vpdpbusd, or vpmaddubsw with its two sums
  bf16,      // vdpbf16ps
  amx_int8,  // tdpbusd on tiles of 16 x 64
  amx_bf16,  // tdpbf16ps on tiles of 16 x 32
};
std::string_view arithmetic_name(Arithmetic arithmetic);

// Whether this machine, restricted to `isa`, has those instructions and this build a probe for them.
bool has_arithmetic(Arithmetic arithmetic, Isa isa);
// By what kernels for `isa` multiply bf16; nothing if they multiply it as f32.
std::optional<Arithmetic> bf16_arithmetic(Isa isa);

// Operations per second on independent registers, every thread at once. Requires has_arithmetic.
double measured_peak(ThreadPool& pool, Arithmetic arithmetic, Isa isa, double seconds = 0.1);

// measured_peak for Arithmetic::f32, which every instruction set has.
double measured_f32_peak(ThreadPool& pool, Isa isa, double seconds = 0.1);

// --- Threads

// Seconds from the start of a parallel region of `tasks` empty tasks to its end: the median over many regions that
// follow each other `gap_seconds` apart (during a gap workers spin, then park).
double measured_region_latency(ThreadPool& pool, int64_t tasks, double gap_seconds = 0, double seconds = 0.1);
// Seconds that a region of one task of `task_seconds` for each thread takes beyond that time: the median over many
// regions, one after another. Empty tasks are mostly run by the thread that starts them; these need all of them.
double measured_region_overhead(ThreadPool& pool, double task_seconds, double seconds = 0.1);

}  // namespace eadem
