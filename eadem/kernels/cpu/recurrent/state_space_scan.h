// SPDX-License-Identifier: Apache-2.0
//
// The operands of state_space_scan (kernels/recurrent/state_space_scan.h), as its forward and its backward kernel read
// them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/recurrent/state_space_scan.h"

namespace eadem::kernels::cpu {

enum ScanPort { kScanX, kScanDt, kScanB, kScanC, kScanDtBias, kScanALog, kScanD, kScanQueryStart, kScanStateSlots };

struct Scan {
  const float* x;              // [tokens, heads, head_dim]
  const float* dt;             // [tokens, heads]
  const float* b;              // [tokens, groups, state]
  const float* c;              // [tokens, groups, state]
  const float* dt_bias;        // [heads]
  const float* a_log;          // [heads]
  const float* d;              // [heads]
  const int32_t* query_start;  // [sequences + 1]
  float* y = nullptr;          // [tokens, heads, head_dim]
  int64_t tokens, sequences, heads, head_dim, groups, state;
  float dt_min, dt_max;

  int64_t group_of(int64_t head) const { return head / (heads / groups); }
  const float* x_row(int64_t t, int64_t h) const { return x + (t * heads + h) * head_dim; }
  float* y_row(int64_t t, int64_t h) const { return y + (t * heads + h) * head_dim; }
  const float* b_row(int64_t t, int64_t h) const { return b + (t * groups + group_of(h)) * state; }
  const float* c_row(int64_t t, int64_t h) const { return c + (t * groups + group_of(h)) * state; }
};

// Of some tokens and one head.
struct ScanSteps {
  float* delta;
  float* decay;
};

inline float scan_softplus(float z) { return std::max(z, 0.0f) + std::log1p(std::exp(-std::fabs(z))); }

inline void make_scan_steps(const Scan& scan, int64_t begin, int64_t end, int64_t head, const ScanSteps& steps) {
  const float rate = -std::exp(scan.a_log[head]), bias = scan.dt_bias[head];
  for (int64_t t = begin; t < end; ++t) {
    const float softplus = scan_softplus(scan.dt[t * scan.heads + head] + bias);
    const float delta = std::min(std::max(softplus, scan.dt_min), scan.dt_max);
    steps.delta[t - begin] = delta;
    steps.decay[t - begin] = std::exp(rate * delta);
  }
}

// The inputs of a call of either pass, whose first ports are the same.
inline Scan scan_of(const KernelCall& call, const StateSpaceScanAttrs& attrs) {
  const Shape &x = call.inputs[kScanX].shape, &b = call.inputs[kScanB].shape;
  return {.x = elements<const float>(call.inputs[kScanX]),
          .dt = elements<const float>(call.inputs[kScanDt]),
          .b = elements<const float>(call.inputs[kScanB]),
          .c = elements<const float>(call.inputs[kScanC]),
          .dt_bias = elements<const float>(call.inputs[kScanDtBias]),
          .a_log = elements<const float>(call.inputs[kScanALog]),
          .d = elements<const float>(call.inputs[kScanD]),
          .query_start = elements<const int32_t>(call.inputs[kScanQueryStart]),
          .tokens = x[0],
          .sequences = call.inputs[kScanQueryStart].shape[0] - 1,
          .heads = x[1],
          .head_dim = x[2],
          .groups = b[1],
          .state = b[2],
          .dt_min = attrs.dt_min,
          .dt_max = attrs.dt_max};
}

extern const Kernel kStateSpaceScanBackward;

}  // namespace eadem::kernels::cpu
