// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/attention/tiled_rows.h"

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/kernels/cpu/linear/amx.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "eadem/kernels/cpu/linear/amx_config.h"

namespace eadem::kernels::cpu {

namespace {

constexpr int64_t kLanes = 16, kLineValues = kTileLine / 2;
static_assert(kTiledGroup == kTileRows && kTiledStep == kLineValues && kTiledKeys == 4 * kTileRows);
constexpr int64_t kParts = 2, kKeyTiles = kTiledKeys / kTiledStep;

// Whether scores of so many rows are products of queries with turned keys. Those of one group are products of keys with
// turned queries. Both have the same bits.
constexpr bool turns_keys(int64_t rows) { return rows > kTiledGroup; }

// Constructors cannot have EADEM_TILES.
EADEM_TILES void configure() {
  TileConfig config;
  std::fill_n(config.lines, 8, static_cast<uint8_t>(kTileRows));
  asm volatile("" ::"r"(&config) : "memory");  // the intrinsic declares only eight bytes as read
  _tile_loadconfig(&config);
}
EADEM_TILES void release() { _tile_release(); }

// The lines of later rows, which are prefetched one after another in equal parts. Smaller parts, a part before the
// tiles instead of after them, and other orders of lines were slower.
class LaterLines {
 public:
  LaterLines(const TiledChunk& chunk, int64_t parts)
      : row_(chunk.later),
        lines_((chunk.later_dims + kLineValues - 1) / kLineValues),
        left_(chunk.later_count * lines_) {
    part_ = (left_ + parts - 1) / parts;
  }
  EADEM_TILES void fetch_part() {
    for (int64_t n = std::min(part_, left_); n > 0; --n, --left_) {
      _mm_prefetch(reinterpret_cast<const char*>(*row_) + line_ * kTileLine, _MM_HINT_T1);
      if (++line_ == lines_) line_ = 0, ++row_;
    }
  }

 private:
  const bf16_t* const* row_;
  int64_t lines_, left_, part_, line_ = 0;
};

// Both parts of 32 numbers.
struct Halves {
  __m512i part[kParts];
};
EADEM_TILES inline void split(Halves& halves, const float* numbers) {
  // The variants with masks of all lanes, since GCC says of the others that they read what is not set.
  constexpr __mmask16 kAll = 0xffff;
  const __m512 first = _mm512_loadu_ps(numbers), second = _mm512_loadu_ps(numbers + kLanes);
  const auto high = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  const __m512i low_words = _mm512_maskz_cvtepu16_epi32(kAll, _mm512_maskz_extracti64x4_epi64(0xff, high, 0)),
                high_words = _mm512_maskz_cvtepu16_epi32(kAll, _mm512_maskz_extracti64x4_epi64(0xff, high, 1));
  const auto first_high = reinterpret_cast<__m512>(_mm512_maskz_slli_epi32(kAll, low_words, 16)),
             second_high = reinterpret_cast<__m512>(_mm512_maskz_slli_epi32(kAll, high_words, 16));
  halves.part[0] = high;
  halves.part[1] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second - second_high, first - first_high));
}

// Transposes four words of each of 16 lines, which begin `line` bytes apart, to four lines of 16 words, `to_line` bytes
// apart.
EADEM_TILES inline void turn_words(char* to, int64_t to_line, const char* from, int64_t line) {
  constexpr __mmask16 kAll = 0xffff;
  constexpr __mmask8 kAllPairs = 0xff;
  __m512i rows[4];  // in 128 bits l: the words of line 4 l + i
  for (int64_t i = 0; i < 4; ++i) {
    const auto at = [&](int64_t l) { return reinterpret_cast<const __m128i*>(from + (4 * l + i) * line); };
    rows[i] = _mm512_castsi128_si512(_mm_loadu_si128(at(0)));
    rows[i] = _mm512_maskz_inserti32x4(kAll, rows[i], _mm_loadu_si128(at(1)), 1);
    rows[i] = _mm512_maskz_inserti32x4(kAll, rows[i], _mm_loadu_si128(at(2)), 2);
    rows[i] = _mm512_maskz_inserti32x4(kAll, rows[i], _mm_loadu_si128(at(3)), 3);
  }
  const __m512i low01 = _mm512_maskz_unpacklo_epi32(kAll, rows[0], rows[1]),
                low23 = _mm512_maskz_unpacklo_epi32(kAll, rows[2], rows[3]),
                high01 = _mm512_maskz_unpackhi_epi32(kAll, rows[0], rows[1]),
                high23 = _mm512_maskz_unpackhi_epi32(kAll, rows[2], rows[3]);
  _mm512_storeu_si512(to, _mm512_maskz_unpacklo_epi64(kAllPairs, low01, low23));
  _mm512_storeu_si512(to + to_line, _mm512_maskz_unpackhi_epi64(kAllPairs, low01, low23));
  _mm512_storeu_si512(to + 2 * to_line, _mm512_maskz_unpacklo_epi64(kAllPairs, high01, high23));
  _mm512_storeu_si512(to + 3 * to_line, _mm512_maskz_unpackhi_epi64(kAllPairs, high01, high23));
}

constexpr int64_t kTurned = 4 * kTileLine;  // bytes that turn_words writes to lines that lie one after another

// Where the tiles of a chunk's keys are: 16 keys each, whose first rows are first[i]; their rows lie line[i] bytes
// apart. Keys that lie otherwise are copied to `spare`.
struct KeyTiles {
  static constexpr int64_t kCount = kTiledKeys / kTileRows;

  KeyTiles(const TiledChunk& chunk, int64_t dims, bf16_t* spare) {
    for (int64_t i = 0; i < kCount; ++i, spare += kTileRows * dims) {
      const bf16_t* const* rows = chunk.rows + i * kTileRows;
      const int64_t count = std::min(kTileRows, chunk.count - i * kTileRows);
      if (count <= 0) {  // no keys: those of the first tile, whose scores nobody reads
        first[i] = first[0], line[i] = line[0];
        continue;
      }
      const auto at = [&](int64_t j) { return reinterpret_cast<const char*>(rows[j]); };
      first[i] = at(0), line[i] = count > 1 ? at(1) - at(0) : 0;
      bool in_place = count == kTileRows;
      for (int64_t j = 1; j < count; ++j) in_place = in_place && at(j) - at(0) == j * line[i];
      if (in_place) continue;
      for (int64_t j = 0; j < kTileRows; ++j) std::copy_n(rows[std::min(j, count - 1)], dims, spare + j * dims);
      first[i] = reinterpret_cast<const char*>(spare), line[i] = dims * 2;
    }
  }

  const char* first[kCount];
  int64_t line[kCount];
};

// Scores [kTiledKeys, kTiledGroup] of one group of rows, whose queries are turned.
EADEM_TILES void scores_by_key(float* by_key, const char* queries, const KeyTiles& keys, int64_t tiles,
                               LaterLines& later) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  EADEM_TILE_BARRIER;
  for (int64_t t = 0; t < tiles; ++t, queries += kParts * kTileBytes) {
    _tile_loadd(6, queries, 64);
    _tile_loadd(7, queries + kTileBytes, 64);
    const int64_t at = t * kTileLine;
    _tile_loadd(4, keys.first[0] + at, keys.line[0]);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, keys.first[1] + at, keys.line[1]);
    _tile_dpbf16ps(1, 5, 6);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(4, keys.first[2] + at, keys.line[2]);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, keys.first[3] + at, keys.line[3]);
    _tile_dpbf16ps(3, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    later.fetch_part();
  }
  constexpr int64_t kSums = kTileRows * kTiledGroup;
  _tile_stored(0, by_key, kTileLine);
  _tile_stored(1, by_key + kSums, kTileLine);
  _tile_stored(2, by_key + 2 * kSums, kTileLine);
  _tile_stored(3, by_key + 3 * kSums, kTileLine);
  EADEM_TILE_BARRIER;
}

// Scores [kTiledGroup, kTiledKeys] of one group of rows and turned keys [tiles][KeyTiles::kCount].
EADEM_TILES void scores_by_row(float* scores, const char* queries, const char* keys, int64_t tiles) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  EADEM_TILE_BARRIER;
  for (int64_t t = 0; t < tiles; ++t, queries += kParts * kTileBytes, keys += KeyTiles::kCount * kTileBytes) {
    _tile_loadd(4, queries, 64);
    _tile_loadd(5, queries + kTileBytes, 64);
    _tile_loadd(6, keys, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, keys + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, keys + 2 * kTileBytes, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, keys + 3 * kTileBytes, 64);
    _tile_dpbf16ps(3, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  constexpr int64_t kLine = kTiledKeys * 4;
  _tile_stored(0, scores, kLine);
  _tile_stored(1, scores + kTileRows, kLine);
  _tile_stored(2, scores + 2 * kTileRows, kLine);
  _tile_stored(3, scores + 3 * kTileRows, kLine);
  EADEM_TILE_BARRIER;
}

// Columns [column, column + 32) of the values as tiles [2 panels][kKeyTiles]; those beyond `count` as zeros.
EADEM_TILES void write_panels(char* to, const TiledChunk& chunk, int64_t column) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int64_t pair = 0; pair < kTiledKeys / 2; ++pair, to += kTileLine) {
    __m512i even = _mm512_setzero_si512(), odd = even;
    if (2 * pair < chunk.count) even = _mm512_loadu_si512(chunk.rows[2 * pair] + column);
    if (2 * pair + 1 < chunk.count) odd = _mm512_loadu_si512(chunk.rows[2 * pair + 1] + column);
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

TiledShape::TiledShape() { configure(); }
TiledShape::~TiledShape() { release(); }

EADEM_TILES void write_tiled_queries(void* to, const float* q, int64_t stride, int64_t rows, int64_t dims) {
  auto* tile = static_cast<char*>(to);
  for (int64_t first = 0; first < rows; first += kTiledGroup)
    for (int64_t d = 0; d < dims; d += kTiledStep) {
      alignas(64) char lines[kParts][kTileBytes] = {};
      for (int64_t r = 0; r < std::min(kTiledGroup, rows - first); ++r) {
        Halves halves;
        split(halves, q + (first + r) * stride + d);
        for (int64_t p = 0; p < kParts; ++p) _mm512_store_si512(lines[p] + r * kTileLine, halves.part[p]);
      }
      for (int64_t p = 0; p < kParts; ++p, tile += kTileBytes) {
        if (turns_keys(rows)) {
          std::copy_n(lines[p], kTileBytes, tile);
          continue;
        }
        for (int64_t i = 0; i < 4; ++i) turn_words(tile + i * kTurned, kTileLine, lines[p] + i * 16, kTileLine);
      }
    }
}

EADEM_TILES void tiled_scores(float* scores, const void* queries, int64_t rows, const TiledChunk& chunk, int64_t dims,
                              void* spare) {
  const KeyTiles keys(chunk, dims, static_cast<bf16_t*>(spare));
  const auto* of_rows = static_cast<const char*>(queries);
  const int64_t tiles = dims / kTiledStep;
  LaterLines later(chunk, tiles);
  if (!turns_keys(rows)) {
    alignas(64) float by_key[kTiledKeys * kTiledGroup];
    scores_by_key(by_key, of_rows, keys, tiles, later);
    for (int64_t r = 0; r < rows; r += 4)
      for (int64_t j = 0; j < kTiledKeys; j += kTileRows)
        turn_words(reinterpret_cast<char*>(scores + r * kTiledKeys + j), kTiledKeys * 4,
                   reinterpret_cast<const char*>(by_key + j * kTiledGroup + r), kTileLine);
    return;
  }
  char* const turned = static_cast<char*>(spare) + kTiledKeys * dims * 2;
  for (int64_t t = 0; t < tiles; ++t) {
    for (int64_t i = 0; i < KeyTiles::kCount; ++i)
      for (int64_t n = 0; n < 4; ++n)
        turn_words(turned + (t * KeyTiles::kCount + i) * kTileBytes + n * kTurned, kTileLine,
                   keys.first[i] + t * kTileLine + n * 16, keys.line[i]);
    later.fetch_part();
  }
  for (int64_t r = 0; r < rows; r += kTiledGroup)
    scores_by_row(scores + r * kTiledKeys, of_rows + r * kParts * dims * 2, turned, tiles);
}

EADEM_TILES void tiled_values(float* out, int64_t out_stride, const float* weights, const TiledChunk& chunk,
                              int64_t rows, int64_t columns) {
  constexpr int64_t kMostGroups = 12;
  // The tiles of some columns are written while those of the columns before them are multiplied.
  alignas(64) char panels[2][2 * kKeyTiles * kTileBytes];
  alignas(64) char parts[kMostGroups][kKeyTiles * kParts * kTileBytes];  // of weights, of each group of rows
  LaterLines later(chunk, columns / kTiledStep);
  for (int64_t from = 0; from < rows; from += kMostGroups * kTiledGroup) {
    const int64_t some = std::min(rows - from, kMostGroups * kTiledGroup);
    for (int64_t r = 0; r < some; ++r)
      for (int64_t t = 0; t < kKeyTiles; ++t) {
        const float* row = weights + (from + r) * kTiledKeys + t * kTiledStep;
        Halves halves;
        split(halves, row);
        for (int64_t p = 0; p < kParts; ++p)
          _mm512_store_si512(parts[r / kTiledGroup] + (t * kParts + p) * kTileBytes + r % kTiledGroup * kTileLine,
                             halves.part[p]);
      }
    write_panels(panels[0], chunk, 0);
    for (int64_t c = 0; c < columns; c += kTiledStep) {
      if (c + kTiledStep < columns) write_panels(panels[(c / kTiledStep + 1) % 2], chunk, c + kTiledStep);
      for (int64_t r = 0; r < some; r += kTiledGroup)
        value_tiles(out + (from + r) * out_stride + c, out_stride * 4, parts[r / kTiledGroup],
                    panels[c / kTiledStep % 2]);
      later.fetch_part();
    }
  }
}

}  // namespace eadem::kernels::cpu

#else

namespace eadem::kernels::cpu {

TiledShape::TiledShape() { EADEM_UNREACHABLE("tiles are of x86 processors"); }
TiledShape::~TiledShape() = default;
void write_tiled_queries(void*, const float*, int64_t, int64_t, int64_t) {
  EADEM_UNREACHABLE("tiles are of x86 processors");
}
void tiled_scores(float*, const void*, int64_t, const TiledChunk&, int64_t, void*) {
  EADEM_UNREACHABLE("tiles are of x86 processors");
}
void tiled_values(float*, int64_t, const float*, const TiledChunk&, int64_t, int64_t) {
  EADEM_UNREACHABLE("tiles are of x86 processors");
}

}  // namespace eadem::kernels::cpu

#endif
