// SPDX-License-Identifier: Apache-2.0
//
// One cluster of blocks, or one block where there are no clusters, draws the token of one row by the rules of
// kernels/sample.h, without sorting.
//
// Probabilities are handled as integers: the weight of a token is exp((logit - largest) / temperature) in f32, scaled
// by a power of two so large that the sum over the vocabulary still fits 63 bits. Integer sums do not depend on the
// order of addition, so that thresholds, ties and the draw are exact for these weights.
//
// The set that a filter keeps is a prefix of the order "falling logit, then rising index". Two numbers describe it:
// every token above a threshold is kept, and tokens at the threshold are kept up to an index. The threshold is found by
// bisection over the bits of the logits, one pass over the row per bit.
#include "eadem/core/philox.h"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/log_softmax.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = kLogSoftmaxThreads, kBlocks = kRowBlocks, kRowWarps = kRowThreads / kWarp;

// The logit of token i, -infinity where the mask does not allow it. NaN stays, so that it fails the row.
__device__ float masked(float logit, const int32_t* mask, int32_t i) {
  if (mask == nullptr || isnan(logit)) return logit;
  return (static_cast<uint32_t>(mask[i / 32]) >> (i % 32) & 1) != 0 ? logit : -INFINITY;
}

struct Row {
  RowReduction& reduction;
  int thread;           // among those of the cluster
  const float* logits;  // [vocab]
  const int32_t* mask;  // [ceil(vocab / 32)] words; null: every token is allowed
  int32_t vocab;
  float largest;      // largest of the logits that are allowed
  float temperature;  // > 0
  float one;          // the weight of probability exp(0): a power of two

  __device__ float logit(int32_t i) const { return masked(logits[i], mask, i); }
  // The probability relative to the largest one, which is 1.
  __device__ float probability(float logit) const { return expf((logit - largest) / temperature); }
  __device__ uint64_t weight(float logit) const { return __float2ull_rn(probability(logit) * one); }
};

// Sums value(i) over the row.
template <typename Value>
__device__ uint64_t row_total(const Row& row, Value value) {
  uint64_t total = 0;
  for (int32_t i = row.thread; i < row.vocab; i += kRowThreads) total += value(i);
  return row.reduction.sum(total);
}

// Returns the largest key t for which the values of the tokens with key >= t add up to at least `goal`, which is in [1,
// sum of all values].
template <typename Value>
__device__ uint32_t threshold_key(const Row& row, uint64_t goal, Value value) {
  uint32_t low = 0, high = key_of(row.largest);
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const uint64_t total =
        row_total(row, [&](int32_t i) { return key_of(row.logit(i)) >= middle ? value(i) : uint64_t{0}; });
    if (total >= goal) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Returns the first index at which the running sum of value(i) exceeds `target`, which is less than the sum over the
// row.
template <typename Value>
__device__ int32_t first_exceeding(const Row& row, uint64_t target, Value value) {
  __shared__ uint64_t totals[kRowWarps], found;
  const int warp = row.thread / kWarp, lane = row.thread % kWarp;

  // 1. Every warp adds up a segment of the row, and tells all blocks.
  const int32_t segment = static_cast<int32_t>(ceil_div(row.vocab, kRowWarps));
  const int32_t begin = warp * segment, end = min(begin + segment, row.vocab);
  uint64_t total = 0;
  for (int32_t i = begin + lane; i < end; i += kWarp) total += value(i);
  total = warp_reduce(total, Sum{});
  if (lane < kBlocks) store_to_block(&totals[warp], lane, total);
  cluster_sync();

  // 2. The warp in whose segment the sum first exceeds the target walks through it.
  uint64_t before = 0;
  for (int w = lane; w < warp; w += kWarp) before += totals[w];
  before = warp_reduce(before, Sum{});
  if (before <= target && before + total > target) {
    for (int32_t base = begin; base < end; base += kWarp) {
      uint64_t running = base + lane < end ? value(base + lane) : uint64_t{0};
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        const uint64_t left = __shfl_up_sync(kAllLanes, running, distance);
        if (lane >= distance) running += left;
      }
      const unsigned exceeding = __ballot_sync(kAllLanes, before + running > target);
      if (exceeding != 0) {
        const uint64_t index = static_cast<uint64_t>(base + __ffs(static_cast<int>(exceeding)) - 1);
        if (lane < kBlocks) store_to_block(&found, lane, index);
        break;
      }
      before += __shfl_sync(kAllLanes, running, kWarp - 1);
    }
  }
  cluster_sync();
  const auto result = static_cast<int32_t>(found);
  cluster_sync();  // the next call overwrites `found` and `totals`
  return result;
}

// The tokens that the filters keep.
struct Kept {
  uint32_t key = 0;           // every token above it is kept
  int32_t last = 0x7fffffff;  // tokens at the key are kept up to this index
  __device__ bool operator()(const Row& row, int32_t i) const {
    const uint32_t k = key_of(row.logit(i));
    return k > key || (k == key && i <= last);
  }
};

// Tokens whose distance is at most that of the last one that typical_p keeps, among those of `weight`. With s = log p
// up to a constant, the distance of a token's -log p from the entropy is that of its s from the mean of s.
struct Typical {
  double mean = 0;
  uint32_t last = 0;  // bits of a distance, which rise with it
  __device__ uint32_t distance(const Row& row, int32_t i) const {
    const double s = (static_cast<double>(row.logit(i)) - row.largest) / row.temperature;
    return __float_as_uint(static_cast<float>(fabs(mean - s)));
  }
  __device__ bool operator()(const Row& row, int32_t i) const { return distance(row, i) <= last; }
};

template <typename Weight>
__device__ Typical typical_of(const Row& row, float typical_p, Weight weight) {
  Typical typical;
  const uint64_t total = row_total(row, weight);
  const auto weighted = [&](int first) {
    double sum = 0.0;
    for (int32_t i = first; i < row.vocab; i += kPartialSums)
      if (const uint64_t w = weight(i); w > 0)
        sum += static_cast<double>(w) * ((static_cast<double>(row.logit(i)) - row.largest) / row.temperature);
    return sum;
  };
  typical.mean = sum_in_order(weighted, row.reduction, row.thread) / static_cast<double>(total);
  const uint64_t wanted = static_cast<uint64_t>(ceil(static_cast<double>(typical_p) * static_cast<double>(total)));
  const uint64_t goal = wanted < 1 ? 1 : wanted > total ? total : wanted;
  uint32_t low = 0, high = 0x7f800000u;  // zero to infinity
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    const uint64_t sum =
        row_total(row, [&](int32_t i) { return typical.distance(row, i) <= middle ? weight(i) : uint64_t{0}; });
    if (sum >= goal) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  typical.last = low;
  return typical;
}

__device__ int32_t draw(const Row& row, const SampleSettings& s, uint64_t position) {
  const int32_t top_k = s.top_k;
  const float top_p = s.top_p, min_p = s.min_p;
  Kept kept;

  // 1. top_k.
  if (top_k > 0 && top_k < row.vocab) {
    const uint32_t key = threshold_key(row, static_cast<uint64_t>(top_k), [](int32_t) { return uint64_t{1}; });
    const uint64_t above = row_total(row, [&](int32_t i) { return uint64_t{key_of(row.logit(i)) > key}; });
    kept.last = first_exceeding(row, static_cast<uint64_t>(top_k) - above - 1,
                                [&](int32_t i) { return uint64_t{key_of(row.logit(i)) == key}; });
    kept.key = key;
  }

  // 2. top_p. All tokens at the threshold have equal weight; `count` of them are needed.
  if (top_p < 1.0f) {
    const auto weight = [&](int32_t i) { return kept(row, i) ? row.weight(row.logit(i)) : uint64_t{0}; };
    const uint64_t total = row_total(row, weight);
    const uint64_t wanted = static_cast<uint64_t>(ceil(static_cast<double>(top_p) * static_cast<double>(total)));
    const uint64_t goal = wanted < 1 ? 1 : wanted > total ? total : wanted;
    const uint32_t key = threshold_key(row, goal, weight);
    const uint64_t above =
        row_total(row, [&](int32_t i) { return key_of(row.logit(i)) > key ? weight(i) : uint64_t{0}; });
    const uint64_t each = row.weight(value_of(key));
    const uint64_t count = (goal - above + each - 1) / each;
    const int32_t last = first_exceeding(
        row, count - 1, [&](int32_t i) { return uint64_t{kept(row, i) && key_of(row.logit(i)) == key}; });
    kept = Kept{key, last};
  }

  // 3. min_p and typical_p.
  const auto likely = [&](int32_t i) {
    const float probability = row.probability(row.logit(i));
    return kept(row, i) && probability >= min_p ? __float2ull_rn(probability * row.one) : uint64_t{0};
  };

  // 4. The draw. With u = word / 2^24, the running sum exceeds u * total if and only if it exceeds floor(word * total /
  // 2^24).
  const auto pick = [&](auto weight) {
    const uint64_t total = row_total(row, weight);
    const uint64_t word = philox4x32(static_cast<uint64_t>(s.seed), position).words[0] >> 8;
    const uint64_t target = (__umul64hi(word, total) << 40) | ((word * total) >> 24);
    return first_exceeding(row, target, weight);
  };
  if (s.typical_p >= 1.0f) return pick(likely);
  const Typical typical = typical_of(row, s.typical_p, likely);
  return pick([&](int32_t i) { return typical(row, i) ? likely(i) : uint64_t{0}; });
}

// Biases and penalizes the row's logits in place and saves their old values. The tokens of a range are distinct, so no
// two threads write one logit.
__device__ void penalize(float* logits, const SampleRow& row, const int32_t* pairs, float* replaced, int thread) {
  const SampleSettings& s = row.settings;
  for (int32_t i = row.biases_begin + thread; i < row.biases_end; i += kRowThreads) {
    replaced[i] = logits[pairs[2 * i]];
    logits[pairs[2 * i]] = __fadd_rn(replaced[i], __int_as_float(pairs[2 * i + 1]));
  }
  cluster_sync();
  for (int32_t i = row.penalties_begin + thread; i < row.penalties_end; i += kRowThreads) {
    float logit = logits[pairs[2 * i]];
    const double count = pairs[2 * i + 1];
    replaced[i] = logit;
    logit = logit < 0 ? __fmul_rn(logit, s.repetition_penalty) : __fdiv_rn(logit, s.repetition_penalty);
    const double lower = __dsub_rn(logit, __dmul_rn(s.frequency_penalty, count));
    logits[pairs[2 * i]] = static_cast<float>(__dsub_rn(lower, count > 0 ? s.presence_penalty : 0.0f));
  }
  cluster_sync();
}

__device__ void put_back(float* logits, const SampleRow& row, const int32_t* pairs, const float* replaced, int thread) {
  cluster_sync();
  for (int32_t i = row.penalties_begin + thread; i < row.penalties_end; i += kRowThreads)
    logits[pairs[2 * i]] = replaced[i];
  cluster_sync();
  for (int32_t i = row.biases_begin + thread; i < row.biases_end; i += kRowThreads) logits[pairs[2 * i]] = replaced[i];
  cluster_sync();
}

// Lists the `count` likeliest tokens of a row, one pass over it for each, and -1 and NaN behind them. `most`: the
// largest of its logits.
__device__ void list_top(const SampleParams& p, int64_t r, const float* logits, int32_t count, float most, double sum,
                         RowReduction& reduction, int thread) {
  int32_t* const token = p.top_token + r * kMostTopLogprobs;
  float* const logprob = p.top_logprob + r * kMostTopLogprobs;
  const bool writes = thread == 0;
  uint64_t before = ~uint64_t{0};
  for (int32_t i = 0; i < kMostTopLogprobs; ++i) {
    uint64_t best = 0;
    if (i < count && before != 0) {
      for (int32_t j = thread; j < p.vocab; j += kRowThreads)
        if (const uint64_t pair = pair_of(logits[j], j); pair < before) best = Max{}(best, pair);
      best = reduction.max(best);
      before = best;
    }
    if (!writes) continue;
    token[i] = best == 0 ? -1 : index_of(best);
    logprob[i] = best == 0 ? nanf("") : log_probability(logits[token[i]], most, sum);
  }
}

// The logits are penalized in place while the token is drawn, then restored bit for bit. Only this cluster reads the
// row, and a copy would take as much memory as the logits.
__global__ void __launch_bounds__(kThreads, 2) sample_rows(SampleParams p) {
  __shared__ uint64_t slots[2][kBlocks];
  RowReduction reduction(slots);
  const int thread = cluster_rank() * kThreads + static_cast<int>(threadIdx.x);
  const bool writes = thread == 0;
  const int64_t r = blockIdx.x / kBlocks;
  cluster_sync();  // no block may be written to before it has begun
  allow_next_kernel();
  wait_for_earlier_kernels();
  float* logits = const_cast<float*>(p.logits) + r * p.vocab;  // [vocab]
  const SampleRow& settings = p.row_settings[r];
  const int32_t* const mask =
      settings.allowed_begin < 0 ? nullptr : p.penalties + 2 * static_cast<int64_t>(settings.allowed_begin);
  const bool penalized =
      settings.penalties_end > settings.penalties_begin || settings.biases_end > settings.biases_begin;
  if (penalized) penalize(logits, settings, p.penalties, p.replaced, thread);

  // 1. The largest logit.
  Largest most = largest_among([&](int32_t i) { return masked(logits[i], mask, i); }, p.vocab, reduction, thread);

  // 2. The token.
  int32_t token = most.finite ? most.index : -1;
  if (most.finite && settings.forced >= 0) {
    token = settings.forced;
  } else if (most.finite && settings.settings.temperature > 0.0f) {
    const SampleSettings& s = settings.settings;
    const int fraction_bits = 31 + __clz(p.vocab - 1);  // vocab <= 2^(32 - clz): the sum is at most 2^63
    const Row row{reduction, thread, logits, mask, p.vocab, most.value, s.temperature, ldexpf(1.0f, fraction_bits)};
    token = draw(row, s, static_cast<uint64_t>(settings.position));
  }
  if (penalized) put_back(logits, settings, p.penalties, p.replaced, thread);
  if (penalized || mask != nullptr) {
    most = largest_of(logits, p.vocab, reduction, thread);
  }

  // 3. Compute the log softmax without temperature, of the token and of the likeliest ones.
  const bool drawn = token >= 0;
  const double sum = drawn ? sum_of_exponentials(logits, p.vocab, most.value, reduction, thread) : 0.0;
  if (writes) {
    p.token[r] = token;
    p.logprob[r] = drawn ? log_probability(logits[token], most.value, sum) : nanf("");
  }
  list_top(p, r, logits, drawn ? settings.settings.top_logprobs : 0, most.value, sum, reduction, thread);
}

}  // namespace

cudaError_t launch_sample(const SampleParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.vocab < 1 || p.vocab > kMaxSampleVocab) return cudaErrorInvalidValue;
  const unsigned blocks = blocks_of_row();
  return launch_clusters(sample_rows, blocks, dim3(static_cast<unsigned>(p.rows) * blocks), kThreads, 0, stream, p);
}

}  // namespace eadem::kernels::cuda
