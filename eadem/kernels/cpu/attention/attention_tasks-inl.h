// SPDX-License-Identifier: Apache-2.0
//
// The tasks of attention's forward pass (AttentionRoutines): blocks of queries over chunks of keys.
//
// A chunk of kAttentionChunk keys is widened into scratch from wherever it is stored (keys transposed, so that lanes
// are keys), and both products are the blocks of matmul-inl.h. For a few rows, as in decode, keys and values are read
// in place (cached_rows-inl.h); for about as many as a panel has, the rows stand in the lanes (rows_in_lanes-inl.h).
// Every score is one chain over head_dim, every output one chain over the chunk's positions, and chunks and splits
// begin at fixed absolute positions: a row's bits do not depend on the rows beside it. Keys and values of an int8
// cache are multiplied as integers where the processor has 8-bit dot products (code_values-inl.h). Those in bf16 that
// enough heads share are multiplied on tiles where the processor has them, for any number of rows; their sums are those
// of tiled_rows.h.
//
// A masked score has weight exactly 0 and adds 0 * v, which changes nothing as long as v is finite. Only the sign of a
// zero could change, so it is cleared at the end.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_ATTENTION_TASKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_ATTENTION_TASKS_INL_H_
#undef EADEM_KERNELS_CPU_ATTENTION_TASKS_INL_H_
#else
#define EADEM_KERNELS_CPU_ATTENTION_TASKS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>

#include "eadem/kernels/cpu/attention/attention-inl.h"
#include "eadem/kernels/cpu/attention/attention_call.h"
#include "eadem/kernels/cpu/attention/cached_rows-inl.h"
#include "eadem/kernels/cpu/attention/code_values-inl.h"
#include "eadem/kernels/cpu/attention/rows_in_lanes-inl.h"
#include "eadem/kernels/cpu/attention/tiled_rows.h"
#include "eadem/kernels/cpu/linear/encode_row-inl.h"
#include "eadem/kernels/cpu/linear/matmul-inl.h"

#ifndef EADEM_KERNELS_CPU_ATTENTION_SCRATCH_
#define EADEM_KERNELS_CPU_ATTENTION_SCRATCH_
namespace eadem::kernels::cpu {
namespace {

// Up to this many rows read keys and values in place; more rows do not, because every tile of rows would widen them
// again. On AVX-512 both ways take equal time at 12 rows (bf16 and f16, head_dim 64 and 128).
constexpr int64_t kRowsInPlace = 12;
// Blocks of more rows than those and at most so many have them in the lanes, unless scores are sums of 8-bit products.
constexpr int64_t kRowsInLanes = kPanelWidth;
static_assert(kRowsInLanes <= kBlockRows / 2 && kRowsInLanes <= kChunk);

bool has_rows_in_lanes(const Attention& a, int64_t rows) {
  return rows > kRowsInPlace && rows <= kRowsInLanes && !a.byte_dots;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// How keys and values reach the rows of a block.
enum class RowsWay { in_place, in_lanes, by_scratch };

struct ForwardScratch {
  float* q;                          // [rows, width]; if queries are rounded, the values of their codes
  int8_t* q_codes;                   // [rows, width]: the codes, if queries are rounded
  int32_t* q_starts;                 // [rows]: -128 times the sum of a row's codes
  float* row_scales;                 // [rows]: the factor of this row's scores
  Gathered split, all;               // the state of the current split, and of all splits so far
  float* scores;                     // [rows, kChunk]; with on_tiles as many rows as whole groups have
  float *keys, *values;              // [kChunk, width], of each its own
  float* keys_t;                     // [head_dim, kChunk]; with rows in lanes, queries [head_dim, kRowsInLanes]
  float *key_scales, *value_scales;  // [kChunk]
  float* new_most;                   // [rows]
  uint8_t* weight_codes;             // [rows, 2, kChunk], with byte_dots
  float* weight_scales;              // [rows]
  void* tile_queries;                // with on_tiles

  static int64_t floats(const Attention& a) {
    const int64_t rows = a.block_rows(), width = a.width(), value_width = a.value_width();
    return round_up(rows * (width + width / 4 + 4 + kChunk / 2) + round_up(rows, kTiledGroup) * kChunk +
                        2 * Gathered::floats(a, rows) + kChunk * (2 * width + value_width + 2) + tile_floats(a),
                    kPanelWidth);
  }
  static int64_t tile_floats(const Attention& a) {
    return a.on_tiles ? tiled_query_bytes(a.block_rows(), a.head_dim) / static_cast<int64_t>(sizeof(float)) : 0;
  }
  ForwardScratch(const Attention& a, float* p) {
    const int64_t rows = a.block_rows(), width = a.width(), value_width = a.value_width();
    const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
    tile_queries = take(tile_floats(a));
    q = take(rows * width), scores = take(round_up(rows, kTiledGroup) * kChunk);
    keys = take(kChunk * width), values = take(kChunk * value_width), keys_t = take(kChunk * width);
    split = Gathered(take(Gathered::floats(a, rows)), rows);
    all = Gathered(take(Gathered::floats(a, rows)), rows);
    q_codes = reinterpret_cast<int8_t*>(take(rows * width / 4)), q_starts = reinterpret_cast<int32_t*>(take(rows));
    row_scales = take(rows);
    key_scales = take(kChunk), value_scales = take(kChunk), new_most = take(rows);
    weight_codes = reinterpret_cast<uint8_t*>(take(rows * kChunk / 2)), weight_scales = take(rows);
  }

  // Returns the part of this scratch that begins at row `first`, for computing a chunk.
  ForwardScratch from_row(int64_t first, const Attention& a) const {
    const int64_t width = a.width();
    ForwardScratch s = *this;
    s.q += first * width, s.q_codes += first * width, s.q_starts += first, s.row_scales += first;
    s.scores += first * kChunk, s.new_most += first;
    s.weight_codes += first * 2 * kChunk, s.weight_scales += first;
    s.split.most += first, s.split.sum += first, s.split.out += first * a.value_width();
    return s;
  }
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Turns the scores of a chunk [rows, kChunk] into weights, updates each row's maximum and sum, and rescales its output.
// A row that sees no key of this chunk gives it weight 0 and stays unchanged. The loops go over all rows pass by pass,
// so that the long dependencies within a row (maximum, exponential, sum) overlap those of its neighbours. kEncoded: the
// scales of keys multiply the scores, and the scales of values multiply the finished weights. meanwhile() is called for
// every vector of weights.
template <bool kEncoded, typename Meanwhile>
void online_softmax(const Attention& a, const TokenBlock& b, int64_t chunk_start, int64_t rows, const ForwardScratch& s,
                    const Meanwhile& meanwhile) {
  const int64_t group = a.group(), width = a.value_width();

  // 1. Scale, cap, mask, and the new maximum of every row.
  for (int64_t r = 0; r < rows; ++r) {
    const Seen keys = seen(a, b.position + r / group, chunk_start);
    float* scores = s.scores + r * kChunk;
    if (keys.first >= keys.last) {
      std::fill(scores, scores + kChunk, 0.0f);
      continue;
    }
    const Vec scale = set(s.row_scales[r]);
    for (int64_t j = 0; j < kChunk; j += kLanes) {
      const Vec score = load(scores + j);
      store(hn::Mul(kEncoded ? hn::Mul(score, load(s.key_scales + j)) : score, scale), scores + j);
    }
    if (a.softcap > 0)
      map(
          scores, kChunk,
          [cap = set(a.softcap), inverse = set(1.0f / a.softcap)](Vec v) { return soft_cap(v, cap, inverse); },
          static_cast<const float*>(scores));
    std::fill(scores, scores + keys.first, -kInfinity);
    std::fill(scores + keys.last, scores + kChunk, -kInfinity);
    Vec largest = set(s.split.most[r]);
    for (int64_t j = 0; j < kChunk; j += kLanes) largest = hn::Max(largest, load(scores + j));
    s.new_most[r] = max_lanes(largest);
  }

  // 2. Weights and their sums. What came before shrinks by exp(old maximum - new maximum), which is 1 after most chunks
  // of a long sequence and exp(-infinity) = 0 before the first.
  for (int64_t r = 0; r < rows; ++r) {
    const Seen keys = seen(a, b.position + r / group, chunk_start);
    if (keys.first >= keys.last) continue;
    float* scores = s.scores + r * kChunk;
    const float new_most = s.new_most[r];
    Vec total = zero();
    for (int64_t j = 0; j < kChunk; j += kLanes) {
      const Vec weight = exp_of_negative(hn::Sub(load(scores + j), set(new_most)));
      store(kEncoded ? hn::Mul(weight, load(s.value_scales + j)) : weight, scores + j);
      total = hn::Add(total, weight);
      meanwhile();
    }
    if (s.split.most[r] != new_most) {
      const Vec shrink = exp_of_negative(set(s.split.most[r] - new_most));
      float* out = s.split.out + r * width;
      map(
          out, width, [shrink](Vec v) { return hn::Mul(v, shrink); }, static_cast<const float*>(out));
      s.split.sum[r] *= hn::GetLane(shrink);
      s.split.most[r] = new_most;
    }
    s.split.sum[r] += sum_lanes(total);
  }
}

template <bool kEncoded>
void online_softmax(const Attention& a, const TokenBlock& b, int64_t chunk_start, int64_t rows,
                    const ForwardScratch& s) {
  online_softmax<kEncoded>(a, b, chunk_start, rows, s, [] {});
}

// Loads the block's queries into scratch. For an int8 cache, queries are rounded to codes too, with one scale for each
// row: sums of products of codes are exact, so every kernel computes equal scores.
template <typename T>
void load_queries(const Attention& a, const TokenBlock& b, int64_t kv_head, const ForwardScratch& s) {
  const int64_t rows = (b.end - b.begin) * a.group(), width = a.width();
  load_rows(s.q, a, a.q, a.head_dim, b, kv_head);
  std::fill_n(s.row_scales, rows, a.scale);
  if constexpr (std::is_same_v<T, int8_t>) {
    for (int64_t r = 0; r < rows; ++r) {
      float* q = s.q + r * width;
      int8_t* codes = s.q_codes + r * width;
      float scale;
      encode_row(codes, &scale, q, width, a.kv_encoding->largest());
      map(
          q, width, [](Vec v) { return v; }, static_cast<const int8_t*>(codes));
      s.row_scales[r] = a.scale * scale;
      s.q_starts[r] = -128 * std::accumulate(codes, codes + width, int32_t{0});
    }
  }
  if (a.on_tiles) return write_tiled_queries(s.tile_queries, s.q, width, rows, a.head_dim);
  if (!has_rows_in_lanes(a, rows)) return;
  std::fill_n(s.q + rows * width, (kRowsInLanes - rows) * width, 0.0f);
  transpose_chunk<kRowsInLanes>(s.keys_t, s.q, width);
}

// ---- The two products of a chunk: through scratch for many rows, in place for a few.

// Sets the addresses of group `g` to the keys from `position` on. If the keys in memory end within the group, at the
// end of the sequence or of a cache block, they are copied to `spare` [kKeyGroup, head_dim] and padded with zeros.
// `end` is the end of the sequence; `fetch_end` is where prefetching stops.
template <typename T>
void take_group(KeyGroups<T>& groups, int g, const KvRows<T>& keys, int64_t position, int64_t end, int64_t fetch_end,
                T* spare) {
  const auto later = [&](int64_t count) { return keys.at(position + count < fetch_end ? position + count : position); };
  groups.at[g] = keys.at(position);
  groups.near[g] = later(kKeysNear);
  groups.ahead[g] = later(kKeysAhead);
  groups.stride[g] = keys.stride();
  if (keys.memory_run(position) >= kKeyGroup) return;
  const int64_t head_dim = keys.dim, count = std::min(end - position, kKeyGroup);
  for (int64_t j = 0; j < count; ++j) std::copy_n(keys.at(position + j), head_dim, spare + j * head_dim);
  std::fill_n(spare + count * head_dim, (kKeyGroup - count) * head_dim, T{});
  groups.at[g] = spare;
  groups.stride[g] = head_dim;
}

// Transposes the keys at [start, start + count) into t [head_dim, kChunk]. Scores of columns past `count` are never
// used.
template <typename T>
void load_transposed(float* t, const Attention& a, int64_t sequence, int64_t kv_head, int64_t start, int64_t count,
                     int64_t end, float* spare) {
  using Columns = KeyColumns<T>;
  const KvRows<T> rows_of{a, static_cast<const T*>(a.k), sequence, kv_head, a.head_dim};
  for (int64_t first = 0; first < count; first += kKeyGroup) {
    KeyGroups<T> group;
    take_group(group, 0, rows_of, start + first, end, 0, reinterpret_cast<T*>(spare));
    const int64_t stride = group.stride[0];
    for (int64_t lane = 0; lane < kKeyGroup; lane += kLanes) {
      const T* keys = group.at[0] + lane * stride;
      float* to = t + first + lane;
      int64_t d = 0;
      for (; d + Columns::kCount <= a.head_dim; d += Columns::kCount) {
        Vec dims[Columns::kCount];
        Columns::load_columns(dims, keys + d, stride);
#pragma GCC unroll kUnroll
        for (int64_t i = 0; i < Columns::kCount; ++i) store(dims[i], to + (d + i) * kChunk);
      }
      for (; d < a.head_dim; ++d) store(load_column(keys + d, stride), to + d * kChunk);
    }
  }
}

template <typename T>
void scores_by_scratch(const Attention& a, int64_t sequence, int64_t kv_head, int64_t start, int64_t count,
                       int64_t rows, const ForwardScratch& s) {
  const int64_t width = a.width();
  load_transposed<T>(s.keys_t, a, sequence, kv_head, start, count, start + count, s.keys);
  matmul_block(s.scores, kChunk, false, RowOperand{s.q, width, 1}, PanelOperand<float>{s.keys_t, kPanelWidth, kChunk},
               rows, kChunk / kPanelWidth, a.head_dim);
}

template <typename T>
void values_by_scratch(const Attention& a, int64_t sequence, int64_t kv_head, int64_t start, int64_t count,
                       int64_t rows, const ForwardScratch& s) {
  const int64_t width = a.value_width();
  load_chunk(s.values, a, static_cast<const T*>(a.v), a.value_dim, a.value_row, sequence, kv_head, start, count);
  matmul_block(s.split.out, width, true, RowOperand{s.scores, kChunk, 1},
               PanelOperand<float>{s.values, kPanelWidth, width}, rows, width / kPanelWidth, count);
}

template <typename T>
void scores_in_place(const Attention& a, int64_t sequence, int64_t kv_head, int64_t start, int64_t end, int64_t rows,
                     const ForwardScratch& s) {
  const int64_t width = a.width(), last = std::min(start + kChunk, end);
  const KvRows<T> rows_of{a, static_cast<const T*>(a.k), sequence, kv_head, a.head_dim};
  T* spare = reinterpret_cast<T*>(s.keys);
  for (int64_t first = start; first < last; first += kScoreGroups * kKeyGroup) {
    KeyGroups<T> keys;
    // Past the last group, the first group takes its place; those scores are never used.
    for (int g = 0; g < kScoreGroups; ++g)
      take_group(keys, g, rows_of, first + g * kKeyGroup < last ? first + g * kKeyGroup : first, end, end,
                 spare + g * kKeyGroup * a.head_dim);
    key_scores(s.scores + (first - start), kChunk, s.q, width, keys, rows, a.head_dim);
  }
}

template <typename T>
void values_in_place(const Attention& a, int64_t sequence, int64_t kv_head, int64_t start, int64_t end, int64_t rows,
                     const ForwardScratch& s) {
  const int64_t width = a.value_width(), last = std::min(start + kChunk, end);
  const KvRows<T> rows_of{a, static_cast<const T*>(a.v), sequence, kv_head, a.value_row};
  for (int64_t position = start; position < last;) {
    // A run is at most kKeysAhead long, so that the addresses of the next run are known when it is prefetched.
    const int64_t count = std::min(rows_of.run(position, last), kKeysAhead);
    const auto later = [&](int64_t n) { return rows_of.at(position + n < end ? position + n : position); };
    const ValueRun<T> values{later(0), later(kValuesNear), later(kKeysAhead), rows_of.stride(), count};
    add_weighted(s.split.out, width, s.scores + (position - start), kChunk, values, rows, a.value_dim);
    position += count;
  }
}

// Whether rows in lanes read values from the rows of keys, which the scores have brought into a cache.
template <typename T>
bool values_are_of_keys(const Attention& a) {
  return sizeof(T) > 1 && a.v == a.k && a.value_row == a.head_dim && a.value_dim % kLaneColumns == 0;
}

// Loads the scales of an encoded cache at [start, start + count), and zeros for the rest of the chunk.
void load_scales(float* scales, const Attention& a, const float* plane, int64_t sequence, int64_t kv_head,
                 int64_t start, int64_t count) {
  for (int64_t j = 0; j < count;) {
    const int64_t position = start + j, block = a.block_table[sequence * a.max_blocks + position / a.block_size];
    const int64_t run = std::min(count - j, a.block_size - position % a.block_size);
    std::copy_n(plane + (block * a.kv_heads + kv_head) * a.block_size + position % a.block_size, run, scales + j);
    j += run;
  }
  std::fill(scales + count, scales + kChunk, 0.0f);
}

// ---- Spans.

void clear(const Gathered& g, int64_t rows, int64_t width) {
  std::fill_n(g.most, rows, -kInfinity);
  std::fill_n(g.sum, rows, 0.0f);
  std::fill_n(g.out, rows * width, 0.0f);
}

// Adds the keys of a chunk in bf16 to the states of the block's `rows` rows in s.split, on tiles.
void attend_on_tiles(const Attention& a, const TokenBlock& b, int64_t kv_head, int64_t start, int64_t rows,
                     const ForwardScratch& s) {
  static_assert(kTiledKeys == kChunk);
  const int64_t end = b.position + (b.end - b.begin), count = std::min(kChunk, end - start);
  const auto rows_of = [&](const void* data, int64_t dim) {
    return LaneChunk<bf16_t>({a, static_cast<const bf16_t*>(data), b.sequence, kv_head, dim}, start, count, end);
  };
  const bool of_keys = a.v == a.k && a.value_row == a.head_dim;
  const LaneChunk<bf16_t> keys = rows_of(a.k, a.head_dim);
  // Where values are of keys, scores prefetch half of the next rows, and sums of values the others.
  const int64_t fetched = of_keys ? keys.later_count / 2 : keys.later_count;
  const TiledChunk of_scores{keys.rows, count, keys.later, fetched, a.head_dim};
  tiled_scores(s.scores, s.tile_queries, rows, of_scores, a.head_dim, s.keys);
  online_softmax<false>(a, b, start, rows, s);
  const auto add_values = [&](const TiledChunk& values) {
    tiled_values(s.split.out, a.value_width(), s.scores, values, rows, a.value_dim);
  };
  if (of_keys) return add_values({keys.rows, count, keys.later + fetched, keys.later_count - fetched, a.head_dim});
  const LaneChunk<bf16_t> values = rows_of(a.v, a.value_row);
  add_values({values.rows, count, values.later, values.later_count, a.value_dim});
}

#if HWY_TARGET == HWY_AVX3
// Adds the keys of a chunk in an int8 cache to the states of the block's `rows` rows in s.split, by 8-bit dot products.
void attend_by_bytes(const Attention& a, const TokenBlock& b, int64_t kv_head, int64_t start, int64_t rows,
                     const ForwardScratch& s) {
  const int64_t end = b.position + (b.end - b.begin), count = std::min(kChunk, end - start);
  const CodeChunk chunk(a, b.sequence, kv_head, start, count, end);
  const int64_t panels = ceil_div(a.value_dim, kPanelWidth), quads = ceil_div(count, kWordCodes);
  FetchAhead ahead = chunk.fetch_ahead();
  // The numbers of calls of fetch_part and of take below, which come about every 20 cycles.
  ahead.begin(ceil_div(rows, 8) * kGroups * (a.head_dim / kBlockCodes) + rows * (kChunk / kLanes) +
                  kQuads * ceil_div(panels, 4),
              ceil_div(rows, 4) * ceil_div(panels, 2), quads);
  chunk.load_scales(s.key_scales, a.k_scales);
  chunk.load_scales(s.value_scales, a.v_scales);
  auto* const spare = reinterpret_cast<int8_t*>(s.keys);
  for (int64_t g = 0; g < chunk.groups; ++g)
    code_scores(s.scores + g * kKeyGroup, s.q_codes, a.width(), s.q_starts, chunk.group(a.k, g, a.head_dim, spare),
                rows, a.head_dim, ahead);
  online_softmax<true>(a, b, start, rows, s, [&] { ahead.fetch_part(); });
  auto* const words = reinterpret_cast<uint8_t*>(s.values);
  for (int64_t g = 0; g < chunk.groups; ++g)
    interleave_codes(words + g * (kKeyGroup / kWordCodes) * kQuadBytes, chunk.group(a.v, g, a.value_row, spare),
                     a.value_row, a.value_dim, ahead);
  for (int64_t r = 0; r < rows; ++r)
    s.weight_scales[r] = round_weights(s.weight_codes + r * kRoundedWeights, s.scores + r * kChunk);
  code_values(s.split.out, a.value_width(), s.weight_codes, s.weight_scales, words, rows, quads, panels, ahead);
}
#endif

// Adds the keys of a chunk to the states of the block's `rows` rows in s.split.
template <typename T>
void attend_chunk(const Attention& a, const TokenBlock& b, int64_t kv_head, int64_t start, int64_t rows, RowsWay way,
                  const ForwardScratch& s) {
  if constexpr (std::is_same_v<T, bf16_t>)
    if (a.on_tiles) return attend_on_tiles(a, b, kv_head, start, rows, s);
#if HWY_TARGET == HWY_AVX3
  if constexpr (std::is_same_v<T, int8_t>)
    if (a.byte_dots) return attend_by_bytes(a, b, kv_head, start, rows, s);
#endif
  constexpr bool kEncoded = std::is_same_v<T, int8_t> || std::is_same_v<T, e4m3_t>;
  const int64_t end = b.position + (b.end - b.begin), count = std::min(kChunk, end - start);
  if constexpr (kEncoded) {
    load_scales(s.key_scales, a, a.k_scales, b.sequence, kv_head, start, count);
    load_scales(s.value_scales, a, a.v_scales, b.sequence, kv_head, start, count);
  }
  if (way == RowsWay::in_lanes) {
    const LaneChunk<T> chunk(KvRows<T>{a, static_cast<const T*>(a.k), b.sequence, kv_head, a.head_dim}, start, count,
                             end);
    RowFetch fetch(chunk.later, chunk.later_count, a.head_dim * static_cast<int64_t>(sizeof(T)));
    float* const by_key = s.keys;  // [kChunk, kRowsInLanes]
    // If values are of keys, half of the next chunk is prefetched during the scores, which alone would have to read
    // faster than memory can.
    const bool of_keys = values_are_of_keys<T>(a);
    of_keys ? lane_scores<2>(by_key, s.keys_t, chunk, count, a.head_dim, fetch)
            : lane_scores<1>(by_key, s.keys_t, chunk, count, a.head_dim, fetch);
    transpose_chunk(s.scores, by_key, kRowsInLanes);
    online_softmax<kEncoded>(a, b, start, rows, s);
    if (of_keys)
      return lane_values(s.split.out, a.value_width(), s.scores, chunk, count, rows, a.value_dim, fetch, s.values);
    return values_by_scratch<T>(a, b.sequence, kv_head, start, count, rows, s);
  }
  if (way == RowsWay::in_place)
    scores_in_place<T>(a, b.sequence, kv_head, start, end, rows, s);
  else
    scores_by_scratch<T>(a, b.sequence, kv_head, start, count, rows, s);
  online_softmax<kEncoded>(a, b, start, rows, s);
  if (way == RowsWay::in_place) return values_in_place<T>(a, b.sequence, kv_head, start, end, rows, s);
  values_by_scratch<T>(a, b.sequence, kv_head, start, count, rows, s);
}

// Computes the states of the block's rows over one split of keys, in s.split. Keys and values after it are prefetched,
// too: they belong to the next split, or to the thread's next task.
template <typename T>
void attend_split(const Attention& a, const TokenBlock& b, int64_t kv_head, int64_t split, const ForwardScratch& s) {
  const int64_t tokens = b.end - b.begin, end = b.position + tokens;
  clear(s.split, tokens * a.group(), a.value_width());
  std::optional<TiledShape> tiles;
  if (a.on_tiles) tiles.emplace();
  const int64_t first = std::max(first_chunk(a, b.position), split * (kSplit / kChunk));
  for (int64_t start = first * kChunk; start < std::min(end, (split + 1) * kSplit); start += kChunk) {
    // Tokens before the chunk see none of its keys. Groups of rows on tiles are those of the block.
    const int64_t before = a.on_tiles ? 0 : std::max<int64_t>(0, start - b.position),
                  rows = (tokens - before) * a.group();
    const TokenBlock late{b.sequence, b.begin + before, b.end, b.position + before};
    // Queries in lanes are those of all rows.
    const RowsWay way = tokens * a.group() <= kRowsInPlace                        ? RowsWay::in_place
                        : before == 0 && has_rows_in_lanes(a, tokens * a.group()) ? RowsWay::in_lanes
                                                                                  : RowsWay::by_scratch;
    attend_chunk<T>(a, late, kv_head, start, rows, way, s.from_row(before * a.group(), a));
  }
}

// Merges the state of a later split into `all`.
void merge(const Gathered& all, const Gathered& split, int64_t rows, int64_t width) {
  const auto same = [](Vec v) { return v; };
  for (int64_t r = 0; r < rows; ++r) {
    const float* part = split.out + r * width;
    float* out = all.out + r * width;
    if (split.sum[r] == 0.0f) continue;
    if (all.sum[r] == 0.0f) {
      all.most[r] = split.most[r];
      all.sum[r] = split.sum[r];
      map(out, width, same, part);
      continue;
    }
    const Vec most = hn::Max(set(all.most[r]), set(split.most[r]));
    const Vec old_factor = exp_of_negative(hn::Sub(set(all.most[r]), most));
    const Vec factor = exp_of_negative(hn::Sub(set(split.most[r]), most));
    all.sum[r] = hn::GetLane(hn::MulAdd(set(split.sum[r]), factor, hn::Mul(set(all.sum[r]), old_factor)));
    all.most[r] = hn::GetLane(most);
    map(
        out, width, [&](Vec x, Vec y) { return hn::MulAdd(y, factor, hn::Mul(x, old_factor)); },
        static_cast<const float*>(out), part);
  }
}

// Adds each head's sink to the states of its rows, as the score of a key whose value is 0.
void add_sinks(const Attention& a, int64_t kv_head, const Gathered& g, int64_t rows) {
  const int64_t width = a.value_width();
  for (int64_t r = 0; r < rows; ++r) {
    const float sink = a.sinks[kv_head * a.group() + r % a.group()], most = std::max(g.most[r], sink);
    const Vec factor = exp_of_negative(set(g.most[r] - most));
    const float weight = hn::GetLane(exp_of_negative(set(sink - most)));
    float* out = g.out + r * width;
    map(
        out, width, [factor](Vec v) { return hn::Mul(v, factor); }, static_cast<const float*>(out));
    g.sum[r] = g.sum[r] * hn::GetLane(factor) + weight;
    g.most[r] = most;
  }
}

void store_block(const Attention& a, const TokenBlock& b, int64_t kv_head, const Gathered& g) {
  const int64_t rows = (b.end - b.begin) * a.group();
  if (a.sinks != nullptr) add_sinks(a, kv_head, g, rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = a.query_start[b.sequence] + b.begin + r / a.group();
    const int64_t row = token * a.heads + kv_head * a.group() + r % a.group();
    map(
        a.y + row * a.value_dim, a.value_dim,
        [total = set(g.sum[r])](Vec v) { return hn::Add(hn::Div(v, total), zero()); },
        static_cast<const float*>(g.out + r * a.value_width()));
    if (a.lse != nullptr) a.lse[row] = g.most[r] + std::log(g.sum[r]);
  }
}

// ---- Tasks.

template <typename T>
void attention_block(const Attention& a, const TokenBlock& b, int64_t kv_head, float* scratch) {
  const ForwardScratch s(a, scratch);
  const int64_t rows = (b.end - b.begin) * a.group();
  load_queries<T>(a, b, kv_head, s);
  clear(s.all, rows, a.value_width());
  for (int64_t split = a.first_split(b); split < a.end_split(b); ++split) {
    attend_split<T>(a, b, kv_head, split, s);
    merge(s.all, s.split, rows, a.value_width());
  }
  store_block(a, b, kv_head, s.all);
}

template <typename T>
void attention_splits(const Attention& a, const TokenBlock& b, int64_t kv_head, int64_t first, int64_t last,
                      float* gathered, int64_t floats, float* scratch) {
  ForwardScratch s(a, scratch);
  load_queries<T>(a, b, kv_head, s);
  for (int64_t split = first; split < last; ++split, gathered += floats) {
    s.split = Gathered(gathered, (b.end - b.begin) * a.group());
    attend_split<T>(a, b, kv_head, split, s);
  }
}

void attention_merge(const Attention& a, const TokenBlock& b, int64_t kv_head, float* gathered, int64_t floats) {
  const int64_t rows = (b.end - b.begin) * a.group();
  const Gathered all(gathered, rows);
  for (int64_t i = 1; i < a.end_split(b) - a.first_split(b); ++i)
    merge(all, Gathered(gathered + i * floats, rows), rows, a.value_width());
  store_block(a, b, kv_head, all);
}

template <typename T>
constexpr AttentionRoutines kAttentionRoutines{attention_block<T>, attention_splits<T>, attention_merge, merge,
                                               store_block};

// Returns the routines for keys and values that `encoding` stores; null: for plain ones of `dtype`.
AttentionRoutines attention_routines(DType dtype, const RowEncoding* encoding) {
  if (encoding != nullptr)
    return encoding->code() == RowEncoding::Code::int8 ? kAttentionRoutines<int8_t> : kAttentionRoutines<e4m3_t>;
  return with_dtype(dtype,
                    [](auto* type) -> AttentionRoutines { return kAttentionRoutines<ElementOf<decltype(type)>>; });
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
