// SPDX-License-Identifier: Apache-2.0
//
// Draws one token per row.
//
//   inputs   logits [rows, vocab] f32 (not changed)
//            rows [rows, kSampleRowWords] i32: the words of one SampleRow each
//            penalties [penalties, 2] i32: pairs (token, count) in the ranges that the rows name. The tokens of a range
//            are distinct and are those that stand in the row's sequence so far, prompt included; `count` says how
//            often the token was generated, 0 for one of the prompt alone. The rows' biases lie in ranges of their own:
//            pairs (token, bits of an f32 bias), the tokens of a range distinct
//   outputs  token [rows] i32; logprob [rows] f32: log softmax of the unmodified logits at the token
//
// The biases of the row come first, at every temperature: logit + bias, rounded to f32. The penalties follow. For each
// pair of the row, rounding to f32 after each step:
//   1. repetition_penalty r: logit < 0 ? logit * r : logit / r              (Keskar et al. 2019, as in transformers)
//   2. logit - frequency_penalty * count - presence_penalty * (count > 0)   (as the OpenAI API and vLLM define them;
//      computed in f64, rounded once)
//
// Temperature 0 is greedy: the smallest index among the largest logits. Otherwise, in this order:
//   1. p = softmax(logits / temperature);
//   2. top_k: keep the k largest, at equal values those with smaller index;
//   3. top_p: of the kept, renormalized, in order of falling p (equal: rising index), keep the shortest prefix whose
//      sum reaches top_p, at least one;
//   4. min_p: drop what is below min_p times the largest p;
//   5. with u = uniform_float(philox4x32(seed, position).words[0]), pick in order of index the first kept token whose
//      cumulated p exceeds u * (sum of the kept p).
// A row whose logits, biased and penalized, hold NaN or whose largest one is not finite gives token -1 (the engine
// fails that request alone).
#pragma once

#include <cstdint>

namespace eadem::kernels {

// How the token of one sequence is drawn. A parameter that kernels read is added here, in the reference
// (ops/sampling/sample.cc) and in the kernels; the layers between pass the struct on as it is.
struct SampleSettings {
  float temperature = 0.0f;  // >= 0; 0 is greedy
  int32_t top_k = 0;         // <= 0: off
  float top_p = 1.0f;        // (0, 1]
  float min_p = 0.0f;        // [0, 1]
  int64_t seed = 0;
  float repetition_penalty = 1.0f;  // > 0; 1 is off
  float presence_penalty = 0.0f;    // 0 is off
  float frequency_penalty = 0.0f;   // 0 is off
  // Tokens at the sequence's start that are its prompt: presence and frequency penalties do not count them, and latent
  // attention may compute them in a form of their own (the option latent_form). Read where the pairs of `penalties` and
  // the input prompt_length are made, not by the kernels of `sample`.
  int32_t prompt_length = 0;

  bool has_penalties() const { return repetition_penalty != 1.0f || presence_penalty != 0 || frequency_penalty != 0; }
};

struct SampleRow {
  SampleSettings settings;
  int64_t position = 0;         // in its sequence, of the token to be drawn
  int32_t penalties_begin = 0;  // the row's pairs: [penalties_begin, penalties_end)
  int32_t penalties_end = 0;
  int32_t biases_begin = 0;  // the row's biases: [biases_begin, biases_end)
  int32_t biases_end = 0;

  bool changes_logits() const { return penalties_end > penalties_begin || biases_end > biases_begin; }
};
inline constexpr int64_t kSampleRowWords = sizeof(SampleRow) / sizeof(int32_t);
static_assert(sizeof(SampleRow) == 64, "no padding: the words are copied as they are");

}  // namespace eadem::kernels
