// SPDX-License-Identifier: Apache-2.0
//
// LLM: text in, text out. A model with its tokenizer, an engine and a scheduler.
//
// One thread at a time may use an LLM.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
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
  std::vector<int32_t> token_ids;  // sampled tokens, without the one that ended the text
  std::vector<float> logprobs;     // of token_ids
  FinishReason finish_reason = FinishReason::length;
  std::string error;
  int64_t prompt_tokens = 0;
  int64_t seed = 0;  // the seed that was used
};

// Wall times of one `generate`, seconds.
struct GenerationStats {
  double tokenize_seconds = 0;
  double first_token_seconds = 0;  // from the start to the first sampled token of any request
  double prompt_seconds = 0;       // time of steps with prompt tokens
  double decode_seconds = 0;       // time of steps without prompt tokens
  int64_t prompt_tokens = 0;       // computed in these steps
  int64_t reused_tokens = 0;       // of prompts, found in the cache (LLM::continue_ids)
  int64_t decode_tokens = 0;       // tokens sampled in decode steps
};

class LLM {
 public:
  // `path` is as in models::open_checkpoint; the tokenizer and generation_config.json are read from beside the model.
  // fit_cache chooses the size of a cache that has none. `log` receives settings of the model's files that nothing
  // honours.
  LLM(const std::string& path, std::shared_ptr<Device> device, const EngineOptions& options,
      const Logger& log = Logger(LogLevel::warning), const std::function<void(int64_t, int64_t)>& progress = {});
  // Takes a checkpoint that is already open, with its weights.
  LLM(models::Checkpoint checkpoint, std::shared_ptr<Device> device, const EngineOptions& options,
      const Logger& log = Logger(LogLevel::warning), const std::function<void(int64_t, int64_t)>& progress = {});

  // Called when more text is complete; `piece` may be empty at the end.
  using OnText = std::function<void(size_t request, std::string_view piece)>;

  // Returns one completion per prompt, in order. A prompt that is refused (too long, not UTF-8) gives a completion with
  // an error; the others are not affected. Throws InvalidArgument for invalid params, and rethrows an exception of
  // `on_text` after all requests of the call have been ended. `cancel` may be set from any thread: the running step is
  // abandoned and the tokens sampled so far are kept. With `parse_special`, special tokens such as <|im_end|> in
  // prompts become those tokens; otherwise they are ordinary text, which is right for text that a user typed.
  std::vector<Completion> generate(const std::vector<std::string>& prompts, const SamplingParams& params,
                                   const OnText& on_text = {}, const std::atomic<bool>* cancel = nullptr,
                                   bool parse_special = false);
  // Takes token ids instead of texts.
  std::vector<Completion> generate_ids(const std::vector<std::vector<int32_t>>& prompts, const SamplingParams& params,
                                       const OnText& on_text = {}, const std::atomic<bool>* cancel = nullptr);
  // One turn of a conversation. The completion is the one that generate_ids gives, but the keys and values stay in the
  // cache, and the next call computes only the tokens after those that both conversations begin with: the new message,
  // or everything that follows an edit. Other calls take the room in the cache when they need it.
  Completion continue_ids(const std::vector<int32_t>& conversation, const SamplingParams& params,
                          const OnText& on_text = {}, const std::atomic<bool>* cancel = nullptr);

  const io::Tokenizer& tokenizer() const { return *tokenizer_; }
  InferEngine& engine() { return *engine_; }
  const SamplingParams& default_params() const { return default_params_; }
  const std::vector<int32_t>& eos_token_ids() const { return eos_; }
  const GenerationStats& last_stats() const { return stats_; }
  const models::Checkpoint& checkpoint() const { return checkpoint_; }

 private:
  std::vector<Completion> run(std::span<const std::vector<int32_t>> prompts, const SamplingParams& params,
                              const OnText& on_text, const std::atomic<bool>* cancel, bool keep);

  models::Checkpoint checkpoint_;
  std::unique_ptr<io::Tokenizer> tokenizer_;
  std::unique_ptr<InferEngine> engine_;
  std::unique_ptr<Scheduler> scheduler_;
  SamplingParams default_params_;
  std::vector<int32_t> eos_;
  GenerationStats stats_;
  uint64_t fresh_seeds_;
};

// Returns `wanted` with a size, if it has none, for a model whose cache takes `token_bytes` a token on a device with
// `free_bytes` of memory. A static cache without a length gets the model's context. A paged cache without memory gets
// room for one sequence of the context, or for max_batch_size sequences of kSharedContext tokens if that is more. Both
// stay below half of the free memory. `log` receives a warning when a sequence of the context does not fit.
inline constexpr int64_t kSharedContext = 2048;
CacheConfig fit_cache(CacheConfig wanted, const models::ModelInfo& info, int64_t token_bytes, int64_t free_bytes,
                      const Logger& log);

// Opens the tokenizer of a checkpoint: tokenizer.json or other tokenizer files in the model's directory, or the one in
// the GGUF file. Throws NotFound naming the places that were searched, Unsupported for an unknown kind of tokenizer,
// and DataCorrupted when it has more tokens than the model.
io::Tokenizer open_tokenizer(const models::Checkpoint& checkpoint);

}  // namespace eadem::engine
