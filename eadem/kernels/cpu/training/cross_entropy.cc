// SPDX-License-Identifier: Apache-2.0
//
// cross_entropy over given logits, and linear_cross_entropy, which computes the logits of a chunk of rows at a time
// with the packed matrix product and uses them while they are in cache.
//
// The backward pass of the fusion needs the weight packed in two ways: it computes the logits again (outputs are words)
// and multiplies their gradient by the weight (outputs are hidden features). The kernel requests the first packing and
// rearranges it into the second in scratch, once per call; this costs little compared with the products. In 8-bit
// floats (cpu_fp8_tensor) the operands are decoded to f32 in each call, for tests and comparison, not for speed.
#include "eadem/kernels/training/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/linear/bf16_gradient.h"
#include "eadem/kernels/cpu/linear/matmul.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/training/cross_entropy.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"
#include "eadem/kernels/cpu/training/log_softmax-inl.h"

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

EADEM_CPU_EXPORT(largest_of);
EADEM_CPU_EXPORT(sum_exp);
EADEM_CPU_EXPORT(cross_entropy_gradient);

namespace {

// The parts of a row's log-softmax (log_softmax-inl.h).
struct LogSoftmax {
  float (*largest)(const float* x, int64_t n);
  double (*sum)(const float* x, int64_t n, float largest);
};
LogSoftmax log_softmax_of(const KernelRequest& r) {
  return {EADEM_CPU_DISPATCH(largest_of, cpu_device(r).isa()), EADEM_CPU_DISPATCH(sum_exp, cpu_device(r).isa())};
}
using RowGradient = void (*)(float* dlogits, const float* logits, int64_t n, int32_t label, float lse, float dloss);

// loss and, unless null, lse of `rows` rows of logits.
void rows_loss(CpuDevice& device, const LogSoftmax& log_softmax, float* loss, float* lse, const float* logits,
               const int32_t* labels, int64_t rows, int64_t vocab) {
  device.pool().parallel_ranges(rows, std::max<int64_t>(1, 2048 / vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (labels[r] < 0 && lse == nullptr) {
        loss[r] = 0.0f;
        continue;
      }
      const float* row = logits + r * vocab;
      const float largest = log_softmax.largest(row, vocab);
      const double log_sum = std::log(log_softmax.sum(row, vocab, largest));
      if (lse != nullptr) lse[r] = static_cast<float>(largest + log_sum);
      loss[r] = labels[r] < 0 ? 0.0f : -log_probability(row[labels[r]], largest, log_sum);
    }
  });
}

void rows_gradient(CpuDevice& device, RowGradient gradient, float* dlogits, const float* logits, const int32_t* labels,
                   const float* lse, const float* dloss, int64_t rows, int64_t vocab) {
  device.pool().parallel_ranges(rows, std::max<int64_t>(1, 2048 / vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      gradient(dlogits + r * vocab, logits + r * vocab, vocab, labels[r], lse[r], dloss[r]);
  });
}

// ---- cross_entropy

Verdict can_cross_entropy(const KernelRequest& r) {
  return Requirements(r)
      .f32("logits", r.inputs[0])
      .one_of("labels", r.inputs[1], {DType::i32})
      .f32("loss", r.outputs[0])
      .verdict();
}

PlanPtr prepare_cross_entropy(const KernelRequest& r, Context&) {
  return make_plan([log_softmax = log_softmax_of(r)](const KernelCall& call) {
    rows_loss(cpu_device(call), log_softmax, elements<float>(call.outputs[0]),
              call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr,
              elements<const float>(call.inputs[0]), elements<const int32_t>(call.inputs[1]), call.inputs[0].shape[0],
              call.inputs[0].shape[1]);
  });
}

Verdict can_cross_entropy_backward(const KernelRequest& r) {
  return Requirements(r)
      .f32("logits", r.inputs[0])
      .one_of("labels", r.inputs[1], {DType::i32})
      .f32("lse", r.inputs[2])
      .f32("dloss", r.inputs[3])
      .f32("dlogits", r.outputs[0])
      .require(!r.attrs.get<CrossEntropyAttrs>().dlogits_in_e5m2, kPlainGradients)
      .verdict();
}

PlanPtr prepare_cross_entropy_backward(const KernelRequest& r, Context&) {
  return make_plan([row = EADEM_CPU_DISPATCH(cross_entropy_gradient, cpu_device(r).isa())](const KernelCall& call) {
    float* dlogits = elements<float>(call.outputs[0]);
    if (dlogits == nullptr) return;
    rows_gradient(cpu_device(call), row, dlogits, elements<const float>(call.inputs[0]),
                  elements<const int32_t>(call.inputs[1]), elements<const float>(call.inputs[2]),
                  elements<const float>(call.inputs[3]), call.inputs[0].shape[0], call.inputs[0].shape[1]);
  });
}

// ---- linear_cross_entropy

using Side = PackedPanels::Side;

// The number of rows whose logits are in memory at a time: about 8 MB of logits, which fit the last-level cache, but at
// least 192 rows, because each chunk reads and writes the gradient of the whole weight (with a vocabulary of 32,000, 60
// rows took 1.5 times as long). It depends on the vocabulary alone, because gradients of the weight are summed chunk by
// chunk.
int64_t chunk_rows(int64_t vocab) { return std::clamp<int64_t>((int64_t{2} << 20) / vocab / 12 * 12, 192, 384); }

int64_t logits_bytes(const KernelRequest& r) {
  const int64_t vocab = r.inputs[1].dim(0).bind(r.bounds);
  const int64_t rows = std::min(chunk_rows(vocab), r.inputs[0].dim(0).bind(r.bounds));
  return round_up(rows * vocab * static_cast<int64_t>(sizeof(float)), 64);
}

// The encoding of x and weight that are in 8-bit floats; null where the weight is not.
const Fp8TensorEncoding* operands_in_8_bits(const KernelRequest& r) {
  const Fp8TensorEncoding* weight = Fp8TensorEncoding::of(r.inputs[1].encoding);
  return weight != nullptr && weight->kind() == Fp8Format::Kind::e4m3 ? weight : nullptr;
}

const Encoding* pack_weight(const KernelRequest& r, int input) {
  if (input != 1) return nullptr;
  if (operands_in_8_bits(r) != nullptr) return PackedPanels::of(DType::f32, Side::normal);  // in scratch
  return PackedPanels::of_forward(r.inputs[1].dtype, cpu_device(r).isa(),
                                  r.attrs.get<LinearCrossEntropyAttrs>().matmul_input);
}

// The packing of the same weight that the gradient of x reads.
const PackedPanels& transposed_of(const PackedPanels& forward) {
  return *PackedPanels::of(forward.dtype(), forward.side() == Side::vnni ? Side::vnni_transposed : Side::transposed);
}

Verdict can_fused(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("x", r.inputs[0])
      .packed("weight", r.inputs[1], kStorageDTypes, pack_weight(r, 1))
      .one_of("labels", r.inputs[2], {DType::i32})
      .require(r.pass != Pass::backward || !r.attrs.get<LinearCrossEntropyAttrs>().dlogits_in_e5m2, kPlainGradients);
  for (const TensorType& type : r.outputs) requirements.f32("an output", type);
  return requirements.verdict();
}

Verdict can_fused_in_8_bits(const KernelRequest& r) {
  const auto& attrs = r.attrs.get<LinearCrossEntropyAttrs>();
  Requirements requirements(r);
  requirements
      .require(operands_in_8_bits(r) != nullptr,
               fmt::format("takes a weight in e4m3 with one scale; it is {}", to_string(r.inputs[1])))
      .require(attrs.matmul_input == MatmulInput::int8,
               fmt::format("rounds x to 8-bit floats; matmul_input is {}", matmul_input_name(attrs.matmul_input)))
      .require(r.pass != Pass::backward || attrs.dlogits_in_e5m2, "multiplies gradients of logits in e5m2")
      .f32("x", r.inputs[0], operands_in_8_bits(r))
      .one_of("labels", r.inputs[2], {DType::i32});
  for (const TensorType& type : r.outputs) requirements.f32("an output", type);
  return requirements.verdict({.reason = "decodes in each call"});
}

const Encoding* wanted_in_8_bits(const KernelRequest& r, int input) {
  return input == 0 ? operands_in_8_bits(r) : nullptr;
}

// The products of a chunk, which run one after another and share scratch: logits, and the gradients of x and weight.
class ChunkProducts {
 public:
  explicit ChunkProducts(const KernelRequest& r)
      : packing_(static_cast<const PackedPanels*>(pack_weight(r, 1))),
        decodes_(operands_in_8_bits(r) != nullptr),
        logits_(cpu_device(r), {.source = source_of(packing_->side()), .b_dtype = packing_->dtype()}),
        dx_(cpu_device(r), {.source = source_of(transposed_of(*packing_).side()), .b_dtype = packing_->dtype()}),
        dweight_(cpu_device(r), {.source = MatmulTypes::Source::matrix, .finish = MatmulTypes::Finish::accumulate}) {
    const Shape x = r.inputs[0].bind(r.bounds);
    const int64_t vocab = r.inputs[1].bind(r.bounds)[0], chunk = std::min(chunk_rows(vocab), x[0]);
    const CpuDevice& device = cpu_device(r);
    scratch_bytes_ = std::max(logits_.scratch_bytes(device, x[0], x[1]), dweight_.scratch_bytes(device, 0, 0));
    if (r.pass == Pass::backward) {
      scratch_bytes_ = std::max(scratch_bytes_, dx_.scratch_bytes(device, chunk, vocab));
      if (packing_->side() == Side::vnni) {
        rounded_dweight_.emplace(device);
        scratch_bytes_ = std::max(scratch_bytes_, rounded_dweight_->scratch_bytes(device, chunk, vocab, x[1]));
      }
    }
    scratch_bytes_ = round_up(scratch_bytes_, 64);
    if (!decodes_) return;
    panels_begin_ = scratch_bytes_;
    x_begin_ = panels_begin_ + round_up(packing_->planes(r.inputs[1].bind(r.bounds))[0].size_bytes(), 64);
    scratch_bytes_ = x_begin_ + round_up(x.num_elements() * static_cast<int64_t>(sizeof(float)), 64);
  }

  const PackedPanels& packing() const { return *packing_; }
  // Operands come in 8-bit floats. Their values are put into scratch, as panels and as a matrix.
  bool decodes() const { return decodes_; }
  float* panels(void* scratch) const {
    return reinterpret_cast<float*>(static_cast<std::byte*>(scratch) + panels_begin_);
  }
  float* x(void* scratch) const { return reinterpret_cast<float*>(static_cast<std::byte*>(scratch) + x_begin_); }
  const MatmulPlan& logits() const { return logits_; }
  const MatmulPlan& dx() const { return dx_; }
  const MatmulPlan& dweight() const { return dweight_; }
  // Replaces dweight() where products are of bf16.
  const std::optional<Bf16WeightGradient>& rounded_dweight() const { return rounded_dweight_; }
  int64_t scratch_bytes() const { return scratch_bytes_; }

 private:
  const PackedPanels* packing_;
  bool decodes_;
  MatmulPlan logits_, dx_, dweight_;
  std::optional<Bf16WeightGradient> rounded_dweight_;
  int64_t scratch_bytes_ = 0, panels_begin_ = 0, x_begin_ = 0;
};

// The values of a matrix in 8-bit floats, as they are and as panels of the normal side.
void decode_matrix(ThreadPool& pool, float* values, const TensorView& encoded) {
  pool.parallel_ranges(encoded.shape[0], 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) encoded.encoding->decode_row(values + r * encoded.shape[1], encoded, r);
  });
}

void decode_panels(ThreadPool& pool, float* panels, const TensorView& encoded) {
  const int64_t rows = encoded.shape[0], columns = encoded.shape[1];
  pool.parallel_for(ceil_div(rows, kPanelWidth), [&](int64_t panel, int) {
    std::vector<float> row(static_cast<size_t>(columns), 0.0f);
    float* out = panels + panel * columns * kPanelWidth;
    for (int64_t lane = 0; lane < kPanelWidth; ++lane) {
      const int64_t r = panel * kPanelWidth + lane;
      if (r < rows)
        encoded.encoding->decode_row(row.data(), encoded, r);
      else
        std::fill(row.begin(), row.end(), 0.0f);
      for (int64_t k = 0; k < columns; ++k) out[k * kPanelWidth + lane] = row[static_cast<size_t>(k)];
    }
  });
}

struct Fused {
  const float* x;
  const void* weight;  // panels
  int64_t rows, hidden, vocab;
  float* logits;  // [chunk_rows, vocab]
};

Fused fused(const ChunkProducts& products, const KernelCall& call) {
  const TensorView &x = call.inputs[0], &weight = call.inputs[1];
  if (products.decodes()) {
    decode_panels(cpu_device(call).pool(), products.panels(call.scratch.data), weight);
    decode_matrix(cpu_device(call).pool(), products.x(call.scratch.data), x);
  } else {
    EADEM_CHECK(weight.encoding == &products.packing(), "weight {} is not packed as was asked", to_string(weight));
  }
  return {.x = products.decodes() ? products.x(call.scratch.data) : elements<const float>(x),
          .weight = products.decodes() ? products.panels(call.scratch.data) : weight.data,
          .rows = call.inputs[0].shape[0],
          .hidden = call.inputs[0].shape[1],
          .vocab = weight.shape[0],
          .logits = reinterpret_cast<float*>(static_cast<std::byte*>(call.scratch.data) + products.scratch_bytes())};
}

void make_logits(const ChunkProducts& products, const KernelCall& call, const Fused& f, int64_t row, int64_t rows) {
  Matmul m;
  m.rows = rows;
  m.k_size = f.hidden;
  m.outputs = f.vocab;
  m.a = f.x + row * f.hidden;
  m.a_row_stride = f.hidden;
  m.b.data = f.weight;
  m.y = f.logits;
  products.logits().run(cpu_device(call), m, call.scratch.data);
}

PlanPtr prepare_fused_forward(const KernelRequest& r, Context&) {
  const ChunkProducts products(r);
  const LogSoftmax log_softmax = log_softmax_of(r);
  return make_plan(
      [=](const KernelCall& call) {
        const Fused f = fused(products, call);
        const int32_t* labels = elements<const int32_t>(call.inputs[2]);
        float* loss = elements<float>(call.outputs[0]);
        float* lse = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr;
        const int64_t chunk = chunk_rows(f.vocab);
        for (int64_t row = 0; row < f.rows; row += chunk) {
          const int64_t rows = std::min(chunk, f.rows - row);
          make_logits(products, call, f, row, rows);
          rows_loss(cpu_device(call), log_softmax, loss + row, lse == nullptr ? nullptr : lse + row, f.logits,
                    labels + row, rows, f.vocab);
        }
      },
      products.scratch_bytes() + logits_bytes(r));
}

// Makes the panels of the transposed side, [ceil(hidden / 16), vocab, 16], from the panels of the forward side: each 16
// x 16 block is moved and transposed.
template <typename W>
void transpose_panels(ThreadPool& pool, void* transposed, const void* forward, int64_t vocab, int64_t hidden) {
  pool.parallel_for(ceil_div(hidden, kPanelWidth), [&](int64_t block, int) {
    const int64_t lanes = std::min(kPanelWidth, hidden - block * kPanelWidth);
    W* out = static_cast<W*>(transposed) + block * vocab * kPanelWidth;
    for (int64_t n = 0; n < vocab; ++n) {
      const W* in = static_cast<const W*>(forward) + (n / kPanelWidth * hidden + block * kPanelWidth) * kPanelWidth +
                    n % kPanelWidth;
      for (int64_t i = 0; i < lanes; ++i) out[n * kPanelWidth + i] = in[i * kPanelWidth];
      for (int64_t i = lanes; i < kPanelWidth; ++i) out[n * kPanelWidth + i] = W{};
    }
  });
}

// Makes the transposed panels of bf16 from VNNI-interleaved panels: [ceil(hidden / 16), ceil(vocab / 32) * 16, 16, 2].
void transpose_vnni(ThreadPool& pool, void* transposed, const void* forward, int64_t vocab, int64_t hidden) {
  const int64_t panel_rows = round_up(hidden, kVnniTile), pairs = round_up(vocab, kVnniTile) / 2;
  pool.parallel_for(ceil_div(hidden, kPanelWidth), [&](int64_t block, int) {
    const int64_t lanes = std::min(kPanelWidth, hidden - block * kPanelWidth);
    auto* out = static_cast<uint32_t*>(transposed) + block * pairs * kPanelWidth;
    for (int64_t pair = 0; pair < pairs; ++pair, out += kPanelWidth) {
      const int64_t n = 2 * pair;
      // A word joins two neighbouring outputs. The last panel holds zeros past the vocabulary, and there are no further
      // panels to read from.
      const auto* in = static_cast<const uint16_t*>(forward) +
                       (n / kPanelWidth * panel_rows + block * kPanelWidth) * kPanelWidth + n % kPanelWidth * 2;
      for (int64_t i = 0; i < kPanelWidth; ++i) {
        const int64_t at = i / 2 * 2 * kPanelWidth + i % 2;
        out[i] = n < vocab && i < lanes ? in[at] | static_cast<uint32_t>(in[at + 2]) << 16 : 0;
      }
    }
  });
}

using TransposePanels = void (*)(ThreadPool& pool, void* transposed, const void* forward, int64_t vocab,
                                 int64_t hidden);

// Only bits move, so bf16 and f16 need no separate code.
TransposePanels transpose_of(const PackedPanels& forward) {
  if (forward.side() == Side::vnni) return transpose_vnni;
  return forward.dtype() == DType::f32 ? transpose_panels<float> : transpose_panels<uint16_t>;
}

struct FusedBackward {
  ChunkProducts products;
  LogSoftmax log_softmax;
  RowGradient gradient;
  TransposePanels transpose;
};

int64_t lse_bytes(const KernelRequest& r) {
  return round_up(chunk_rows(r.inputs[1].dim(0).bind(r.bounds)) * static_cast<int64_t>(sizeof(float)), 64);
}

// The scale of gradients of logits that are rounded to e5m2, not finite if a value of dloss is not.
float e5m2_scale(const float* dloss, int64_t rows) {
  const TensorView row(const_cast<float*>(dloss), DType::f32, {1, rows});
  return Fp8TensorEncoding::largest_magnitude(row, 0, 1) / fp8_largest(Fp8Format::Kind::e5m2);
}

void round_to_e5m2(ThreadPool& pool, float* values, int64_t rows, int64_t columns, float scale) {
  constexpr auto kKind = Fp8Format::Kind::e5m2;
  pool.parallel_ranges(rows, 1, [&](int64_t begin, int64_t end) {
    for (float& value : std::span(values + begin * columns, static_cast<size_t>((end - begin) * columns)))
      value = scale * fp8_to_float(kKind, Fp8TensorEncoding::code_of(kKind, value, scale));
  });
}

void run_fused_backward(const FusedBackward& plan, const KernelCall& call) {
  CpuDevice& device = cpu_device(call);
  const Fused f = fused(plan.products, call);
  const int32_t* labels = elements<const int32_t>(call.inputs[2]);
  const float* saved_lse = elements<const float>(call.inputs[3]);
  const float* dloss = elements<const float>(call.inputs[4]);
  float* dx = elements<float>(call.outputs[0]);
  float* dweight = elements<float>(call.outputs[1]);
  float* loss = call.outputs.size() > 2 ? elements<float>(call.outputs[2]) : nullptr;
  const int64_t chunk = chunk_rows(f.vocab);
  float* const chunk_lse = f.logits + round_up(std::min(chunk, f.rows) * f.vocab, 16);

  // 1. Pack the transposed side of the weight.
  void* transposed = chunk_lse + round_up(chunk, 16);
  if (dx != nullptr) plan.transpose(device.pool(), transposed, f.weight, f.vocab, f.hidden);
  const float scale = plan.products.decodes() ? e5m2_scale(dloss, f.rows) : 0.0f;

  for (int64_t row = 0; row < f.rows; row += chunk) {
    const int64_t rows = std::min(chunk, f.rows - row);
    // 2. The gradient of the chunk's logits overwrites the logits.
    make_logits(plan.products, call, f, row, rows);
    if (loss != nullptr)
      rows_loss(device, plan.log_softmax, loss + row, chunk_lse, f.logits, labels + row, rows, f.vocab);
    const float* lse = loss != nullptr ? chunk_lse : saved_lse + row;
    rows_gradient(device, plan.gradient, f.logits, f.logits, labels + row, lse, dloss + row, rows, f.vocab);
    if (plan.products.decodes()) round_to_e5m2(device.pool(), f.logits, rows, f.vocab, scale);

    // 3. dx = dlogits weight
    if (dx != nullptr) {
      Matmul m;
      m.rows = rows;
      m.k_size = f.vocab;
      m.outputs = f.hidden;
      m.a = f.logits;
      m.a_row_stride = f.vocab;
      m.b.data = transposed;
      m.y = dx + row * f.hidden;
      plan.products.dx().run(device, m, call.scratch.data);
    }

    // 4. dweight += dlogits^T x
    if (dweight != nullptr && plan.products.rounded_dweight()) {
      plan.products.rounded_dweight()->add(device, dweight, {f.x + row * f.hidden, f.logits, rows, f.vocab, f.hidden},
                                           call.scratch.data);
    } else if (dweight != nullptr) {
      Matmul m;
      m.rows = f.vocab;
      m.k_size = rows;
      m.outputs = f.hidden;
      m.a = f.logits;
      m.a_row_stride = 1;
      m.a_k_stride = f.vocab;
      m.b.data = f.x + row * f.hidden;
      m.y = dweight;
      plan.products.dweight().run(device, m, call.scratch.data);
    }
  }
}

PlanPtr prepare_fused_backward(const KernelRequest& r, Context&) {
  const ChunkProducts products(r);
  const FusedBackward plan{products, log_softmax_of(r), EADEM_CPU_DISPATCH(cross_entropy_gradient, cpu_device(r).isa()),
                           transpose_of(products.packing())};
  return make_plan(
      [plan](const KernelCall& call) { run_fused_backward(plan, call); },
      products.scratch_bytes() + logits_bytes(r) + lse_bytes(r) +
          round_up(transposed_of(products.packing()).planes(r.inputs[1].bind(r.bounds))[0].size_bytes(), 64));
}

constexpr Kernel kForward{"cpu_rows", Pass::forward, can_cross_entropy, prepare_cross_entropy};
constexpr Kernel kInference{"cpu_rows", Pass::inference, can_cross_entropy, prepare_cross_entropy};
constexpr Kernel kBackward{"cpu_rows", Pass::backward, can_cross_entropy_backward, prepare_cross_entropy_backward};
constexpr Kernel kFused{"cpu_row_chunks", Pass::forward, can_fused, prepare_fused_forward, pack_weight};
constexpr Kernel kFusedInference{"cpu_row_chunks", Pass::inference, can_fused, prepare_fused_forward, pack_weight};
constexpr Kernel kFusedBackward{"cpu_row_chunks", Pass::backward, can_fused, prepare_fused_backward, pack_weight};

constexpr Kernel in_8_bits(Kernel kernel) {
  kernel.name = "cpu_fp8_tensor";
  kernel.can_handle = can_fused_in_8_bits;
  kernel.packing = nullptr;
  kernel.wanted_encoding = wanted_in_8_bits;
  return kernel;
}
constexpr Kernel kForward8 = in_8_bits(kFused), kInference8 = in_8_bits(kFusedInference),
                 kBackward8 = in_8_bits(kFusedBackward);

}  // namespace

KernelList cross_entropy_kernels() { return {&kForward, &kInference, &kBackward}; }
KernelList linear_cross_entropy_kernels() {
  return {&kFused, &kFusedInference, &kFusedBackward, &kForward8, &kInference8, &kBackward8};
}

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
