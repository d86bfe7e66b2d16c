// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/recurrent/short_convolution.h"

#include <algorithm>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/recurrent/short_convolution.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_SHORT_CONVOLUTION_PARAMS_
#define EADEM_KERNELS_CPU_SHORT_CONVOLUTION_PARAMS_
namespace eadem::kernels::cpu {
namespace {

struct Convolution {
  float* y;                    // [tokens, channels]
  const float* x;              // [tokens, channels]
  const float* weight;         // [taps, channels]
  const float* bias;           // [channels] or null
  const int32_t* query_start;  // [sequences + 1]
  const int32_t* slots;        // [sequences] or null
  float* state;                // [num_slots, taps - 1, channels] or null
  int64_t sequences, channels, taps;

  // What the sequence has kept [taps - 1, channels], or null.
  float* kept_by(int64_t sequence) const {
    return slots == nullptr || slots[sequence] < 0 ? nullptr : state + slots[sequence] * (taps - 1) * channels;
  }
};

struct ConvolutionGradient {
  Convolution forward;  // without y and state
  const float* dy;      // [tokens, channels]
  float* dx;            // [tokens, channels] or null
  float* dweight;       // [taps, channels] or null
  float* dbias;         // [channels] or null
};

// Routines for channels [begin, end).
struct ConvolutionRoutines {
  void (*forward)(const Convolution& p, int64_t begin, int64_t end);
  void (*backward)(const ConvolutionGradient& p, int64_t begin, int64_t end);
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// The rows that the taps of one token meet. Those before `first` are zeros.
struct TapRows {
  const float* rows[kMaxTaps];
  int64_t first;
};

// Of the i-th token of a sequence, whose rows of x begin at `x`.
TapRows rows_of_taps(const Convolution& p, const float* x, const float* kept, int64_t i) {
  TapRows result{{}, p.taps};
  for (int64_t j = p.taps; j-- > 0; result.first = j) {
    const int64_t from = i - (p.taps - 1) + j;
    if (from < 0 && kept == nullptr) break;
    result.rows[j] = from >= 0 ? x + from * p.channels : kept + (p.taps - 1 + from) * p.channels;
  }
  return result;
}

// z of `lanes` channels from c on.
HWY_INLINE Vec convolved(const Convolution& p, const TapRows& taps, int64_t c, int64_t lanes) {
  const auto at = [&](const float* row) { return lanes == kLanes ? load(row + c) : load_n(row + c, lanes); };
  Vec z = p.bias != nullptr ? at(p.bias) : zero();
  for (int64_t j = taps.first; j < p.taps; ++j) z = hn::MulAdd(at(p.weight + j * p.channels), at(taps.rows[j]), z);
  return z;
}

// The last taps - 1 rows of what was kept and `tokens` rows of x; in ascending order, since old rows move up.
void keep_last_rows(const Convolution& p, float* kept, const float* x, int64_t tokens, int64_t begin, int64_t end) {
  for (int64_t r = 0; r < p.taps - 1; ++r) {
    const int64_t from = tokens - (p.taps - 1) + r;
    const float* row = from >= 0 ? x + from * p.channels : kept + (p.taps - 1 + from) * p.channels;
    if (float* to = kept + r * p.channels; to != row) std::copy(row + begin, row + end, to + begin);
  }
}

template <bool kSilu>
void convolve(const Convolution& p, int64_t begin, int64_t end) {
  for (int64_t s = 0; s < p.sequences; ++s) {
    const int64_t first = p.query_start[s], tokens = p.query_start[s + 1] - first;
    const float* x = p.x + first * p.channels;
    float* kept = p.kept_by(s);
    for (int64_t i = 0; i < tokens; ++i) {
      const TapRows taps = rows_of_taps(p, x, kept, i);
      float* y = p.y + (first + i) * p.channels;
      for (int64_t c = begin; c < end; c += kLanes) {
        const int64_t lanes = std::min(kLanes, end - c);
        Vec z = convolved(p, taps, c, lanes);
        if constexpr (kSilu) z = activate<ActivationKind::silu>(z);
        if (lanes == kLanes)
          store(z, y + c);
        else
          store_n(z, y + c, lanes);
      }
    }
    if (kept != nullptr) keep_last_rows(p, kept, x, tokens, begin, end);
  }
}

// dz = dy * slope(z). A token adds to the gradients of the rows that its taps met, in the order of tokens.
template <bool kSilu>
void convolve_backward(const ConvolutionGradient& p, int64_t begin, int64_t end) {
  const Convolution& f = p.forward;
  for (int64_t s = 0; s < f.sequences; ++s) {
    const int64_t first = f.query_start[s], tokens = f.query_start[s + 1] - first;
    const float* x = f.x + first * f.channels;
    for (int64_t i = 0; i < tokens; ++i) {
      const TapRows taps = rows_of_taps(f, x, nullptr, i);
      for (int64_t c = begin; c < end; c += kLanes) {
        const int64_t lanes = std::min(kLanes, end - c);
        const auto at = [&](const float* row) { return lanes == kLanes ? load(row + c) : load_n(row + c, lanes); };
        const auto add_to = [&](float* row, Vec sum) {
          map(
              row + c, lanes, [sum](Vec d) { return hn::Add(d, sum); }, static_cast<const float*>(row + c));
        };
        Vec dz = at(p.dy + (first + i) * f.channels);
        if constexpr (kSilu) dz = hn::Mul(dz, activate_derivative<ActivationKind::silu>(convolved(f, taps, c, lanes)));
        if (p.dbias != nullptr) add_to(p.dbias, dz);
        if (p.dx != nullptr) std::fill_n(p.dx + (first + i) * f.channels + c, lanes, 0.0f);
        for (int64_t j = taps.first; j < f.taps; ++j) {
          if (p.dweight != nullptr) add_to(p.dweight + j * f.channels, hn::Mul(dz, at(taps.rows[j])));
          if (p.dx != nullptr) add_to(p.dx + (taps.rows[j] - f.x), hn::Mul(dz, at(f.weight + j * f.channels)));
        }
      }
    }
  }
}

ConvolutionRoutines convolution_routines(bool silu) {
  if (silu) return {convolve<true>, convolve_backward<true>};
  return {convolve<false>, convolve_backward<false>};
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(convolution_routines);

namespace {

// A task has this many channels of all tokens: eight cache lines of a row.
constexpr int64_t kConvolutionBlock = 128;

ConvolutionRoutines convolution_routines_of(const KernelRequest& r) {
  return EADEM_CPU_DISPATCH(convolution_routines, cpu_device(r).isa())(r.attrs.get<ShortConvolutionAttrs>().silu);
}

template <typename Task>
void for_each_channel_block(const KernelCall& call, int64_t channels, Task&& task) {
  cpu_device(call).pool().parallel_for(ceil_div(channels, kConvolutionBlock), [&](int64_t block, int) {
    task(block * kConvolutionBlock, std::min(channels, (block + 1) * kConvolutionBlock));
  });
}

// Ports x, weight, bias and query_start come first in every pass.
Convolution convolution_of(const KernelCall& call) {
  return {.y = nullptr,
          .x = elements<const float>(call.inputs[0]),
          .weight = elements<const float>(call.inputs[1]),
          .bias = elements<const float>(call.inputs[2]),
          .query_start = elements<const int32_t>(call.inputs[3]),
          .slots = nullptr,
          .state = nullptr,
          .sequences = call.inputs[3].shape[0] - 1,
          .channels = call.inputs[0].shape[1],
          .taps = call.inputs[1].shape[0]};
}

Verdict can_convolve(const KernelRequest& r) {
  Requirements requirements(r);
  return requirements.f32("x", r.inputs[0]).f32("y", r.outputs[0]).verdict();
}

PlanPtr prepare_convolve(const KernelRequest& r, Context&) {
  const bool cached = r.attrs.get<ShortConvolutionAttrs>().cached;
  return make_plan([task = convolution_routines_of(r).forward, cached](const KernelCall& call) {
    Convolution p = convolution_of(call);
    p.y = elements<float>(call.outputs[0]);
    if (cached) {
      p.slots = elements<const int32_t>(call.inputs[4]);
      p.state = elements<float>(call.outputs[1]);
    }
    for_each_channel_block(call, p.channels, [&](int64_t begin, int64_t end) { task(p, begin, end); });
  });
}

Verdict can_convolve_backward(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("x", r.inputs[0]).f32("dy", r.inputs[4]);
  for (const TensorType& type : r.outputs) requirements.f32("a gradient", type);
  return requirements.verdict();
}

PlanPtr prepare_convolve_backward(const KernelRequest& r, Context&) {
  return make_plan([task = convolution_routines_of(r).backward](const KernelCall& call) {
    const ConvolutionGradient p{.forward = convolution_of(call),
                                .dy = elements<const float>(call.inputs[4]),
                                .dx = elements<float>(call.outputs[0]),
                                .dweight = elements<float>(call.outputs[1]),
                                .dbias = elements<float>(call.outputs[2])};
    for_each_channel_block(call, p.forward.channels, [&](int64_t begin, int64_t end) { task(p, begin, end); });
  });
}

constexpr Kernel kConvolution{"cpu_channels", Pass::forward, can_convolve, prepare_convolve};
constexpr Kernel kConvolutionInference{"cpu_channels", Pass::inference, can_convolve, prepare_convolve};
constexpr Kernel kConvolutionBackward{"cpu_channels", Pass::backward, can_convolve_backward, prepare_convolve_backward};

}  // namespace

KernelList short_convolution_kernels() { return {&kConvolution, &kConvolutionInference, &kConvolutionBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
