// SPDX-License-Identifier: Apache-2.0
//
// LLM: text in, text out. A model with its tokenizer, an engine and a loop that runs requests on it.
//
// Any number of threads may generate with one LLM at once: their requests share steps, and each gets the text that it
// would get alone. Callbacks run on the thread of their call and may call the LLM. While calls are under way, nobody
// may use engine().
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/engine/engine_loop.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/engine/sampling_params.h"
#include "eadem/engine/speculation/speculation_options.h"
#include "eadem/io/tokenizer/tokenizer.h"

namespace eadem::engine {

class LLM {
 public:
  // `path` is as in models::open_checkpoint; the tokenizer and generation_config.json are read from beside the model.
  // fit_cache chooses the size of a cache that has none. `log` receives settings of the model's files that nothing
  // honours. With `speculation`, steps compute proposed tokens, too; completions are the same. make_speculator says
  // what it refuses.
  LLM(const std::string& path, std::shared_ptr<Device> device, const EngineOptions& options,
      const Logger& log = Logger(LogLevel::warning), const std::function<void(int64_t, int64_t)>& progress = {},
      const SpeculationOptions& speculation = {});
  // Takes a checkpoint that is already open, with its weights.
  LLM(models::Checkpoint checkpoint, std::shared_ptr<Device> device, const EngineOptions& options,
      const Logger& log = Logger(LogLevel::warning), const std::function<void(int64_t, int64_t)>& progress = {},
      const SpeculationOptions& speculation = {});

  // Called when more text is complete; `piece` may be empty at the end.
  using OnText = std::function<void(size_t request, std::string_view piece)>;

  // Returns params.n completions per prompt, in order: those of the first prompt, then those of the second … `request`
  // counts completions, too. A prompt that is refused (too long, not UTF-8) gives a completion with
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
  // One turn of a conversation. Throws InvalidArgument unless params.n is 1. The completion is the one that
  // generate_ids gives, but the keys and values stay in the cache, and the next call computes only the tokens after
  // those that both conversations begin with: the new message, or everything that follows an edit. Other calls take the
  // room in the cache when they need it.
  Completion continue_ids(const std::vector<int32_t>& conversation, const SamplingParams& params,
                          const OnText& on_text = {}, const std::atomic<bool>* cancel = nullptr);

  const io::Tokenizer& tokenizer() const { return *tokenizer_; }
  InferEngine& engine() { return *engine_; }
  const SamplingParams& default_params() const { return default_params_; }
  const std::vector<int32_t>& eos_token_ids() const { return eos_; }
  // Statistics of the call that ended last, of whichever thread.
  GenerationStats last_stats() const;
  // What all requests found in the cache so far. Any thread, at any time.
  CacheCounters cache_counters() const { return loop_->counters(); }
  // Blocks of the cache that neither a request nor the conversation of continue_ids holds. Any thread, at any time.
  int64_t num_free_blocks() const { return loop_->num_free_blocks(); }
  const models::Checkpoint& checkpoint() const { return checkpoint_; }

 private:
  std::vector<Completion> run(std::span<const std::vector<int32_t>> prompts, const SamplingParams& params,
                              const OnText& on_text, const std::atomic<bool>* cancel, bool keep,
                              double tokenize_seconds = 0);
  std::vector<Completion> run_beams(std::span<const std::vector<int32_t>> prompts, const SamplingParams& params,
                                    const OnText& on_text, const std::atomic<bool>* cancel, double tokenize_seconds);
  Completion completion_of(const Beam& beam, const SamplingParams& params, std::span<const int32_t> prompt) const;
  std::vector<std::vector<int32_t>> bad_words(const SamplingParams& params) const;
  GenerationRequest request_of(const SamplingParams& params, const std::vector<int32_t>& prompt,
                               const std::vector<std::vector<int32_t>>& words) const;
  void set_stats(const GenerationStats& stats);

  models::Checkpoint checkpoint_;
  std::unique_ptr<io::Tokenizer> tokenizer_;
  std::unique_ptr<InferEngine> engine_;
  std::unique_ptr<EngineLoop> loop_;
  SamplingParams default_params_;
  std::vector<int32_t> eos_;
  std::atomic<uint64_t> fresh_seeds_;
  mutable std::mutex stats_mutex_;
  GenerationStats stats_;  // guarded by stats_mutex_
};

// Returns the request's configuration with a size, if it has none, on a device with `free_bytes` of memory. A static
// cache without a length gets the model's context. A paged cache without memory gets room for one sequence of the
// context, or for max_batch_size sequences of kSharedContext tokens if that is more. Both stay below half of the free
// memory. `log` receives a warning when a sequence of the context does not fit.
inline constexpr int64_t kSharedContext = 2048;
CacheConfig fit_cache(const CachePlanRequest& request, int64_t free_bytes, const Logger& log);

// Opens the tokenizer of a checkpoint: tokenizer.json or other tokenizer files in the model's directory, or the one in
// the GGUF file. Throws NotFound naming the places that were searched, Unsupported for an unknown kind of tokenizer,
// and DataCorrupted when it has more tokens than the model.
io::Tokenizer open_tokenizer(const models::Checkpoint& checkpoint);

}  // namespace eadem::engine
