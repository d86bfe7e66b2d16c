// SPDX-License-Identifier: Apache-2.0
//
// A model's own head for multi-token prediction: its logits and proposals are those of PyTorch, what it proposes
// changes no bit of an answer, and what has none, or cannot compute it, is refused before weights are read.
#include "eadem/engine/speculation/mtp_head.h"

#include <filesystem>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/engine/llm.h"
#include "eadem/io/gguf.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/family.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/mtp_model.h"
#include "eadem/models/parameter_reader.h"
#include "tests/engine/speculation/speculating_loop.h"
#include "tests/support/f32_error.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace mtp_head_test {

namespace fs = std::filesystem;
using models::Checkpoint;
using test::refusal;
using Ids = std::vector<int32_t>;

std::shared_ptr<Device> cpu() { return open_device("cpu", {.num_threads = 2}); }

EngineOptions contiguous(int64_t batch, int64_t length, int64_t step = 64) {
  EngineOptions options;
  options.mode = HardwareMode::accuracy;
  options.cache = StaticKVCacheConfig{.max_batch_size = batch, .max_cache_len = length};
  options.max_num_batched_tokens = step;
  options.max_logit_rows = 64;
  return options;
}

std::unique_ptr<InferEngine> model_of(const Checkpoint& checkpoint, const EngineOptions& options) {
  return InferEngine::from_checkpoint(checkpoint, cpu(), options);
}

std::unique_ptr<MtpHead> head_of(const Checkpoint& checkpoint, const InferEngine& model, const EngineOptions& options) {
  return std::make_unique<MtpHead>(
      InferEngine::from_checkpoint(models::mtp_checkpoint(checkpoint), model.device(), options), model, 0.1);
}

Ids ids_of(const Tensor& tensor) {
  return {tensor.view.as<int32_t>(), tensor.view.as<int32_t>() + tensor.view.num_elements()};
}

std::span<const std::byte> bytes_of(const Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.view.data), static_cast<size_t>(tensor.view.size_bytes())};
}

// --- Against PyTorch.

class MtpGolden : public testing::TestWithParam<const char*> {
 protected:
  MtpGolden()
      : checkpoint(models::open_checkpoint(golden(GetParam()))),
        expected(io::open_weights(golden(GetParam()) + "/mtp.safetensors")),
        prompt(ids_of(expected->get("prompt"))),
        model(model_of(checkpoint, contiguous(1, 64))) {
    model->forward({.input_ids = prompt, .input_lengths = {static_cast<int32_t>(prompt.size())}, .cache_lengths = {0}});
    hidden = model->mtp_hidden();
  }

  // Logits of the pairs of the prompt, which are read in chunks.
  std::vector<float> logits(const Checkpoint& of, int64_t chunk) const {
    const auto engine = model_of(models::mtp_checkpoint(of), contiguous(1, 64));
    const auto row_bytes = static_cast<size_t>(hidden.view.rows(0, 1).size_bytes());
    const Ids row = {0};
    std::vector<float> result;
    for (size_t begin = 0; begin + 1 < prompt.size();) {
      const size_t count = std::min(static_cast<size_t>(chunk), prompt.size() - 1 - begin);
      const std::vector<StepSequence> plan = {
          {.tokens = std::span(prompt).subspan(begin + 1, count),
           .cached = static_cast<int64_t>(begin),
           .blocks = row,
           .drafts = static_cast<int64_t>(count) - 1,  // so that each has a row of logits
           .hidden = bytes_of(hidden).subspan(begin * row_bytes, count * row_bytes)}};
      engine->forward(plan);
      const std::vector<float> own = values(engine->logits());
      result.insert(result.end(), own.begin(), own.end());
      begin += count;
    }
    return result;
  }

  Checkpoint checkpoint;
  std::shared_ptr<const io::WeightSource> expected;
  Ids prompt;
  std::unique_ptr<InferEngine> model;
  Tensor hidden;
};
INSTANTIATE_TEST_SUITE_P(Models, MtpGolden,
                         testing::Values("deepseek_v3_mtp", "deepseek_v32_mtp", "glm4_moe_mtp", "qwen3_next_mtp",
                                         "qwen3_5_mtp", "qwen3_5_moe_mtp", "nemotron_h_mtp", "longcat_flash_mtp",
                                         "deepseek_v4_mtp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(MtpGolden, LogitsMatchPyTorch) {
  const std::vector<float> actual = logits(checkpoint, 64);
  const Tensor f32 = expected->get("mtp_logits"), f64 = expected->get("mtp_logits_f64");
  ASSERT_EQ(std::ssize(actual), f32.view.num_elements());
  const auto of = [](const Tensor& tensor) { return [&](size_t i) { return tensor.view.as<float>()[i]; }; };
  test::expect_f32_error(test::deviation(
                             actual.size(), [&](size_t i) { return actual[i]; }, of(f64)),
                         test::deviation(actual.size(), of(f32), of(f64)), GetParam());
  expect_same_bits(logits(checkpoint, 5), actual, "in chunks, from its own cache");
}

// Greedy, each from the head's hidden state of the pair before.
TEST_P(MtpGolden, ProposalsMatchPyTorch) {
  for (const int64_t step : {64, 7}) {  // all pairs in one step of the head, or in several
    const auto head = head_of(checkpoint, *model, contiguous(1, 64, step));
    const Ids row = {0};
    const std::vector<StepSequence> plan = {{.tokens = prompt, .blocks = row}};
    const RequestId id = 7;
    Ids tokens = prompt;
    tokens.push_back(model->forward(plan).output_ids[0]);
    EXPECT_EQ(tokens.back(), ids_of(expected->get("first"))[0]);
    head->see({&id, 1}, plan, *model);
    EXPECT_EQ(head->backlog(id, tokens), std::ssize(prompt));
    const GenerationRequest request{.prompt = prompt};
    const Ids drafts = ids_of(expected->get("drafts"));
    std::vector<Proposal> proposals = {{.id = id, .tokens = tokens, .request = &request, .depth = std::ssize(drafts)}};
    head->propose(proposals);
    EXPECT_EQ(proposals[0].drafts, drafts);
    EXPECT_EQ(head->backlog(id, tokens), 0);
  }
}

// llama.cpp's converter names the tensors of "mtp." as those of further layers.
class MtpGguf : public MtpGolden {};
INSTANTIATE_TEST_SUITE_P(Models, MtpGguf, testing::Values("qwen3_5_mtp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(MtpGguf, LogitsAreThoseOfTheDirectory) {
  io::GgufMetadata metadata = checkpoint.model->config()->to_gguf();
  for (auto& [key, value] : metadata)
    if (key == "qwen35.block_count") value = io::GgufValue::scalar(uint32_t{3});
  metadata.emplace_back("qwen35.nextn_predict_layers", io::GgufValue::scalar(uint32_t{1}));
  std::vector<Tensor> kept;
  std::vector<io::NamedTensor> tensors;
  for (const Checkpoint& each : {checkpoint, models::mtp_checkpoint(checkpoint)}) {
    const models::ParameterReader reader(each);
    for (const auto& [name, recipe] : models::tensors_of(*each.model, models::CheckpointFormat::gguf)) {
      if (std::any_of(tensors.begin(), tensors.end(), [&, &own = name](const auto& t) { return t.name == own; }))
        continue;
      kept.push_back(models::evaluate(
          recipe, [&](const std::string& own) { return reader.read(own); }, name));
      tensors.push_back({name, kept.back().view});
    }
  }
  const std::string path = testing::TempDir() + "mtp_qwen.gguf";
  io::write_gguf(path, metadata, tensors);
  const Checkpoint gguf = models::open_checkpoint(path);
  EXPECT_EQ(gguf.model->info().layers, 2);
  EXPECT_EQ(models::mtp_place(gguf), "blk.2");
  EXPECT_EQ(models::mtp_place(checkpoint), "mtp");
  expect_same_bits(logits(gguf, 64), logits(checkpoint, 64), "from the GGUF file");
  fs::remove(path);
}

// --- Answers.

// The golden with other weights: layers add `share` of what they do. With none, a token follows from the one before it
// alone; the head reads that one's embedding, and `mix` times the hidden state before it. With a mix of 0 it is right
// then.
class Bigrams final : public io::WeightSource {
 public:
  Bigrams(std::shared_ptr<const io::WeightSource> plain, float mix, float share = 0)
      : WeightSource(plain->path()), plain_(std::move(plain)), mix_(mix), share_(share) {
    set_tensors({plain_->tensors().begin(), plain_->tensors().end()});
  }
  void release(std::string_view) const override {}
  std::vector<std::shared_ptr<const io::MappedFile>> files() const override { return plain_->files(); }

 private:
  Tensor load(size_t index) const override {
    const io::WeightInfo& info = tensors()[index];
    if (info.name.ends_with("shared_head.norm.weight") || info.name.ends_with("mtp.norm.weight"))
      return plain_->get("model.norm.weight");
    if (info.name.ends_with("tid2eid")) return plain_->get(info.name);
    if (info.name.ends_with("final_layernorm.weight")) return plain_->get("backbone.norm_f.weight");
    constexpr std::string_view kV4 = "mtp.0.";  // has a norm of its own, and weights that merge streams
    for (const std::string_view part : {"norm.weight", "hc_head_"})
      if (info.name.starts_with(kV4) && std::string_view(info.name).substr(kV4.size()).starts_with(part))
        return plain_->get(info.name.substr(kV4.size()));
    const Tensor values = converted_on_host(plain_->get(info.name).view, DType::f32);
    auto* data = values.view.as<float>();
    const auto has = [&](const char* part) { return info.name.find(part) != std::string::npos; };
    const bool joins = has("eh_proj") || has("mtp.fc."), adds = has("mtp.0.e_proj.") || has("mtp.0.h_proj.");
    const int64_t count = values.view.num_elements();
    if (has("o_proj") || has("out_proj") || has("down_proj") || has(".wo_b.") || has(".w2."))
      std::transform(data, data + count, data, [&](float value) { return share_ * value; });
    if (joins || adds || has("mtp.pre_fc_norm")) std::fill_n(data, count, 0.0f);  // Qwen's norms multiply by 1 + weight
    if (has("enorm") || has("hnorm")) std::fill_n(data, count, 1.0f);
    const int64_t hidden = info.shape[0];
    for (int64_t i = 0; joins && i < hidden; ++i) {
      data[i * 2 * hidden + i] = 1;
      data[i * 2 * hidden + hidden + i] = mix_;
    }
    for (int64_t i = 0; adds && i < hidden; ++i) data[i * hidden + i] = has("e_proj") ? 1 : mix_;
    return values;
  }
  Tensor load_bytes(size_t index) const override { return plain_->get_bytes(tensors()[index].name); }

  std::shared_ptr<const io::WeightSource> plain_;
  float mix_, share_;
};

Checkpoint bigrams(const char* name, float mix, float share = 0) {
  Checkpoint checkpoint = models::open_checkpoint(golden(name));
  checkpoint.weights = std::make_shared<Bigrams>(checkpoint.weights, mix, share);
  return checkpoint;
}

// As run_requests, with what the head proposes; the cache is left as it is.
SpeculatingRun run_with(InferEngine& engine, const std::vector<GenerationRequest>& requests, MtpHead* head,
                        int64_t depth = 4) {
  Scheduler scheduler(engine.limits());
  SpeculatingRun run;
  run.answers.resize(requests.size());
  std::map<RequestId, size_t> index;
  for (const GenerationRequest& request : requests) {
    const size_t next = index.size();
    index[scheduler.add(request)] = next;
  }
  while (!scheduler.is_idle()) {
    std::vector<Proposal> proposals;
    for (const Draftable& each : scheduler.draftable())
      if (head != nullptr && each.most > 0)
        proposals.push_back(
            {.id = each.id, .tokens = each.tokens, .request = each.request, .depth = std::min(depth, each.most)});
    if (head != nullptr) head->propose(proposals);
    for (const Proposal& each : proposals) scheduler.propose(each.id, each.drafts);
    const std::span<const StepSequence> plan = scheduler.plan(engine.cache_contents());
    const InferEngine::Output& output = engine.forward(plan);
    if (head != nullptr) head->see(scheduler.planned(), plan, engine);
    ++run.steps;
    for (const StepEvent& event : scheduler.commit(output.output_ids, output.logprobs)) {
      if (event.sampled) {
        run.answers[index.at(event.id)].tokens.push_back(event.token);
        run.answers[index.at(event.id)].logprobs.push_back(event.logprob);
      }
      if (event.state == RequestState::finished && head != nullptr) head->end(event.id);
    }
  }
  run.proposed = scheduler.proposed_tokens();
  run.accepted = scheduler.accepted_tokens();
  return run;
}

EngineOptions speculating(int64_t batch, int64_t length = 96, int64_t memory = 0) {
  EngineOptions options;
  options.mode = HardwareMode::accuracy;
  options.cache = PagedKVCacheConfig{
      .max_kv_memory_bytes = memory, .block_size = 8, .max_batch_size = batch, .max_cache_len = length};
  options.max_num_batched_tokens = 16;  // prompts take several steps
  options.draft_tokens = 4;
  return options;
}

std::vector<GenerationRequest> requests_of(int64_t vocab) {
  return {{.prompt = tokens_of(21, vocab, 1), .max_tokens = 40},
          {.prompt = tokens_of(33, vocab, 2), .sampling = {.temperature = 0.9f, .seed = 3}, .max_tokens = 40},
          {.prompt = tokens_of(2, vocab, 3),
           .sampling = {.temperature = 0.7f, .top_k = 20, .seed = 5, .repetition_penalty = 1.2f},
           .biases = {{.token = 9, .bias = kNeverSampled, .end = 12}},
           .max_tokens = 30},
          {.prompt = tokens_of(1, vocab, 4), .max_tokens = 25}};
}

class MtpAnswers : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, MtpAnswers,
                         testing::Values("deepseek_v3_mtp", "deepseek_v32_mtp", "glm4_moe_mtp", "qwen3_next_mtp",
                                         "qwen3_5_mtp", "qwen3_5_moe_mtp", "nemotron_h_mtp", "longcat_flash_mtp",
                                         "deepseek_v4_mtp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(MtpAnswers, AreThoseWithoutIt) {
  for (const float mix : {0.0f, 0.6f, -1.0f}) {  // always right, sometimes, and as in the file
    const float share = mix > 0 ? 0.05f : 0;
    const Checkpoint checkpoint =
        mix < 0 ? models::open_checkpoint(golden(GetParam())) : bigrams(GetParam(), mix, share);
    EngineOptions options = speculating(3);
    if (std::string_view(GetParam()) == "deepseek_v4_mtp")  // has rows of 4 and of 12 tokens
      std::get<PagedKVCacheConfig>(options.cache).block_size = 24;
    const auto engine = model_of(checkpoint, options);
    const std::vector<GenerationRequest> requests = requests_of(engine->model().info().vocab);
    const auto head = head_of(checkpoint, *engine, contiguous(3, 96, 16));
    const SpeculatingRun plain = run_with(*engine, requests, nullptr);
    engine->reset_cache();
    const SpeculatingRun run = run_with(*engine, requests, head.get());
    expect_same_answers(run, plain, fmt::format("mix {}", mix));
    EXPECT_GT(run.proposed, 50);
    if (mix == 0) {
      EXPECT_GT(run.accepted, run.proposed * 3 / 4);
      EXPECT_LT(run.steps, plain.steps / 2);
    } else if (mix > 0) {
      EXPECT_GT(run.accepted, 0);
      EXPECT_LT(run.accepted, run.proposed);
    }
    // Prompts that begin in the cache: the head sees what is computed alone.
    expect_same_answers(run_with(*engine, requests, head.get()), plain, fmt::format("once more, mix {}", mix));
    // The same again is proposed and accepted.
    engine->reset_cache();
    const auto fresh = head_of(checkpoint, *engine, contiguous(3, 96, 16));
    const SpeculatingRun again = run_with(*engine, requests, fresh.get());
    EXPECT_EQ(again.proposed, run.proposed);
    EXPECT_EQ(again.accepted, run.accepted);
  }
}

TEST(MtpHeadTest, GreedyAndRightIsAlwaysAccepted) {
  const Checkpoint checkpoint = bigrams("glm4_moe_mtp", 0);
  const auto engine = model_of(checkpoint, speculating(1));
  const auto head = head_of(checkpoint, *engine, contiguous(1, 96));
  const std::vector<GenerationRequest> requests = {{.prompt = tokens_of(12, 384, 1), .max_tokens = 61}};
  const SpeculatingRun run = run_with(*engine, requests, head.get());
  EXPECT_EQ(run.accepted, run.proposed);
  EXPECT_EQ(run.steps, 13) << "one for the prompt, and 12 of 5 tokens";
}

// Sequences lose their rows, and begin again behind what they have read; a short cache fills up; and requests that were
// preempted are computed again from their first token.
TEST(MtpHeadTest, ForgetsAndGoesOn) {
  const Checkpoint checkpoint = bigrams("glm4_moe_mtp", 0);
  const auto engine = model_of(checkpoint, speculating(4));
  const std::vector<GenerationRequest> requests = requests_of(384);
  const SpeculatingRun plain = run_with(*engine, requests, nullptr);
  for (const auto& [rows, length] : std::vector<std::pair<int64_t, int64_t>>{{2, 96}, {4, 24}, {1, 16}}) {
    engine->reset_cache();
    const auto head = head_of(checkpoint, *engine, contiguous(rows, length, 16));
    const SpeculatingRun run = run_with(*engine, requests, head.get());
    expect_same_answers(run, plain, fmt::format("{} rows of {}", rows, length));
    EXPECT_GT(run.accepted, 20) << rows << " rows of " << length;
  }
  const int64_t all = engine->cache_bytes();
  const auto small = model_of(checkpoint, speculating(4, 80, all / 3));
  const auto head = head_of(checkpoint, *small, contiguous(4, 80, 16));
  const SpeculatingRun run = run_with(*small, requests, head.get());
  expect_same_answers(run, plain, "preempted");
  EXPECT_GT(run.accepted, 20);
}

// A long prompt: the head reads its end.
TEST(MtpHeadTest, ReadsTheEndOfALongPrompt) {
  const Checkpoint checkpoint = bigrams("glm4_moe_mtp", 0);
  Checkpoint longer = checkpoint;
  models::ModelConfig config = *checkpoint.model->config();
  config.max_position_embeddings = 4096;
  longer.model = std::make_shared<models::Decoder>(config);
  EngineOptions options = speculating(1, 3000);
  options.max_num_batched_tokens = 512;
  const auto engine = model_of(longer, options);
  const auto head = head_of(longer, *engine, contiguous(1, 2 * MtpHead::kMostWaiting, 512));
  const std::vector<GenerationRequest> requests = {{.prompt = tokens_of(2500, 384, 1), .max_tokens = 40}};
  const SpeculatingRun plain = run_with(*engine, requests, nullptr);
  engine->reset_cache();
  const SpeculatingRun run = run_with(*engine, requests, head.get());
  expect_same_answers(run, plain, "a long prompt");
  EXPECT_GT(run.accepted, 25);
}

// --- Text in, text out.

constexpr int64_t kTokens = 384;  // of the tokenizer

// Embeddings and heads of few tokens become those of kTokens: row i is the row i % rows, a little longer each time.
class Padded final : public io::WeightSource {
 public:
  explicit Padded(std::shared_ptr<const io::WeightSource> plain)
      : WeightSource(plain->path()), plain_(std::move(plain)) {
    std::vector<io::WeightInfo> all(plain_->tensors().begin(), plain_->tensors().end());
    for (io::WeightInfo& each : all)
      if (is_padded(each.name)) each.shape[0] = kTokens;
    set_tensors(std::move(all));
  }
  void release(std::string_view) const override {}
  std::vector<std::shared_ptr<const io::MappedFile>> files() const override { return plain_->files(); }

 private:
  static bool is_padded(std::string_view name) {
    return name.ends_with("embed_tokens.weight") || name == "lm_head.weight";
  }
  Tensor load(size_t index) const override {
    const io::WeightInfo& info = tensors()[index];
    const Tensor plain = plain_->get(info.name);
    if (!is_padded(info.name)) return plain;
    const Tensor padded = Tensor::on_host(DType::f32, info.shape);
    const int64_t rows = plain.shape()[0], width = info.shape[1];
    for (int64_t i = 0; i < kTokens; ++i)
      for (int64_t j = 0; j < width; ++j)
        padded.view.as<float>()[i * width + j] =
            plain.view.as<float>()[i % rows * width + j] * (1 + 0.05f * static_cast<float>(i / rows));
    return padded;
  }
  Tensor load_bytes(size_t index) const override { return plain_->get_bytes(tensors()[index].name); }

  std::shared_ptr<const io::WeightSource> plain_;
};

class MtpLlm : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    folder = fs::path(testing::TempDir()) / fmt::format("mtp_llm_{}", GetParam());
    fs::create_directories(folder);
    for (const std::string& from : {fmt::format("golden/{}", GetParam()), std::string("chat/small")})
      for (const auto& each : fs::directory_iterator(fs::path(EADEM_SOURCE_DIR) / "tests/data" / from))
        if (each.is_regular_file() && each.path().filename() != "mtp.safetensors")
          fs::copy_file(each.path(), folder / each.path().filename(), fs::copy_options::overwrite_existing);
  }
  void TearDown() override { fs::remove_all(folder); }

  std::unique_ptr<LLM> open(const char* speculate) const {
    Checkpoint checkpoint = models::open_checkpoint(folder.string());
    models::ModelConfig config = *checkpoint.model->config();
    config.vocab_size = kTokens;
    checkpoint.model = std::make_shared<models::Decoder>(config);
    checkpoint.weights =
        std::make_shared<Bigrams>(std::make_shared<Padded>(checkpoint.weights), 0.3f, states() ? 0.05f : 0.0f);
    EngineOptions options;
    const int64_t block = std::string_view(GetParam()) == "deepseek_v4_mtp" ? 24 : 16;
    options.cache = PagedKVCacheConfig{.block_size = block, .max_batch_size = 3, .max_cache_len = 120};
    return std::make_unique<LLM>(std::move(checkpoint), cpu(), options, Logger(LogLevel::warning),
                                 std::function<void(int64_t, int64_t)>{}, SpeculationOptions::of(speculate));
  }

  // Whether the model has states per sequence.
  static bool states() { return std::string_view(GetParam()).starts_with("qwen"); }

  fs::path folder;
};
INSTANTIATE_TEST_SUITE_P(Models, MtpLlm,
                         testing::Values("glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "longcat_flash_mtp",
                                         "deepseek_v4_mtp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(MtpLlm, CompletionsAreThoseWithoutIt) {
  const auto plain = open("none"), mtp = open("mtp"), lookup = open("lookup");
  SamplingParams params;
  params.temperature = 0;
  params.max_tokens = 60;
  params.ignore_eos = true;
  params.seed = 3;
  SamplingParams sampled = params;
  sampled.temperature = 0.8;
  sampled.n = 2;
  for (const SamplingParams& each : {params, sampled}) {
    const std::vector<std::string> prompts = {"Hello there", "a b c", "The cat sat. The cat", "one"};
    const std::vector<Completion> expected = plain->generate(prompts, each);
    for (LLM* const llm : {mtp.get(), lookup.get()}) {
      const std::vector<Completion> actual = llm->generate(prompts, each);
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < actual.size(); ++i) {
        EXPECT_EQ(actual[i].error, "");
        EXPECT_EQ(actual[i].token_ids, expected[i].token_ids);
        EXPECT_EQ(actual[i].logprobs, expected[i].logprobs);
        EXPECT_LE(actual[i].accepted_tokens, actual[i].proposed_tokens);
      }
      // What is computed again is no token of an answer.
      EXPECT_EQ(llm->last_stats().decode_tokens, plain->last_stats().decode_tokens);
    }
  }
  EXPECT_EQ(plain->last_stats().proposed_tokens, 0);
}

// --- Files.

// llama.cpp's converter keeps the head in the blocks behind the last one.
TEST(MtpFiles, AGgufFileHasTheBitsOfItsDirectory) {
  const Checkpoint directory = models::open_checkpoint(golden("glm4_moe_mtp"));
  const Checkpoint module = models::mtp_checkpoint(directory);
  models::ModelConfig config = *directory.model->config();
  ++config.num_hidden_layers;
  config.layer_windows.push_back(0);
  io::GgufMetadata metadata = config.to_gguf();
  metadata.emplace_back("glm4moe.nextn_predict_layers", io::GgufValue::scalar(uint32_t{1}));
  std::vector<Tensor> kept;
  std::vector<io::NamedTensor> tensors;
  const models::ParameterReader reader(directory), module_reader(module);
  for (const auto& [name, recipe] : models::tensors_of(*directory.model, models::CheckpointFormat::gguf)) {
    kept.push_back(models::evaluate(
        recipe, [&](const std::string& own) { return reader.read(own); }, name));
    tensors.push_back({name, kept.back().view});
  }
  for (const models::ParameterInfo& each : module.model->parameters()) {
    const std::string name = module.model->recipes(each, models::CheckpointFormat::gguf).front().names().front();
    if (!name.starts_with("blk.")) continue;
    kept.push_back(module_reader.read(each.name));
    tensors.push_back({name, kept.back().view});
  }
  EXPECT_NE(std::find_if(tensors.begin(), tensors.end(),
                         [](const auto& each) { return each.name == "blk.2.nextn.eh_proj.weight"; }),
            tensors.end());
  const std::string path = testing::TempDir() + "mtp.gguf";
  io::write_gguf(path, metadata, tensors);
  const Checkpoint gguf = models::open_checkpoint(path);
  EXPECT_EQ(gguf.model->info().layers, 2);
  const auto drafts_of = [](const Checkpoint& checkpoint) {
    const auto engine = model_of(checkpoint, speculating(3));
    const auto head = head_of(checkpoint, *engine, contiguous(3, 96));
    const SpeculatingRun run = run_with(*engine, requests_of(384), head.get());
    return std::pair(run.proposed, run.accepted);
  };
  EXPECT_EQ(drafts_of(gguf), drafts_of(directory));
  fs::remove(path);
}

// The golden with weights that are not to be read.
class Unread final : public io::WeightSource {
 public:
  explicit Unread(const io::WeightSource& plain) : WeightSource(plain.path()) {
    set_tensors({plain.tensors().begin(), plain.tensors().end()});
  }
  void release(std::string_view) const override {}
  std::vector<std::shared_ptr<const io::MappedFile>> files() const override { return {}; }

 private:
  Tensor load(size_t index) const override { return load_bytes(index); }
  Tensor load_bytes(size_t index) const override { throw IoError("'{}' was read", tensors()[index].name); }
};

Checkpoint unread(const char* name) {
  Checkpoint checkpoint = models::open_checkpoint(golden(name));
  checkpoint.weights = std::make_shared<Unread>(*checkpoint.weights);
  return checkpoint;
}

std::string refusal_of_llm(const Checkpoint& checkpoint, const EngineOptions& options) {
  return refusal(
      [&] { LLM(checkpoint, cpu(), options, Logger(LogLevel::warning), {}, SpeculationOptions::of("mtp")); });
}

// GLM-4.5, but that the layer behind the model's has heads that kernels of the CPU do not read from an int8 cache.
const models::ModelFamily& with_a_wide_head() {
  static const models::ModelFamily family = [] {
    models::ModelFamily made = models::family_of_type("glm4_moe", "");
    made.decoder = [](const models::ModelConfig& config) {
      models::DecoderSpec spec = config.family().decoder(config);
      if (spec.layers.size() == 3) std::get<modules::CausalAttention::Config>(spec.layers.back().mixer).head_dim = 2048;
      return spec;
    };
    return made;
  }();
  return family;
}

TEST(MtpFiles, WhatCannotBeComputedIsRefusedBeforeWeightsAreRead) {
  EngineOptions options = speculating(1);
  EXPECT_HAS(refusal_of_llm(unread("glm4_moe"), options), "there is no 'model.layers.2.enorm.weight'");
  EXPECT_HAS(refusal_of_llm(unread("qwen3_next"), options), "there is no 'mtp.pre_fc_norm_embedding.weight'");

  Checkpoint checkpoint = unread("glm4_moe_mtp");
  checkpoint.model = std::make_shared<models::Decoder>(*checkpoint.model->config(), with_a_wide_head());
  options.hardware.kv_cache = {*kv_cache_type("int8"), "test"};
  EXPECT_NO_THROW(InferEngine(checkpoint.model, cpu(), options, models::spec_of(checkpoint))) << "the model itself";
  const std::string text = refusal_of_llm(checkpoint, options);
  EXPECT_HAS(text, "Unsupported: the head for multi-token prediction (MTP) of glm4_moe: ");
  EXPECT_HAS(text, "model.layers.2");
  EXPECT_HAS(text, "have no kernel on cpu");
}

TEST(MtpFiles, ModelsWithoutAHeadAreRefused) {
  const auto refused = [](const char* name) {
    return refusal([&] { models::mtp_checkpoint(models::open_checkpoint(golden(name))); });
  };
  EXPECT_HAS(refused("llama"), "Unsupported: llama has no head for multi-token prediction (MTP)");
  EXPECT_HAS(refused("nemotron_h"), "Unsupported: nemotron_h has no head for multi-token prediction (MTP)");
  EXPECT_HAS(refused("qwen3_next"),
             "the file has no head for multi-token prediction (MTP) of qwen3_next: there is no "
             "'mtp.pre_fc_norm_embedding.weight'");
  EXPECT_HAS(refused("glm4_moe"),
             "the file has no head for multi-token prediction (MTP) of glm4_moe: there is no "
             "'model.layers.2.enorm.weight'");
  EXPECT_HAS(refused("nemotron_h_moe"),
             "the file has no head for multi-token prediction (MTP) of nemotron_h: there is no "
             "'mtp.layers.0.enorm.weight'");
  EXPECT_HAS(refused("longcat_flash"),
             "the file has no head for multi-token prediction (MTP) of longcat_flash: there is no "
             "'model.mtp.layers.0.enorm.m.weight'");
  EXPECT_HAS(refused("deepseek_v4"),
             "the file has no head for multi-token prediction (MTP) of deepseek_v4: there is no 'mtp.0.enorm.weight'");
  EXPECT_EQ(models::why_no_mtp(models::open_checkpoint(golden("glm4_moe_mtp"))), "");
  EXPECT_EQ(models::mtp_place(models::open_checkpoint(golden("nemotron_h_mtp"))), "mtp");
  EXPECT_EQ(models::mtp_place(models::open_checkpoint(golden("longcat_flash_mtp"))), "model.mtp");
  EXPECT_EQ(models::mtp_place(models::open_checkpoint(golden("deepseek_v4_mtp"))), "mtp.0");
  EXPECT_EQ(models::mtp_place(models::open_checkpoint(golden("glm4_moe"))), "");
  EXPECT_HAS(models::why_no_mtp(models::open_config(golden("glm4_moe_mtp"))), "has no weights");
  EXPECT_HAS(refusal([] {
               LLM(EADEM_SOURCE_DIR "/assets/stories", cpu(), EngineOptions{}, Logger(LogLevel::warning), {},
                   SpeculationOptions::of("mtp"));
             }),
             "Unsupported: llama has no head");
}

TEST(MtpFiles, GgufFilesOfDeepseekV4HaveNone) {
  const Checkpoint directory = models::open_checkpoint(golden("deepseek_v4_usual"));
  const models::ParameterReader reader(directory);
  std::vector<Tensor> kept;
  std::vector<io::NamedTensor> tensors;
  for (const auto& [name, recipe] : models::tensors_of(*directory.model, models::CheckpointFormat::gguf)) {
    kept.push_back(models::evaluate(
        recipe, [&](const std::string& own) { return reader.read(own); }, name));
    tensors.push_back({name, kept.back().view});
  }
  const std::string path = testing::TempDir() + "mtp_v4.gguf";
  io::write_gguf(path, directory.model->config()->to_gguf(), tensors);
  EXPECT_HAS(models::why_no_mtp(models::open_checkpoint(path)),
             "GGUF files of deepseek_v4 have no head for multi-token prediction (MTP) that is read");
  fs::remove(path);
}

TEST(MtpFiles, TheHeadReadsHiddenStates) {
  const Checkpoint checkpoint = models::open_checkpoint(golden("glm4_moe_mtp"));
  const auto engine = model_of(models::mtp_checkpoint(checkpoint), contiguous(1, 32));
  EXPECT_HAS(refusal([&] { engine->forward({.input_ids = {5}, .input_lengths = {1}, .cache_lengths = {0}}); }),
             "sequence 0 has 0 bytes of hidden states for 1 new tokens; glm4_moe reads 96 of each");
  const auto model = model_of(checkpoint, contiguous(1, 32));
  const std::vector<std::byte> state(96);
  const Ids token = {5}, row = {0};
  const std::vector<StepSequence> plan = {{.tokens = token, .blocks = row, .hidden = state}};
  EXPECT_HAS(refusal([&] { model->forward(plan); }), "96 bytes of hidden states for 1 new tokens");
}

}  // namespace mtp_head_test
}  // namespace eadem::engine
