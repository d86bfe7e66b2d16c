// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "eadem/core/device/cpu_probe.h"
#include "eadem/core/device/probe_timing.h"
#include "eadem/core/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace eadem {

namespace {

// One pass over a thread's part: `bytes`, a multiple of kGrain, aligned to 64. Copy has its two arrays and triad its
// three one behind the other, each as long as the others. Returns something that depends on what was read.
using MemoryLoop = uint64_t (*)(std::byte* data, int64_t bytes);

constexpr int64_t kGrain = 6 * 4096;  // divisible into 2, 3 and 4 arrays of whole vectors

// Bytes ahead of a stream that are prefetched. 1 KiB and 4 KiB were no better on Cascade Lake and Emerald Rapids.
constexpr int64_t kAhead = 2048;

uint64_t read_plain(std::byte* data, int64_t bytes) {
  const auto* words = reinterpret_cast<const uint64_t*>(data);
  uint64_t sums[8] = {};
  for (int64_t i = 0; i < bytes / 8; i += 8)
    for (int lane = 0; lane < 8; ++lane) sums[lane] += words[i + lane];
  uint64_t sum = 0;
  for (uint64_t lane : sums) sum += lane;
  return sum;
}

uint64_t read_streams_plain(std::byte* data, int64_t bytes) {
  const int64_t length = bytes / 4;
  uint64_t sums[4] = {};
  for (int64_t i = 0; i < length; i += 64)
    for (int stream = 0; stream < 4; ++stream) {
      const std::byte* p = data + stream * length + i;
      __builtin_prefetch(p + kAhead);
      const auto* words = reinterpret_cast<const uint64_t*>(p);
      for (int w = 0; w < 8; ++w) sums[stream] += words[w];
    }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

uint64_t copy_plain(std::byte* data, int64_t bytes) {
  std::memcpy(data + bytes / 2, data, static_cast<size_t>(bytes / 2));
  return static_cast<uint64_t>(data[bytes - 1]);
}

uint64_t triad_plain(std::byte* data, int64_t bytes) {
  const int64_t length = bytes / 3 / 4;
  auto* a = reinterpret_cast<float*>(data);
  const float *b = a + length, *c = b + length;
  for (int64_t i = 0; i < length; ++i) a[i] = b[i] + 0.5f * c[i];
  return static_cast<uint64_t>(data[0]);
}

#if defined(__x86_64__)
#define EADEM_AVX512 __attribute__((target("avx512f")))
#define EADEM_AVX2 __attribute__((target("avx2,fma")))

EADEM_AVX512 uint64_t first_lane(__m512i sum) {
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, sum);
  return lanes[0];
}

EADEM_AVX512 uint64_t read_avx512(std::byte* data, int64_t bytes) {
  __m512i sums[4] = {};
  for (int64_t i = 0; i < bytes; i += 256)
    for (int k = 0; k < 4; ++k) sums[k] = _mm512_add_epi64(sums[k], _mm512_load_si512(data + i + 64 * k));
  return first_lane(_mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3])));
}

EADEM_AVX512 uint64_t read_streams_avx512(std::byte* data, int64_t bytes) {
  const int64_t length = bytes / 4;
  __m512i sums[4] = {};
  for (int64_t i = 0; i < length; i += 64)
    for (int stream = 0; stream < 4; ++stream) {
      const std::byte* p = data + stream * length + i;
      __builtin_prefetch(p + kAhead);
      sums[stream] = _mm512_add_epi64(sums[stream], _mm512_load_si512(p));
    }
  return first_lane(_mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3])));
}

EADEM_AVX512 uint64_t copy_avx512(std::byte* data, int64_t bytes) {
  const int64_t length = bytes / 2;
  for (int64_t i = 0; i < length; i += 256)
    for (int k = 0; k < 4; ++k) _mm512_store_si512(data + length + i + 64 * k, _mm512_load_si512(data + i + 64 * k));
  return static_cast<uint64_t>(data[bytes - 1]);
}

EADEM_AVX512 uint64_t triad_avx512(std::byte* data, int64_t bytes) {
  const int64_t length = bytes / 3 / 4;
  auto* a = reinterpret_cast<float*>(data);
  const float *b = a + length, *c = b + length;
  const __m512 s = _mm512_set1_ps(0.5f);
  for (int64_t i = 0; i < length; i += 64)
    for (int k = 0; k < 64; k += 16)
      _mm512_store_ps(a + i + k, _mm512_fmadd_ps(s, _mm512_load_ps(c + i + k), _mm512_load_ps(b + i + k)));
  return static_cast<uint64_t>(data[0]);
}

EADEM_AVX2 const __m256i* vector(const std::byte* p) { return reinterpret_cast<const __m256i*>(p); }

EADEM_AVX2 uint64_t first_lane(__m256i sum) {
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
  return lanes[0];
}

EADEM_AVX2 uint64_t read_avx2(std::byte* data, int64_t bytes) {
  __m256i sums[8] = {};
  for (int64_t i = 0; i < bytes; i += 256)
    for (int k = 0; k < 8; ++k) sums[k] = _mm256_add_epi64(sums[k], _mm256_load_si256(vector(data + i + 32 * k)));
  for (int k = 1; k < 8; ++k) sums[0] = _mm256_add_epi64(sums[0], sums[k]);
  return first_lane(sums[0]);
}

EADEM_AVX2 uint64_t read_streams_avx2(std::byte* data, int64_t bytes) {
  const int64_t length = bytes / 4;
  __m256i sums[8] = {};
  for (int64_t i = 0; i < length; i += 64)
    for (int stream = 0; stream < 4; ++stream) {
      const std::byte* p = data + stream * length + i;
      __builtin_prefetch(p + kAhead);
      for (int k = 0; k < 2; ++k)
        sums[2 * stream + k] = _mm256_add_epi64(sums[2 * stream + k], _mm256_load_si256(vector(p + 32 * k)));
    }
  for (int k = 1; k < 8; ++k) sums[0] = _mm256_add_epi64(sums[0], sums[k]);
  return first_lane(sums[0]);
}

EADEM_AVX2 uint64_t triad_avx2(std::byte* data, int64_t bytes) {
  const int64_t length = bytes / 3 / 4;
  auto* a = reinterpret_cast<float*>(data);
  const float *b = a + length, *c = b + length;
  const __m256 s = _mm256_set1_ps(0.5f);
  for (int64_t i = 0; i < length; i += 32)
    for (int k = 0; k < 32; k += 8)
      _mm256_store_ps(a + i + k, _mm256_fmadd_ps(s, _mm256_load_ps(c + i + k), _mm256_load_ps(b + i + k)));
  return static_cast<uint64_t>(data[0]);
}
#undef EADEM_AVX512
#undef EADEM_AVX2
#endif

MemoryLoop widest_loop(MemoryPass pass) {
  constexpr MemoryLoop kPlain[] = {read_plain, read_streams_plain, copy_plain, triad_plain};
  const auto index = static_cast<size_t>(pass);
#if defined(__x86_64__)
  constexpr MemoryLoop kAvx512[] = {read_avx512, read_streams_avx512, copy_avx512, triad_avx512};
  constexpr MemoryLoop kAvx2[] = {read_avx2, read_streams_avx2, copy_plain, triad_avx2};
  const int lanes = isa_lanes(available_isas().front());
  if (lanes == 16) return kAvx512[index];
  if (lanes == 8) return kAvx2[index];
#endif
  return kPlain[index];
}

// Memory of this process alone, in which every thread has touched its parts first.
class Mapping {
 public:
  Mapping(ThreadPool& pool, int64_t parts, int64_t part_bytes, bool huge_pages)
      : bytes_(static_cast<size_t>(parts * part_bytes)) {
    void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw OutOfMemory("cannot allocate {} bytes to measure memory with", bytes_);
    madvise(data, bytes_, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    data_ = static_cast<std::byte*>(data);
    pool.parallel_for(
        parts, [&](int64_t part, int) { std::memset(data_ + part * part_bytes, 1, static_cast<size_t>(part_bytes)); });
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(data_, bytes_); }
  std::byte* data() const { return data_; }

 private:
  std::byte* data_;
  size_t bytes_;
};

}  // namespace

int64_t cache_bytes(int level) {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  const int name = level == 1 ? _SC_LEVEL1_DCACHE_SIZE : level == 2 ? _SC_LEVEL2_CACHE_SIZE : _SC_LEVEL3_CACHE_SIZE;
  return std::max<int64_t>(0, sysconf(name));
#else
  (void)level;
  return 0;
#endif
}

int64_t last_level_cache_bytes() {
  int64_t largest = std::max(cache_bytes(2), cache_bytes(3));
#if defined(_SC_LEVEL4_CACHE_SIZE)
  largest = std::max<int64_t>(largest, sysconf(_SC_LEVEL4_CACHE_SIZE));
#endif
  return largest;
}

std::string_view memory_pass_name(MemoryPass pass) {
  switch (pass) {
    case MemoryPass::read: return "read";
    case MemoryPass::read_streams: return "read_streams";
    case MemoryPass::copy: return "copy";
    case MemoryPass::triad: return "triad";
  }
  return "?";
}

double measured_memory_rate(ThreadPool& pool, MemoryPass pass, int64_t working_set_bytes, double seconds,
                            bool huge_pages) {
  // A large working set is read in a few long parts per thread: long enough for the prefetchers, short enough that
  // other threads can help a slow one. A small set is one part per thread, so that it stays in that thread's cache.
  constexpr int64_t kLongPart = 4 << 20;
  const int64_t threads = pool.active_threads();
  const int64_t parts = working_set_bytes / threads >= 8 * kLongPart ? 8 * threads : threads;
  const int64_t part_bytes = std::max<int64_t>(working_set_bytes / parts / kGrain, 1) * kGrain;
  // A pass of a small set goes over it often enough that starting the threads costs nothing beside.
  const int64_t repeats = std::max<int64_t>(1, kLongPart / part_bytes);
  const Mapping mapping(pool, parts, part_bytes, huge_pages);
  const MemoryLoop loop = widest_loop(pass);
  std::atomic<uint64_t> sum{0};  // so that the reads cannot be left out
  const double best = probe::best_seconds(seconds, [&] {
    pool.parallel_for(parts, [&](int64_t part, int) {
      uint64_t part_sum = 0;
      for (int64_t r = 0; r < repeats; ++r) {
        part_sum += loop(mapping.data() + part * part_bytes, part_bytes);
        asm volatile("" ::: "memory");
      }
      sum.fetch_add(part_sum, std::memory_order_relaxed);
    });
  });
  return static_cast<double>(parts * part_bytes * repeats) / best;
}

int64_t probe_buffer_bytes() {
  return std::clamp<int64_t>(2 * last_level_cache_bytes(), int64_t{128} << 20, int64_t{1} << 30);
}

double measured_read_bandwidth(ThreadPool& pool, int64_t buffer_bytes, double seconds) {
  return std::max(measured_memory_rate(pool, MemoryPass::read, buffer_bytes, seconds / 2),
                  measured_memory_rate(pool, MemoryPass::read_streams, buffer_bytes, seconds / 2));
}

}  // namespace eadem
