// SPDX-License-Identifier: Apache-2.0
//
// Products of a token's queries with the rows of keys or values that it sees, gathered in chunks. Compiled once per
// instruction set.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_GATHERED_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_GATHERED_ROWS_INL_H_
#undef EADEM_KERNELS_CPU_GATHERED_ROWS_INL_H_
#else
#define EADEM_KERNELS_CPU_GATHERED_ROWS_INL_H_
#endif

#include "eadem/kernels/cpu/attention/attention-inl.h"
#include "eadem/kernels/cpu/attention/selected_call.h"
#include "eadem/kernels/cpu/linear/matmul-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

// Loads keys or values at `count` positions into rows of scratch; the other rows of the chunk are set to 0.
template <typename T>
void gather_chunk(float* rows, const Attention& a, const void* data, const float* scales, int64_t dim, int64_t row_dim,
                  const SelectedToken& t, int64_t kv_head, const int32_t* positions, int64_t count) {
  const int64_t width = Attention::padded(dim);
  const KvRows<T> from{a, static_cast<const T*>(data), t.sequence, kv_head, row_dim};
  for (int64_t j = 0; j < count; ++j) {
    const T* row = from.at(positions[j]);
    widen_row(rows + j * width, row, dim, width);
    if (scales == nullptr) continue;
    const Vec scale = set(scales[(row - from.base) / row_dim]);
    map(
        rows + j * width, dim, [scale](Vec v) { return hn::Mul(v, scale); },
        static_cast<const float*>(rows + j * width));
  }
  std::fill(rows + count * width, rows + kChunk * width, 0.0f);
}

template <typename T>
void gather_keys(const SelectedScratch& s, const SelectedCall& c, const SelectedToken& t, int64_t kv_head,
                 int64_t first, int64_t count) {
  gather_chunk<T>(s.rows, c.a, c.a.k, c.a.k_scales, c.a.head_dim, c.a.head_dim, t, kv_head, s.positions + first, count);
}
template <typename T>
void gather_values(const SelectedScratch& s, const SelectedCall& c, const SelectedToken& t, int64_t kv_head,
                   int64_t first, int64_t count) {
  gather_chunk<T>(s.rows, c.a, c.a.v, c.a.v_scales, c.a.value_dim, c.a.value_row, t, kv_head, s.positions + first,
                  count);
}

// Loads the rows of a token's group from x [tokens, heads, dim].
inline void load_group(float* rows, const SelectedCall& c, const float* x, int64_t dim, const SelectedToken& t,
                       int64_t kv_head) {
  const int64_t token = t.token - c.a.query_start[t.sequence];
  load_rows(rows, c.a, x, dim, {t.sequence, token, token + 1, t.position}, kv_head);
}

inline int64_t first_row(const SelectedCall& c, const SelectedToken& t, int64_t kv_head) {
  return t.token * c.a.heads + kv_head * c.a.group();
}

// products [group, most_keys] = rows of x times the gathered rows of `count` positions.
template <typename Gather>
void multiply_gathered(float* products, const SelectedCall& c, const SelectedScratch& s, const float* x, int64_t dim,
                       int64_t count, Gather gather) {
  const int64_t width = Attention::padded(dim);
  for (int64_t first = 0; first < count; first += kChunk) {
    gather(first, std::min(kChunk, count - first));
    transpose_chunk(s.rows_t, s.rows, width);
    matmul_block(products + first, c.most_keys(), false, RowOperand{x, width, 1},
                 PanelOperand<float>{s.rows_t, kPanelWidth, kChunk}, c.a.group(), kChunk / kPanelWidth, dim);
  }
}

// out [group, width] = factors [group, most_keys] times the gathered rows; 0 without one.
template <typename Gather>
void sum_gathered(float* out, const SelectedCall& c, const SelectedScratch& s, const float* factors, int64_t dim,
                  int64_t count, Gather gather) {
  const int64_t width = Attention::padded(dim);
  if (count == 0) std::fill_n(out, c.a.group() * width, 0.0f);
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t own = std::min(kChunk, count - first);
    gather(first, own);
    matmul_block(out, width, first > 0, RowOperand{factors + first, c.most_keys(), 1},
                 PanelOperand<float>{s.rows, kPanelWidth, width}, c.a.group(), width / kPanelWidth, own);
  }
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
