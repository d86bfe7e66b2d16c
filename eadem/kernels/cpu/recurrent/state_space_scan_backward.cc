// SPDX-License-Identifier: Apache-2.0
//
// The gradients of state_space_scan. A task is a sequence and a slice of the heads of a group: for each head it makes
// the states again, keeps those before every chunk of tokens, and goes back chunk by chunk with all states of one in
// memory. What heads add to the gradients of b and c is summed slice by slice in scratch, then over the slices in
// order.
#include <algorithm>

#include "eadem/kernels/cpu/recurrent/state_space_scan.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/recurrent/state_space_scan_backward.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_SCAN_GRADIENT_
#define EADEM_KERNELS_CPU_SCAN_GRADIENT_
namespace eadem::kernels::cpu {
namespace {

constexpr int64_t kScanChunk = 32;      // tokens whose states are in memory together
constexpr int64_t kHeadsInSlice = 8;    // few enough to keep threads busy, and the sums over slices small
constexpr int64_t kScanParameters = 3;  // of a head: dt_bias, a_log, d

struct ScanGradient {
  Scan scan;
  const float* dy;         // [tokens, heads, head_dim]
  float* dx;               // [tokens, heads, head_dim] or null
  float* ddt;              // [tokens, heads] or null
  float* db;               // [slices, tokens, groups, state]
  float* dc;               // [slices, tokens, groups, state]
  float* parameter_parts;  // [sequences, heads, kScanParameters]
};

// The scratch of one worker.
struct ScanStates {
  float* checkpoints;  // [chunks, state, head_dim]: before each chunk
  float* states;       // [kScanChunk + 1, state, head_dim]: before each token of a chunk, and after the last one
  float* gradient;     // [state, head_dim]
  float* dux;          // [head_dim]

  static int64_t floats(int64_t tokens, int64_t size, int64_t head_dim) {
    return (ceil_div(tokens, kScanChunk) + kScanChunk + 2) * size + round_up(head_dim, 16);
  }
  ScanStates(float* scratch, int64_t tokens, int64_t size)
      : checkpoints(scratch),
        states(checkpoints + ceil_div(tokens, kScanChunk) * size),
        gradient(states + (kScanChunk + 1) * size),
        dux(gradient + size) {}
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// next = decay state + delta b x, each [state, head_dim]; next may be state.
void advance_state(float* next, const float* state, const Scan& scan, int64_t t, int64_t head, float delta,
                   float decay) {
  const float* b = scan.b_row(t, head);
  for (int64_t n = 0; n < scan.state; ++n)
    map(
        next + n * scan.head_dim, scan.head_dim,
        [k = set(decay), u = set(delta * b[n])](Vec s, Vec x) { return hn::MulAdd(u, x, hn::Mul(k, s)); },
        state + n * scan.head_dim, scan.x_row(t, head));
}

// One number of the state of a token and a head, for all of head_dim. `gradient` [head_dim] is that of the state after
// the token, without what the token's own output adds; on return it is that of the state before.
struct StateRow {
  float b, c, decay;
  const float *x, *dy;          // [head_dim]
  const float *before, *after;  // [head_dim]: the state
  float *gradient, *dux;        // [head_dim]; b times the gradient is added to dux
  int64_t head_dim;
};

// Sums over head_dim: of the gradient after the token times x, of dy times the state, of the gradient times the state
// before the token.
struct StateRowSums {
  Vec gradient_x, dy_state, gradient_before;
};

HWY_INLINE void row_backward(const StateRow& row, StateRowSums& sums) {
  const Vec b = set(row.b), c = set(row.c), decay = set(row.decay);
  for (int64_t p = 0; p < row.head_dim; p += kLanes) {
    const int64_t lanes = std::min(kLanes, row.head_dim - p);
    const auto at = [&](const float* values) { return lanes == kLanes ? load(values + p) : load_n(values + p, lanes); };
    const auto put = [&](Vec v, float* to) { lanes == kLanes ? store(v, to + p) : store_n(v, to + p, lanes); };
    const Vec dy = at(row.dy), gradient = hn::MulAdd(c, dy, at(row.gradient));
    sums.dy_state = hn::MulAdd(dy, at(row.after), sums.dy_state);
    sums.gradient_x = hn::MulAdd(gradient, at(row.x), sums.gradient_x);
    sums.gradient_before = hn::MulAdd(gradient, at(row.before), sums.gradient_before);
    put(hn::MulAdd(b, gradient, at(row.dux)), row.dux);
    put(hn::Mul(decay, gradient), row.gradient);
  }
}

// Adds the gradients of one token of one head. On return `gradient` is that of the state before the token.
void token_backward(const ScanGradient& g, const ScanStates& own, const float* before, const float* after, int64_t t,
                    int64_t head, float delta, float decay, float* parameters) {
  const Scan& scan = g.scan;
  const int64_t size = scan.head_dim, shared = (t * scan.groups + scan.group_of(head)) * scan.state;
  const float *x = scan.x_row(t, head), *dy = g.dy + (t * scan.heads + head) * size;
  std::fill_n(own.dux, size, 0.0f);
  StateRowSums sums{.gradient_before = zero()};
  for (int64_t n = 0; n < scan.state; ++n) {
    sums.gradient_x = sums.dy_state = zero();
    row_backward({.b = scan.b[shared + n],
                  .c = scan.c[shared + n],
                  .decay = decay,
                  .x = x,
                  .dy = dy,
                  .before = before + n * size,
                  .after = after + n * size,
                  .gradient = own.gradient + n * size,
                  .dux = own.dux,
                  .head_dim = size},
                 sums);
    g.db[shared + n] += delta * sum_lanes(sums.gradient_x);
    g.dc[shared + n] += sum_lanes(sums.dy_state);
  }
  const float along_decay = -std::exp(scan.a_log[head]) * decay * sum_lanes(sums.gradient_before);
  const float z = scan.dt[t * scan.heads + head] + scan.dt_bias[head];
  const float slope = scan_softplus(z) == delta ? 1.0f / (1.0f + std::exp(-z)) : 0.0f;
  const float dz = slope * (dot(x, own.dux, size) + along_decay);
  if (g.ddt != nullptr) g.ddt[t * scan.heads + head] = dz;
  parameters[0] += dz;
  parameters[1] += delta * along_decay;
  parameters[2] += dot(x, dy, size);
  if (g.dx != nullptr)
    map(
        g.dx + (t * scan.heads + head) * size, size,
        [u = set(delta), d = set(scan.d[head])](Vec from_state, Vec direct) {
          return hn::MulAdd(u, from_state, hn::Mul(d, direct));
        },
        static_cast<const float*>(own.dux), dy);
}

void scan_backward_head(const ScanGradient& g, int64_t sequence, int64_t head, const ScanStates& own) {
  const Scan& scan = g.scan;
  const int64_t begin = scan.query_start[sequence], end = scan.query_start[sequence + 1];
  const int64_t size = scan.state * scan.head_dim;
  float delta[kScanChunk], decay[kScanChunk];
  float* parameters = g.parameter_parts + (sequence * scan.heads + head) * kScanParameters;
  std::fill_n(parameters, kScanParameters, 0.0f);

  // 1. The states before every chunk.
  std::fill_n(own.gradient, size, 0.0f);
  for (int64_t first = begin; first < end; first += kScanChunk) {
    std::copy_n(own.gradient, size, own.checkpoints + (first - begin) / kScanChunk * size);
    const int64_t last = std::min(end, first + kScanChunk);
    make_scan_steps(scan, first, last, head, {delta, decay});
    for (int64_t t = first; t < last; ++t)
      advance_state(own.gradient, own.gradient, scan, t, head, delta[t - first], decay[t - first]);
  }

  // 2. Chunk by chunk from the end: its states, and back.
  std::fill_n(own.gradient, size, 0.0f);
  for (int64_t chunk = ceil_div(end - begin, kScanChunk); chunk-- > 0;) {
    const int64_t first = begin + chunk * kScanChunk, last = std::min(end, first + kScanChunk);
    make_scan_steps(scan, first, last, head, {delta, decay});
    std::copy_n(own.checkpoints + chunk * size, size, own.states);
    for (int64_t t = first; t < last; ++t)
      advance_state(own.states + (t - first + 1) * size, own.states + (t - first) * size, scan, t, head,
                    delta[t - first], decay[t - first]);
    for (int64_t t = last; t-- > first;)
      token_backward(g, own, own.states + (t - first) * size, own.states + (t - first + 1) * size, t, head,
                     delta[t - first], decay[t - first], parameters);
  }
}

// sum[i] = the slices of `parts`, which are `stride` apart, added in order, for i < n.
void sum_slices(float* sum, const float* parts, int64_t slices, int64_t stride, int64_t n) {
  std::copy_n(parts, n, sum);
  for (int64_t slice = 1; slice < slices; ++slice)
    map(
        sum, n, [](Vec a, Vec b) { return hn::Add(a, b); }, static_cast<const float*>(sum), parts + slice * stride);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(scan_backward_head);
EADEM_CPU_EXPORT(sum_slices);

namespace {

// The parts of the scratch, in floats.
struct ScanBackwardScratch {
  int64_t slices;  // of a group's heads
  int64_t shared;  // of the gradients of b, and of c, of a slice
  int64_t parameters, worker;

  ScanBackwardScratch(int64_t tokens, int64_t sequences, int64_t heads, int64_t head_dim, int64_t groups, int64_t state)
      : slices(ceil_div(heads / groups, kHeadsInSlice)),
        shared(round_up(tokens * groups * state, 16)),
        parameters(round_up(sequences * heads * kScanParameters, 16)),
        worker(round_up(ScanStates::floats(tokens, state * head_dim, head_dim), 16)) {}

  int64_t floats(int64_t workers) const { return 2 * slices * shared + parameters + workers * worker; }
};

Verdict can_scan_backward(const KernelRequest& r) {
  Requirements requirements(r);
  for (size_t port = 0; port <= kScanD; ++port) requirements.f32("an input", r.inputs[port]);
  requirements.f32("dy", r.inputs.back());
  for (const TensorType& type : r.outputs) requirements.f32("a gradient", type);
  return requirements.verdict();
}

// Adds what the sequences add to the gradients of parameters, in their order.
void add_parameter_parts(const ScanGradient& g, std::span<const TensorView> outputs) {
  for (int64_t i = 0; i < kScanParameters; ++i) {
    float* gradient = elements<float>(outputs[static_cast<size_t>(kScanDtBias + i)]);
    for (int64_t head = 0; gradient != nullptr && head < g.scan.heads; ++head)
      for (int64_t s = 0; s < g.scan.sequences; ++s)
        gradient[head] += g.parameter_parts[(s * g.scan.heads + head) * kScanParameters + i];
  }
}

PlanPtr prepare_scan_backward(const KernelRequest& r, Context&) {
  const auto& attrs = r.attrs.get<StateSpaceScanAttrs>();
  const auto task = EADEM_CPU_DISPATCH(scan_backward_head, cpu_device(r).isa());
  const auto sum = EADEM_CPU_DISPATCH(sum_slices, cpu_device(r).isa());
  const auto extent = [&](ScanPort port, int axis) { return r.inputs[port].dim(axis).bind(r.bounds); };
  const ScanBackwardScratch most(extent(kScanX, 0), extent(kScanQueryStart, 0) - 1, extent(kScanX, 1),
                                 extent(kScanX, 2), extent(kScanB, 1), extent(kScanB, 2));
  return make_plan(
      [=](const KernelCall& call) {
        ThreadPool& pool = cpu_device(call).pool();
        const Scan scan = scan_of(call, attrs);
        const ScanBackwardScratch parts(scan.tokens, scan.sequences, scan.heads, scan.head_dim, scan.groups,
                                        scan.state);
        auto* const scratch = static_cast<float*>(call.scratch.data);
        const ScanGradient all{.scan = scan,
                               .dy = elements<const float>(call.inputs.back()),
                               .dx = elements<float>(call.outputs[kScanX]),
                               .ddt = elements<float>(call.outputs[kScanDt]),
                               .db = scratch,
                               .dc = scratch + parts.slices * parts.shared,
                               .parameter_parts = scratch + 2 * parts.slices * parts.shared};
        float* const workers = all.parameter_parts + parts.parameters;
        std::fill_n(scratch, 2 * parts.slices * parts.shared, 0.0f);
        const int64_t group_heads = scan.heads / scan.groups;
        pool.parallel_for(scan.sequences * scan.groups * parts.slices, [&](int64_t index, int worker) {
          const int64_t slice = index % parts.slices, group = index / parts.slices % scan.groups,
                        sequence = index / parts.slices / scan.groups;
          ScanGradient own = all;
          own.db += slice * parts.shared;
          own.dc += slice * parts.shared;
          const ScanStates states(workers + worker * parts.worker, scan.tokens, scan.state * scan.head_dim);
          const int64_t last = std::min(group_heads, (slice + 1) * kHeadsInSlice);
          for (int64_t head = slice * kHeadsInSlice; head < last; ++head)
            task(own, sequence, group * group_heads + head, states);
        });
        const auto sum_slices = [&](int output, const float* from) {
          if (float* to = elements<float>(call.outputs[output]); to != nullptr)
            pool.parallel_ranges(scan.tokens * scan.groups * scan.state, 4096, [&](int64_t begin, int64_t end) {
              sum(to + begin, from + begin, parts.slices, parts.shared, end - begin);
            });
        };
        sum_slices(kScanB, all.db);
        sum_slices(kScanC, all.dc);
        add_parameter_parts(all, call.outputs);
      },
      most.floats(cpu_device(r).pool().num_threads()) * static_cast<int64_t>(sizeof(float)));
}

}  // namespace

const Kernel kStateSpaceScanBackward{"cpu_recompute", Pass::backward, can_scan_backward, prepare_scan_backward};

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
