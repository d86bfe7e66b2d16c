// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/llm.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <random>
#include <system_error>
#include <utility>

#include "eadem/engine/model_files.h"
#include "eadem/io/gguf.h"

namespace eadem::engine {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The state of a running request.
struct Running {
  size_t index;
  Completion* completion;
  io::IncrementalDecoder decoder;
  StopWatcher stops;
};

}  // namespace

CacheConfig fit_cache(CacheConfig wanted, const models::ModelInfo& info, int64_t token_bytes, int64_t free_bytes,
                      const Logger& log) {
  constexpr int64_t kLeastTokens = 256;
  auto* fixed = std::get_if<StaticKVCacheConfig>(&wanted);
  auto* paged = std::get_if<PagedKVCacheConfig>(&wanted);
  if (fixed != nullptr ? fixed->max_cache_len != 0 : paged->max_kv_memory_bytes != 0) return wanted;
  const int64_t sequences = fixed != nullptr ? std::max<int64_t>(1, fixed->max_batch_size) : 1;
  const int64_t fits = std::max(kLeastTokens, free_bytes / 2 / token_bytes / sequences);  // tokens of each sequence
  const int64_t length = std::min(info.max_positions, fits);
  if (length < info.max_positions)
    log.log(LogLevel::warning, "context limited to {} of {} tokens: {} bytes of memory are free", length,
            info.max_positions, free_bytes);
  if (fixed != nullptr) {
    fixed->max_cache_len = length;
  } else {
    const int64_t shared = std::max<int64_t>(1, paged->max_batch_size) * std::min(info.max_positions, kSharedContext);
    paged->max_kv_memory_bytes = std::min(std::max(info.max_positions, shared), fits) * token_bytes;
  }
  return wanted;
}

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::length: return "length";
    case FinishReason::stop: return "stop";
    case FinishReason::cancelled: return "cancelled";
    case FinishReason::error: return "error";
  }
  return "?";
}

io::Tokenizer open_tokenizer(const models::Checkpoint& checkpoint) {
  const auto* gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get());
  io::Tokenizer tokenizer =
      gguf != nullptr ? io::tokenizer_from_gguf(*gguf) : io::Tokenizer::from_file(model_folder(checkpoint));
  if (tokenizer.vocab_size() > checkpoint.model->info().vocab)
    throw DataCorrupted("{}: the tokenizer has {} tokens; the model of {} has {}", tokenizer.source(),
                        tokenizer.vocab_size(), checkpoint.config_path, checkpoint.model->info().vocab);
  return tokenizer;
}

LLM::LLM(const std::string& path, std::shared_ptr<Device> device, const EngineOptions& options, const Logger& log,
         const std::function<void(int64_t, int64_t)>& progress)
    : LLM(models::open_checkpoint(path), std::move(device), options, log, progress) {}

LLM::LLM(models::Checkpoint checkpoint, std::shared_ptr<Device> device, const EngineOptions& options, const Logger& log,
         const std::function<void(int64_t, int64_t)>& progress)
    : checkpoint_(std::move(checkpoint)), fresh_seeds_(std::random_device{}()) {
  // Reading a large vocabulary takes as long as reading a gigabyte of weights, so both are read at the same time. If
  // the tokenizer fails, loading stops. If no thread can be started, the tokenizer is read after the weights.
  const auto open = [this] { return open_tokenizer(checkpoint_); };
  std::future<io::Tokenizer> tokenizer;
  try {
    tokenizer = std::async(std::launch::async, open);
  } catch (const std::system_error& error) {
    log.log(LogLevel::warning, "no thread for reading the tokenizer beside the weights ({})", error.what());
    tokenizer = std::async(std::launch::deferred, open);
  }
  const auto take_tokenizer = [&] { tokenizer_ = std::make_unique<io::Tokenizer>(tokenizer.get()); };
  EngineOptions fitted = options;
  const models::ModelInfo& info = checkpoint_.model->info();
  fitted.cache = fit_cache(options.cache, info, kv_bytes_per_token(checkpoint_, *device, options),
                           device->memory().free_bytes, log);
  const auto on_progress = [&](int64_t done, int64_t total) {
    if (tokenizer.valid() && tokenizer.wait_for(std::chrono::seconds(0)) == std::future_status::ready) take_tokenizer();
    if (progress) progress(done, total);
  };
  engine_ = InferEngine::from_checkpoint(checkpoint_, device, fitted, on_progress, log);
  if (tokenizer.valid()) take_tokenizer();
  scheduler_ = std::make_unique<Scheduler>(*engine_);

  std::vector<int64_t> eos = checkpoint_.model->info().eos_token_ids;
  if (const auto path = generation_config_path(checkpoint_)) {
    const io::GenerationConfig config = io::read_generation_config(*path);
    default_params_ = SamplingParams::from_generation_config(config, *path, log);
    if (!config.eos_token_ids.empty()) eos = config.eos_token_ids;
  }
  for (int64_t id : eos) eos_.push_back(static_cast<int32_t>(id));
  if (eos_.empty() && tokenizer_->eos()) eos_.push_back(*tokenizer_->eos());
}

std::vector<Completion> LLM::generate(const std::vector<std::string>& prompts, const SamplingParams& params,
                                      const OnText& on_text, const std::atomic<bool>* cancel, bool parse_special) {
  const Clock::time_point start = Clock::now();
  std::vector<std::vector<int32_t>> ids(prompts.size());
  std::vector<std::string> errors(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    try {
      ids[i] = tokenizer_->encode(prompts[i], {.parse_special = parse_special, .cancel = cancel});
      // An empty prompt becomes the BOS token, the beginning of a text.
      if (ids[i].empty() && tokenizer_->bos()) ids[i].push_back(*tokenizer_->bos());
    } catch (const Cancelled&) {
      stats_ = {};
      std::vector<Completion> none(prompts.size());
      for (Completion& completion : none) completion.finish_reason = FinishReason::cancelled;
      return none;
    } catch (const Error& error) {
      errors[i] = error.what();
    }
  }
  const double tokenize_seconds = seconds_since(start);
  std::vector<Completion> completions = generate_ids(ids, params, on_text, cancel);
  stats_.tokenize_seconds = tokenize_seconds;
  for (size_t i = 0; i < prompts.size(); ++i)
    if (!errors[i].empty()) completions[i].error = errors[i];
  return completions;
}

std::vector<Completion> LLM::generate_ids(const std::vector<std::vector<int32_t>>& prompts,
                                          const SamplingParams& params, const OnText& on_text,
                                          const std::atomic<bool>* cancel) {
  return run(prompts, params, on_text, cancel, false);
}

Completion LLM::continue_ids(const std::vector<int32_t>& conversation, const SamplingParams& params,
                             const OnText& on_text, const std::atomic<bool>* cancel) {
  return std::move(run({&conversation, 1}, params, on_text, cancel, true)[0]);
}

std::vector<Completion> LLM::run(std::span<const std::vector<int32_t>> prompts, const SamplingParams& params,
                                 const OnText& on_text, const std::atomic<bool>* cancel, bool keep) {
  params.validate();
  stats_ = {};
  std::vector<Completion> completions(prompts.size());
  std::map<Scheduler::RequestId, Running> running;
  for (size_t i = 0; i < prompts.size(); ++i) {
    Completion& completion = completions[i];
    completion.prompt_tokens = static_cast<int64_t>(prompts[i].size());
    completion.seed = params.seed ? *params.seed : static_cast<int64_t>(fresh_seeds_++ & 0x7fffffff);
    try {
      const Scheduler::RequestId id = scheduler_->add({.prompt = prompts[i],
                                                       .sampling = params.settings(completion.seed),
                                                       .max_tokens = params.max_tokens,
                                                       .keep = keep});
      Running request{i, &completion, io::IncrementalDecoder(*tokenizer_), StopWatcher(params.stop)};
      for (int32_t token : prompts[i])
        if (tokenizer_->is_token(token)) request.decoder.next(token);  // the continuation starts where the prompt ends
      running.emplace(id, std::move(request));
    } catch (const Error& error) {
      completion.finish_reason = FinishReason::error;
      completion.error = error.what();
    }
  }

  bool callback_failed = false;  // on_text threw: it is not called again
  const auto show = [&](const Running& request, std::string_view piece) {
    request.completion->text += piece;
    if (!on_text || piece.empty()) return;
    callback_failed = true;
    on_text(request.index, piece);
    callback_failed = false;
  };
  const auto is_end = [&](int32_t token) {
    if (!params.ignore_eos && std::find(eos_.begin(), eos_.end(), token) != eos_.end()) return true;
    return std::find(params.stop_token_ids.begin(), params.stop_token_ids.end(), token) != params.stop_token_ids.end();
  };
  const auto end = [&](Scheduler::RequestId id, FinishReason reason) {
    Running& request = running.at(id);
    if (!request.stops.stopped()) {
      show(request, request.stops.feed(request.decoder.finish()));
      if (!request.stops.stopped()) show(request, request.stops.finish());
    }
    request.completion->finish_reason = reason;
    running.erase(id);
  };
  const Scheduler::OnToken on_token = [&](const Scheduler::Drawn& drawn) {
    if (callback_failed) return false;
    Running& request = running.at(drawn.id);
    Completion& completion = *request.completion;
    if (stats_.first_token_seconds == 0) stats_.first_token_seconds = -1;  // -1 until the step is complete
    if (drawn.token < 0) {
      completion.error = "the model's logits are not finite (NaN or infinity): its weights or the input overflow";
      end(drawn.id, FinishReason::error);
      return false;
    }
    if (is_end(drawn.token)) {
      end(drawn.id, FinishReason::stop);
      return false;
    }
    completion.token_ids.push_back(drawn.token);
    completion.logprobs.push_back(drawn.logprob);
    // Vocabularies are padded: an id without a token can be sampled, and has no text.
    if (tokenizer_->is_token(drawn.token)) show(request, request.stops.feed(request.decoder.next(drawn.token)));
    if (request.stops.stopped()) {
      end(drawn.id, FinishReason::stop);
      return false;
    }
    if (drawn.last) end(drawn.id, FinishReason::length);
    return true;
  };

  const int64_t reused_before = scheduler_->reused_tokens();
  const Clock::time_point start = Clock::now();
  bool more = !running.empty();
  try {
    while (more) {
      const Clock::time_point step_start = Clock::now();
      const int64_t prompt_before = scheduler_->prompt_tokens(), decode_before = scheduler_->decode_tokens();
      try {
        more = scheduler_->step(on_token, cancel);
      } catch (const Cancelled&) {  // the step was cancelled; earlier tokens stay
        if (cancel == nullptr || !cancel->load()) throw;
      }
      const double seconds = seconds_since(step_start);
      const int64_t prompt = scheduler_->prompt_tokens() - prompt_before;
      (prompt > 0 ? stats_.prompt_seconds : stats_.decode_seconds) += seconds;
      stats_.prompt_tokens += prompt;
      stats_.decode_tokens += scheduler_->decode_tokens() - decode_before;
      stats_.reused_tokens = scheduler_->reused_tokens() - reused_before;
      if (stats_.first_token_seconds < 0) stats_.first_token_seconds = seconds_since(start);
      if (cancel != nullptr && cancel->load()) {
        while (!running.empty()) {
          const Scheduler::RequestId id = running.begin()->first;
          scheduler_->cancel(id);
          end(id, FinishReason::cancelled);
        }
        more = false;
      }
    }
  } catch (...) {
    for (const auto& [id, request] : running) scheduler_->cancel(id);
    throw;
  }
  return completions;
}

}  // namespace eadem::engine
