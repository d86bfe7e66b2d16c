// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/amx.h"

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/kernels/cpu/linear/stream_ahead.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "eadem/kernels/cpu/linear/amx_config.h"

namespace eadem::kernels::cpu {

namespace {

constexpr int64_t kPanel = 16;
// How many tiles of k are processed before the next ones: a few hundred rows of them (1.5 KB each) stay in the
// second-level cache while the panels pass by. Two panels (48 KB) stay in the first-level cache while the rows pass by,
// because rows are loaded with a hint that they are not read again soon. The next two panels are prefetched meanwhile.
// Sums are loaded and stored once for all these tiles. On Emerald Rapids a product of tiles takes 24.5 cycles so, 28.6
// with 32 tiles and without the hint, and 26.7 with 16 tiles.
constexpr int64_t kRowTiles = 24;

// Tile registers: 0 to 3 hold sums (0 and 1 the top row of tiles), 4 and 5 hold a, 6 and 7 hold b.
EADEM_TILES void configure(int64_t top_rows, int64_t bottom_rows) {
  TileConfig config;
  const auto top = static_cast<uint8_t>(top_rows), bottom = static_cast<uint8_t>(std::max<int64_t>(bottom_rows, 1));
  const uint8_t lines[] = {top, top, bottom, bottom, top, bottom, 16, 16};
  std::copy(std::begin(lines), std::end(lines), config.lines);
  asm volatile("" ::"r"(&config) : "memory");  // the intrinsic declares only eight bytes as read
  _tile_loadconfig(&config);
}

// The prefetch of the next two panels: while a block passes, lines [begin, end) of each panel for each tile of k, in
// the order in which they lie. Hardware runs ahead of such a sequence; it did not of one line in each tile (3 to 8 %
// longer).
struct Fetch {
  const char* tiles;
  int64_t begin, end;
};

enum class Values : uint8_t { bf16, bytes };

// Adds a product to sum kTo of a block. Tile numbers must be literals.
template <Values kValues, int kTo>
EADEM_TILES inline void add_product() {
  if constexpr (kValues == Values::bf16) {
    if constexpr (kTo == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTo == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTo == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kTo == 3) _tile_dpbf16ps(3, 5, 7);
  } else {
    if constexpr (kTo == 0) _tile_dpbsud(0, 4, 6);
    if constexpr (kTo == 1) _tile_dpbsud(1, 4, 7);
    if constexpr (kTo == 2) _tile_dpbsud(2, 5, 6);
    if constexpr (kTo == 3) _tile_dpbsud(3, 5, 7);
  }
}

// The sums of a block of one or two rows of tiles by one or two panels. They start from c, or from zeros if c is null,
// and are stored to `to`; lines of both are `line` bytes apart.
template <Values kValues, bool kBottom, bool kRight>
EADEM_TILES inline void block(const void* c, void* to, int64_t line, const TileRows& a, const char* a_rows,
                              const char* b, int64_t panel_stride, int64_t tiles, const Fetch& fetch) {
  constexpr int64_t kRightBytes = kPanel * 4;
  if (c != nullptr) {
    const char *top = static_cast<const char*>(c), *bottom = top + kTileRows * line;
    EADEM_TILE_BARRIER;
    _tile_loadd(0, top, line);
    if constexpr (kRight) _tile_loadd(1, top + kRightBytes, line);
    if constexpr (kBottom) _tile_loadd(2, bottom, line);
    if constexpr (kBottom && kRight) _tile_loadd(3, bottom + kRightBytes, line);
  } else {
    _tile_zero(0);
    if constexpr (kRight) _tile_zero(1);
    if constexpr (kBottom) _tile_zero(2);
    if constexpr (kBottom && kRight) _tile_zero(3);
  }
  const char* a_tile = a_rows;
  const char* fetched = fetch.tiles + fetch.begin * tiles * kTileLine;
  for (int64_t t = 0; t < tiles; ++t) {
    const char* b_tile = b + t * kTileBytes;
    _tile_stream_loadd(4, a_tile, a.line_stride);
    _tile_loadd(6, b_tile, 64);
    add_product<kValues, 0>();
    if constexpr (kRight) {
      _tile_loadd(7, b_tile + panel_stride, 64);
      add_product<kValues, 1>();
    }
    if constexpr (kBottom) {
      _tile_stream_loadd(5, a_tile + a.half_stride, a.line_stride);
      add_product<kValues, 2>();
      if constexpr (kRight) add_product<kValues, 3>();
    }
    a_tile += (t + 1) % kTileBlock == 0 ? a.k_stride - (kTileBlock - 1) * a.tile_stride : a.tile_stride;
    for (int64_t i = fetch.begin; i < fetch.end; ++i, fetched += kTileLine) {
      _mm_prefetch(fetched, _MM_HINT_T1);
      if constexpr (kRight) _mm_prefetch(fetched + panel_stride, _MM_HINT_T1);
    }
  }
  char *top = static_cast<char*>(to), *bottom = top + kTileRows * line;
  _tile_stored(0, top, line);
  if constexpr (kRight) _tile_stored(1, top + kRightBytes, line);
  if constexpr (kBottom) _tile_stored(2, bottom, line);
  if constexpr (kBottom && kRight) _tile_stored(3, bottom + kRightBytes, line);
  EADEM_TILE_BARRIER;
}

// Multiplies all rows by one or two panels, for the tiles of k from `first` on.
template <bool kRight>
EADEM_TILES void rows_of_tiles(char* c, int64_t c_stride, bool resume, const TileRows& a, const char* b,
                               int64_t panel_stride, int64_t rows, int64_t first, int64_t tiles, const char* next,
                               int64_t& configured) {
  constexpr int64_t kBlockRows = 2 * kTileRows;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const char* a_rows = static_cast<const char*>(a.data) + first / kTileBlock * a.k_stride;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t height = std::min(kBlockRows, rows - i * kBlockRows);
    if (configured != height) {
      configure(std::min(height, kTileRows), height - kTileRows);
      configured = height;
    }
    const Fetch fetch{next, i * kTileRows / blocks, (i + 1) * kTileRows / blocks};
    const auto run = height > kTileRows ? block<Values::bf16, true, kRight> : block<Values::bf16, false, kRight>;
    run(resume ? c : nullptr, c, c_stride * 4, a, a_rows, b + first * kTileBytes, panel_stride, tiles, fetch);
    c += kBlockRows * c_stride * 4;
    a_rows += a.pair_stride;
  }
}

// GCC 12 warns of uninitialized operands of intrinsics that shift and convert.
using Integers = int32_t __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(64)));
EADEM_TILES inline __m512 to_floats(__m512i v) {
  return reinterpret_cast<__m512>(__builtin_convertvector(reinterpret_cast<Integers>(v), Floats));
}

// The integer sums of a block, and the operands that scale them. They are added to c only after the loads of the next
// block's tiles have been issued, so that their stores have completed by then.
struct alignas(64) BlockSums {
  int32_t sums[2 * kTileRows][2 * kPanel];
  char* c = nullptr;
  TileScales scales{};
  int64_t rows = 0;
};

template <bool kRight>
EADEM_TILES void add_sums(const BlockSums& block, int64_t c_line) {
  for (int64_t r = 0; r < block.rows; ++r) {
    const __m512i start = _mm512_set1_epi32(block.scales.starts[r * block.scales.stride]);
    const __m512 scale = _mm512_set1_ps(block.scales.scales[r * block.scales.stride]);
    float* c = reinterpret_cast<float*>(block.c + r * c_line);
    for (int64_t n = 0; n < (kRight ? 2 * kPanel : kPanel); n += kPanel) {
      const __m512i sum = _mm512_add_epi32(_mm512_load_si512(&block.sums[r][n]), start);
      _mm512_storeu_ps(c + n, _mm512_fmadd_ps(scale, to_floats(sum), _mm512_loadu_ps(c + n)));
    }
  }
}

template <bool kRight>
EADEM_TILES void rows_of_bytes(char* c, int64_t c_line, const TileRows& a, const char* b, int64_t panel_stride,
                               const TileScales& scales, int64_t rows, int64_t tiles, const char* next,
                               int64_t& configured) {
  constexpr int64_t kBlockRows = 2 * kTileRows;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const char* a_rows = static_cast<const char*>(a.data);
  BlockSums sums[2];
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t height = std::min(kBlockRows, rows - i * kBlockRows), row = i * kBlockRows;
    if (configured != height) {
      configure(std::min(height, kTileRows), height - kTileRows);
      configured = height;
    }
    const Fetch fetch{next, next == nullptr ? 0 : i * kTileRows / blocks,
                      next == nullptr ? 0 : (i + 1) * kTileRows / blocks};
    BlockSums& to = sums[i % 2];
    const auto run = height > kTileRows ? block<Values::bytes, true, kRight> : block<Values::bytes, false, kRight>;
    run(nullptr, to.sums, sizeof(to.sums[0]), a, a_rows, b, panel_stride, tiles, fetch);
    add_sums<kRight>(sums[(i + 1) % 2], c_line);
    to.c = c + row * c_line;
    to.scales = {scales.starts + row * scales.stride, scales.scales + row * scales.stride, scales.stride};
    to.rows = height;
    a_rows += a.pair_stride;
  }
  add_sums<kRight>(sums[(blocks + 1) % 2], c_line);
}

// Each word holds two bf16 values.
using Words = uint32_t __attribute__((vector_size(64)));
EADEM_TILES inline __m512 first_of(Words pairs) { return reinterpret_cast<__m512>(pairs << 16); }
EADEM_TILES inline __m512 second_of(Words pairs) { return reinterpret_cast<__m512>(pairs & 0xffff0000u); }

// Computes kPanels panels side by side; kPanels is small enough that all chains stay in registers.
template <int kPanels>
EADEM_TILES __attribute__((noinline)) void row_of_panels(float* c, const TileRows& a, const char* b,
                                                         int64_t panel_stride, int64_t tiles) {
  const StreamAhead ahead(panel_stride, (kPanels - 1) * panel_stride);
  __m512 sum[kPanels];
  for (int p = 0; p < kPanels; ++p) sum[p] = _mm512_setzero_ps();
  for (int64_t t = 0; t < tiles; ++t, b += kTileBytes) {
    const char* x = static_cast<const char*>(a.data) + t / kTileBlock * a.k_stride + t % kTileBlock * a.tile_stride;
    __m512 even[kPanels], odd[kPanels];
    for (int p = 0; p < kPanels; ++p) even[p] = odd[p] = _mm512_setzero_ps();
    for (int64_t i = 0; i < kTileRows; ++i) {
      int pair;
      __builtin_memcpy(&pair, x + 4 * i, sizeof(pair));
      const auto both = reinterpret_cast<Words>(_mm512_set1_epi32(pair));
      const __m512 x_even = first_of(both), x_odd = second_of(both);
      const int64_t at = t * kTileBytes + i * 64, near = ahead.offset(at, kFetchNear),
                    far = ahead.offset(at, kFetchFar);
      for (int p = 0; p < kPanels; ++p) {
        const char* line = b + p * panel_stride + i * 64;
        fetch_near(line + near);
        fetch_far(line + far);
        const auto w = reinterpret_cast<Words>(_mm512_loadu_si512(line));
        even[p] = _mm512_fmadd_ps(x_even, first_of(w), even[p]);
        odd[p] = _mm512_fmadd_ps(x_odd, second_of(w), odd[p]);
      }
    }
    for (int p = 0; p < kPanels; ++p) sum[p] = _mm512_add_ps(sum[p], _mm512_add_ps(even[p], odd[p]));
  }
  for (int p = 0; p < kPanels; ++p) _mm512_storeu_ps(c + p * kPanel, sum[p]);
}

}  // namespace

EADEM_TILES void bf16_tiles(float* c, int64_t c_stride, const TileRows& a, const TilePanels& b, int64_t rows,
                            int64_t panels, int64_t tiles) {
  if (rows == 1) return bf16_row(c, a, b, panels, tiles);
  static_assert(kRowTiles % kTileBlock == 0);
  int64_t configured = 0;  // rows of the block
  for (int64_t row_tile = 0; row_tile < tiles || row_tile == 0; row_tile += kRowTiles) {
    const int64_t end = std::min(tiles, row_tile + kRowTiles);
    for (int64_t p = 0; p < panels; p += 2) {
      char* c_panels = reinterpret_cast<char*>(c) + p * kPanel * 4;
      const char* b_panels = static_cast<const char*>(b.data) + p * b.panel_stride;
      const char* next = p + 2 < panels ? b_panels + 2 * b.panel_stride + row_tile * kTileBytes
                         : end < tiles  ? static_cast<const char*>(b.data) + end * kTileBytes
                                        : b_panels + 2 * b.panel_stride;
      const auto run = p + 1 < panels ? rows_of_tiles<true> : rows_of_tiles<false>;
      run(c_panels, c_stride, row_tile > 0, a, b_panels, b.panel_stride, rows, row_tile, end - row_tile, next,
          configured);
    }
  }
  _tile_release();
}

EADEM_TILES void int8_tiles(float* c, int64_t c_stride, const TileRows& a, const TilePanels& b,
                            const TileScales& scales, int64_t rows, int64_t panels, int64_t tiles, const void* next) {
  int64_t configured = 0;  // rows of the block
  for (int64_t p = 0; p < panels; p += 2) {
    const auto run = p + 1 < panels ? rows_of_bytes<true> : rows_of_bytes<false>;
    const char* fetch = next == nullptr ? nullptr : static_cast<const char*>(next) + p * b.panel_stride;
    run(reinterpret_cast<char*>(c + p * kPanel), c_stride * 4, a, static_cast<const char*>(b.data) + p * b.panel_stride,
        b.panel_stride, scales, rows, tiles, fetch, configured);
  }
  _tile_release();
}

void bf16_row(float* c, const TileRows& a, const TilePanels& b, int64_t panels, int64_t tiles) {
  constexpr unsigned kSubnormalsAreZero = 0x8040;
  const unsigned state = _mm_getcsr();
  _mm_setcsr(state | kSubnormalsAreZero);
  const char* data = static_cast<const char*>(b.data);
  int64_t p = 0;
  for (; p + 4 <= panels; p += 4) row_of_panels<4>(c + p * kPanel, a, data + p * b.panel_stride, b.panel_stride, tiles);
  for (; p < panels; ++p) row_of_panels<1>(c + p * kPanel, a, data + p * b.panel_stride, b.panel_stride, tiles);
  _mm_setcsr(state);
}

EADEM_TILES void round_to_tiles(const TileRows& rows, int64_t row, const float* x, int64_t n) {
  constexpr int64_t kLanes = 16, kTileValues = kTileLine / 2;
  for (int64_t k0 = 0; k0 < n; k0 += kTileValues) {
    char* to = rows.line(row, k0 / kTileValues);
    for (int64_t k = 0; k < kTileValues; k += kLanes) {
      const int64_t some = std::clamp<int64_t>(n - k0 - k, 0, kLanes);
      const __m512 values = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << some) - 1), x + k0 + k);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + k * 2),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
    }
  }
}

}  // namespace eadem::kernels::cpu

#else

namespace eadem::kernels::cpu {

void bf16_tiles(float*, int64_t, const TileRows&, const TilePanels&, int64_t, int64_t, int64_t) {
  EADEM_UNREACHABLE("tiles are of x86 processors");
}
void int8_tiles(float*, int64_t, const TileRows&, const TilePanels&, const TileScales&, int64_t, int64_t, int64_t,
                const void*) {
  EADEM_UNREACHABLE("tiles are of x86 processors");
}
void bf16_row(float*, const TileRows&, const TilePanels&, int64_t, int64_t) {
  EADEM_UNREACHABLE("tiles are of x86 processors");
}
void round_to_tiles(const TileRows&, int64_t, const float*, int64_t) {
  EADEM_UNREACHABLE("tiles are of x86 processors");
}

}  // namespace eadem::kernels::cpu

#endif
