// SPDX-License-Identifier: Apache-2.0
//
// Draws one token per row.
//
//   inputs   logits [rows, vocab] f32 (not changed)
//            rows [rows, kSampleRowWords] i32: the words of one SampleRow each
//            penalties [penalties, 2] i32: pairs (token, count) in the ranges that the rows name. The tokens of a range
//            are distinct and are those that stand in the row's sequence so far, prompt included; `count`
//            says how often the token was generated, 0 for one of the prompt alone. The rows' biases lie in ranges of
//            their own: pairs (token, bits of an f32 bias), the tokens of a range distinct. So do masks: ceil(vocab /
//            32) words, where bit t % 32 of word t / 32 says whether token t is allowed
//   outputs  token [rows] i32; logprob [rows] f32: log softmax of the unmodified logits at the token
//            top_token, top_logprob [rows, kMostTopLogprobs] i32, f32: the row's `top_logprobs` likeliest tokens by the
//            unmodified logits, in falling order, of equals that with the smaller index first, and the log softmax at
//            each; -1 and NaN behind them, or if there are no more tokens
//
// A row with a `forced` token draws nothing: its token is that one, whatever its settings say.
//
// The biases of the row come first, at every temperature: logit + bias, rounded to f32. The penalties follow. For each
// pair of the row, rounding to f32 after each step:
//   1. repetition_penalty r: logit < 0 ? logit * r : logit / r              (Keskar et al. 2019, as in transformers)
//   2. logit - frequency_penalty * count - presence_penalty * (count > 0)   (as the OpenAI API and vLLM define them;
//      computed in f64, rounded once)
// Last, the logits of tokens that the row's mask does not allow become -infinity, unless they are NaN.
//
// Temperature 0 is greedy: the smallest index among the largest logits. Otherwise, in this order:
//   1. p = softmax(logits / temperature);
//   2. top_k: keep the k largest, at equal values those with smaller index;
//   3. top_p: of the kept, renormalized, in order of falling p (equal: rising index), keep the shortest prefix whose
//      sum reaches top_p, at least one;
//   4. min_p: drop what is below min_p times the largest p;
//   5. typical_p: of the kept, renormalized, with entropy H: in order of rising |-log p - H|, keep the shortest prefix
//      whose sum reaches typical_p, and what equals its last one (Meister et al. 2023, as in transformers);
//   6. with u = uniform_float(philox4x32(seed, position).words[0]), pick in order of index the first kept token whose
//      cumulated p exceeds u * (sum of the kept p).
// A row whose logits, biased, penalized and masked, hold NaN or whose largest one is not finite gives token -1, logprob
// NaN and no top tokens (the engine fails that request alone).
#pragma once

#include <cstdint>

namespace eadem::kernels {

// As many as the OpenAI API and vLLM give.
inline constexpr int64_t kMostTopLogprobs = 20;

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
  float typical_p = 1.0f;    // (0, 1]; 1 is off
  int32_t top_logprobs = 0;  // [0, kMostTopLogprobs]

  bool has_penalties() const { return repetition_penalty != 1.0f || presence_penalty != 0 || frequency_penalty != 0; }
};

struct SampleRow {
  SampleSettings settings;
  int64_t position = 0;         // in its sequence, of the token to be drawn
  int32_t penalties_begin = 0;  // the row's pairs: [penalties_begin, penalties_end)
  int32_t penalties_end = 0;
  int32_t biases_begin = 0;  // the row's biases: [biases_begin, biases_end)
  int32_t biases_end = 0;
  int32_t allowed_begin = -1;  // the pair at which the row's mask begins; -1: every token is allowed
  int32_t forced = -1;         // the token whose log-probability is wanted; -1: one is drawn

  bool changes_logits() const {
    return penalties_end > penalties_begin || biases_end > biases_begin || allowed_begin >= 0;
  }
};
inline constexpr int64_t kSampleRowWords = sizeof(SampleRow) / sizeof(int32_t);
static_assert(sizeof(SampleRow) == 80, "no padding: the words are copied as they are");

// Pairs that a mask of a vocabulary takes.
constexpr int64_t mask_pairs(int64_t vocab) { return (vocab + 63) / 64; }
// Whether the mask at `words` allows a token.
constexpr bool allows(const int32_t* words, int64_t token) {
  return (static_cast<uint32_t>(words[token / 32]) >> (token % 32) & 1) != 0;
}

}  // namespace eadem::kernels
