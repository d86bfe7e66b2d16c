// SPDX-License-Identifier: Apache-2.0
//
// Resumed runs: changes that a recipe may make, more steps, damaged checkpoints, one run at a time.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <fstream>
#include <set>

#include "eadem/io/files/mapped_file.h"
#include "eadem/io/json.h"
#include "eadem/train/checkpoint.h"
#include "tests/support/refusal.h"
#include "tests/train/run_fixture.h"

namespace eadem::train {
namespace {

using test::refusal;

std::string text_of(const fs::path& path) { return io::read_file(path.string(), 1 << 24); }

void flip_bit(const fs::path& path, int64_t place) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(place);
  const auto byte = static_cast<char>(file.get() ^ 4);
  file.seekp(place);
  file.put(byte);
  ASSERT_TRUE(file.good());
}

class Resume : public TrainingRun {
 protected:
  static bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }

  // Messages of the level `warning` while `call` runs.
  template <typename Call>
  static std::string warnings(Call&& call) {
    std::string all;
    call(Logger(LogLevel::warning, [&](LogLevel, std::string_view message) { all += std::string(message) + "\n"; }));
    return all;
  }
};

TEST_F(Resume, OnlyItsOwnCheckpointsCountAndTheNewestStays) {
  const Recipe short_run = recipe("out", "f32", "keep_checkpoints = 1", 3);
  run(short_run, options());
  const fs::path checkpoints = root_ / "out" / "checkpoints";
  for (const char* copy : {"step_best", "step_00000003.bak", "step_3", "step_-0000001", "step_"})
    fs::copy(checkpoints / "step_00000003", checkpoints / copy, fs::copy_options::recursive);
  fs::copy(checkpoints / "step_00000003", checkpoints / "step_100000003", fs::copy_options::recursive);
  fs::copy(checkpoints / "step_00000003", checkpoints / "step_99999999", fs::copy_options::recursive);
  EXPECT_EQ(
      list_checkpoints(checkpoints.string()),
      (std::vector<std::string>{(checkpoints / "step_00000003").string(), (checkpoints / "step_99999999").string(),
                                (checkpoints / "step_100000003").string()}));
  fs::remove_all(checkpoints / "step_100000003"), fs::remove_all(checkpoints / "step_99999999");
  EXPECT_EQ(first_step_of_rest(recipe("out", "f32", "keep_checkpoints = 1", 6)), 4);
  EXPECT_EQ(list_checkpoints(checkpoints.string()),
            (std::vector<std::string>{(checkpoints / "step_00000006").string()}));
  for (const char* copy : {"step_best", "step_00000003.bak"}) EXPECT_TRUE(fs::exists(checkpoints / copy)) << copy;
}

TEST_F(Resume, WhatChangesNothingMayChange) {
  run_until(recipe("out", "f32"), 3);
  // A comment, other spelling, a default written out, other intervals, another directory.
  fs::rename(root_ / "out", root_ / "moved");
  const Recipe changed = recipe("moved", "f32",
                                "# a comment\nlearning_rate = 0.1e-2\nmin_learning_rate = 1e-4\nbeta2 = 0.95\n"
                                "keep_checkpoints = 5\nseed = 1");
  EXPECT_EQ(first_step_of_rest(changed), 4);
  const Recipe whole = recipe("whole", "f32");
  run(whole, options());
  EXPECT_EQ(model_hash(changed), model_hash(whole));
}

TEST_F(Resume, DelayedScalesGoOn) {
  const char* products = "products = \"fp8_tensor_delayed\"\namax_history = 4";
  const Recipe interrupted = recipe("out", "bf16", products), whole = recipe("whole", "bf16", products);
  run_until(interrupted, 3);
  EXPECT_EQ(first_step_of_rest(interrupted), 4);
  run(whole, options());
  EXPECT_EQ(model_hash(interrupted), model_hash(whole));
  run_until(recipe("other", "bf16", products), 3);
  const std::string message =
      refusal([&] { run(recipe("other", "bf16", "products = \"fp8_tensor_delayed\""), options()); });
  EXPECT_TRUE(contains(message, "training.amax_history is 4 in the checkpoint and 16")) << message;
}

TEST_F(Resume, ValuesThatDifferAreNamedWithBothValues) {
  run_until(recipe("out", "f32"), 3);
  const auto refused = [&](const Recipe& r, const std::vector<std::string>& parts) {
    const std::string message = refusal([&] { run(r, options()); });
    for (const std::string& part : parts) EXPECT_TRUE(contains(message, part)) << message;
    EXPECT_FALSE(contains(message, "training.beta1")) << message;
  };
  refused(recipe("out", "f32", "seed = 99"), {"training.seed is 1 in the checkpoint and 99 in", "out.toml"});
  refused(recipe("out", "bf16"), {"training.weights is f32", "and bf16"});
  refused(recipe("out", "f32", "products = \"fp8_block128\""), {"training.products is", "and fp8_e4m3_block128"});
  refused(recipe("out", "f32", "head_products = \"fp8_tensor\""),
          {"training.head_products is nothing in the checkpoint and fp8_e4m3_current"});
  refused(recipe("out", "f32", "learning_rate = 2e-3"),
          {"training.learning_rate is 0.001", "and 0.002", "training.min_learning_rate is 0.0001"});
  refused(recipe("out", "f32", "decay_steps = 40"), {"training.decay_steps is 12", "and 40"});
  refused(recipe("out", "f32", "", 2), {"training.steps is 2", "stands at step 3"});

  const std::string text = text_of(root_ / "text.txt");
  io::write_file_atomically((root_ / "text.txt").string(), text + "One more.\n<|endoftext|>\n");
  refused(recipe("out", "f32"), {"data.train (hashes of its files) is ", "data.eval (hashes of its files) is "});
  io::write_file_atomically((root_ / "text.txt").string(), text);

  const std::string config = text_of(root_ / "config.json");
  std::string other = config;
  other.replace(other.find("\"rms_norm_eps\": 1e-5"), 20, "\"rms_norm_eps\": 1e-6");
  io::write_file_atomically((root_ / "config.json").string(), other);
  refused(recipe("out", "f32"), {"model.rms_norm_eps is 1e-05 in the checkpoint and 1e-06 in"});
  io::write_file_atomically((root_ / "config.json").string(), config);

  const fs::path tokenizer = root_ / "tokenizer/tokenizer_config.json";
  const std::string before = text_of(tokenizer);
  io::write_file_atomically(tokenizer.string(), before + " ");
  refused(recipe("out", "f32"), {"tokenizer (hash) is "});
  io::write_file_atomically(tokenizer.string(), before);
  EXPECT_EQ(first_step_of_rest(recipe("out", "f32")), 4) << "nothing of this has harmed the run";
}

// A finished run and a stopped run are extended with the schedule that they began with. Their bits are those of one run
// of that many steps whose cosine ends where the shorter run's did.
TEST_F(Resume, MoreStepsKeepTheSchedule) {
  const Recipe reference = recipe("reference", "f32", "decay_steps = 6", 10);
  run(reference, options());
  run(recipe("finished", "f32", "", 6), options());
  const Recipe finished = recipe("finished", "f32", "", 10);
  EXPECT_EQ(first_step_of_rest(finished), 7);
  EXPECT_EQ(model_hash(finished), model_hash(reference));
  run_until(recipe("stopped", "f32", "", 6), 4);
  const Recipe stopped = recipe("stopped", "f32", "", 10);
  EXPECT_EQ(first_step_of_rest(stopped), 5);
  EXPECT_EQ(model_hash(stopped), model_hash(reference));
  // Once more, with the schedule written out.
  const Recipe longer = recipe("stopped", "f32", "decay_steps = 6", 11);
  EXPECT_EQ(first_step_of_rest(longer), 11);
  const Recipe nothing_to_do = longer;
  EXPECT_EQ(first_step_of_rest(nothing_to_do), 0);
}

TEST_F(Resume, TheLeastLearningRateFollowsThePeak) {
  EXPECT_EQ(recipe("out", "f32").training.min_learning_rate, 1e-4);
  EXPECT_EQ(recipe("out", "f32", "learning_rate = 3e-3").training.min_learning_rate, 3e-4);
  EXPECT_EQ(recipe("out", "f32", "learning_rate = 5e-5").training.min_learning_rate, 5e-6);
  EXPECT_EQ(recipe("out", "f32", "learning_rate = 0").training.min_learning_rate, 0.0);
  EXPECT_EQ(recipe("out", "f32", "learning_rate = 7.0\nmin_learning_rate = 1").training.min_learning_rate, 1.0);
}

TEST_F(Resume, LearningRatesBehindTheDecayAreTheMinimum) {
  Recipe::Training t{
      .steps = 30, .learning_rate = 1.0, .min_learning_rate = 0.25, .warmup_steps = 4, .decay_steps = 10};
  EXPECT_DOUBLE_EQ(learning_rate_at(t, 0), 0.25);
  EXPECT_DOUBLE_EQ(learning_rate_at(t, 4), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate_at(t, 7), 0.625);
  for (int64_t step : {10, 11, 29}) EXPECT_DOUBLE_EQ(learning_rate_at(t, step), 0.25);
}

TEST_F(Resume, ADamagedCheckpointFallsBackToTheNewestWholeOne) {
  const Recipe whole = recipe("whole", "f32");
  run(whole, options());
  struct Damage {
    const char* file;
    int64_t bit_at;  // -1: cut in half
  };
  for (const Damage& damage : {Damage{"model.safetensors", 20000},
                               {"optimizer.safetensors", 30000},
                               {"model.safetensors", -1},
                               {"optimizer.safetensors", -1},
                               {"trainer.json", 20},
                               {"trainer.json", -1},
                               {"tokenizer.json", 100},
                               {"config.json", 30}}) {
    const Recipe r = recipe("out", "f32");
    fs::remove_all(r.output);
    run_until(r, 6);
    const fs::path file = checkpoint(r, 6) / damage.file;
    if (damage.bit_at >= 0)
      flip_bit(file, damage.bit_at);
    else
      fs::resize_file(file, fs::file_size(file) / 2);
    int64_t first = 0;
    const std::string said = warnings([&](const Logger& log) { first = first_step_of_rest(r, log); });
    EXPECT_EQ(first, 4) << damage.file;
    EXPECT_TRUE(contains(said, "step_00000006 is damaged") && contains(said, damage.file) &&
                contains(said, "step_00000003 is used instead"))
        << said;
    EXPECT_EQ(model_hash(r), model_hash(whole));
    EXPECT_TRUE(fs::exists(fs::path(r.output) / "checkpoints/damaged_step_00000006"));
  }
}

TEST_F(Resume, DamagedTokensAreMadeAnew) {
  const Recipe r = recipe("out", "f32");
  run_until(r, 3);
  const fs::path tokens = fs::path(r.output) / "tokens/train.tok";
  const std::string whole = text_of(tokens);
  flip_bit(tokens, static_cast<int64_t>(whole.size()) - 3);  // a token that the vocabulary does not have
  run_until(r, 4);
  EXPECT_EQ(text_of(tokens), whole);
  fs::resize_file(tokens, whole.size() / 2);
  run_until(r, 5);
  EXPECT_EQ(text_of(tokens), whole);
}

TEST_F(Resume, WithoutAWholeCheckpointNothingIsStartedOver) {
  const Recipe r = recipe("out", "f32", "keep_checkpoints = 1");
  run_until(r, 3);
  flip_bit(checkpoint(r, 3) / "model.safetensors", 20000);
  const std::string message = refusal([&] { run(r, options()); });
  EXPECT_TRUE(contains(message, "no checkpoint is whole") && contains(message, "model.safetensors")) << message;
  EXPECT_TRUE(fs::exists(checkpoint(r, 3))) << "kept for whoever wants to look";
}

TEST_F(Resume, ARunIsOnlyStartedOverOnPurpose) {
  const Recipe r = recipe("out", "f32");
  run_until(r, 3);
  RunOptions o = options();
  o.resume = false;
  EXPECT_TRUE(contains(refusal([&] { run(r, o); }), "--resume"));
}

TEST_F(Resume, TwoRunsDoNotWriteOneDirectory) {
  const Recipe r = recipe("out", "f32");
  run_until(r, 3);
  const std::string before = text_of(fs::path(r.output) / "metrics.jsonl");
  const int holder = ::open((fs::path(r.output) / "lock").c_str(), O_RDWR);
  ASSERT_EQ(::flock(holder, LOCK_EX | LOCK_NB), 0) << "a run that has ended holds no lock";
  const std::string message = refusal([&] { run(r, options()); });
  EXPECT_TRUE(contains(message, r.output + ": another run is writing there: process ")) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_EQ(text_of(fs::path(r.output) / "metrics.jsonl"), before);
  ::close(holder);
  EXPECT_EQ(first_step_of_rest(r), 4);
}

TEST_F(Resume, MetricsNeverRepeatAStep) {
  const Recipe r = recipe("out", "f32");
  run_until(r, 6);
  const fs::path path = fs::path(r.output) / "metrics.jsonl";
  {
    // Killed runs may leave lines behind the checkpoint, repeated lines, and a line that was cut off.
    const std::string lines = text_of(path);
    std::ofstream file(path, std::ios::app);
    file << lines << R"({"step":7,"loss":5.0,"learning_rate":0.1,"grad_norm":1.0,"tokens":9,"tokens_per_second":1.0})"
         << "\n"
         << R"({"step":8,"lo)";
  }
  EXPECT_EQ(first_step_of_rest(r), 7);
  std::vector<int64_t> steps, evals;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const io::JsonReader json = io::JsonReader::parse(line, "metrics.jsonl");
    (json.has("eval_loss") ? evals : steps).push_back(json.integer("step", 1));
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
  EXPECT_EQ(evals, (std::vector<int64_t>{4, 8, 12}));
}

TEST_F(Resume, CheckpointsReplaceOnlyCheckpoints) {
  const Recipe r = recipe("out", "f32");
  run_until(r, 3);
  const models::Checkpoint source = models::open_checkpoint(checkpoint(r, 3).string());
  Trainer trainer(source.model, options().device, {});
  load_checkpoint(trainer, checkpoint(r, 3).string(), verify_checkpoint(checkpoint(r, 3).string()));
  EXPECT_EQ(trainer.num_steps(), 3);
  EXPECT_THROW(write_checkpoint(trainer, {}, {}, (root_ / "tokenizer").string()), InvalidArgument);
  EXPECT_TRUE(fs::exists(root_ / "tokenizer/tokenizer.json"));
  EXPECT_THROW(write_checkpoint(trainer, {}, {}, "."), InvalidArgument);
  for (int64_t step : {3, 4}) {  // the second replaces the first
    write_checkpoint(trainer, {.step = step}, {}, (root_ / "copy").string() + "/");
    EXPECT_EQ(verify_checkpoint((root_ / "copy").string()).step, step);
  }
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(root_)) names.insert(entry.path().filename().string());
  EXPECT_EQ(std::count_if(names.begin(), names.end(), [](const std::string& name) { return name.starts_with("."); }), 0)
      << "nothing is left beside it";
}

}  // namespace
}  // namespace eadem::train
