// SPDX-License-Identifier: Apache-2.0
//
// Products with an unpacked chunk of quantized weights on AMX tiles, for many rows. A tile sums one step of 16 rows and
// 16 outputs in integers; vectors multiply the sums by the scales, as for rows that have no tiles, so the bits are
// theirs.
//
// Measured on Emerald Rapids, for a step of 16 rows and 16 outputs: a product of tiles takes 16 cycles, however short
// the step, and storing its sums 12 more. While tiles are at work, and about 170 cycles after, vectors of 512 bits
// begin one a cycle instead of two, so three operations a row take 48 and four 64. All of it takes 63 to 66 cycles for
// q8_0 and 79 for q4_k, unpacking included; with dot products of bytes, which alone take 64, it takes 92 and 99. Steps
// of two sums gain nothing: 111 and 107 for q6_k. Sums that begin at 1.5 * 2^23, so that a fused operation makes f32 of
// them and multiplies by the scale at once, gained nothing (36 and 35 ns a step of q4_k, 33 and 33 of mxfp4).
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_STEP_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_STEP_TILES_INL_H_
#undef EADEM_KERNELS_CPU_STEP_TILES_INL_H_
#else
#define EADEM_KERNELS_CPU_STEP_TILES_INL_H_
#endif

#include "eadem/kernels/cpu/linear/amx.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_steps-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

// The unpacked chunk of one panel.
struct UnpackedChunk {
  const uint8_t* codes;  // [steps, 8, 16, 4]
  const float* scratch;  // its scales and mins
  const uint8_t* later;  // the packed codes of a later chunk, to prefetch
};

#if HWY_TARGET == HWY_AVX3

#define EADEM_AMX __attribute__((target("amx-tile,amx-int8")))

// The rows of a chunk, from a first one on, and where their results are.
struct ChunkRows {
  const int8_t* codes;    // [rows, kChunkSteps, kStep]
  const float* scales;    // [rows, kChunkSteps]
  const int32_t* starts;  // [rows, kChunkSteps], read where kUnsigned
  const float* sums;      // [rows, kChunkSteps]
  const int32_t* pairs;   // [rows, kChunkSteps]
  float* c;               // [rows, panels * 16]
};

// Tile registers: 0 and 1 hold sums, 4 and 5 rows of x, 6 and 7 weights.
EADEM_AMX inline void configure_step_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {64, 64, 0, 0, kStep, kStep, 64, 64};
    uint8_t lines[16] = {16, 16, 0, 0, 16, 16, kStepVectors, kStepVectors};
  } config;
  asm volatile("" ::"r"(&config) : "memory");  // the intrinsic declares only eight bytes as read
  _tile_loadconfig(&config);
}

EADEM_AMX inline void release_tiles() { _tile_release(); }

// The sums of some steps [16, 16], made ahead of their use: so many steps that the stores of a sum have completed when
// it is loaded.
struct alignas(64) SumRing {
  static constexpr int64_t kAhead = 3, kSteps = 4;

  HWY_INLINE SumRing() {}  // compilers give an implicit one the baseline's target
  HWY_INLINE int32_t* of(int64_t n) { return sums[n % kSteps][0]; }

  int32_t sums[kSteps][kTileRows][kPanelWidth];
};

// Makes the sums of one step after the other: the steps of a panel, the panels of a block of 16 rows, and the blocks.
// The counters are apart from the ring that is written to. In one object with it the compiler would keep them in
// memory, because the stores of tiles might change them, and a step would take 10 cycles more.
template <bool kUnsigned>
class StepSums {
 public:
  HWY_INLINE StepSums(const int8_t* x, int64_t blocks, const UnpackedChunk* w, int64_t panels, int64_t steps)
      : x_(x), codes_(w->codes), w_(w), blocks_(blocks), panels_(panels), steps_(steps) {}

  // Makes the sums of the next step, which is number n of all, if there is one.
  EADEM_AMX HWY_INLINE void make(int64_t n, int32_t* sums) {
    if (blocks_ == 0) return;
    constexpr int64_t kLine = kChunkSteps * kStep;
    if (n % 2 == 0) {
      _tile_loadd(4, x_, kLine);
      _tile_loadd(6, codes_, 64);
      _tile_zero(0);
      if constexpr (kUnsigned)
        _tile_dpbsud(0, 4, 6);
      else
        _tile_dpbssd(0, 4, 6);
      _tile_stored(0, sums, 64);
    } else {
      _tile_loadd(5, x_, kLine);
      _tile_loadd(7, codes_, 64);
      _tile_zero(1);
      if constexpr (kUnsigned)
        _tile_dpbsud(1, 5, 7);
      else
        _tile_dpbssd(1, 5, 7);
      _tile_stored(1, sums, 64);
    }
    x_ += kStep;
    codes_ += kStepBytes;
    if (++step_ < steps_) return;
    x_ -= steps_ * kStep;
    step_ = 0;
    if (++panel_ == panels_) {
      panel_ = 0;
      x_ += kTileRows * kChunkSteps * kStep;
      --blocks_;
    }
    codes_ = w_[panel_].codes;
  }

 private:
  const int8_t* x_;
  const uint8_t* codes_;
  const UnpackedChunk* w_;
  int64_t blocks_, panels_, steps_;
  int64_t panel_ = 0, step_ = 0;
};

// c [16 * blocks, panels * 16] += rows of x times the chunks w. While the first block passes, `fetch_bytes` bytes of
// later packed chunks are prefetched at each step.
template <typename Tile, bool kUnsigned>
EADEM_AMX HWY_NOINLINE void blocks_on_tiles(const ChunkRows x, int64_t blocks, const UnpackedChunk* w, int64_t panels,
                                            int64_t steps, int64_t fetch_bytes) {
  static_assert(kLanes == kPanelWidth && Tile::kDots == 1);
  asm volatile("" ::: "memory");  // the compiler does not know that tile intrinsics read memory
  SumRing ring;
  StepSums<kUnsigned> sums(x.codes, blocks, w, panels, steps);
  int64_t n = 0;
  for (; n < ring.kAhead; ++n) sums.make(n, ring.of(n));
  const int64_t c_stride = panels * kPanelWidth;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kTileRows * kChunkSteps;
    for (int64_t p = 0; p < panels; ++p) {
      float* HWY_RESTRICT c = x.c + block * kTileRows * c_stride + p * kPanelWidth;
      const float* scratch = w[p].scratch;
      Vec chains[kTileRows];
#pragma GCC unroll kUnroll
      for (int r = 0; r < kTileRows; ++r) chains[r] = load(c + r * c_stride);
      for (int64_t s = 0; s < steps; ++s, ++n) {
        if (block == 0)
          for (int64_t i = s * fetch_bytes; i < (s + 1) * fetch_bytes; i += 64) fetch_far(w[p].later + i);
        sums.make(n, ring.of(n));
        const int32_t* step = ring.of(n - ring.kAhead);
        const float* x_scales = x.scales + first + s;
        const Vec scale = load(scratch + kScalesAt + s * kPanelWidth);
        Vec min;
        Ints min_pairs;
        if constexpr (Tile::kMin) min = load(scratch + kMinsAt + s * kPanelWidth);
        if constexpr (Tile::kFolded) min_pairs = hn::BitCast(IntLanes(), load(scratch + kMinPairsAt + s * kPanelWidth));
#pragma GCC unroll kUnroll
        for (int r = 0; r < kTileRows; ++r) {
          Ints dots = hn::Load(IntLanes(), step + r * kPanelWidth);
          if constexpr (kUnsigned) dots = hn::Add(dots, hn::Set(IntLanes(), x.starts[first + r * kChunkSteps + s]));
          const float x_scale = x_scales[r * kChunkSteps];
          if constexpr (Tile::kFolded) {
            const Ints pairs = hn::Set(IntLanes(), x.pairs[first + r * kChunkSteps + s]);
            chains[r] = add_step<Tile>(chains[r], &dots, x_scale, &scale,
                                       hn::ConvertTo(Lanes(), dot_pairs(min_pairs, pairs)), min);
          } else if constexpr (Tile::kMin) {
            chains[r] =
                add_step<Tile>(chains[r], &dots, x_scale, &scale, set(x.sums[first + r * kChunkSteps + s]), min);
          } else {
            chains[r] = add_step<Tile>(chains[r], &dots, x_scale, &scale);
          }
        }
      }
#pragma GCC unroll kUnroll
      for (int r = 0; r < kTileRows; ++r) store(chains[r], c + r * c_stride);
    }
  }
}

// Multiplies rows r0 … of x, which are whole tiles, by all panels.
template <typename Tile, bool kUnsigned>
void quantized_on_tiles(float* c, const QuantizedRows& x, int64_t r0, int64_t rows, const UnpackedChunk* w,
                        int64_t panels, int64_t s0, int64_t steps, int64_t step_bytes) {
  const int64_t first = x.step(r0, s0);
  blocks_on_tiles<Tile, kUnsigned>(
      {x.codes + first * kStep, x.scales + first, x.starts + first, x.sums + first, x.pairs + first, c},
      rows / kTileRows, w, panels, steps, step_bytes);
}

#undef EADEM_AMX
#endif  // HWY_TARGET == HWY_AVX3

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
