// SPDX-License-Identifier: Apache-2.0
//
// One row per task. The whole vocabulary is never sorted: top_k selects, top_p sorts only a prefix, as long as the kept
// set needs, and drawing a token walks over sums of blocks.
#include "eadem/kernels/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "eadem/core/philox.h"
#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/sample.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"
#include "eadem/kernels/cpu/training/log_softmax-inl.h"

#ifndef EADEM_KERNELS_CPU_SAMPLE_PARAMS_
#define EADEM_KERNELS_CPU_SAMPLE_PARAMS_
namespace eadem::kernels::cpu {
namespace {

struct RowMaximum {
  float value;
  int64_t index;  // the smallest index that has this value
  bool has_nan;
};

// The routines of one instruction set.
struct SampleRoutines {
  RowMaximum (*maximum)(const float* x, int64_t n);
  double (*sum)(const float* x, int64_t n, float most);
  void (*weights)(float* weights, const float* x, int64_t n, float most, float temperature);
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

RowMaximum row_maximum(const float* x, int64_t n) {
  // 1. Find the largest value; NaN is tracked separately because Max drops it.
  Vec most = set(x[0]);
  Mask nan = hn::IsNaN(most);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i);
    nan = hn::Or(nan, hn::IsNaN(v));
    most = hn::Max(most, v);
  }
  bool has_nan = !hn::AllFalse(Lanes(), nan);
  float value = max_lanes(most);
  for (; i < n; ++i) {
    has_nan = has_nan || std::isnan(x[i]);
    value = std::max(value, x[i]);
  }
  if (has_nan) return {value, -1, true};

  // 2. Find its first index.
  const Vec wanted = set(value);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    const Mask equal = hn::Eq(load(x + i), wanted);
    if (!hn::AllFalse(Lanes(), equal)) break;
  }
  while (x[i] != value) ++i;
  return {value, i, false};
}

// weights[i] = exp((x[i] - most) / temperature): the probabilities up to a common factor.
void sample_weights(float* weights, const float* x, int64_t n, float most, float temperature) {
  map(
      weights, n, [m = set(most), t = set(temperature)](Vec v) { return exp(hn::Div(hn::Sub(v, m), t)); }, x);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(row_maximum);
EADEM_CPU_EXPORT(sum_exp);
EADEM_CPU_EXPORT(sample_weights);

namespace {

enum SampleInput { kLogits, kRows, kPenalties };

// The scratch of one worker for a row of `vocab` logits.
struct RowScratch {
  uint64_t* keys;      // [vocab]
  double* block_sums;  // [ceil(vocab / kSumBlock)]
  float* weights;      // [vocab]
  float* penalized;    // [vocab]: the logits, where something changes them
};

int64_t row_scratch_bytes(int64_t vocab) {
  return round_up(8 * vocab, 64) + round_up(8 * ceil_div(vocab, kSumBlock), 64) + 2 * round_up(4 * vocab, 64);
}

RowScratch row_scratch(void* scratch, int worker, int64_t vocab) {
  std::byte* base = static_cast<std::byte*>(scratch) + worker * row_scratch_bytes(vocab);
  std::byte* sums = base + round_up(8 * vocab, 64);
  std::byte* weights = sums + round_up(8 * ceil_div(vocab, kSumBlock), 64);
  std::byte* penalized = weights + round_up(4 * vocab, 64);
  return {reinterpret_cast<uint64_t*>(base), reinterpret_cast<double*>(sums), reinterpret_cast<float*>(weights),
          reinterpret_cast<float*>(penalized)};
}

// Writes the row's logits with its biases, penalties and mask to `y`.
void penalize(float* y, const float* logits, int64_t vocab, const SampleRow& row, const int32_t* pairs) {
  std::copy_n(logits, vocab, y);
  const SampleSettings& s = row.settings;
  for (int32_t pair = row.biases_begin; pair < row.biases_end; ++pair)
    y[pairs[2 * pair]] += std::bit_cast<float>(pairs[2 * pair + 1]);
  for (int32_t pair = row.penalties_begin; pair < row.penalties_end; ++pair) {
    float& logit = y[pairs[2 * pair]];
    const double count = pairs[2 * pair + 1];
    logit = logit < 0 ? logit * s.repetition_penalty : logit / s.repetition_penalty;
    logit = static_cast<float>(logit - s.frequency_penalty * count - (count > 0 ? s.presence_penalty : 0));
  }
  if (row.allowed_begin < 0) return;
  const int32_t* const mask = pairs + 2 * row.allowed_begin;
  for (int64_t i = 0; i < vocab; ++i)
    if (!allows(mask, i) && !std::isnan(y[i])) y[i] = -std::numeric_limits<float>::infinity();
}

// Ascending keys order tokens by falling logit and, among equal logits, by rising index.
uint64_t order_key(float logit, int64_t index) {
  const uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 becomes +0
  const uint32_t rising = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{~rising} << 32 | static_cast<uint64_t>(index);
}

int64_t key_index(uint64_t key) { return static_cast<int64_t>(key & 0xffffffffu); }

// Reorders `keys`, of `kept` tokens, and returns that of the first token in rising order at which the sum of weights
// reaches `wanted`; the last one's if none does. Sorts a prefix, and a longer one until the sum is reached.
uint64_t prefix_reaching(uint64_t* keys, int64_t kept, const float* weights, double wanted) {
  double sum = 0;
  for (int64_t sorted = 0, next = 64; sorted < kept; next *= 8) {
    const int64_t end = std::min(kept, next);
    if (end < kept) std::nth_element(keys + sorted, keys + end, keys + kept);
    std::sort(keys + sorted, keys + end);
    for (int64_t i = sorted; i < end; ++i) {
      sum += weights[key_index(keys[i])];
      if (sum >= wanted) return keys[i];
    }
    sorted = end;
  }
  return keys[kept - 1];
}

// Returns the key of the last token that top_k and top_p keep, in falling order of logits.
uint64_t last_kept_key(const RowScratch& s, const float* logits, int64_t vocab, int64_t top_k, float top_p) {
  for (int64_t i = 0; i < vocab; ++i) s.keys[i] = order_key(logits[i], i);
  int64_t kept = vocab;

  // 1. top_k: the k smallest keys come first, in any order.
  if (top_k > 0 && top_k < vocab) {
    std::nth_element(s.keys, s.keys + (top_k - 1), s.keys + vocab);
    kept = top_k;
  }
  if (top_p >= 1.0f) return *std::max_element(s.keys, s.keys + kept);

  // 2. top_p.
  double total = 0;
  for (int64_t i = 0; i < kept; ++i) total += s.weights[key_index(s.keys[i])];
  return prefix_reaching(s.keys, kept, s.weights, static_cast<double>(top_p) * total);
}

// Clears the weights of tokens that top_k, top_p, min_p or typical_p drop.
void keep_typical(const RowScratch& s, const float* logits, int64_t vocab, uint64_t last_key, bool all,
                  float min_weight, float typical_p) {
  double total = 0, weighted = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (s.weights[i] < min_weight || (!all && order_key(logits[i], i) > last_key)) s.weights[i] = 0.0f;
    if (s.weights[i] == 0.0f) continue;
    total += s.weights[i];
    weighted += s.weights[i] * std::log(static_cast<double>(s.weights[i]));
  }
  // With p = weight / total: -log p - entropy is the mean of log weight less log weight. The distance is not negative,
  // so that its bits rise with it.
  const double mean = weighted / total;
  const auto distance = [&](float weight) {
    return std::bit_cast<uint32_t>(static_cast<float>(std::fabs(mean - std::log(static_cast<double>(weight)))));
  };
  int64_t kept = 0;
  for (int64_t i = 0; i < vocab; ++i)
    if (s.weights[i] > 0.0f) s.keys[kept++] = uint64_t{distance(s.weights[i])} << 32 | static_cast<uint64_t>(i);
  const uint64_t last = prefix_reaching(s.keys, kept, s.weights, static_cast<double>(typical_p) * total) >> 32;
  for (int64_t i = 0; i < kept; ++i)
    if (s.keys[i] >> 32 > last) s.weights[key_index(s.keys[i])] = 0.0f;
}

// Lists the likeliest tokens of a row, and -1 and NaN behind them. `keys` has room for `vocab`.
void list_top(int32_t* token, float* logprob, int64_t count, const float* logits, int64_t vocab, float largest,
              double log_sum, uint64_t* keys) {
  const int64_t listed = std::min(count, vocab);
  if (listed > 0) {
    for (int64_t i = 0; i < vocab; ++i) keys[i] = order_key(logits[i], i);
    if (listed < vocab) std::nth_element(keys, keys + listed, keys + vocab);
    std::sort(keys, keys + listed);
  }
  for (int64_t i = 0; i < kMostTopLogprobs; ++i) {
    token[i] = i < listed ? static_cast<int32_t>(key_index(keys[i])) : -1;
    logprob[i] =
        i < listed ? log_probability(logits[token[i]], largest, log_sum) : std::numeric_limits<float>::quiet_NaN();
  }
}

// Returns the first kept token at which the cumulated weight exceeds u * (sum of the kept weights).
int64_t draw(const RowScratch& s, const float* logits, int64_t vocab, uint64_t last_key, bool all, float min_weight,
             float u) {
  const auto kept = [&](int64_t i) {
    return s.weights[i] >= min_weight && (all || order_key(logits[i], i) <= last_key);
  };
  double total = 0;
  for (int64_t begin = 0; begin < vocab; begin += kSumBlock) {
    double block = 0;
    for (int64_t i = begin; i < std::min(vocab, begin + kSumBlock); ++i)
      if (kept(i)) block += s.weights[i];
    s.block_sums[begin / kSumBlock] = block;
    total += block;
  }
  const double wanted = static_cast<double>(u) * total;
  double sum = 0;
  int64_t last = 0;
  for (int64_t begin = 0; begin < vocab; begin += kSumBlock) {
    const double block = s.block_sums[begin / kSumBlock];
    if (block == 0.0) continue;
    double within = 0;
    const bool here = sum + block > wanted;
    for (int64_t i = begin; i < std::min(vocab, begin + kSumBlock); ++i) {
      if (!kept(i) || s.weights[i] == 0.0f) continue;
      last = i;
      within += s.weights[i];
      if (here && sum + within > wanted) return i;
    }
    sum += block;
  }
  return last;  // reached only if u * total was rounded up to the sum itself
}

Verdict can_sample(const KernelRequest& r) {
  return Requirements(r)
      .f32("logits", r.inputs[kLogits])
      .one_of("rows", r.inputs[kRows], {DType::i32})
      .one_of("penalties", r.inputs[kPenalties], {DType::i32})
      .one_of("token", r.outputs[0], {DType::i32})
      .f32("logprob", r.outputs[1])
      .one_of("top_token", r.outputs[2], {DType::i32})
      .f32("top_logprob", r.outputs[3])
      .verdict();
}

int64_t sample_scratch_bytes(const KernelRequest& r) {
  return cpu_device(r).pool().num_threads() * row_scratch_bytes(r.inputs[kLogits].dim(1).bind(r.bounds));
}

void run_sample(const SampleRoutines& routines, const KernelCall& call) {
  CpuDevice& device = cpu_device(call);
  const int64_t rows = call.inputs[kLogits].shape[0], vocab = call.inputs[kLogits].shape[1];
  const float* all_logits = elements<const float>(call.inputs[kLogits]);
  const int32_t* all_rows = elements<const int32_t>(call.inputs[kRows]);
  const int32_t* pairs = elements<const int32_t>(call.inputs[kPenalties]);
  int32_t* token = elements<int32_t>(call.outputs[0]);
  float* logprob = elements<float>(call.outputs[1]);
  int32_t* top_token = elements<int32_t>(call.outputs[2]);
  float* top_logprob = elements<float>(call.outputs[3]);

  device.pool().parallel_for(rows, [&](int64_t row, int worker) {
    SampleRow settings_row;
    std::memcpy(static_cast<void*>(&settings_row), all_rows + row * kSampleRowWords, sizeof(settings_row));
    const SampleSettings& settings = settings_row.settings;
    const RowScratch s = row_scratch(call.scratch.data, worker, vocab);
    const auto list = [&](int64_t count, float largest, double log_sum) {
      list_top(top_token + row * kMostTopLogprobs, top_logprob + row * kMostTopLogprobs, count,
               all_logits + row * vocab, vocab, largest, log_sum, s.keys);
    };

    // 1. The logits that the token is drawn from, and the largest of them. A row that is not a distribution fails
    // without affecting other rows.
    const float* unmodified = all_logits + row * vocab;
    const float* logits = unmodified;
    if (settings_row.changes_logits()) {
      penalize(s.penalized, unmodified, vocab, settings_row, pairs);
      logits = s.penalized;
    }
    const RowMaximum most = routines.maximum(logits, vocab);
    if (most.has_nan || !std::isfinite(most.value)) {
      token[row] = -1;
      logprob[row] = std::numeric_limits<float>::quiet_NaN();
      list(0, 0, 0);
      return;
    }

    // 2. The token.
    int64_t chosen = settings_row.forced >= 0 ? settings_row.forced : most.index;
    if (settings_row.forced < 0 && settings.temperature > 0.0f) {
      routines.weights(s.weights, logits, vocab, most.value, settings.temperature);
      const bool all = (settings.top_k <= 0 || settings.top_k >= vocab) && settings.top_p >= 1.0f;
      const uint64_t last_key = all ? 0 : last_kept_key(s, logits, vocab, settings.top_k, settings.top_p);
      if (settings.typical_p < 1.0f) keep_typical(s, logits, vocab, last_key, all, settings.min_p, settings.typical_p);
      const PhiloxBlock random =
          philox4x32(static_cast<uint64_t>(settings.seed), static_cast<uint64_t>(settings_row.position));
      chosen = draw(s, logits, vocab, last_key, all, settings.min_p, uniform_float(random.words[0]));
    }

    // 3. Its log-probability under the unmodified logits, and the largest ones.
    const float largest = logits == unmodified ? most.value : routines.maximum(unmodified, vocab).value;
    const double log_sum = std::log(routines.sum(unmodified, vocab, largest));
    token[row] = static_cast<int32_t>(chosen);
    logprob[row] = log_probability(unmodified[chosen], largest, log_sum);
    list(settings.top_logprobs, largest, log_sum);
  });
}

PlanPtr prepare_sample(const KernelRequest& r, Context&) {
  const Isa isa = cpu_device(r).isa();
  const SampleRoutines routines{EADEM_CPU_DISPATCH(row_maximum, isa), EADEM_CPU_DISPATCH(sum_exp, isa),
                                EADEM_CPU_DISPATCH(sample_weights, isa)};
  return make_plan([routines](const KernelCall& call) { run_sample(routines, call); }, sample_scratch_bytes(r));
}

constexpr Kernel kSample{"cpu_select_prefix", Pass::inference, can_sample, prepare_sample};

}  // namespace

KernelList sample_kernels() { return {&kSample}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
