// SPDX-License-Identifier: Apache-2.0
//
// LLM: text in, text out. A model with its tokenizer, an engine and a scheduler.
//
// One thread at a time may use an LLM.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/engine/infer_engine.h"
#include "eadem/engine/sampling_params.h"
#include "eadem/engine/scheduler.h"
#include "eadem/engine/stop_watcher.h"
#include "eadem/io/tokenizer/tokenizer.h"

namespace eadem::engine {

enum class FinishReason : uint8_t {
  length,     // max_tokens, or the context is full
  stop,       // end of sequence, a stop token or a stop string
  cancelled,  // asked to stop
  error,      // the request failed alone; see Completion::error
};

std::string_view finish_reason_name(FinishReason reason);

struct Completion {
  std::string text;
  std::vector<int32_t> token_ids;  // drawn, without the token that ended it
  std::vector<float> logprobs;     // of token_ids
  FinishReason finish_reason = FinishReason::length;
  std::string error;
  int64_t prompt_tokens = 0;
  int64_t seed = 0;  // that was used
};

// Wall times of one `generate`, seconds.
struct GenerationStats {
  double tokenize_seconds = 0;
  double first_token_seconds = 0;  // from the start to the first drawn token of any request
  double prompt_seconds = 0;       // steps that held prompt tokens
  double decode_seconds = 0;       // steps that held none
  int64_t prompt_tokens = 0;
  int64_t decode_tokens = 0;  // drawn in decode steps
};

class LLM {
 public:
  // `path` as in models::open_checkpoint; the tokenizer and generation_config.json are looked for beside the model. An
  // unset size of the cache is chosen by fit_cache. `log` takes what the model's files ask for and nothing honours.
  LLM(const std::string& path, std::shared_ptr<Device> device, const EngineOptions& options,
      const Logger& log = Logger(LogLevel::warning), const std::function<void(int64_t, int64_t)>& progress = {});
  // Takes a checkpoint that is open already, with its weights.
  LLM(models::Checkpoint checkpoint, std::shared_ptr<Device> device, const EngineOptions& options,
      const Logger& log = Logger(LogLevel::warning), const std::function<void(int64_t, int64_t)>& progress = {});

  // Called as text becomes complete; `piece` may be empty at the end.
  using OnText = std::function<void(size_t request, std::string_view piece)>;

  // One completion per prompt, in order. A prompt that is refused (too long, not UTF-8) gives a completion with an
  // error; the others are not affected. Throws InvalidArgument for invalid params, and what `on_text` throws, after
  // which no request of the call is left. `cancel` may be set from anywhere: the step that runs is given up, and what
  // was drawn is kept. With `parse_special`, special tokens such as <|im_end|> are read from the prompts; without, such
  // strings are text, as in a prompt that somebody typed.
  std::vector<Completion> generate(const std::vector<std::string>& prompts, const SamplingParams& params,
                                   const OnText& on_text = {}, const std::atomic<bool>* cancel = nullptr,
                                   bool parse_special = false);
  // Takes token ids instead of texts.
  std::vector<Completion> generate_ids(const std::vector<std::vector<int32_t>>& prompts, const SamplingParams& params,
                                       const OnText& on_text = {}, const std::atomic<bool>* cancel = nullptr);

  const io::Tokenizer& tokenizer() const { return *tokenizer_; }
  InferEngine& engine() { return *engine_; }
  const SamplingParams& default_params() const { return default_params_; }
  const std::vector<int32_t>& eos_token_ids() const { return eos_; }
  const GenerationStats& last_stats() const { return stats_; }
  const models::Checkpoint& checkpoint() const { return checkpoint_; }

 private:
  models::Checkpoint checkpoint_;
  std::unique_ptr<io::Tokenizer> tokenizer_;
  std::unique_ptr<InferEngine> engine_;
  std::unique_ptr<Scheduler> scheduler_;
  SamplingParams default_params_;
  std::vector<int32_t> eos_;
  GenerationStats stats_;
  uint64_t fresh_seeds_;
};

// `wanted` with a size where it has none, for a model that takes `token_bytes` of cache a token on a device with
// `free_bytes` of memory. A static cache without a length gets the model's context; a paged one without memory gets
// room for one sequence of the context, or for max_batch_size sequences of kSharedContext tokens if that is more.
// Either stays below half of the free memory, and `log` takes a warning when a sequence of the context does not fit
// then.
inline constexpr int64_t kSharedContext = 2048;
CacheConfig fit_cache(CacheConfig wanted, const models::ModelInfo& info, int64_t token_bytes, int64_t free_bytes,
                      const Logger& log);

// The tokenizer of a checkpoint: tokenizer.json and its kin in the model's directory, or the GGUF file's own. Throws
// NotFound naming the places looked at, Unsupported for a tokenizer that is not known, DataCorrupted when it has more
// tokens than the model.
io::Tokenizer open_tokenizer(const models::Checkpoint& checkpoint);

}  // namespace eadem::engine
