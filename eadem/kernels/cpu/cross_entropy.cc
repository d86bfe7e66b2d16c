// SPDX-License-Identifier: Apache-2.0
//
// cross_entropy over given logits, and linear_cross_entropy, which computes the logits of a chunk of rows at a time
// with the packed matrix product and uses them while they are in cache.
//
// The backward pass of the fusion needs the weight packed in two ways: it computes the logits again (outputs are words)
// and multiplies their gradient by the weight (outputs are hidden features). The kernel requests the first packing and
// rearranges it into the second in scratch, once per call; this costs little compared with the products.
#include "eadem/kernels/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "eadem/kernels/backends.h"
#include "eadem/kernels/cpu/matmul.h"
#include "eadem/kernels/cpu/packed_panels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/cross_entropy.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/log_softmax-inl.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

float largest_of(const float* x, int64_t n) { return max_of(x, n); }

// dlogits = dloss * (exp(logits - lse) - onehot(label)); 0 for an ignored row. dlogits may be logits.
void cross_entropy_gradient(float* dlogits, const float* logits, int64_t n, int32_t label, float lse, float dloss) {
  if (label < 0) {
    std::fill(dlogits, dlogits + n, 0.0f);
    return;
  }
  map(
      dlogits, n, [l = set(lse), g = set(dloss)](Vec v) { return hn::Mul(g, exp(hn::Sub(v, l))); }, logits);
  dlogits[label] -= dloss;
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(largest_of);
HWY_EXPORT(sum_exp);
HWY_EXPORT(cross_entropy_gradient);

namespace {

// loss and, unless null, lse of `rows` rows of logits.
void rows_loss(CpuDevice& device, float* loss, float* lse, const float* logits, const int32_t* labels, int64_t rows,
               int64_t vocab) {
  const auto largest_of_row = EADEM_CPU_DISPATCH(largest_of, device.isa());
  const auto sum_of_row = EADEM_CPU_DISPATCH(sum_exp, device.isa());
  device.pool().parallel_ranges(rows, std::max<int64_t>(1, 2048 / vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (labels[r] < 0 && lse == nullptr) {
        loss[r] = 0.0f;
        continue;
      }
      const float* row = logits + r * vocab;
      const float largest = largest_of_row(row, vocab);
      const double log_sum = std::log(sum_of_row(row, vocab, largest));
      if (lse != nullptr) lse[r] = static_cast<float>(largest + log_sum);
      loss[r] = labels[r] < 0 ? 0.0f : -log_probability(row[labels[r]], largest, log_sum);
    }
  });
}

void rows_gradient(CpuDevice& device, float* dlogits, const float* logits, const int32_t* labels, const float* lse,
                   const float* dloss, int64_t rows, int64_t vocab) {
  const auto task = EADEM_CPU_DISPATCH(cross_entropy_gradient, device.isa());
  device.pool().parallel_ranges(rows, std::max<int64_t>(1, 2048 / vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      task(dlogits + r * vocab, logits + r * vocab, vocab, labels[r], lse[r], dloss[r]);
  });
}

// ---- cross_entropy

Verdict can_cross_entropy(const KernelRequest& r) {
  return Requirements(r)
      .f32("logits", r.inputs[0])
      .one_of("labels", r.inputs[1], {DType::i32})
      .f32("loss", r.outputs[0])
      .at_cost(20 * elements_of(r, r.inputs[0]));
}

void run_cross_entropy(const KernelCall& call) {
  rows_loss(cpu_device(call), elements<float>(call.outputs[0]),
            call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr, elements<const float>(call.inputs[0]),
            elements<const int32_t>(call.inputs[1]), call.inputs[0].shape[0], call.inputs[0].shape[1]);
}

Verdict can_cross_entropy_backward(const KernelRequest& r) {
  return Requirements(r)
      .f32("logits", r.inputs[0])
      .one_of("labels", r.inputs[1], {DType::i32})
      .f32("lse", r.inputs[2])
      .f32("dloss", r.inputs[3])
      .f32("dlogits", r.outputs[0])
      .at_cost(20 * elements_of(r, r.inputs[0]));
}

void run_cross_entropy_backward(const KernelCall& call) {
  float* dlogits = elements<float>(call.outputs[0]);
  if (dlogits == nullptr) return;
  rows_gradient(cpu_device(call), dlogits, elements<const float>(call.inputs[0]),
                elements<const int32_t>(call.inputs[1]), elements<const float>(call.inputs[2]),
                elements<const float>(call.inputs[3]), call.inputs[0].shape[0], call.inputs[0].shape[1]);
}

// ---- linear_cross_entropy

using Side = PackedPanels::Side;

// The number of rows whose logits are in memory at a time: about 8 MB of logits, which fit the last-level cache, and a
// multiple of the row tiles. It depends on the vocabulary alone, because gradients of the weight are summed chunk by
// chunk.
int64_t chunk_rows(int64_t vocab) { return std::clamp<int64_t>((int64_t{2} << 20) / vocab / 12 * 12, 48, 384); }

int64_t logits_bytes(const KernelRequest& r) {
  const int64_t vocab = r.inputs[1].dim(0).bind(r.bounds);
  const int64_t rows = std::min(chunk_rows(vocab), r.inputs[0].dim(0).bind(r.bounds));
  return round_up(rows * vocab * static_cast<int64_t>(sizeof(float)), 64);
}

const Encoding* pack_weight(const KernelRequest& r, int input) {
  return input == 1 ? PackedPanels::of_forward(r.inputs[1].dtype, cpu_device(r).isa()) : nullptr;
}

// Bytes of scratch for products of up to `rows` rows of x. The products run one after another and share it.
int64_t product_bytes(const CpuDevice& device, DType dtype, int64_t rows, int64_t hidden) {
  const Matmul::Source logits = source_of(PackedPanels::of_forward(dtype, device.isa())->side());
  return round_up(std::max({matmul_scratch_bytes(device, logits, rows, hidden),
                            matmul_scratch_bytes(device, Matmul::Source::panels),
                            matmul_scratch_bytes(device, Matmul::Source::matrix)}),
                  64);
}

int64_t fused_scratch_bytes(const KernelRequest& r) {
  const Shape x = r.inputs[0].bind(r.bounds);
  return product_bytes(cpu_device(r), r.inputs[1].dtype, x[0], x[1]) + logits_bytes(r);
}

int64_t transposed_bytes(const Shape& weight, DType dtype) {
  return round_up(PackedPanels::of(dtype, Side::transposed)->planes(weight)[0].size_bytes(), 64);
}

int64_t fused_backward_scratch_bytes(const KernelRequest& r) {
  return fused_scratch_bytes(r) + transposed_bytes(r.inputs[1].bind(r.bounds), r.inputs[1].dtype);
}

Verdict can_fused(const KernelRequest& r, double products) {
  Requirements requirements(r);
  requirements.f32("x", r.inputs[0])
      .packed("weight", r.inputs[1], {DType::f32, DType::bf16, DType::f16}, pack_weight(r, 1))
      .one_of("labels", r.inputs[2], {DType::i32});
  for (const TensorType& type : r.outputs) requirements.f32("an output", type);
  const double rows = static_cast<double>(r.inputs[0].dim(0).bind(r.bounds));
  return requirements.at_cost(2.0 * products * rows * elements_of(r, r.inputs[1]));
}

Verdict can_fused_forward(const KernelRequest& r) { return can_fused(r, 1); }
Verdict can_fused_backward(const KernelRequest& r) { return can_fused(r, 3); }

struct Fused {
  const float* x;
  int64_t rows, hidden, vocab;
  float* logits;  // [chunk_rows, vocab]
  void* matmul_scratch;
};

Fused fused(const KernelCall& call) {
  Fused f{};
  f.x = elements<const float>(call.inputs[0]);
  f.rows = call.inputs[0].shape[0];
  f.hidden = call.inputs[0].shape[1];
  f.vocab = call.inputs[1].shape[0];
  const TensorView& weight = call.inputs[1];
  const CpuDevice& device = cpu_device(call);
  EADEM_CHECK(weight.encoding == PackedPanels::of_forward(weight.dtype, device.isa()),
              "weight {} is not packed as was asked", to_string(weight));
  f.matmul_scratch = call.scratch.data;
  f.logits = reinterpret_cast<float*>(static_cast<std::byte*>(call.scratch.data) +
                                      product_bytes(device, weight.dtype, f.rows, f.hidden));
  return f;
}

void make_logits(CpuDevice& device, const Fused& f, const TensorView& weight, int64_t row, int64_t rows) {
  Matmul m;
  m.rows = rows;
  m.k_size = f.hidden;
  m.outputs = f.vocab;
  m.a = f.x + row * f.hidden;
  m.a_row_stride = f.hidden;
  set_panels(m, weight);
  m.y = f.logits;
  matmul(device, m, f.matmul_scratch);
}

void run_fused_forward(const KernelCall& call) {
  CpuDevice& device = cpu_device(call);
  const Fused f = fused(call);
  const int32_t* labels = elements<const int32_t>(call.inputs[2]);
  float* loss = elements<float>(call.outputs[0]);
  float* lse = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr;
  const int64_t chunk = chunk_rows(f.vocab);
  for (int64_t row = 0; row < f.rows; row += chunk) {
    const int64_t rows = std::min(chunk, f.rows - row);
    make_logits(device, f, call.inputs[1], row, rows);
    rows_loss(device, loss + row, lse == nullptr ? nullptr : lse + row, f.logits, labels + row, rows, f.vocab);
  }
}

// Makes the panels of the transposed side, [ceil(hidden / 16), vocab, 16], from the panels of the forward side: each 16
// x 16 block is moved and transposed.
template <typename W, bool kPairs>
void transpose_panels(ThreadPool& pool, void* transposed, const void* forward, int64_t vocab, int64_t hidden) {
  const int64_t panel_rows = kPairs ? round_up(hidden, kPairTile) : hidden;
  pool.parallel_for(ceil_div(hidden, kPanelWidth), [&](int64_t block, int) {
    const int64_t lanes = std::min(kPanelWidth, hidden - block * kPanelWidth);
    W* out = static_cast<W*>(transposed) + block * vocab * kPanelWidth;
    for (int64_t n = 0; n < vocab; ++n) {
      const W* in = static_cast<const W*>(forward) +
                    (n / kPanelWidth * panel_rows + block * kPanelWidth) * kPanelWidth +
                    n % kPanelWidth * (kPairs ? 2 : 1);
      for (int64_t i = 0; i < lanes; ++i)
        out[n * kPanelWidth + i] = in[kPairs ? i / 2 * 2 * kPanelWidth + i % 2 : i * kPanelWidth];
      for (int64_t i = lanes; i < kPanelWidth; ++i) out[n * kPanelWidth + i] = W{};
    }
  });
}

void run_fused_backward(const KernelCall& call) {
  CpuDevice& device = cpu_device(call);
  const Fused f = fused(call);
  const TensorView& weight = call.inputs[1];
  const int32_t* labels = elements<const int32_t>(call.inputs[2]);
  const float* lse = elements<const float>(call.inputs[3]);
  const float* dloss = elements<const float>(call.inputs[4]);
  float* dx = elements<float>(call.outputs[0]);
  float* dweight = elements<float>(call.outputs[1]);
  const int64_t chunk = chunk_rows(f.vocab);

  // 1. Pack the transposed side of the weight.
  void* transposed = f.logits + round_up(std::min(chunk, f.rows) * f.vocab, 16);
  if (dx != nullptr) {
    // Only bits move, so bf16 and f16 need no separate code.
    const bool pairs = weight.encoding == PackedPanels::of(weight.dtype, Side::pairs);
    const auto transpose = weight.dtype == DType::f32 ? transpose_panels<float, false>
                           : pairs                    ? transpose_panels<uint16_t, true>
                                                      : transpose_panels<uint16_t, false>;
    transpose(device.pool(), transposed, weight.data, f.vocab, f.hidden);
  }

  for (int64_t row = 0; row < f.rows; row += chunk) {
    const int64_t rows = std::min(chunk, f.rows - row);
    // 2. The gradient of the chunk's logits overwrites the logits.
    make_logits(device, f, weight, row, rows);
    rows_gradient(device, f.logits, f.logits, labels + row, lse + row, dloss + row, rows, f.vocab);

    // 3. dx = dlogits weight
    if (dx != nullptr) {
      Matmul m;
      m.rows = rows;
      m.k_size = f.vocab;
      m.outputs = f.hidden;
      m.a = f.logits;
      m.a_row_stride = f.vocab;
      m.b = transposed;
      m.b_dtype = weight.dtype;
      m.y = dx + row * f.hidden;
      matmul(device, m, f.matmul_scratch);
    }

    // 4. dweight += dlogits^T x
    if (dweight != nullptr) {
      Matmul m;
      m.rows = f.vocab;
      m.k_size = rows;
      m.outputs = f.hidden;
      m.a = f.logits;
      m.a_row_stride = 1;
      m.a_k_stride = f.vocab;
      m.b_source = Matmul::Source::matrix;
      m.b = f.x + row * f.hidden;
      m.finish = Matmul::Finish::accumulate;
      m.y = dweight;
      matmul(device, m, f.matmul_scratch);
    }
  }
}

constexpr Kernel kForward{"cpu_rows", Pass::forward, can_cross_entropy, run_cross_entropy};
constexpr Kernel kInference{"cpu_rows", Pass::inference, can_cross_entropy, run_cross_entropy};
constexpr Kernel kBackward{"cpu_rows", Pass::backward, can_cross_entropy_backward, run_cross_entropy_backward};
constexpr Kernel kFused{"cpu_row_chunks",  Pass::forward,       can_fused_forward,
                        run_fused_forward, fused_scratch_bytes, pack_weight};
constexpr Kernel kFusedInference{"cpu_row_chunks",  Pass::inference,     can_fused_forward,
                                 run_fused_forward, fused_scratch_bytes, pack_weight};
constexpr Kernel kFusedBackward{
    "cpu_row_chunks", Pass::backward, can_fused_backward, run_fused_backward, fused_backward_scratch_bytes,
    pack_weight};

}  // namespace

KernelList cross_entropy_kernels() { return {&kForward, &kInference, &kBackward}; }
KernelList linear_cross_entropy_kernels() { return {&kFused, &kFusedInference, &kFusedBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
