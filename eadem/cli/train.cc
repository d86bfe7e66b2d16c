// SPDX-License-Identifier: Apache-2.0
//
// eadem train: trains a model from a recipe.
#include "eadem/train/train.h"

#include <cmath>

#include "eadem/cli/commands.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/options/model_options.h"
#include "eadem/cli/stop_and_save.h"
#include "eadem/cli/terminal.h"

namespace eadem::cli {

namespace {

// Without a terminal, a line is printed at most this often.
constexpr std::chrono::seconds kLineInterval(10);

}  // namespace

int train(CommandLine command_line) {
  ModelOptions options;
  std::string path;
  bool resume = false;
  Arguments arguments(
      "train",
      "Trains or fine-tunes a model as a recipe says. Checkpoints, metrics as JSON lines, a plot of the "
      "loss and the finished model go to the recipe's output directory.");
  arguments.operand("RECIPE.toml", path, "what to train, on what, and how");
  arguments.flag("--resume", resume, "go on from the newest checkpoint; the result is the same to the bit");
  options.add_device(arguments);
  arguments.note(
      "Ctrl-C, SIGTERM or a closed terminal saves a checkpoint after the current step and exits 130. Without --resume, "
      "an output directory that holds checkpoints is refused; with it, the recipe must mean the same: only steps, "
      "intervals, keep_checkpoints and the output directory may change. A run whose steps are done is extended by more "
      "steps and --resume. When it is done, the directory of the model is printed to stdout. docs/train.md describes "
      "recipes.");
  arguments.example("eadem train assets/stories/recipe.toml", "the bundled model, from scratch");
  arguments.example("eadem train recipe.toml --resume", "after Ctrl-C or a crash");
  if (!arguments.parse(command_line)) return kOk;

  const std::atomic<bool>& stop = listen_for_stop_and_save();
  const train::Recipe recipe = train::load_recipe(path);

  ProgressBar bar("training");
  std::optional<ProgressBar> preparing;
  auto last_line = std::chrono::steady_clock::now() - kLineInterval;
  train::RunOptions run_options;
  run_options.device = options.open();
  run_options.resume = resume;
  run_options.cancel = &stop;
  run_options.on_preparation = [&](const char* what, int64_t done, int64_t total) {
    if (stop) throw Cancelled("interrupted");
    if (!preparing) preparing.emplace(what);
    preparing->update(static_cast<double>(done), static_cast<double>(total));
  };
  run_options.on_note = [&](const std::string& sentence) {
    preparing.reset();
    note("{}", sentence);
  };
  run_options.on_step = [&](const train::Progress& progress) {
    preparing.reset();
    const std::string state =
        fmt::format("step {}/{}  loss {:.4f}  {} tokens/s  {} left", progress.step, progress.steps, progress.loss,
                    count_text(progress.tokens_per_second), seconds_text(progress.seconds_left));
    if (!std::isnan(progress.eval_loss)) {
      bar.clear();
      note("{}  eval loss {:.4f}, perplexity {:.2f}", state, progress.eval_loss, std::exp(progress.eval_loss));
    } else if (const auto now = std::chrono::steady_clock::now();
               !stderr_is_terminal() && now - last_line >= kLineInterval) {
      last_line = now;
      note("{}", state);
    }
    bar.update(static_cast<double>(progress.step), static_cast<double>(progress.steps), state);
  };
  note("training {} on {}", recipe.path, run_options.device->description());
  const train::RunResult result = train::run(recipe, run_options, cli_logger());
  preparing.reset();
  bar.clear();
  if (result.cancelled) {
    note("stopped after step {} of {}; a checkpoint is saved: `eadem train {} --resume` goes on", result.steps,
         recipe.training.steps, path);
    return kInterrupted;
  }
  note("step {} done{}{}", result.steps, std::isnan(result.loss) ? "" : fmt::format(", loss {:.4f}", result.loss),
       std::isnan(result.eval_loss)
           ? ""
           : fmt::format(", eval loss {:.4f}, perplexity {:.2f}", result.eval_loss, std::exp(result.eval_loss)));
  print(result.model_directory + "\n");
  return kOk;
}

}  // namespace eadem::cli
