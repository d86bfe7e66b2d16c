// SPDX-License-Identifier: Apache-2.0
//
// latent_attention in both of its forms.
//
// Decompressed: a task is a head and a range of a sequence's prompt tokens. It goes through the splits of positions
// (attention_call.h); of each it makes the head's keys and values in scratch, once for all of its tokens, and lets the
// tasks of attention read them there as a cache of one block. A key or value is a sum over the latent in order,
// whatever row stands beside it, and splits are merged in order, so that a token's bits depend neither on the other
// tokens of the step nor on the threads.
//
// Absorbed: the products of head_linear and the attention of attention.cc, over the tokens that are not of a prompt.
// Where others stand between them their queries are gathered, and their results scattered.
#include "eadem/kernels/attention/latent_attention.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "eadem/kernels/cpu/attention/attention_call.h"
#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/linear/head_matrix.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention/latent_attention.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/attention/attention-inl.h"
#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/linear/matmul-inl.h"

#ifndef EADEM_KERNELS_CPU_LATENT_ATTENTION_TYPES_
#define EADEM_KERNELS_CPU_LATENT_ATTENTION_TYPES_
namespace eadem::kernels::cpu {
namespace {

// The sizes of a head and of its scratch. Rows are whole panels.
struct LatentSizes {
  int64_t latent, nope, rope, value;

  int64_t row() const { return latent + rope; }
  int64_t head() const { return nope + rope; }
  int64_t row_width() const { return Attention::padded(row()); }
  int64_t nope_width() const { return Attention::padded(nope); }
  int64_t value_width() const { return Attention::padded(value); }
};

// What a task makes of a head. Matrices are in panels: [outputs / 16, latent, 16].
struct HeadScratch {
  float *to_keys, *to_values;  // the matrices, from a latent to the first part of a key and to a value
  float* rows;                 // [kChunk, row_width]
  float* made;                 // [kChunk, nope_width]
  float *keys, *values;        // [kSplit, head], [kSplit, value_width]
  float* decoded;              // a row of a matrix

  static int64_t floats(const LatentSizes& z) {
    return z.latent * (z.nope_width() + z.value_width()) + kChunk * (z.row_width() + z.nope_width()) +
           kSplit * (Attention::padded(z.head()) + z.value_width()) + std::max(z.row_width(), z.nope_width());
  }
  HeadScratch(const LatentSizes& z, float* p) {
    const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
    to_keys = take(z.latent * z.nope_width()), to_values = take(z.latent * z.value_width());
    rows = take(kChunk * z.row_width()), made = take(kChunk * z.nope_width());
    keys = take(kSplit * Attention::padded(z.head())), values = take(kSplit * z.value_width());
    decoded = take(std::max(z.row_width(), z.nope_width()));
  }
};

// Makes keys and values of the cached rows at [start, start + count) of a sequence, at the beginning of the head's
// scratch. `cache` describes the rows.
using Decompress = void (*)(const Attention& cache, const LatentSizes& z, int64_t sequence, int64_t start,
                            int64_t count, const HeadScratch& s);

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Loads the rows at [first, first + count), which is at most a chunk.
template <typename T>
void load_latents(float* rows, const Attention& cache, int64_t sequence, int64_t first, int64_t count) {
  const int64_t dim = cache.head_dim, width = Attention::padded(dim);
  const KvRows<T> from{cache, static_cast<const T*>(cache.k), sequence, 0, dim};
  for (int64_t j = 0; j < count; ++j, rows += width) {
    const T* row = from.at(first + j);
    widen_row(rows, row, dim, width);
    if constexpr (std::is_same_v<T, int8_t> || std::is_same_v<T, e4m3_t>) {
      const Vec scale = set(cache.k_scales[(row - from.base) / dim]);
      map(
          rows, dim, [scale](Vec v) { return hn::Mul(v, scale); }, static_cast<const float*>(rows));
    }
  }
}

template <typename T>
void decompress(const Attention& cache, const LatentSizes& z, int64_t sequence, int64_t start, int64_t count,
                const HeadScratch& s) {
  const int64_t width = z.row_width();
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t rows = std::min(kChunk, count - first);
    load_latents<T>(s.rows, cache, sequence, start + first, rows);
    const RowOperand latents{s.rows, width, 1};
    matmul_block(s.made, z.nope_width(), false, latents,
                 PanelOperand<float>{s.to_keys, z.latent * kPanelWidth, kPanelWidth}, rows,
                 z.nope_width() / kPanelWidth, z.latent);
    matmul_block(s.values + first * z.value_width(), z.value_width(), false, latents,
                 PanelOperand<float>{s.to_values, z.latent * kPanelWidth, kPanelWidth}, rows,
                 z.value_width() / kPanelWidth, z.latent);
    for (int64_t j = 0; j < rows; ++j) {
      float* const key = s.keys + (first + j) * z.head();
      std::copy_n(s.made + j * z.nope_width(), z.nope, key);
      std::copy_n(s.rows + j * width + z.latent, z.rope, key + z.nope);
    }
  }
}

// Returns the routine for rows that `encoding` stores; null: for plain ones of `dtype`.
Decompress decompress_of(DType dtype, const RowEncoding* encoding) {
  if (encoding != nullptr) return encoding->code() == RowEncoding::Code::int8 ? decompress<int8_t> : decompress<e4m3_t>;
  return with_dtype(dtype, [](auto* type) -> Decompress { return decompress<ElementOf<decltype(type)>>; });
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(decompress_of);

namespace {

enum LatentInput { kLatentQ, kRows, kKeyMatrix, kValueMatrix, kStarts, kLengths, kTable, kPromptLength };

// A product with the matrices of heads, as head_linear has it.
struct HeadProduct {
  WeightReader reader;
  MatmulPlan plan;
  MatrixStack matrices;
  int64_t heads, width, outputs;

  HeadProduct(const KernelRequest& r, const TensorType& weight, MatmulInput x)
      : reader(head_matrix(r, weight, x), x),
        plan(cpu_device(r), reader.types()),
        matrices(stack_encoding(head_matrix(r, weight, x)), weight.dtype, weight.bind({})),
        heads(weight.fixed(0)),
        width(weight.fixed(2)),
        outputs(weight.fixed(1)) {}

  // y[t, h, :outputs] = matrix[h] x[t, h, :width]; x_row and y_row are the elements between heads.
  void run(CpuDevice& device, const TensorView& weights, const float* x, int64_t x_row, float* y, int64_t y_row,
           int64_t tokens, void* scratch) const {
    plan.run_each(
        device, heads,
        [&](int64_t h) {
          Matmul m;
          m.rows = tokens;
          m.k_size = width;
          m.outputs = outputs;
          m.a = x + h * x_row;
          m.a_row_stride = heads * x_row;
          m.b = reader.read(matrices.matrix(weights, h));
          m.y = y + h * y_row;
          m.y_row_stride = heads * y_row;
          return m;
        },
        scratch);
  }
};

// The tokens of a sequence in a step: the first ones may be of its prompt.
struct Tokens {
  int64_t begin, prompt, end;  // [begin, prompt) and [prompt, end), counted within the step
  int64_t cached;              // the position of the first
};

struct LatentPlan {
  LatentAttentionAttrs attrs;
  LatentSizes sizes;
  Attention cache;  // of the rows
  AttentionPlan decompressed, absorbed;
  Decompress decompress;
  HeadProduct key_product, value_product;
  // What a step may have, and the floats of scratch of a worker in the decompressed form.
  int64_t most_tokens, most_splits, most_sequences, worker_floats;
};

int64_t state_floats(const LatentPlan& p, int64_t tokens) {
  return ceil_div(tokens, kBlockRows) * Gathered::floats(kBlockRows, p.sizes.value_width());
}

// Scratch of a worker: the head, the states of all blocks and of one split, and what tasks of attention need.
int64_t decompressed_floats(const LatentPlan& p) {
  return round_up(HeadScratch::floats(p.sizes) + state_floats(p, p.most_tokens) +
                      Gathered::floats(kBlockRows, p.sizes.value_width()) + p.decompressed.worker_floats,
                  kPanelWidth);
}

// The parts of a step's scratch.
struct LatentScratch {
  int32_t* zeros;                   // [most_splits]: a block table
  int32_t* starts;                  // [most_sequences + 1]: of the tokens that are gathered
  float *gathered, *query, *mixed;  // [tokens, heads, head], [tokens, heads, row], [tokens, heads, latent or value]
  float* others;                    // workers, products and attention, in turns

  static int64_t fixed_floats(const LatentPlan& p) {
    return round_up(p.most_splits, kPanelWidth) + round_up(p.most_sequences + 1, kPanelWidth) +
           p.most_tokens * p.attrs.heads * (std::max(p.sizes.head(), p.sizes.value) + p.sizes.row() + p.sizes.latent);
  }
  LatentScratch(const LatentPlan& p, void* memory) {
    float* at = static_cast<float*>(memory);
    const auto take = [&](int64_t n) { return std::exchange(at, at + n); };
    zeros = reinterpret_cast<int32_t*>(take(round_up(p.most_splits, kPanelWidth)));
    starts = reinterpret_cast<int32_t*>(take(round_up(p.most_sequences + 1, kPanelWidth)));
    const int64_t rows = p.most_tokens * p.attrs.heads;
    gathered = take(rows * std::max(p.sizes.head(), p.sizes.value));
    query = take(rows * p.sizes.row()), mixed = take(rows * p.sizes.latent);
    others = at;
  }
};

// One step.
class LatentStep {
 public:
  LatentStep(const LatentPlan& plan, const KernelCall& call)
      : plan_(plan),
        call_(call),
        device_(cpu_device(call)),
        scratch_(plan, call.scratch.data),
        starts_(elements<const int32_t>(call.inputs[kStarts])),
        lengths_(elements<const int32_t>(call.inputs[kLengths])),
        prompts_(elements<const int32_t>(call.inputs[kPromptLength])),
        sequences_(call.inputs[kLengths].shape[0]),
        cache_(plan.cache) {
    const TensorView& rows = call.inputs[kRows];
    EADEM_CHECK(rows.is_contiguous(), "rows {}", to_string(rows));
    cache_.k = cache_.v = rows.data;
    cache_.k_scales = cache_.v_scales = static_cast<const float*>(rows.plane(1));
    cache_.block_table = elements<const int32_t>(call.inputs[kTable]);
    cache_.max_blocks = call.inputs[kTable].shape[1];
    cache_.block_size = rows.shape[2];
    cache_.query_start = starts_;
    cache_.kv_length = lengths_;
    cache_.sequences = sequences_;
  }

  void run() {
    int64_t prompts = 0, others = 0;
    for (int64_t s = 0; s < sequences_; ++s) {
      const Tokens t = tokens_of(s);
      prompts += t.begin < t.prompt ? 1 : 0;
      others += t.end - t.prompt;
    }
    if (prompts > 0) run_decompressed(prompts);
    if (others > 0) run_absorbed(others);
  }

 private:
  Tokens tokens_of(int64_t sequence) const {
    const int64_t begin = starts_[sequence], end = starts_[sequence + 1], cached = lengths_[sequence] - (end - begin);
    return {begin, begin + std::clamp<int64_t>(prompts_[sequence] - cached, 0, end - begin), end, cached};
  }

  void run_decompressed(int64_t prompts) {
    const int64_t heads = plan_.attrs.heads, threads = device_.pool().active_threads();
    std::fill_n(scratch_.zeros, plan_.most_splits, 0);
    // Where there are fewer heads than threads, ranges of tokens become tasks, and each makes its keys by itself.
    const int64_t parts = std::max<int64_t>(1, threads / (heads * prompts));
    device_.pool().parallel_for(prompts * parts * heads, [&](int64_t index, int worker) {
      const int64_t head = index % heads, part = index / heads % parts;
      int64_t sequence = 0;
      for (int64_t left = index / (heads * parts);; ++sequence) {
        const Tokens t = tokens_of(sequence);
        if (t.begin < t.prompt && left-- == 0) break;
      }
      const Tokens t = tokens_of(sequence);
      const int64_t length = round_up(ceil_div(t.prompt - t.begin, parts), kChunk);
      const int64_t first = std::min(t.prompt - t.begin, part * length),
                    last = std::min(t.prompt - t.begin, first + length);
      if (first < last)
        attend(sequence, head, {sequence, first, last, t.cached + first},
               scratch_.others + worker * plan_.worker_floats);
    });
  }

  // Computes a range of a prompt's tokens for a head.
  void attend(int64_t sequence, int64_t head, const TokenBlock& range, float* memory) const {
    const LatentSizes& z = plan_.sizes;
    const HeadScratch s(z, memory);
    memory += HeadScratch::floats(z);
    load_matrices(head, s);
    Attention a = plan_.decompressed.shape;
    a.q = elements<const float>(call_.inputs[kLatentQ]) + head * z.head();
    a.y = elements<float>(call_.outputs[0]) + head * z.value;
    a.k = s.keys;
    a.v = s.values;
    a.query_start = starts_;
    a.kv_length = lengths_;
    a.sequences = sequences_;
    a.block_table = scratch_.zeros;
    a.block_size = kSplit;

    const int64_t width = z.value_width(), tokens = range.end - range.begin, blocks = ceil_div(tokens, kBlockRows);
    const int64_t floats = Gathered::floats(kBlockRows, width);
    float* const states = memory;
    float* const part = states + blocks * floats;
    float* const others = part + floats;
    const auto block_at = [&](int64_t i) {
      const int64_t first = range.begin + i * kBlockRows;
      return TokenBlock{sequence, first, std::min(range.end, first + kBlockRows), range.position + first - range.begin};
    };
    const AttentionRoutines& routines = plan_.decompressed.routines;
    for (int64_t i = 0; i < blocks; ++i) std::fill_n(states + i * floats + kBlockRows, kBlockRows, 0.0f);  // the sums
    for (int64_t split = 0; split < a.end_split(range); ++split) {
      const int64_t start = split * kSplit, end = range.position + tokens;
      plan_.decompress(cache_, z, sequence, start, std::min(kSplit, end - start), s);
      for (int64_t i = 0; i < blocks; ++i) {
        const TokenBlock b = block_at(i);
        if (split >= a.end_split(b)) continue;
        routines.splits(a, b, 0, split, split + 1, part, floats, others);
        routines.add(Gathered(states + i * floats, kBlockRows), Gathered(part, b.end - b.begin), b.end - b.begin,
                     width);
      }
    }
    for (int64_t i = 0; i < blocks; ++i) routines.store(a, block_at(i), 0, Gathered(states + i * floats, kBlockRows));
  }

  // Decodes the matrices of a head into panels.
  void load_matrices(int64_t head, const HeadScratch& s) const {
    const LatentSizes& z = plan_.sizes;
    const TensorView to_latent = plan_.key_product.matrices.matrix(call_.inputs[kKeyMatrix], head),
                     to_value = plan_.value_product.matrices.matrix(call_.inputs[kValueMatrix], head);
    for (int64_t l = 0; l < z.latent; ++l) {
      std::fill_n(s.decoded, z.nope_width(), 0.0f);
      to_latent.encoding->decode_row(s.decoded, to_latent, l);
      for (int64_t n = 0; n < z.nope_width(); n += kPanelWidth)
        std::copy_n(s.decoded + n, kPanelWidth, s.to_keys + n * z.latent + l * kPanelWidth);
    }
    if (z.value < z.value_width()) std::fill_n(s.to_values, z.latent * z.value_width(), 0.0f);
    for (int64_t v = 0; v < z.value; ++v) {
      to_value.encoding->decode_row(s.decoded, to_value, v);
      float* const to = s.to_values + v / kPanelWidth * kPanelWidth * z.latent + v % kPanelWidth;
      for (int64_t l = 0; l < z.latent; ++l) to[l * kPanelWidth] = s.decoded[l];
    }
  }

  void run_absorbed(int64_t count) {
    const LatentSizes& z = plan_.sizes;
    const int64_t heads = plan_.attrs.heads, tokens = starts_[sequences_];
    const float* q = elements<const float>(call_.inputs[kLatentQ]);
    float* y = elements<float>(call_.outputs[0]);
    Attention a = cache_;
    const bool gathers = count < tokens;
    if (gathers) {
      a.query_start = scratch_.starts;
      each_run(z.head(),
               [&](int64_t to, int64_t from, int64_t n) { std::copy_n(q + from, n, scratch_.gathered + to); });
      q = scratch_.gathered;
    }
    plan_.key_product.run(device_, call_.inputs[kKeyMatrix], q, z.head(), scratch_.query, z.row(), count,
                          scratch_.others);
    for (int64_t i = 0; i < count * heads; ++i)
      std::copy_n(q + i * z.head() + z.nope, z.rope, scratch_.query + i * z.row() + z.latent);
    a.q = scratch_.query;
    a.y = scratch_.mixed;
    run_attention(plan_.absorbed, device_, a, scratch_.others);
    float* const results = gathers ? scratch_.gathered : y;
    plan_.value_product.run(device_, call_.inputs[kValueMatrix], scratch_.mixed, z.latent, results, z.value, count,
                            scratch_.others);
    if (gathers)
      each_run(z.value, [&](int64_t from, int64_t to, int64_t n) { std::copy_n(results + from, n, y + to); });
  }

  // Calls copy(gathered, in_step, n) for the elements of each sequence's tokens behind the prompt, of rows [heads,
  // dim], and writes where sequences begin among the gathered ones.
  template <typename Copy>
  void each_run(int64_t dim, Copy&& copy) {
    const int64_t row = plan_.attrs.heads * dim;
    int64_t count = 0;
    scratch_.starts[0] = 0;
    for (int64_t s = 0; s < sequences_; ++s) {
      const Tokens t = tokens_of(s);
      copy(count * row, t.prompt * row, (t.end - t.prompt) * row);
      count += t.end - t.prompt;
      scratch_.starts[s + 1] = static_cast<int32_t>(count);
    }
  }

  const LatentPlan& plan_;
  const KernelCall& call_;
  CpuDevice& device_;
  LatentScratch scratch_;
  const int32_t *starts_, *lengths_, *prompts_;
  int64_t sequences_;
  Attention cache_;
};

const Encoding* pack_latent(const KernelRequest& r, int input) {
  if (input != kKeyMatrix && input != kValueMatrix) return nullptr;
  return stack_encoding(
      head_matrix(r, r.inputs[static_cast<size_t>(input)], r.attrs.get<LatentAttentionAttrs>().matmul_input));
}

Verdict can_attend_latent(const KernelRequest& r) {
  const LatentAttentionAttrs& attrs = r.attrs.get<LatentAttentionAttrs>();
  const RowEncoding* encoding = RowEncoding::of(r.inputs[kRows].encoding);
  Requirements requirements(r);
  requirements.f32("q", r.inputs[kLatentQ]).packed("rows", r.inputs[kRows], kStorageDTypes, encoding);
  for (const size_t input : {size_t{kKeyMatrix}, size_t{kValueMatrix}}) {
    const TensorType& weight = r.inputs[input];
    const Encoding* matrix = head_matrix(r, weight, attrs.matmul_input);
    requirements.require(matrix != nullptr, fmt::format("reads no weight in {}", to_string(weight)))
        .require(GroupPanels::of(matrix) == nullptr || weight.fixed(2) % kStep == 0,
                 fmt::format("takes weight in rows of whole steps of {}; it is {}", kStep, to_string(weight)));
  }
  if (encoding != nullptr && encoding->code() == RowEncoding::Code::int8)
    requirements.require(attrs.row_dim() <= kMostCodes, "rows of an int8 cache have too many codes for exact sums");
  return requirements.f32("y", r.outputs[0]).verdict();
}

Attention latent_shape(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t value_dim, float scale) {
  Attention a{};
  a.heads = heads;
  a.kv_heads = kv_heads;
  a.head_dim = head_dim;
  a.value_dim = value_dim;
  a.scale = scale;
  return a;
}

PlanPtr prepare_latent(const KernelRequest& r, Context&) {
  const CpuDevice& device = cpu_device(r);
  const LatentAttentionAttrs& attrs = r.attrs.get<LatentAttentionAttrs>();
  const TensorType& rows = r.inputs[kRows];
  const LatentSizes sizes{attrs.latent_dim, attrs.nope_dim, attrs.rope_dim, attrs.value_dim};
  Attention cache = latent_shape(attrs.heads, 1, attrs.row_dim(), attrs.latent_dim, attrs.scale);
  cache.value_row = attrs.row_dim();
  Attention made = latent_shape(attrs.heads, attrs.heads, attrs.head_dim(), attrs.value_dim, attrs.scale);
  made.value_row = sizes.value_width();
  const TensorType keys(DType::f32, {1, attrs.heads, kSplit, attrs.head_dim()});
  const int64_t block_size = rows.fixed(2), threads = device.pool().num_threads();
  LatentPlan plan{
      .attrs = attrs,
      .sizes = sizes,
      .cache = {},
      .decompressed = attention_plan(device, made, keys, r.bounds, 0),
      .absorbed = attention_plan(device, cache, rows, r.bounds, block_size),
      .decompress = EADEM_CPU_DISPATCH(decompress_of, device.isa())(rows.dtype, RowEncoding::of(rows.encoding)),
      .key_product = HeadProduct(r, r.inputs[kKeyMatrix], attrs.matmul_input),
      .value_product = HeadProduct(r, r.inputs[kValueMatrix], attrs.matmul_input),
      .most_tokens = r.bounds[Symbol::tokens],
      .most_splits = ceil_div(r.bounds[Symbol::max_blocks] * block_size, kSplit),
      .most_sequences = r.bounds[Symbol::sequences],
      .worker_floats = 0};
  plan.cache = plan.absorbed.shape;
  plan.worker_floats = decompressed_floats(plan);
  const int64_t floats = std::max(threads * plan.worker_floats, plan.absorbed.floats);
  int64_t bytes = floats * static_cast<int64_t>(sizeof(float));
  for (const HeadProduct* product : {&plan.key_product, &plan.value_product})
    bytes = std::max(bytes, product->plan.scratch_bytes_each(device, plan.most_tokens, product->width));
  bytes += LatentScratch::fixed_floats(plan) * static_cast<int64_t>(sizeof(float));
  return make_plan([plan](const KernelCall& call) { LatentStep(plan, call).run(); }, bytes);
}

constexpr Kernel kLatentInference{"cpu_latent_forms", Pass::inference, can_attend_latent, prepare_latent, pack_latent};

}  // namespace

KernelList latent_attention_kernels() { return {&kLatentInference}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
