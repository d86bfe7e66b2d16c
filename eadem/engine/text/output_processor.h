// SPDX-License-Identifier: Apache-2.0
//
// OutputProcessor: turns the sampled tokens of one request into its completion. It decides when the text ends (end of
// sequence, stop tokens, stop strings), detokenizes, and holds back text that may become a stop string. It knows
// neither engine nor scheduler. One thread at a time may use it.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "eadem/engine/sampling_params.h"
#include "eadem/engine/text/completion.h"
#include "eadem/engine/text/stop_watcher.h"
#include "eadem/io/tokenizer/tokenizer.h"

namespace eadem::engine {

// The likeliest tokens at a place and their log-probabilities, in falling order; -1 ends them early.
struct TopOfRow {
  std::span<const int32_t> tokens;
  std::span<const float> logprobs;
};

class OutputProcessor {
 public:
  // `tokenizer`, `params` and `eos`, the tokens that end a sequence, must outlive the processor. The text continues
  // where `prompt` ends.
  OutputProcessor(const io::Tokenizer& tokenizer, const SamplingParams& params, std::span<const int32_t> eos,
                  std::span<const int32_t> prompt, int64_t seed);

  // Takes the log-probability of the next token of the prompt, from the second on.
  void take_prompt(float logprob, const TopOfRow& top = {});
  // Takes a sampled token; -1 stands for logits that were not finite, and fails the request. Returns the text that may
  // be shown now. Afterwards has_ended() says whether the text ends here; the text that was held back is then part of
  // what was returned.
  std::string take(int32_t token, float logprob, const TopOfRow& top = {});
  // Ends the text for a reason from outside, and returns what was held back.
  std::string end(FinishReason reason);
  // Likewise, as an error.
  std::string fail(std::string why);
  bool has_ended() const { return ended_; }

  Completion& completion() { return completion_; }

 private:
  bool is_end(int32_t token) const;

  const io::Tokenizer& tokenizer_;
  const SamplingParams& params_;
  std::span<const int32_t> eos_;
  io::IncrementalDecoder decoder_;
  StopWatcher stops_;
  Completion completion_;
  bool ended_ = false;
};

}  // namespace eadem::engine
