// SPDX-License-Identifier: Apache-2.0
//
// Where the keys and values of a chunk of an int8 cache lie: in groups of 16 positions, whose rows are neighbours
// unless a block of the cache ends among them. The lines of the next chunk are prefetched a few at a time between the
// products of this one, so that memory is read all the time.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_CODE_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_CODE_CHUNK_INL_H_
#undef EADEM_KERNELS_CPU_CODE_CHUNK_INL_H_
#else
#define EADEM_KERNELS_CPU_CODE_CHUNK_INL_H_
#endif

#include "eadem/kernels/cpu/attention/attention-inl.h"
#include "eadem/kernels/cpu/attention/cached_rows-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

inline constexpr int64_t kGroups = kChunk / kKeyGroup;

// Lines to prefetch into the second-level cache.
class FetchAhead {
 public:
  void add(const void* data, int64_t bytes) {
    runs_[count_++] = {static_cast<const char*>(data), bytes};
    lines_ += ceil_div(bytes, kLineBytes);
  }
  // Begins: `takes` calls of take bring `taken` lines each, and `parts` calls of fetch_part the others.
  void begin(int64_t parts, int64_t takes, int64_t taken) {
    const int64_t left = std::max<int64_t>(0, lines_ - takes * taken);
    rate_ = left * kOne / (parts * kTogether) + 1;
    next();
  }
  HWY_INLINE void fetch_part() {
    due_ += rate_;
    if (due_ < kOne || at_ == nullptr) return;
    due_ -= kOne;
    for (int64_t i = 0; i < kTogether; ++i) fetch_far(at_ + i * kLineBytes);
    advance(kTogether);
  }
  // The next `lines` lines, which the caller fetches; null: there are none.
  HWY_INLINE const char* take(int64_t lines) {
    const char* const at = at_;
    if (at != nullptr) advance(lines);
    return at;
  }

 private:
  // Parts are counted in units of 1 / kOne of kTogether lines.
  static constexpr int64_t kOne = 256, kTogether = 4;

  struct Run {
    const char* at;
    int64_t bytes;
  };
  void next() {
    if (count_ == 0) {
      at_ = nullptr;
      return;
    }
    const Run& run = runs_[--count_];
    at_ = run.at, end_ = run.at + run.bytes;
  }
  HWY_INLINE void advance(int64_t lines) {
    at_ += lines * kLineBytes;
    if (at_ >= end_) next();
  }

  const char *at_ = nullptr, *end_ = nullptr;
  int64_t rate_ = 0, due_ = 0, lines_ = 0, count_ = 0;
  Run runs_[2 * kGroups];
};

// The rows of a chunk from `start` on, of which the first `count` are there, as numbers of rows of the whole cache.
struct CodeChunk {
  CodeChunk(const Attention& a, int64_t sequence, int64_t kv_head, int64_t start, int64_t count, int64_t fetch_end)
      : a(a), count(count), groups(ceil_div(count, kKeyGroup)) {
    const int32_t* const table = a.block_table + sequence * a.max_blocks;
    const auto row_at = [&](int64_t position) {
      const int64_t block = position / a.block_size;
      return (table[block] * a.kv_heads + kv_head) * a.block_size + (position - block * a.block_size);
    };
    for (int64_t g = 0; g < groups; ++g) {
      row[g] = row_at(start + g * kKeyGroup);
      whole[g] = a.block_size - (start + g * kKeyGroup) % a.block_size >= kKeyGroup;
      if (whole[g]) continue;
      for (int64_t j = 0; j < kKeyGroup; ++j)
        rows[g * kKeyGroup + j] = row_at(start + g * kKeyGroup + (g * kKeyGroup + j < count ? j : 0));
    }
    // Of a group that lies in two blocks, what follows its first rows is prefetched in the place of the others.
    later_groups = std::clamp<int64_t>(ceil_div(fetch_end - (start + kChunk), kKeyGroup), 0, kGroups);
    for (int64_t g = 0; g < later_groups; ++g) later[g] = row_at(start + kChunk + g * kKeyGroup);
  }

  // The 16 rows of group `g` of data, which has rows of `dim` codes. Those of several blocks are copied to `spare`.
  HWY_INLINE const int8_t* group(const void* data, int64_t g, int64_t dim, int8_t* spare) const {
    const auto* const from = static_cast<const int8_t*>(data);
    if (whole[g]) return from + row[g] * dim;
    for (int64_t j = 0; j < kKeyGroup; ++j) std::copy_n(from + rows[g * kKeyGroup + j] * dim, dim, spare + j * dim);
    return spare;
  }

  // Scales of the chunk's rows, and zeros for the rest.
  HWY_INLINE void load_scales(float* scales, const float* plane) const {
    for (int64_t g = 0; g < groups; ++g) {
      float* const to = scales + g * kKeyGroup;
      if (whole[g])
        store(load(plane + row[g]), to);
      else
        for (int64_t j = 0; j < kKeyGroup; ++j) to[j] = plane[rows[g * kKeyGroup + j]];
    }
    for (int64_t g = 0; g < later_groups; ++g) fetch_far(plane + later[g]);
    std::fill(scales + count, scales + kChunk, 0.0f);
  }

  FetchAhead fetch_ahead() const {
    FetchAhead ahead;
    for (int64_t g = later_groups - 1; g >= 0; --g) {
      if (a.v != a.k) ahead.add(static_cast<const int8_t*>(a.v) + later[g] * a.value_row, kKeyGroup * a.value_row);
      ahead.add(static_cast<const int8_t*>(a.k) + later[g] * a.head_dim, kKeyGroup * a.head_dim);
    }
    return ahead;
  }

  const Attention& a;
  int64_t count, groups;
  int64_t row[kGroups];
  bool whole[kGroups];
  int64_t rows[kChunk];  // of groups that are not whole
  int64_t later[kGroups], later_groups;
};

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3

#endif  // per-target include guard
