// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/feed_tokens.h"

#include <algorithm>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

namespace eadem::kernels::cpu {

namespace {

Verdict can_feed(const KernelRequest& r) {
  return Requirements(r)
      .one_of("ids", r.inputs[0], {DType::i32})
      .one_of("sampled", r.inputs[1], {DType::i32})
      .one_of("y", r.outputs[0], {DType::i32})
      .verdict();
}

void feed(const KernelCall& call) {
  const int32_t* ids = elements<const int32_t>(call.inputs[0]);
  const int32_t* sampled = elements<const int32_t>(call.inputs[1]);
  int32_t* y = elements<int32_t>(call.outputs[0]);
  for (int64_t t = 0; t < call.outputs[0].shape[0]; ++t) y[t] = ids[t] < 0 ? std::max(sampled[-1 - ids[t]], 0) : ids[t];
}

PlanPtr prepare_feed(const KernelRequest&, Context&) { return make_plan(feed); }

constexpr Kernel kFeed{"cpu_feed_tokens", Pass::inference, can_feed, prepare_feed};

}  // namespace

KernelList feed_tokens_kernels() { return {&kFeed}; }

}  // namespace eadem::kernels::cpu
