// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/attention/latent_tiles.h"

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/kernels/cpu/linear/amx.h"
#include "eadem/kernels/cpu/linear/transpose.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "eadem/kernels/cpu/linear/amx_config.h"

namespace eadem::kernels::cpu {

namespace {

constexpr int64_t kLanes = 16, kLineValues = kTileLine / 2;
static_assert(kLatentGroup == kTileRows && kLatentStep == kLineValues && kLatentKeys == 4 * kTileRows);
constexpr int64_t kParts = 2, kKeyTiles = kLatentKeys / kLatentStep;

// Tiles 0 to 5 get `rows` lines, 6 and 7 all.
EADEM_TILES void configure(int64_t rows) {
  TileConfig config;
  std::fill_n(config.lines, 8, static_cast<uint8_t>(rows));
  config.lines[6] = config.lines[7] = kTileRows;
  asm volatile("" ::"r"(&config) : "memory");  // the intrinsic declares only eight bytes as read
  _tile_loadconfig(&config);
}

// Lines of later rows to prefetch, some at a time.
class LaterLines {
 public:
  // Part `part` of `parts` of all lines of rows of `dims` dimensions.
  LaterLines(const LatentChunk& chunk, int64_t dims, int64_t part, int64_t parts)
      : lines_of_row_((dims + kLineValues - 1) / kLineValues) {
    const int64_t lines = chunk.later_count * lines_of_row_, begin = lines * part / parts;
    rows_ = chunk.later + begin / lines_of_row_;
    line_ = begin % lines_of_row_;
    left_ = lines * (part + 1) / parts - begin;
  }

  // The next lines, if `steps` calls follow, this one included.
  EADEM_TILES void next(int64_t steps) {
    for (int64_t n = (left_ + steps - 1) / steps; n > 0; --n, --left_) {
      _mm_prefetch(reinterpret_cast<const char*>(*rows_) + line_ * kTileLine, _MM_HINT_T1);
      if (++line_ == lines_of_row_) line_ = 0, ++rows_;
    }
  }

 private:
  int64_t lines_of_row_, line_, left_;
  const bf16_t* const* rows_;
};

using Words = uint32_t __attribute__((vector_size(64)));

// To the nearest bf16, in f32.
EADEM_TILES inline __m512 rounded(__m512 value) {
  const auto bits = reinterpret_cast<Words>(value);
  return reinterpret_cast<__m512>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

// Both parts of 32 numbers.
struct Halves {
  __m512i part[kParts];
};
EADEM_TILES inline void split(Halves& halves, const float* numbers) {
  const __m512 first = _mm512_loadu_ps(numbers), second = _mm512_loadu_ps(numbers + kLanes);
  const __m512 first_high = rounded(first), second_high = rounded(second);
  halves.part[0] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second_high, first_high));
  halves.part[1] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second - second_high, first - first_high));
}

// The scores of four groups of 16 keys, whose first rows are keys[i]; their rows lie strides[i] bytes apart.
EADEM_TILES void score_tiles(float* by_key, const char* queries, const char* const* keys, const int64_t* strides,
                             int64_t tiles, LaterLines& later) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  EADEM_TILE_BARRIER;
  for (int64_t t = 0; t < tiles; ++t) {
    _tile_loadd(6, queries + 2 * t * kTileBytes, 64);
    _tile_loadd(7, queries + (2 * t + 1) * kTileBytes, 64);
    const int64_t at = t * kTileLine;
    _tile_loadd(4, keys[0] + at, strides[0]);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, keys[1] + at, strides[1]);
    _tile_dpbf16ps(1, 5, 6);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(4, keys[2] + at, strides[2]);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, keys[3] + at, strides[3]);
    _tile_dpbf16ps(3, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    later.next(tiles - t);
  }
  constexpr int64_t kSums = kTileRows * kLatentGroup;
  _tile_stored(0, by_key, kTileLine);
  _tile_stored(1, by_key + kSums, kTileLine);
  _tile_stored(2, by_key + 2 * kSums, kTileLine);
  _tile_stored(3, by_key + 3 * kSums, kTileLine);
  EADEM_TILE_BARRIER;
}

// Columns [column, column + 32) of the keys as tiles [2 panels][kKeyTiles]; keys beyond `count` as zeros.
EADEM_TILES void write_panels(char* to, const LatentChunk& chunk, int64_t column) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int64_t pair = 0; pair < kLatentKeys / 2; ++pair, to += kTileLine) {
    __m512i even = _mm512_setzero_si512(), odd = even;
    if (2 * pair < chunk.count) even = _mm512_loadu_si512(chunk.keys[2 * pair] + column);
    if (2 * pair + 1 < chunk.count) odd = _mm512_loadu_si512(chunk.keys[2 * pair + 1] + column);
    _mm512_store_si512(to, _mm512_permutex2var_epi16(even, first, odd));
    _mm512_store_si512(to + kKeyTiles * kTileBytes, _mm512_permutex2var_epi16(even, second, odd));
  }
}

// Adds products of weights, as tiles [kKeyTiles][kParts], and both panels to 32 columns of out.
EADEM_TILES void value_tiles(float* out, int64_t line, const char* weights, const char* panels) {
  EADEM_TILE_BARRIER;
  _tile_loadd(0, out, line);
  _tile_loadd(1, out + kLanes, line);
  _tile_loadd(2, weights, 64);
  _tile_loadd(6, panels, 64);
  _tile_dpbf16ps(0, 2, 6);
  _tile_loadd(3, weights + kTileBytes, 64);
  _tile_dpbf16ps(0, 3, 6);
  _tile_loadd(7, panels + kKeyTiles * kTileBytes, 64);
  _tile_dpbf16ps(1, 2, 7);
  _tile_dpbf16ps(1, 3, 7);
  _tile_loadd(4, weights + 2 * kTileBytes, 64);
  _tile_loadd(6, panels + kTileBytes, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, weights + 3 * kTileBytes, 64);
  _tile_dpbf16ps(0, 5, 6);
  _tile_loadd(7, panels + (kKeyTiles + 1) * kTileBytes, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(1, 5, 7);
  _tile_stored(0, out, line);
  _tile_stored(1, out + kLanes, line);
  EADEM_TILE_BARRIER;
}

}  // namespace

EADEM_TILES void write_latent_queries(void* to, const float* q, int64_t stride, int64_t rows, int64_t dims) {
  auto* tile = static_cast<uint8_t*>(to);
  for (int64_t first = 0; first < rows; first += kLatentGroup)
    for (int64_t d = 0; d < dims; d += kLatentStep) {
      alignas(64) uint8_t lines[kParts][kLatentGroup][kTileLine] = {};
      for (int64_t r = 0; r < std::min(kLatentGroup, rows - first); ++r) {
        Halves halves;
        split(halves, q + (first + r) * stride + d);
        for (int64_t p = 0; p < kParts; ++p) _mm512_store_si512(lines[p][r], halves.part[p]);
      }
      for (int64_t p = 0; p < kParts; ++p, tile += kTileBytes)
        for (int64_t r = 0; r < kLatentGroup; r += 4) {
          const uint8_t* const rows_of_four[] = {lines[p][r], lines[p][r + 1], lines[p][r + 2], lines[p][r + 3]};
          for (int64_t at = 0; at < kTileLine; at += 16)
            transpose_words(tile + at / 4 * kTileLine + r * 4, rows_of_four, at);
        }
    }
}

EADEM_TILES void latent_scores(float* by_key, const void* queries, int64_t group, int64_t groups,
                               const LatentChunk& chunk, int64_t dims, bf16_t* spare) {
  const char* keys[kLatentKeys / kTileRows];
  int64_t strides[kLatentKeys / kTileRows];
  for (int64_t i = 0; i < kLatentKeys; i += kTileRows) {
    const char*& first = keys[i / kTileRows];
    int64_t& stride = strides[i / kTileRows];
    if (i >= chunk.count) {  // no keys: those of the first tile, whose scores nobody reads
      first = keys[0], stride = strides[0];
      continue;
    }
    const auto at = [&](int64_t j) { return reinterpret_cast<const char*>(chunk.keys[j]); };
    const int64_t count = std::min(kTileRows, chunk.count - i);
    first = at(i), stride = count > 1 ? at(i + 1) - first : 0;
    bool in_place = count == kTileRows;
    for (int64_t j = 1; j < count; ++j) in_place = in_place && at(i + j) - first == j * stride;
    if (in_place) continue;
    for (int64_t j = 0; j < kTileRows; ++j)
      std::copy_n(chunk.keys[i + std::min(j, count - 1)], dims, spare + (i + j) * dims);
    first = reinterpret_cast<const char*>(spare + i * dims), stride = dims * 2;
  }
  const int64_t tiles = dims / kLatentStep;
  LaterLines later(chunk, dims, group, 2 * groups);
  configure(kTileRows);
  score_tiles(by_key, static_cast<const char*>(queries) + group * kParts * tiles * kTileBytes, keys, strides, tiles,
              later);
  _tile_release();
}

EADEM_TILES void latent_values(float* out, int64_t out_stride, const float* weights, const LatentChunk& chunk,
                               int64_t rows, int64_t columns, int64_t dims) {
  constexpr int64_t kMostGroups = 12;
  alignas(64) char panels[2 * kKeyTiles * kTileBytes];
  alignas(64) char parts[kMostGroups][kKeyTiles * kParts * kTileBytes];  // of weights, of each group of rows
  LaterLines later(chunk, dims, 1, 2);
  for (int64_t from = 0; from < rows; from += kMostGroups * kLatentGroup) {
    const int64_t some = std::min(rows - from, kMostGroups * kLatentGroup);
    for (int64_t r = 0; r < some; ++r)
      for (int64_t t = 0; t < kKeyTiles; ++t) {
        const float* row = weights + (from + r) * kLatentKeys + t * kLatentStep;
        Halves halves;
        split(halves, row);
        for (int64_t p = 0; p < kParts; ++p)
          _mm512_store_si512(parts[r / kLatentGroup] + (t * kParts + p) * kTileBytes + r % kLatentGroup * kTileLine,
                             halves.part[p]);
      }
    int64_t configured = 0;
    for (int64_t c = 0; c < columns; c += kLatentStep) {
      write_panels(panels, chunk, c);
      later.next((columns - c) / kLatentStep);
      for (int64_t r = 0; r < some; r += kLatentGroup) {
        const int64_t height = std::min(kLatentGroup, some - r);
        if (height != configured) configure(configured = height);
        value_tiles(out + (from + r) * out_stride + c, out_stride * 4, parts[r / kLatentGroup], panels);
      }
    }
  }
  _tile_release();
}

}  // namespace eadem::kernels::cpu

#else

namespace eadem::kernels::cpu {

void write_latent_queries(void*, const float*, int64_t, int64_t, int64_t) {
  EADEM_UNREACHABLE("tiles are of x86 processors");
}
void latent_scores(float*, const void*, int64_t, int64_t, const LatentChunk&, int64_t, bf16_t*) {
  EADEM_UNREACHABLE("tiles are of x86 processors");
}
void latent_values(float*, int64_t, const float*, const LatentChunk&, int64_t, int64_t, int64_t) {
  EADEM_UNREACHABLE("tiles are of x86 processors");
}

}  // namespace eadem::kernels::cpu

#endif
