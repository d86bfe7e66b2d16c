// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/train.h"

#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>

#include "eadem/io/atomic_file.h"
#include "eadem/io/sha256.h"
#include "eadem/train/checkpoint.h"
#include "eadem/train/metrics.h"
#include "eadem/train/trainer.h"

namespace eadem::train {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr double kNoEval = std::numeric_limits<double>::quiet_NaN();

TrainerOptions trainer_options(const Recipe::Training& t) {
  return {.weights = t.weights,
          .batch_tokens = t.batch_tokens,
          .beta1 = t.beta1,
          .beta2 = t.beta2,
          .eps = t.eps,
          .weight_decay = t.weight_decay,
          .max_grad_norm = t.max_grad_norm};
}

// One run of a recipe; the members are what its steps share.
class Run {
 public:
  Run(const Recipe& recipe, const RunOptions& options, const Logger& log)
      : recipe_(recipe), options_(options), log_(log), tokenizer_(io::Tokenizer::from_file(recipe.tokenizer)) {
    std::error_code error;
    fs::create_directories(folder("tokens"), error);
    if (error) throw IoError("cannot make directory '{}': {}", folder("tokens"), error.message());
    recipe_hash_ = io::sha256_hex_of_file(recipe.path);
    prepare_model();
    prepare_data();
    restore();
  }

  RunResult train() {
    const Recipe::Training& t = recipe_.training;
    RunResult result;
    result.eval_loss = kNoEval;
    std::vector<Batch> batches(static_cast<size_t>(t.accumulation));
    while (state_.step < t.steps) {
      const Clock::time_point start = Clock::now();
      for (Batch& batch : batches) loader_->next(batch);
      const double rate = learning_rate_at(t, state_.step);
      const StepResult step = trainer_->step(batches, rate);
      ++state_.step;
      state_.tokens += t.batch_tokens * t.accumulation;
      state_.cursor = loader_->cursor();
      const bool last = state_.step == t.steps;

      Progress progress{.step = state_.step,
                        .steps = t.steps,
                        .loss = step.loss,
                        .learning_rate = rate,
                        .grad_norm = step.grad_norm,
                        .tokens = state_.tokens,
                        .tokens_per_second = speed(start),
                        .seconds_left = 0,
                        .eval_loss = kNoEval};
      progress.seconds_left =
          static_cast<double>((t.steps - state_.step) * t.batch_tokens * t.accumulation) / progress.tokens_per_second;
      metrics_->add(
          StepMetrics{state_.step, step.loss, rate, step.grad_norm, state_.tokens, progress.tokens_per_second});
      if (eval_data_ && (last || state_.step % t.eval_interval == 0)) {
        progress.eval_loss = result.eval_loss = evaluate();
        metrics_->add(EvalMetrics{state_.step, progress.eval_loss});
      }
      if (options_.on_step) options_.on_step(progress);
      const bool cancelled = options_.cancel != nullptr && options_.cancel->load();
      if (last || cancelled || state_.step % t.checkpoint_interval == 0) {
        save_checkpoint(*trainer_, state_, recipe_.tokenizer, folder("checkpoints"), t.keep_checkpoints);
        write_plot();
      }
      if (cancelled && !last) {
        result.cancelled = true;
        break;
      }
    }
    result.steps = state_.step;
    if (!result.cancelled) {
      result.model_directory = folder("final");
      fs::create_directories(result.model_directory);
      write_model(*trainer_, recipe_.tokenizer, result.model_directory);
      if (std::isnan(result.eval_loss) && !metrics_->evals().empty()) result.eval_loss = metrics_->evals().back().loss;
      write_plot();
    }
    return result;
  }

 private:
  std::string folder(const char* name) const { return (fs::path(recipe_.output) / name).string(); }

  void prepare_model() {
    const bool fine_tune = !recipe_.init_from.empty();
    const models::Checkpoint checkpoint =
        fine_tune
            ? models::open_checkpoint(recipe_.init_from)
            : models::Checkpoint{recipe_.config, models::model_from_config(recipe_.config), nullptr, recipe_.config};
    if (tokenizer_.vocab_size() > checkpoint.model->info().vocab)
      throw InvalidArgument("{}: the tokenizer has {} tokens; {} has a vocabulary of {}", tokenizer_.source(),
                            tokenizer_.vocab_size(), checkpoint.config_path, checkpoint.model->info().vocab);
    if (recipe_.training.sequence_length > checkpoint.model->info().max_positions)
      throw InvalidArgument("{}: sequence_length is {}; {} has a context of {}", recipe_.path,
                            recipe_.training.sequence_length, checkpoint.config_path,
                            checkpoint.model->info().max_positions);
    trainer_ = std::make_unique<Trainer>(checkpoint.model, options_.device, trainer_options(recipe_.training));
    if (fine_tune)
      trainer_->load(checkpoint);
    else
      trainer_->load_random(recipe_.training.seed, recipe_.init_std);
  }

  void prepare_data() {
    const std::string hash = io::sha256_hex_of_file((fs::path(recipe_.tokenizer) / "tokenizer.json").string());
    const auto open = [&](const char* name, const std::vector<std::string>& texts) {
      return std::make_unique<TokenFile>(TokenFile::open_or_make((fs::path(folder("tokens")) / name).string(), texts,
                                                                 recipe_.separator, tokenizer_, hash,
                                                                 [&](int64_t done, int64_t total) {
                                                                   if (options_.on_preparation)
                                                                     options_.on_preparation("tokenizing", done, total);
                                                                 }));
    };
    data_ = open("train.tok", recipe_.train_files);
    if (!recipe_.eval_files.empty()) eval_data_ = open("eval.tok", recipe_.eval_files);
    loader_ = std::make_unique<DataLoader>(*data_, recipe_.training.batch_tokens, recipe_.training.sequence_length,
                                           recipe_.training.seed);
  }

  void restore() {
    state_.recipe_hash = recipe_hash_;
    if (const std::optional<std::string> newest = newest_checkpoint(folder("checkpoints"))) {
      if (!options_.resume)
        throw InvalidArgument("'{}' holds a run already; resume it, or choose another output directory",
                              recipe_.output);
      const RunState saved = load_checkpoint(*trainer_, *newest);
      if (saved.recipe_hash != recipe_hash_)
        throw InvalidArgument(
            "'{}' was made by a recipe with SHA-256 {}; {} has {}: restore it, or choose another output "
            "directory",
            *newest, saved.recipe_hash, recipe_.path, recipe_hash_);
      state_ = saved;
      loader_->seek(state_.cursor);
      log_.log(LogLevel::info, "resuming from {}", *newest);
    }
    metrics_ = std::make_unique<Metrics>(folder("metrics.jsonl"), state_.step);
  }

  double evaluate() {
    const Recipe::Training& t = recipe_.training;
    double total = 0;
    int64_t count = 0;
    Batch batch;
    clear(batch);
    const auto flush = [&] {
      if (batch.token_ids.empty()) return;
      const auto [loss, labels] = trainer_->evaluate(batch);
      total += loss * static_cast<double>(labels);
      count += labels;
      clear(batch);
    };
    for (int64_t d = 0; d < eval_data_->num_documents(); ++d) {
      const std::span<const uint32_t> document = eval_data_->document(d);
      for (int64_t begin = 0; begin < static_cast<int64_t>(document.size()); begin += t.sequence_length) {
        const int64_t longest = std::min(t.sequence_length, t.batch_tokens);
        const int64_t end = std::min<int64_t>(static_cast<int64_t>(document.size()), begin + longest);
        if (static_cast<int64_t>(batch.token_ids.size()) + end - begin > t.batch_tokens) flush();
        append_piece(batch, document, begin, end);
      }
    }
    flush();
    return total / static_cast<double>(std::max<int64_t>(count, 1));
  }

  // Tokens per second over the last steps: an exponential mean that a pause does not spoil for long.
  double speed(Clock::time_point step_start) {
    const double seconds = std::chrono::duration<double>(Clock::now() - step_start).count();
    const double now =
        static_cast<double>(recipe_.training.batch_tokens * recipe_.training.accumulation) / std::max(seconds, 1e-9);
    speed_ = speed_ == 0 ? now : 0.9 * speed_ + 0.1 * now;
    return speed_;
  }

  void write_plot() {
    io::write_file_atomically(folder("loss.svg"), plot_svg(*metrics_, fs::path(recipe_.output).filename().string()));
  }

  const Recipe& recipe_;
  const RunOptions& options_;
  const Logger& log_;
  io::Tokenizer tokenizer_;
  std::string recipe_hash_;
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<TokenFile> data_, eval_data_;
  std::unique_ptr<DataLoader> loader_;
  std::unique_ptr<Metrics> metrics_;
  RunState state_;
  double speed_ = 0;
};

}  // namespace

RunResult run(const Recipe& recipe, const RunOptions& options, const Logger& log) {
  return Run(recipe, options, log).train();
}

}  // namespace eadem::train
