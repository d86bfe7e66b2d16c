// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/device/cpu_probe.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "eadem/core/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace eadem {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The pass of least time within about `seconds`; three at least, so that one is warm.
template <typename Pass>
double best_seconds(double seconds, const Pass& pass) {
  const Clock::time_point start = Clock::now();
  double best = 1e30;
  for (int i = 0; i < 3 || seconds_since(start) < seconds; ++i) {
    const Clock::time_point pass_start = Clock::now();
    pass();
    best = std::min(best, seconds_since(pass_start));
  }
  return best;
}

// Sums of `count` 64-bit words, a multiple of 32, aligned to 64 bytes. In the widest loads there are: a core that loads
// 16 bytes at a time does not keep up with memory.
using ReadLoop = uint64_t (*)(const uint64_t* words, int64_t count);

uint64_t read_plain(const uint64_t* words, int64_t count) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i < count; i += 8)
    for (int lane = 0; lane < 8; ++lane) sums[lane] += words[i + lane];
  uint64_t sum = 0;
  for (uint64_t lane : sums) sum += lane;
  return sum;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) uint64_t read_avx512(const uint64_t* words, int64_t count) {
  __m512i sums[4] = {};
  for (int64_t i = 0; i < count; i += 32)
    for (int k = 0; k < 4; ++k) sums[k] = _mm512_add_epi64(sums[k], _mm512_load_si512(words + i + 8 * k));
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3])));
  return lanes[0];
}

__attribute__((target("avx2"))) uint64_t read_avx2(const uint64_t* words, int64_t count) {
  __m256i sums[8] = {};
  for (int64_t i = 0; i < count; i += 32)
    for (int k = 0; k < 8; ++k)
      sums[k] = _mm256_add_epi64(sums[k], _mm256_load_si256(reinterpret_cast<const __m256i*>(words + i + 4 * k)));
  for (int k = 1; k < 8; ++k) sums[0] = _mm256_add_epi64(sums[0], sums[k]);
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sums[0]);
  return lanes[0];
}
#endif

ReadLoop widest_read_loop() {
#if defined(__x86_64__)
  const int lanes = isa_lanes(available_isas().front());
  if (lanes == 16) return read_avx512;
  if (lanes == 8) return read_avx2;
#endif
  return read_plain;
}

// One pass of multiply-adds over kChains independent registers: enough for two units of a latency of five.
constexpr int kChains = 12;
constexpr int64_t kIterations = 200000;

#if defined(__x86_64__)
__attribute__((target("avx512f"))) float multiply_add_avx512() {
  __m512 x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = _mm512_set1_ps(static_cast<float>(c));
  const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(1.0f);
  for (int64_t i = 0; i < kIterations; ++i)
    for (int c = 0; c < kChains; ++c) x[c] = _mm512_fmadd_ps(x[c], a, b);
  __m512 sum = x[0];
  for (int c = 1; c < kChains; ++c) sum = _mm512_add_ps(sum, x[c]);
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, sum);
  return lanes[0];
}

__attribute__((target("avx2,fma"))) float multiply_add_avx2() {
  __m256 x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = _mm256_set1_ps(static_cast<float>(c));
  const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(1.0f);
  for (int64_t i = 0; i < kIterations; ++i)
    for (int c = 0; c < kChains; ++c) x[c] = _mm256_fmadd_ps(x[c], a, b);
  __m256 sum = x[0];
  for (int c = 1; c < kChains; ++c) sum = _mm256_add_ps(sum, x[c]);
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, sum);
  return lanes[0];
}

float multiply_add_sse4() {
  __m128 x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = _mm_set1_ps(static_cast<float>(c));
  const __m128 a = _mm_set1_ps(0.5f), b = _mm_set1_ps(1.0f);
  for (int64_t i = 0; i < kIterations; ++i)
    for (int c = 0; c < kChains; ++c) x[c] = _mm_add_ps(_mm_mul_ps(x[c], a), b);
  __m128 sum = x[0];
  for (int c = 1; c < kChains; ++c) sum = _mm_add_ps(sum, x[c]);
  return _mm_cvtss_f32(sum);
}
#elif defined(__aarch64__)
float multiply_add_neon() {
  float32x4_t x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = vdupq_n_f32(static_cast<float>(c));
  const float32x4_t a = vdupq_n_f32(0.5f), b = vdupq_n_f32(1.0f);
  for (int64_t i = 0; i < kIterations; ++i)
    for (int c = 0; c < kChains; ++c) x[c] = vfmaq_f32(b, x[c], a);
  float32x4_t sum = x[0];
  for (int c = 1; c < kChains; ++c) sum = vaddq_f32(sum, x[c]);
  return vgetq_lane_f32(sum, 0);
}
#endif

float multiply_add_scalar() {
  float x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = static_cast<float>(c);
  // Read through a volatile, so that the compiler computes what it is told.
  volatile float half = 0.5f;
  const float a = half;
  for (int64_t i = 0; i < kIterations; ++i)
    for (int c = 0; c < kChains; ++c) {
      x[c] = x[c] * a + 1.0f;
      asm volatile("" : "+m"(x[c]));
    }
  float sum = 0;
  for (float value : x) sum += value;
  return sum;
}

struct PeakLoop {
  int lanes;
  float (*run)();
};
constexpr PeakLoop kPeakLoops[] = {
#if defined(__x86_64__)
    {16, multiply_add_avx512},
    {8, multiply_add_avx2},
    {4, multiply_add_sse4},
#elif defined(__aarch64__)
    {4, multiply_add_neon},
#endif
    {1, multiply_add_scalar}};

}  // namespace

int64_t last_level_cache_bytes() {
  int64_t largest = 0;
#if defined(_SC_LEVEL4_CACHE_SIZE)
  for (int name : {_SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL4_CACHE_SIZE})
    largest = std::max<int64_t>(largest, sysconf(name));
#endif
  return largest;
}

int64_t probe_buffer_bytes() {
  return std::clamp<int64_t>(2 * last_level_cache_bytes(), int64_t{128} << 20, int64_t{1} << 30);
}

double measured_read_bandwidth(ThreadPool& pool, int64_t buffer_bytes, double seconds) {
  // A few long parts per thread: long enough for the prefetchers, short enough that a slow thread is helped out.
  const int64_t parts = int64_t{8} * pool.num_threads();
  const int64_t part_bytes = std::max<int64_t>(buffer_bytes / parts, 1 << 20) / 4096 * 4096;
  const auto total_bytes = static_cast<size_t>(parts * part_bytes);
  void* data = mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw OutOfMemory("cannot allocate {} bytes to measure memory with", total_bytes);
  madvise(data, total_bytes, MADV_HUGEPAGE);
  auto* bytes = static_cast<std::byte*>(data);
  pool.parallel_for(
      parts, [&](int64_t part, int) { std::memset(bytes + part * part_bytes, 1, static_cast<size_t>(part_bytes)); });
  const ReadLoop read = widest_read_loop();
  std::atomic<uint64_t> sum{0};  // so that the reads cannot be left out
  const double best = best_seconds(seconds, [&] {
    pool.parallel_for(parts, [&](int64_t part, int) {
      sum.fetch_add(read(reinterpret_cast<const uint64_t*>(bytes + part * part_bytes), part_bytes / 8),
                    std::memory_order_relaxed);
    });
  });
  munmap(data, total_bytes);
  return static_cast<double>(total_bytes) / best;
}

double measured_f32_peak(ThreadPool& pool, Isa isa, double seconds) {
  for (const PeakLoop& loop : kPeakLoops) {
    if (loop.lanes != isa_lanes(isa)) continue;
    std::vector<float> sinks(static_cast<size_t>(pool.num_threads()) * 16);
    const double best = best_seconds(seconds, [&] {
      pool.parallel_for(pool.num_threads(),
                        [&](int64_t index, int) { sinks[static_cast<size_t>(index) * 16] = loop.run(); });
    });
    return 2.0 * loop.lanes * kChains * static_cast<double>(kIterations) * pool.num_threads() / best;
  }
  throw Unsupported("no arithmetic probe for instruction set '{}'", isa_name(isa));
}

}  // namespace eadem
