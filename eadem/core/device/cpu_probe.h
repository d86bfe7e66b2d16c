// SPDX-License-Identifier: Apache-2.0
//
// What this processor can do, measured: how fast its threads read memory, and how many f32 operations they finish. The
// limits that speeds are reported against.
#pragma once

#include <cstdint>

#include "eadem/core/isa.h"
#include "eadem/core/thread_pool.h"

namespace eadem {

// Bytes of the last-level cache as the system reports it; 0 when it does not.
int64_t last_level_cache_bytes();

// Sequential reads with wide loads, every thread its own part of `buffer_bytes`, which should be larger than the
// caches; the best pass within about `seconds`. Throws OutOfMemory.
double measured_read_bandwidth(ThreadPool& pool, int64_t buffer_bytes, double seconds = 0.15);

// A buffer for measured_read_bandwidth: twice the last-level cache, between 128 MiB and 1 GiB.
int64_t probe_buffer_bytes();

// Multiply-adds of independent registers in the widest vectors of `isa`, counted as two operations each; every thread
// at once; the best pass within about `seconds`. `isa` must be available. (sse4 and scalar have no fused multiply-add:
// a product and a sum there.)
double measured_f32_peak(ThreadPool& pool, Isa isa, double seconds = 0.1);

}  // namespace eadem
