// SPDX-License-Identifier: Apache-2.0
//
// Prefetching weights, keys and values for few rows, which are bound by reading memory. Some panels are read side by
// side, each as a stream. After the end of a stream comes a panel of the next group.
//
// Measured on Emerald Rapids with four streams: hardware prefetch alone reaches 75 to 80% of the read bandwidth.
// Prefetching into the first-level cache reaches 90 to 94% at any distance, presumably because its line buffers then
// wait for memory. So every line is prefetched twice: from far ahead into the second-level cache, and from there into
// the first.
//
// Measured on Zen 3, whose tiles are narrower: four streams reach 67% of the read bandwidth that way, one stream 95%,
// and one prefetch of each line into the first-level cache is enough (quantized_row.cc). So it is for 16-bit weights
// (matmul-inl.h), whose four streams are read 1.05 to 1.13 times as fast with one prefetch as with two.
#pragma once

#include <hwy/base.h>

#include <cstdint>

namespace eadem::kernels::cpu {

inline constexpr int64_t kFetchNear = 1024, kFetchFar = 4096;  // bytes

// Finds the lines that a stream will read soon, as offsets from the line that it reads now.
class StreamAhead {
 public:
  // `panel_bytes` is the length of a stream; `jump` is the distance from its end to the start of its successor in the
  // next group.
  StreamAhead(int64_t panel_bytes, int64_t jump) : panel_bytes_(panel_bytes), jump_(jump) {}

  // The offset of the line that is read `distance` bytes after the one at `at` bytes from the start of the stream.
  int64_t offset(int64_t at, int64_t distance) const { return distance + (at + distance < panel_bytes_ ? 0 : jump_); }

 private:
  int64_t panel_bytes_, jump_;
};

// p may point outside of any memory: the prefetch then does nothing. The functions must be inlined, because GCC drops
// calls to a function that only prefetches as having no effect.
HWY_INLINE void fetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }
HWY_INLINE void fetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace eadem::kernels::cpu
