// SPDX-License-Identifier: Apache-2.0
//
// eadem perplexity: how well a model predicts a text.
//
// The protocol is that of llama.cpp's perplexity tool with its defaults, so that numbers compare: the text is
// tokenized as one, cut into chunks of `context` tokens without overlap, a rest is dropped; the first token of each
// chunk is replaced by BOS if the tokenizer puts one before texts; the tokens of the second half of each chunk are
// scored: those at positions context/2 + 1 to context - 1.
#include <algorithm>
#include <cmath>

#include "eadem/cli/commands.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/options/model_options.h"
#include "eadem/cli/options/standard_input.h"
#include "eadem/cli/terminal.h"
#include "eadem/engine/llm.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/json.h"

namespace eadem::cli {

namespace {

using engine::InferEngine;

constexpr int64_t kMaxEvaluatedBytes = int64_t{1} << 30;
constexpr int64_t kMaxContext = int64_t{1} << 24;
// The logits of a step take at most this many bytes, whatever the vocabulary.
constexpr int64_t kLogitBytes = 64 << 20;

// Sums of one model over a text: of the tokens' negative log-likelihoods and their squares.
struct Score {
  double sum = 0, sum_squares = 0;
  int64_t count = 0;

  void add(double value) {
    sum += value;
    sum_squares += value * value;
    ++count;
  }
  double mean() const { return sum / static_cast<double>(count); }
  // Standard error of the mean.
  double error() const {
    if (count < 2) return 0;
    const double n = static_cast<double>(count);
    return std::sqrt(std::max(0.0, (sum_squares / n - mean() * mean()) / (n - 1)));
  }
};

// Natural logarithms of the softmax of one row, in double.
void log_softmax(const float* logits, int64_t count, std::vector<double>& result) {
  const double most = *std::max_element(logits, logits + count);
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(logits[i] - most);
  const double log_sum = std::log(sum) + most;
  result.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) result[static_cast<size_t>(i)] = logits[i] - log_sum;
}

double log_probability(const float* logits, int64_t count, int32_t token) {
  const double most = *std::max_element(logits, logits + count);
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(logits[i] - most);
  return logits[token] - most - std::log(sum);
}

std::unique_ptr<InferEngine> open_engine(const models::Checkpoint& checkpoint, const std::shared_ptr<Device>& device,
                                         engine::EngineOptions options, int64_t context) {
  const int64_t rows = std::clamp<int64_t>(kLogitBytes / (4 * checkpoint.model->info().vocab), 1, context);
  options.cache = engine::StaticKVCacheConfig{.max_batch_size = 1, .max_cache_len = context};
  options.max_num_batched_tokens = rows;
  options.max_logit_rows = rows;
  ProgressBar bar("loading");
  const auto progress = [&](int64_t done, int64_t total) {
    stop_if_interrupted();
    bar.update(static_cast<double>(done), static_cast<double>(total));
  };
  return InferEngine::from_checkpoint(checkpoint, device, options, progress, cli_logger());
}

struct PerplexityOptions {
  ModelOptions model;
  std::string file;  // its name in messages
  bool from_stdin = false;
  std::optional<std::string> base;
  int64_t context = 512, max_chunks = 0;
  bool json = false;
};

// Returns nothing when help was asked for.
std::optional<PerplexityOptions> parse_perplexity(CommandLine command_line) {
  PerplexityOptions options;
  std::vector<std::string> operands;
  std::optional<std::string> file;
  Arguments arguments("perplexity",
                      "How well a model predicts a text: the perplexity of the second half of each chunk, with its "
                      "standard error. The protocol is the usual one (chunks of 512 tokens without overlap, BOS first "
                      "in each where the tokenizer has one), so that the number compares with that of other tools.");
  arguments.rest("[MODEL] FILE", operands,
                 "the model (default: the bundled one), and a UTF-8 text; - is standard input", false);
  arguments.option("-m,--model", "MODEL", options.model.model, "the model, instead of the first operand");
  arguments.option("-f,--file", "FILE", file, "the text, instead of the last operand");
  arguments.option("--context", "N", options.context, "tokens of a chunk (default: 512)");
  arguments.option("--chunks", "N", options.max_chunks, "only the first N chunks; 0 is all (default: 0)");
  arguments.option(
      "--kl", "BASE", options.base,
      "also the mean Kullback-Leibler divergence from this model, which must have the same tokenizer: what "
      "an encoding or a precision costs");
  arguments.flag("--json", options.json, "one JSON object");
  options.model.add_device(arguments);
  options.model.add_precision(arguments);
  options.model.add_loading(arguments);
  arguments.example("eadem perplexity model.gguf wiki.test.raw", "the number of the usual tables");
  arguments.example("head -c 100k book.txt | eadem perplexity model.gguf -", "of a part of a text");
  arguments.example("eadem perplexity model-bf16.gguf wiki.test.raw --kl model-f32.gguf --chunks 20",
                    "what rounding the weights costs");
  if (!arguments.parse(command_line)) return std::nullopt;
  // Operands give what no option gave: first the model, then the text.
  if (!file) {
    if (operands.empty()) throw UsageError("FILE is missing");
    file = operands.back();
    operands.pop_back();
  }
  if (!options.model.model && !operands.empty()) {
    options.model.model = operands.front();
    operands.erase(operands.begin());
  }
  if (!operands.empty()) throw UsageError(fmt::format("unexpected argument '{}'", operands[0]));
  options.from_stdin = *file == "-";
  options.file = options.from_stdin ? "standard input" : *file;
  if (options.context < 4 || options.context > kMaxContext)
    throw UsageError(fmt::format("--context is {}; expected 4 to {}", options.context, kMaxContext));
  if (options.max_chunks < 0) throw UsageError(fmt::format("--chunks is {}; expected at least 0", options.max_chunks));
  return options;
}

// The text as chunks of `context` tokens.
struct Chunks {
  std::string text;
  std::vector<int32_t> ids;
  int64_t context = 0, count = 0;
  std::optional<int32_t> bos;  // set if the tokenizer puts BOS before texts

  std::vector<int32_t> chunk(int64_t n) const {
    std::vector<int32_t> tokens(ids.begin() + n * context, ids.begin() + (n + 1) * context);
    if (bos) tokens[0] = *bos;
    return tokens;
  }
};

Chunks read_chunks(const PerplexityOptions& options, const io::Tokenizer& tokenizer) {
  Chunks chunks{.context = options.context};
  chunks.text = options.from_stdin ? read_stdin(kMaxEvaluatedBytes) : io::read_file(options.file, kMaxEvaluatedBytes);
  if (chunks.text.empty()) throw InvalidArgument("{} is empty", options.file);
  try {
    chunks.ids = tokenizer.encode(chunks.text,
                                  {.add_special_tokens = true, .parse_special = false, .cancel = &interrupt_flag()});
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("{}: {}", options.file, error.what());
  }
  chunks.count = static_cast<int64_t>(chunks.ids.size()) / options.context;
  if (chunks.count < 1)
    throw InvalidArgument("{}: {} tokens, less than one chunk of {} (--context)", options.file, chunks.ids.size(),
                          options.context);
  if (options.max_chunks > 0) chunks.count = std::min(chunks.count, options.max_chunks);
  if (!tokenizer.prefix_ids().empty() && tokenizer.prefix_ids()[0] == tokenizer.bos()) chunks.bos = tokenizer.bos();
  return chunks;
}

models::Checkpoint open_measured(const PerplexityOptions& options) {
  models::Checkpoint checkpoint = models::open_checkpoint(resolve_model(options.model.model));
  if (options.context > checkpoint.model->info().max_positions)
    throw InvalidArgument("--context is {}; the model's context is {} tokens", options.context,
                          checkpoint.model->info().max_positions);
  return checkpoint;
}

// Opens the model of --kl. Refuses a model with another vocabulary.
models::Checkpoint open_base(const PerplexityOptions& options, const models::Checkpoint& checkpoint,
                             const Chunks& chunks) {
  models::Checkpoint base = models::open_checkpoint(resolve_model(options.base));
  const io::Tokenizer tokenizer = engine::open_tokenizer(base);
  if (base.model->info().vocab != checkpoint.model->info().vocab ||
      tokenizer.encode(chunks.text, {.parse_special = false, .cancel = &interrupt_flag()}) != chunks.ids)
    throw InvalidArgument("--kl: {} and {} do not have the same tokenizer", *options.base, checkpoint.path);
  if (options.context > base.model->info().max_positions)
    throw InvalidArgument("--context is {}; the context of {} is {} tokens", options.context, *options.base,
                          base.model->info().max_positions);
  return base;
}

struct Scores {
  Score model, base, divergence;  // the last two only with --kl
};

// Runs chunks through the model and, with --kl, through the base.
class Scorer {
 public:
  Scorer(const PerplexityOptions& options, const models::Checkpoint& checkpoint,
         const std::optional<models::Checkpoint>& base, const std::shared_ptr<Device>& device)
      : context_(options.context),
        vocab_(checkpoint.model->info().vocab),
        engine_(open_engine(checkpoint, device, options.model.engine_options(), options.context)) {
    if (!base) return;
    // The base runs in the precision of its files: the precision options are for the model that is measured.
    engine::EngineOptions base_options;
    base_options.pack_cache = options.model.pack_cache;
    base_engine_ = open_engine(*base, device, base_options, options.context);
  }

  // Throws Cancelled when the user asked to stop; `scores` then holds a part of the chunk.
  void add(std::span<const int32_t> chunk, Scores& scores) {
    const int64_t step = engine_->options().max_num_batched_tokens;
    for (int64_t begin = 0; begin + 1 < context_; begin += step) {
      const int64_t count = std::min(step, context_ - begin);
      const Tensor base_logits = base_engine_ ? logits(*base_engine_, chunk, begin, count) : Tensor();
      const Tensor model_logits = logits(*engine_, chunk, begin, count);
      for (int64_t row = 0; row < count; ++row) {
        const int64_t position = begin + row;  // predicts the token at position + 1
        if (position < context_ / 2 || position + 1 >= context_) continue;
        const int32_t target = chunk[static_cast<size_t>(position + 1)];
        const float* values = model_logits.view.as<float>() + row * vocab_;
        if (base_engine_)
          add_both(values, base_logits.view.as<float>() + row * vocab_, target, scores);
        else
          scores.model.add(-log_probability(values, vocab_, target));
      }
    }
  }

 private:
  // Returns [count, vocab] f32 logits of the tokens from `begin` on; the tokens before are in the cache.
  static Tensor logits(InferEngine& engine, std::span<const int32_t> chunk, int64_t begin, int64_t count) {
    InferEngine::Input input;
    input.input_ids.assign(chunk.begin() + begin, chunk.begin() + begin + count);
    input.input_lengths = {static_cast<int32_t>(count)};
    input.cache_lengths = {static_cast<int32_t>(begin)};
    input.all_logits = true;
    engine.forward(input, &interrupt_flag());
    return engine.logits();
  }

  void add_both(const float* values, const float* base_values, int32_t target, Scores& scores) {
    log_softmax(values, vocab_, logs_);
    log_softmax(base_values, vocab_, base_logs_);
    scores.model.add(-logs_[static_cast<size_t>(target)]);
    scores.base.add(-base_logs_[static_cast<size_t>(target)]);
    double kl = 0;
    for (size_t i = 0; i < logs_.size(); ++i) kl += std::exp(base_logs_[i]) * (base_logs_[i] - logs_[i]);
    scores.divergence.add(kl);
  }

  int64_t context_, vocab_;
  std::unique_ptr<InferEngine> engine_, base_engine_;
  std::vector<double> logs_, base_logs_;
};

struct Result {
  Scores scores;
  int64_t chunks = 0;
  bool stopped = false;
};

// Scores whole chunks: all of them, or those before the user stopped.
Result score(Scorer& scorer, const Chunks& chunks, const std::string& model) {
  Result result;
  ProgressBar bar("perplexity");
  auto last_line = std::chrono::steady_clock::now();
  while (result.chunks < chunks.count && !result.stopped) {
    Scores scores = result.scores;
    try {
      scorer.add(chunks.chunk(result.chunks), scores);
    } catch (const Cancelled&) {
      if (result.chunks == 0) throw;
      result.stopped = true;
      break;
    }
    result.scores = scores;
    ++result.chunks;
    if (!std::isfinite(scores.model.sum))
      throw InvalidArgument("{}: the model's logits are not finite in chunk {}", model, result.chunks);
    const std::string state =
        fmt::format("{}/{} chunks  perplexity {:.4f}", result.chunks, chunks.count, std::exp(scores.model.mean()));
    bar.update(static_cast<double>(result.chunks), static_cast<double>(chunks.count), state);
    if (const auto now = std::chrono::steady_clock::now();
        !stderr_is_terminal() && now - last_line > std::chrono::seconds(10)) {
      last_line = now;
      note("{}", state);
    }
    result.stopped = interrupted();
  }
  return result;
}

void print_result(const PerplexityOptions& options, const std::string& model, const Result& result) {
  const Score& score = result.scores.model;
  const Score &base = result.scores.base, &divergence = result.scores.divergence;
  // The error of exp(mean), to first order.
  const double value = std::exp(score.mean()), error = value * score.error();
  if (options.json) {
    io::JsonValue json = io::JsonValue::object();
    json.set("model", json_text(model)).set("file", json_text(options.file));
    json.set("context", options.context).set("chunks", result.chunks);
    json.set("scored_tokens", score.count).set("perplexity", value).set("error", error);
    json.set("mean_negative_log_likelihood", score.mean()).set("stopped", result.stopped);
    if (options.base)
      json.set("base", json_text(*options.base))
          .set("base_perplexity", std::exp(base.mean()))
          .set("kl_divergence", divergence.mean())
          .set("kl_divergence_error", divergence.error());
    print(io::to_json(json) + "\n");
    return;
  }
  print(fmt::format("perplexity {:.4f} ± {:.4f} ({} tokens scored, {} chunks of {})\n", value, error, score.count,
                    result.chunks, options.context));
  if (options.base)
    print(fmt::format("base       {:.4f}; mean KL divergence from it {:.6f} ± {:.6f} nats per token\n",
                      std::exp(base.mean()), divergence.mean(), divergence.error()));
}

}  // namespace

int perplexity(CommandLine command_line) {
  const std::optional<PerplexityOptions> options = parse_perplexity(command_line);
  if (!options) return kOk;
  listen_for_interrupt();
  const models::Checkpoint checkpoint = open_measured(*options);
  const Chunks chunks = read_chunks(*options, engine::open_tokenizer(checkpoint));
  std::optional<models::Checkpoint> base;
  if (options->base) base = open_base(*options, checkpoint, chunks);
  const std::shared_ptr<Device> device = options->model.open();
  Scorer scorer(*options, checkpoint, base, device);
  note("{}: {} tokens, {} chunks of {}, on {}", options->file, chunks.ids.size(), chunks.count, options->context,
       device->description());
  const Result result = score(scorer, chunks, checkpoint.path);
  print_result(*options, checkpoint.path, result);
  if (result.stopped) note("stopped after {} of {} chunks", result.chunks, chunks.count);
  return result.stopped ? kInterrupted : kOk;
}

}  // namespace eadem::cli
