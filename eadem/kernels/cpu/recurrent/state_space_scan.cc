// SPDX-License-Identifier: Apache-2.0
//
// state_space_scan: a task is a sequence and a head. The lanes are those of head_dim, so that every sum over the state
// is one chain. The outputs of a tile of head_dim stay in registers while the states pass.
#include "eadem/kernels/cpu/recurrent/state_space_scan.h"

#include <algorithm>

#include "eadem/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/recurrent/state_space_scan.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// States of so many numbers pass before the next token takes its turn: 32 x 64 floats are a quarter of a usual L1.
constexpr int64_t kStateBlock = 32;
// Tokens whose steps are made at once.
constexpr int64_t kScanTokens = 64;

struct ScanTile {
  const Scan& scan;
  const ScanSteps& steps;  // of the tokens
  int64_t begin, end;      // tokens
  int64_t head;
  float* state;  // [state, head_dim]
};

// Tokens [begin, end) of states [n_begin, n_end) and of kVectors vectors of head_dim from `p` on, of which the last one
// has `lanes` lanes. 8 outputs, the decay, b, c and a state: 12 registers.
template <int kVectors>
void scan_tile(const ScanTile& tile, int64_t n_begin, int64_t n_end, int64_t p, int64_t lanes) {
  const Scan& scan = tile.scan;
  const auto at = [&](const float* row, int v) {
    return v + 1 < kVectors || lanes == kLanes ? load(row + v * kLanes) : load_n(row + v * kLanes, lanes);
  };
  const auto put = [&](Vec value, float* row, int v) {
    v + 1 < kVectors || lanes == kLanes ? store(value, row + v * kLanes) : store_n(value, row + v * kLanes, lanes);
  };
  const Vec skip = set(scan.d[tile.head]);
  for (int64_t t = tile.begin; t < tile.end; ++t) {
    const float* x = scan.x_row(t, tile.head) + p;
    float* y = scan.y_row(t, tile.head) + p;
    const float *b = scan.b_row(t, tile.head), *c = scan.c_row(t, tile.head);
    const Vec delta = set(tile.steps.delta[t - tile.begin]), decay = set(tile.steps.decay[t - tile.begin]);
    float dx[kVectors * kLanes];  // delta x
    Vec sum[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const Vec value = at(x, v);
      store(hn::Mul(delta, value), dx + v * kLanes);
      sum[v] = n_begin == 0 ? hn::Mul(skip, value) : at(y, v);
    }
    for (int64_t n = n_begin; n < n_end; ++n) {
      float* row = tile.state + n * scan.head_dim + p;
      const Vec b_n = set(b[n]), c_n = set(c[n]);
      HWY_UNROLL(kUnroll)
      for (int v = 0; v < kVectors; ++v) {
        const Vec next = hn::MulAdd(b_n, load(dx + v * kLanes), hn::Mul(decay, at(row, v)));
        put(next, row, v);
        sum[v] = hn::MulAdd(c_n, next, sum[v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) put(sum[v], y, v);
  }
}

// All tiles of kVectors vectors from `p` on, then narrower ones, the last one with a part of a vector.
template <int kVectors>
void scan_tiles(const ScanTile& tile, int64_t n_begin, int64_t n_end, int64_t p) {
  const int64_t head_dim = tile.scan.head_dim;
  for (; p + kVectors * kLanes <= head_dim; p += kVectors * kLanes)
    scan_tile<kVectors>(tile, n_begin, n_end, p, kLanes);
  if constexpr (kVectors > 1)
    scan_tiles<kVectors / 2>(tile, n_begin, n_end, p);
  else if (p < head_dim)
    scan_tile<1>(tile, n_begin, n_end, p, head_dim - p);
}

void scan_head(const Scan& scan, int64_t begin, int64_t end, int64_t head, float* state) {
  float delta[kScanTokens], decay[kScanTokens];
  for (int64_t first = begin; first < end; first += kScanTokens) {
    const int64_t last = std::min(end, first + kScanTokens);
    const ScanSteps steps{delta, decay};
    make_scan_steps(scan, first, last, head, steps);
    for (int64_t n = 0; n < scan.state; n += kStateBlock)
      scan_tiles<8>({scan, steps, first, last, head, state}, n, std::min(scan.state, n + kStateBlock), 0);
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(scan_head);

namespace {

Verdict can_scan(const KernelRequest& r) {
  Requirements requirements(r);
  for (size_t port = 0; port <= kScanD; ++port) requirements.f32("an input", r.inputs[port]);
  for (const TensorType& type : r.outputs) requirements.f32("an output", type);
  return requirements.verdict();
}

PlanPtr prepare_scan(const KernelRequest& r, Context&) {
  const auto& attrs = r.attrs.get<StateSpaceScanAttrs>();
  const auto task = EADEM_CPU_DISPATCH(scan_head, cpu_device(r).isa());
  const int64_t floats = round_up(r.inputs[kScanB].fixed(2) * r.inputs[kScanX].fixed(2), 16);
  return make_plan(
      [=](const KernelCall& call) {
        Scan scan = scan_of(call, attrs);
        scan.y = elements<float>(call.outputs[0]);
        const int32_t* slots = attrs.cached ? elements<const int32_t>(call.inputs[kScanStateSlots]) : nullptr;
        float* states = attrs.cached ? elements<float>(call.outputs[1]) : nullptr;
        const int64_t size = scan.state * scan.head_dim;
        cpu_device(call).pool().parallel_for(scan.sequences * scan.heads, [&](int64_t index, int worker) {
          const int64_t sequence = index / scan.heads, head = index % scan.heads;
          float* state = static_cast<float*>(call.scratch.data) + worker * floats;
          if (slots != nullptr && slots[sequence] >= 0)
            state = states + (slots[sequence] * scan.heads + head) * size;
          else
            std::fill_n(state, size, 0.0f);
          task(scan, scan.query_start[sequence], scan.query_start[sequence + 1], head, state);
        });
      },
      cpu_device(r).pool().num_threads() * floats * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kScanForward{"cpu_recurrence", Pass::forward, can_scan, prepare_scan};
constexpr Kernel kScanInference{"cpu_recurrence", Pass::inference, can_scan, prepare_scan};

}  // namespace

KernelList state_space_scan_kernels() { return {&kScanForward, &kScanInference, &kStateSpaceScanBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
