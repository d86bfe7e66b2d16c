// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "eadem/core/device/cpu_probe.h"
#include "eadem/core/device/probe_timing.h"
#include "eadem/core/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace eadem {

namespace {

// One pass of multiply-adds over kChains independent registers: enough for two units of a latency of five.
constexpr int kChains = 12;
constexpr int64_t kIterations = 200000;

// Keeps a register's value from being computed ahead of the loop or left out.
#if defined(__aarch64__)
#define EADEM_OPAQUE(x) asm volatile("" : "+w"(x))
#else
#define EADEM_OPAQUE(x) asm volatile("" : "+v"(x))
#endif

#if defined(__x86_64__)

__attribute__((target("avx512f"))) float f32_avx512() {
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

__attribute__((target("avx2,fma"))) float f32_avx2() {
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

float f32_sse4() {
  __m128 x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = _mm_set1_ps(static_cast<float>(c));
  const __m128 a = _mm_set1_ps(0.5f), b = _mm_set1_ps(1.0f);
  for (int64_t i = 0; i < kIterations; ++i)
    for (int c = 0; c < kChains; ++c) x[c] = _mm_add_ps(_mm_mul_ps(x[c], a), b);
  __m128 sum = x[0];
  for (int c = 1; c < kChains; ++c) sum = _mm_add_ps(sum, x[c]);
  return _mm_cvtss_f32(sum);
}

__attribute__((target("avx512f,avx512vnni"))) float int8_avx512_vnni() {
  __m512i x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = _mm512_set1_epi32(c);
  __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-2);
  for (int64_t i = 0; i < kIterations; ++i) {
    EADEM_OPAQUE(a);
    for (int c = 0; c < kChains; ++c) x[c] = _mm512_dpbusd_epi32(x[c], a, b);
  }
  for (int c = 1; c < kChains; ++c) x[0] = _mm512_add_epi32(x[0], x[c]);
  alignas(64) int lanes[16];
  _mm512_store_si512(lanes, x[0]);
  return static_cast<float>(lanes[0]);
}

// Without vpdpbusd a dot product is three instructions. Ten chains of sums leave registers for the products.
__attribute__((target("avx512f,avx512bw"))) float int8_avx512() {
  __m512i x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = _mm512_set1_epi32(c);
  __m512i a = _mm512_set1_epi8(3);
  const __m512i b = _mm512_set1_epi8(-2), ones = _mm512_set1_epi16(1);
  for (int64_t i = 0; i < kIterations; ++i)
    for (int c = 0; c < kChains; ++c) {
      EADEM_OPAQUE(a);
      x[c] = _mm512_add_epi32(x[c], _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), ones));
    }
  for (int c = 1; c < kChains; ++c) x[0] = _mm512_add_epi32(x[0], x[c]);
  alignas(64) int lanes[16];
  _mm512_store_si512(lanes, x[0]);
  return static_cast<float>(lanes[0]);
}

__attribute__((target("avx2"))) float int8_avx2() {
  __m256i x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = _mm256_set1_epi32(c);
  __m256i a = _mm256_set1_epi8(3);
  const __m256i b = _mm256_set1_epi8(-2), ones = _mm256_set1_epi16(1);
  for (int64_t i = 0; i < kIterations; ++i)
    for (int c = 0; c < kChains; ++c) {
      EADEM_OPAQUE(a);
      x[c] = _mm256_add_epi32(x[c], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    }
  for (int c = 1; c < kChains; ++c) x[0] = _mm256_add_epi32(x[0], x[c]);
  alignas(32) int lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x[0]);
  return static_cast<float>(lanes[0]);
}

__attribute__((target("ssse3"))) float int8_sse4() {
  __m128i x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = _mm_set1_epi32(c);
  __m128i a = _mm_set1_epi8(3);
  const __m128i b = _mm_set1_epi8(-2), ones = _mm_set1_epi16(1);
  for (int64_t i = 0; i < kIterations; ++i)
    for (int c = 0; c < kChains; ++c) {
      EADEM_OPAQUE(a);
      x[c] = _mm_add_epi32(x[c], _mm_madd_epi16(_mm_maddubs_epi16(a, b), ones));
    }
  for (int c = 1; c < kChains; ++c) x[0] = _mm_add_epi32(x[0], x[c]);
  return static_cast<float>(_mm_cvtsi128_si32(x[0]));
}

__attribute__((target("avx512f,avx512bf16"))) float bf16_avx512() {
  __m512 x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = _mm512_set1_ps(static_cast<float>(c));
  // 2^-1 and 1 in bf16.
  __m512i a_bits = _mm512_set1_epi16(0x3f00);
  const __m512i b_bits = _mm512_set1_epi16(0x3f80);
  for (int64_t i = 0; i < kIterations; ++i) {
    EADEM_OPAQUE(a_bits);
    for (int c = 0; c < kChains; ++c)
      x[c] = _mm512_dpbf16_ps(x[c], reinterpret_cast<__m512bh>(a_bits), reinterpret_cast<__m512bh>(b_bits));
  }
  for (int c = 1; c < kChains; ++c) x[0] = _mm512_add_ps(x[0], x[c]);
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, x[0]);
  return lanes[0];
}

// --- AMX: tiles of 16 rows of 64 bytes. Tiles 0 to 5 are sums, 6 and 7 the factors.
constexpr int kTileSums = 6;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct alignas(64) TileBytes {
  uint8_t bytes[16 * 64];
};

#define EADEM_AMX_PASS(name, target_text, instruction, fill)              \
  __attribute__((target(target_text))) float name() {                     \
    const TileConfig config;                                              \
    TileBytes factors, sum;                                               \
    for (int i = 0; i < 16 * 64; ++i) factors.bytes[i] = (fill);          \
    /* the intrinsics do not say what memory they read and write */       \
    asm volatile("" ::"r"(&config), "r"(&factors), "r"(&sum) : "memory"); \
    _tile_loadconfig(&config);                                            \
    _tile_zero(0);                                                        \
    _tile_zero(1);                                                        \
    _tile_zero(2);                                                        \
    _tile_zero(3);                                                        \
    _tile_zero(4);                                                        \
    _tile_zero(5);                                                        \
    _tile_loadd(6, factors.bytes, 64);                                    \
    _tile_loadd(7, factors.bytes, 64);                                    \
    for (int64_t i = 0; i < kIterations / 16; ++i) {                      \
      instruction(0, 6, 7);                                               \
      instruction(1, 6, 7);                                               \
      instruction(2, 6, 7);                                               \
      instruction(3, 6, 7);                                               \
      instruction(4, 6, 7);                                               \
      instruction(5, 6, 7);                                               \
    }                                                                     \
    _tile_stored(0, sum.bytes, 64);                                       \
    asm volatile("" ::: "memory");                                        \
    _tile_release();                                                      \
    return static_cast<float>(sum.bytes[0]);                              \
  }
EADEM_AMX_PASS(pass_amx_int8, "amx-tile,amx-int8", _tile_dpbusd, 3)
EADEM_AMX_PASS(pass_amx_bf16, "amx-tile,amx-bf16", _tile_dpbf16ps, i % 2 == 0 ? 0 : 0x3f)  // 2^-1
#undef EADEM_AMX_PASS

#elif defined(__aarch64__)
float f32_neon() {
  float32x4_t x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = vdupq_n_f32(static_cast<float>(c));
  const float32x4_t a = vdupq_n_f32(0.5f), b = vdupq_n_f32(1.0f);
  for (int64_t i = 0; i < kIterations; ++i)
    for (int c = 0; c < kChains; ++c) x[c] = vfmaq_f32(b, x[c], a);
  float32x4_t sum = x[0];
  for (int c = 1; c < kChains; ++c) sum = vaddq_f32(sum, x[c]);
  return vgetq_lane_f32(sum, 0);
}

__attribute__((target("arch=armv8.2-a+dotprod"))) float int8_neon_dotprod() {
  int32x4_t x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = vdupq_n_s32(c);
  int8x16_t a = vdupq_n_s8(3);
  const int8x16_t b = vdupq_n_s8(-2);
  for (int64_t i = 0; i < kIterations; ++i) {
    EADEM_OPAQUE(a);
    for (int c = 0; c < kChains; ++c) x[c] = vdotq_s32(x[c], a, b);
  }
  for (int c = 1; c < kChains; ++c) x[0] = vaddq_s32(x[0], x[c]);
  return static_cast<float>(vgetq_lane_s32(x[0], 0));
}

// Without sdot: two halves multiplied, neighbours added in 16 bits, then in 32.
float int8_neon() {
  int32x4_t x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = vdupq_n_s32(c);
  int8x16_t a = vdupq_n_s8(3);
  const int8x16_t b = vdupq_n_s8(-2);
  for (int64_t i = 0; i < kIterations; ++i)
    for (int c = 0; c < kChains; ++c) {
      EADEM_OPAQUE(a);
      x[c] = vpadalq_s16(x[c], vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
    }
  for (int c = 1; c < kChains; ++c) x[0] = vaddq_s32(x[0], x[c]);
  return static_cast<float>(vgetq_lane_s32(x[0], 0));
}
#endif

float f32_scalar() {
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
  Arithmetic arithmetic;
  Isa isa;
  double operations;  // in one run
  float (*run)();
};

// Chains of vectors: `per_lane` multiply-adds in each of the f32 lanes of `isa`.
constexpr double chained(int lanes, int per_lane) {
  return 2.0 * lanes * per_lane * kChains * static_cast<double>(kIterations);
}
#if defined(__x86_64__)
constexpr double kTilePasses = kTileSums * static_cast<double>(kIterations / 16);
#endif

constexpr PeakLoop kPeakLoops[] = {
#if defined(__x86_64__)
    {Arithmetic::f32, Isa::amx, chained(16, 1), f32_avx512},
    {Arithmetic::f32, Isa::avx512_bf16, chained(16, 1), f32_avx512},
    {Arithmetic::f32, Isa::avx512_vnni, chained(16, 1), f32_avx512},
    {Arithmetic::f32, Isa::avx512, chained(16, 1), f32_avx512},
    {Arithmetic::f32, Isa::avx2, chained(8, 1), f32_avx2},
    {Arithmetic::f32, Isa::sse4, chained(4, 1), f32_sse4},
    {Arithmetic::int8, Isa::amx, chained(16, 4), int8_avx512_vnni},
    {Arithmetic::int8, Isa::avx512_bf16, chained(16, 4), int8_avx512_vnni},
    {Arithmetic::int8, Isa::avx512_vnni, chained(16, 4), int8_avx512_vnni},
    {Arithmetic::int8, Isa::avx512, chained(16, 4), int8_avx512},
    {Arithmetic::int8, Isa::avx2, chained(8, 4), int8_avx2},
    {Arithmetic::int8, Isa::sse4, chained(4, 4), int8_sse4},
    {Arithmetic::bf16, Isa::amx, chained(16, 2), bf16_avx512},
    {Arithmetic::bf16, Isa::avx512_bf16, chained(16, 2), bf16_avx512},
    {Arithmetic::amx_int8, Isa::amx, kTilePasses * 2 * 16 * 16 * 64, pass_amx_int8},
    {Arithmetic::amx_bf16, Isa::amx, kTilePasses * 2 * 16 * 16 * 32, pass_amx_bf16},
#elif defined(__aarch64__)
    {Arithmetic::f32, Isa::neon_dotprod, chained(4, 1), f32_neon},
    {Arithmetic::f32, Isa::neon, chained(4, 1), f32_neon},
    {Arithmetic::int8, Isa::neon_dotprod, chained(4, 4), int8_neon_dotprod},
    {Arithmetic::int8, Isa::neon, chained(4, 4), int8_neon},
#endif
    {Arithmetic::f32, Isa::scalar, chained(1, 1), f32_scalar}};

const PeakLoop* find_loop(Arithmetic arithmetic, Isa isa) {
  for (const PeakLoop& loop : kPeakLoops)
    if (loop.arithmetic == arithmetic && loop.isa == isa) return &loop;
  return nullptr;
}

}  // namespace

std::string_view arithmetic_name(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::f32: return "f32";
    case Arithmetic::int8: return "int8";
    case Arithmetic::bf16: return "bf16";
    case Arithmetic::amx_int8: return "amx_int8";
    case Arithmetic::amx_bf16: return "amx_bf16";
  }
  return "?";
}

bool has_arithmetic(Arithmetic arithmetic, Isa isa) {
  const std::vector<Isa> isas = available_isas();
  return std::find(isas.begin(), isas.end(), isa) != isas.end() && find_loop(arithmetic, isa) != nullptr;
}

std::optional<Arithmetic> bf16_arithmetic(Isa isa) {
  if (has_arithmetic(Arithmetic::amx_bf16, isa)) return Arithmetic::amx_bf16;
  if (has_arithmetic(Arithmetic::bf16, isa)) return Arithmetic::bf16;
  return std::nullopt;
}

double measured_peak(ThreadPool& pool, Arithmetic arithmetic, Isa isa, double seconds) {
  if (!has_arithmetic(arithmetic, isa))
    throw Unsupported("no {} probe for instruction set '{}' on this machine", arithmetic_name(arithmetic),
                      isa_name(isa));
  const PeakLoop& loop = *find_loop(arithmetic, isa);
  std::vector<float> sinks(static_cast<size_t>(pool.active_threads()) * 16);
  const double best = probe::best_seconds(seconds, [&] {
    pool.parallel_for(pool.active_threads(),
                      [&](int64_t index, int) { sinks[static_cast<size_t>(index) * 16] = loop.run(); });
  });
  return loop.operations * pool.active_threads() / best;
}

double measured_f32_peak(ThreadPool& pool, Isa isa, double seconds) {
  return measured_peak(pool, Arithmetic::f32, isa, seconds);
}

namespace {

double median(std::vector<double>& values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

double measured_region_latency(ThreadPool& pool, int64_t tasks, double gap_seconds, double seconds) {
  using probe::Clock;
  std::vector<double> times;
  const Clock::time_point start = Clock::now();
  while (times.size() < 20 || probe::seconds_since(start) < seconds) {
    const Clock::time_point region_start = Clock::now();
    pool.parallel_for(tasks, [](int64_t, int) {});
    times.push_back(probe::seconds_since(region_start));
    const Clock::time_point gap_start = Clock::now();
    while (probe::seconds_since(gap_start) < gap_seconds) {
    }
  }
  return median(times);
}

double measured_region_overhead(ThreadPool& pool, double task_seconds, double seconds) {
  using probe::Clock;
  std::vector<double> times;
  const Clock::time_point start = Clock::now();
  while (times.size() < 20 || probe::seconds_since(start) < seconds) {
    const Clock::time_point region_start = Clock::now();
    pool.parallel_for(pool.active_threads(), [&](int64_t, int) {
      const Clock::time_point task_start = Clock::now();
      while (probe::seconds_since(task_start) < task_seconds) {
      }
    });
    times.push_back(probe::seconds_since(region_start) - task_seconds);
  }
  return median(times);
}

}  // namespace eadem
