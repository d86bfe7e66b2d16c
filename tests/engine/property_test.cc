// SPDX-License-Identifier: Apache-2.0
//
// Property ring of the engine: a request's tokens are its own, bit for bit. Every comparison here is of bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <set>

#include "eadem/core/device/cpu_device.h"
#include "eadem/engine/llm.h"
#include "eadem/train/trainer.h"
#include "tests/core/fake_system.h"
#include "tests/engine/engine_helpers.h"
#include "tests/engine/golden_families.h"

namespace eadem::engine {
namespace {

class EveryModel : public testing::TestWithParam<const char*> {
 protected:
  // Blocks of a paged cache are multiples of the tokens that a pooled row stands for: 4, and 12.
  static int64_t tokens_of_rows() { return std::string_view(GetParam()) == "deepseek_v4" ? 12 : 1; }
};

TEST_P(EveryModel, ChunkingDoesNotChangeBits) {
  EngineSetup setup{.model = golden(GetParam())};
  const auto engine = make_engine(setup);
  const std::vector<int32_t> tokens = tokens_of(40, engine->model().info().vocab, 1);
  const std::vector<float> whole = logits_in_chunks(*engine, tokens, {40});
  expect_same_bits(whole, logits_in_chunks(*engine, tokens, {13, 1, 20, 6}), "13 + 1 + 20 + 6");
  expect_same_bits(whole, logits_in_chunks(*engine, tokens, std::vector<int>(40, 1)), "token by token");
}

TEST_P(EveryModel, PagedCacheGivesTheBitsOfTheStaticOne) {
  EngineSetup setup{.model = golden(GetParam())};
  const auto fixed = make_engine(setup);
  const std::vector<int32_t> tokens = tokens_of(40, fixed->model().info().vocab, 2);
  const std::vector<float> expected = logits_in_chunks(*fixed, tokens, {17, 23});
  for (int64_t blocks : {1, 5, 16, 64}) {
    const int64_t block_size = blocks * tokens_of_rows();
    setup.options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 4 << 20, .block_size = block_size};
    expect_same_bits(expected, logits_in_chunks(*make_engine(setup), tokens, {17, 23}),
                     fmt::format("block {}", block_size));
  }
}

TEST_P(EveryModel, ThreadsDoNotChangeBits) {
  for (Isa isa : available_isas()) {
    EngineSetup setup{.model = golden(GetParam()), .threads = 1, .isa = std::string(isa_name(isa))};
    const auto one = make_engine(setup);
    const std::vector<int32_t> tokens = tokens_of(40, one->model().info().vocab, 3);
    const std::vector<float> expected = logits_in_chunks(*one, tokens, {30, 1, 9});
    for (int threads : {2, 3}) {
      setup.threads = threads;
      expect_same_bits(expected, logits_in_chunks(*make_engine(setup), tokens, {30, 1, 9}),
                       fmt::format("{} threads, {}", threads, isa_name(isa)));
    }
  }
}

// Whatever threads decode and prefill have, and wherever they and their memory are: with long and short steps, from a
// cache of one sequence (whose heads are shared out) and of several, and paged (whose pages go round the nodes).
TEST_P(EveryModel, ThreadsOfDecodeAndPrefillAndNodesDoNotChangeBits) {
  const models::Checkpoint checkpoint = models::open_checkpoint(golden(GetParam()));
  const std::vector<int32_t> tokens = tokens_of(40, checkpoint.model->info().vocab, 3);
  const std::vector<int> chunks = {30, 1, 1, 8};
  const std::vector<float> expected =
      logits_in_chunks(*make_engine({.model = golden(GetParam()), .threads = 1}), tokens, chunks);
  const Topology two_nodes = two_node_topology(), here = Topology::of_this_process();
  struct Case {
    int decode_threads, prefill_threads;  // 0: as many
    bool pin;
    const Topology& topology;
  };
  for (const CacheConfig& cache :
       {CacheConfig(StaticKVCacheConfig{}), CacheConfig(StaticKVCacheConfig{.max_batch_size = 3}),
        CacheConfig(PagedKVCacheConfig{.max_kv_memory_bytes = 4 << 20, .block_size = 5 * tokens_of_rows()})})
    for (const Case& c : {Case{1, 3, true, here}, Case{3, 1, true, here}, Case{2, 2, false, here},
                          Case{2, 0, true, two_nodes}, Case{3, 8, true, two_nodes}, Case{8, 5, true, two_nodes}}) {
      EngineOptions options;
      options.cache = cache;
      options.max_logit_rows = 128;
      const auto device = std::make_shared<CpuDevice>(
          DeviceOptions{.num_threads = c.decode_threads, .prefill_threads = c.prefill_threads, .pin = c.pin},
          c.topology);
      expect_same_bits(expected,
                       logits_in_chunks(*InferEngine::from_checkpoint(checkpoint, device, options), tokens, chunks),
                       device->description());
      EXPECT_EQ(device->pool().active_threads(), device->prefill_threads()) << "as before the steps";
    }
}

TEST_P(EveryModel, SixtyFourThreadsDoNotChangeBits) {
  EngineSetup setup{.model = golden(GetParam()), .threads = 1};
  const std::vector<int32_t> tokens = tokens_of(40, make_engine(setup)->model().info().vocab, 5);
  const std::vector<float> expected = logits_in_chunks(*make_engine(setup), tokens, {30, 1, 9});
  setup.threads = 64;
  expect_same_bits(expected, logits_in_chunks(*make_engine(setup), tokens, {30, 1, 9}), "64 threads");
}

TEST_P(EveryModel, OpByOpGivesTheBitsOfTheFusedProgram) {
  EngineSetup setup{.model = golden(GetParam())};
  const auto fused = make_engine(setup);
  const std::vector<int32_t> tokens = tokens_of(40, fused->model().info().vocab, 4);
  const std::vector<float> expected = logits_in_chunks(*fused, tokens, {40});
  setup.options.op_by_op = true;
  expect_same_bits(expected, logits_in_chunks(*make_engine(setup), tokens, {40}), "op by op");
  setup.options.op_by_op = false;
  for (const char* fusion : {"add_rms_norm", "linear_add", "linear_gated_activation", "rope_kv_append", "all"}) {
    setup.options.disabled_fusions = {fusion};
    expect_same_bits(expected, logits_in_chunks(*make_engine(setup), tokens, {40}), fusion);
  }
}

TEST_P(EveryModel, TrainingForwardGivesTheBitsOfEvaluation) {
  for (DType weights : {DType::f32, DType::bf16}) {
    const models::Checkpoint checkpoint = models::open_checkpoint(golden(GetParam()));
    train::Trainer trainer(checkpoint.model, open_device("cpu"), {.weights = weights, .batch_tokens = 64});
    trainer.load(checkpoint);
    const std::vector<int32_t> tokens = tokens_of(40, checkpoint.model->info().vocab, 5);
    const std::vector<uint32_t> document(tokens.begin(), tokens.end());
    train::Batch batch;
    train::clear(batch);
    train::append_piece(batch, document, 0, 20);  // two pieces: a token must see its own only
    train::append_piece(batch, document, 20, 40);
    trainer.evaluate(batch);
    const std::vector<float> served = trainer.last_token_losses();
    // The first training step runs the training forward pass before it changes any weight.
    trainer.step(std::span(&batch, 1), 1e-3);
    expect_same_bits(served, trainer.last_token_losses(), std::string(dtype_name(weights)));
  }
}

// The first golden of every model type, and further ones whose layers are of other kinds.
std::vector<const char*> every_model() {
  std::vector<const char*> folders = {"llama",    "llama31",      "mistral",     "qwen2",      "qwen3",
                                      "smollm2",  "gemma3",       "qwen3_moe",   "mixtral",    "qwen2_moe",
                                      "glm4_moe", "ernie4_5_moe", "deepseek_v2", "deepseek_v3"};
  std::set<std::string> types;
  const auto type_of = [](const char* folder) {
    return io::JsonReader::read(golden(folder) + "/config.json").optional_string("model_type");
  };
  for (const char* folder : folders) types.insert(type_of(folder).value());
  for (const test::GoldenFamily& family : test::kGoldenFamilies)
    if (types.insert(type_of(family.folder).value()).second) folders.push_back(family.folder);
  for (const char* folder : {"nemotron_h_moe", "gemma4_experts", "gpt_oss_mxfp4"}) folders.push_back(folder);
  return folders;
}
INSTANTIATE_TEST_SUITE_P(Transformers, EveryModel, testing::ValuesIn(every_model()));

class Batching : public EveryModel {};
INSTANTIATE_TEST_SUITE_P(Transformers, Batching, testing::Values("llama", "granitemoehybrid", "deepseek_v4"));

TEST_P(Batching, ARequestsTokensAreItsOwn) {
  for (const bool paged : {false, true}) {
    EngineSetup setup{.model = golden(GetParam())};
    setup.options.max_num_batched_tokens = 24;  // prompts are cut, and mixed with the decoding of others
    if (paged)
      setup.options.cache =
          PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 4 * tokens_of_rows(), .max_batch_size = 4};
    else
      setup.options.cache = StaticKVCacheConfig{.max_batch_size = 4};
    const auto engine = make_engine(setup);
    std::vector<StepLoop::Request> requests;
    for (int i = 0; i < 9; ++i)
      requests.push_back({.prompt = tokens_of(3 + 11 * i % 50, engine->model().info().vocab, i),
                          .sampling = {.temperature = i % 3 == 0 ? 0.0f : 0.9f,
                                       .top_k = i % 2 ? 20 : 0,
                                       .top_p = 0.95f,
                                       .seed = 77 + i},
                          .max_tokens = 5 + i});
    std::vector<std::vector<int32_t>> alone;
    for (const StepLoop::Request& request : requests) alone.push_back(schedule(*engine, {request})[0]);
    EXPECT_EQ(schedule(*engine, requests), alone) << "in order";
    std::vector<StepLoop::Request> reversed(requests.rbegin(), requests.rend());
    std::vector<std::vector<int32_t>> reversed_alone(alone.rbegin(), alone.rend());
    EXPECT_EQ(schedule(*engine, reversed), reversed_alone) << "reversed";
  }
}

TEST(Engine, RefusesInputsThatContradictThemselves) {
  EngineSetup setup;
  const auto engine = make_engine(setup);
  const InferEngine::Input good{.input_ids = {1, 2}, .input_lengths = {2}, .cache_lengths = {0}};
  const auto refused = [&](auto&& change, const char* part) {
    InferEngine::Input input = good;
    change(input);
    try {
      engine->forward(input);
      ADD_FAILURE() << "accepted: " << part;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused([](auto& i) { i.input_ids[1] = 100000; }, "100000");
  refused([](auto& i) { i.input_ids[1] = -1; }, "-1");
  refused([](auto& i) { i.input_lengths = {3}; }, "input_lengths");
  refused([](auto& i) { i.input_lengths = {}; }, "0 sequences");
  refused([](auto& i) { i.cache_lengths = {1 << 20}; }, "the cache holds");
  refused([](auto& i) { i.position_ids = {0, 1 << 20}; }, "position 1048576");
  refused([](auto& i) { i.slot_mapping = {0, 7}; }, "slot 7");
  refused([](auto& i) { i.block_tables = {{3}}; }, "block 3");
  refused([](auto& i) { i.sampling = {{.top_p = 0}}; }, "top_p");
  EXPECT_NO_THROW(engine->forward(good));
}

TEST(Engine, ACancelledStepEndsBetweenKernelsAndMayBeRunAgain) {
  EngineSetup setup;
  const auto engine = make_engine(setup);
  const std::vector<int32_t> tokens = tokens_of(20, engine->model().info().vocab, 9);
  const std::vector<float> expected = logits_in_chunks(*engine, tokens, {12, 8});
  logits_in_chunks(*engine, tokens_of(20, engine->model().info().vocab, 10), {20});  // other things in the cache

  std::atomic<bool> cancel = false;
  InferEngine::Input input{.input_ids = {tokens.begin(), tokens.begin() + 12},
                           .input_lengths = {12},
                           .cache_lengths = {0},
                           .all_logits = true};
  engine->forward(input, &cancel);
  std::vector<float> logits = values(engine->logits());
  input = {.input_ids = {tokens.begin() + 12, tokens.end()},
           .input_lengths = {8},
           .cache_lengths = {12},
           .all_logits = true};
  // Set by the first value that is made in layer 0: no other layer makes any.
  std::set<int> layers;
  engine->hooks().register_hook("model.layers.*", [&](const std::string&, const TensorView&, int layer) {
    layers.insert(layer);
    cancel = true;
  });
  EXPECT_THROW(engine->forward(input, &cancel), Cancelled);
  EXPECT_EQ(layers, std::set<int>{0});
  EXPECT_THROW(engine->logits(), InvalidArgument);  // of no step
  EXPECT_THROW(engine->forward(input, &cancel), Cancelled);
  engine->hooks().clear();
  cancel = false;
  engine->forward(input, &cancel);
  for (float value : values(engine->logits())) logits.push_back(value);
  expect_same_bits(expected, logits, "after a cancelled step");
}

TEST(Engine, ResetCacheKeepsTheWeights) {
  EngineSetup setup;
  const auto engine = make_engine(setup);
  const std::vector<int32_t> tokens = tokens_of(20, engine->model().info().vocab, 9);
  const std::vector<float> before = logits_in_chunks(*engine, tokens, {20});
  engine->reset_cache(PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 8});
  expect_same_bits(before, logits_in_chunks(*engine, tokens, {20}), "paged");
  EXPECT_THROW(engine->reset_cache(StaticKVCacheConfig{.max_batch_size = 0}), InvalidArgument);
  expect_same_bits(before, logits_in_chunks(*engine, tokens, {20}), "after a refused reset");
}

// `explain` shows the programs that run: the same bounds, kernels and memory.
TEST(Engine, ExplainCompilesWhatRuns) {
  EngineSetup setup;
  for (const CacheConfig& cache :
       {CacheConfig(StaticKVCacheConfig{}), CacheConfig(StaticKVCacheConfig{.max_batch_size = 40}),
        CacheConfig(PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 4, .max_batch_size = 3})})
    for (const int64_t logit_rows : {1, 200}) {
      setup.options.cache = cache;
      setup.options.max_logit_rows = logit_rows;
      const auto checkpoint = models::open_checkpoint(setup.model);
      const auto device = open_device("cpu", {.num_threads = setup.threads});
      const auto engine = InferEngine::from_checkpoint(checkpoint, device, setup.options);
      const ProgramSet set =
          InferEngine::compile_for_explain(*checkpoint.model, device, setup.options, models::spec_of(checkpoint));
      for (const bool decode : {true, false}) {
        const pipeline::Program* explained = (decode ? set.decode() : set.prefill()).program.get();
        const pipeline::Program& runs = decode ? engine->decode_program() : engine->prefill_program();
        EXPECT_EQ(explained->environment().bounds, runs.environment().bounds) << decode << " " << logit_rows;
        EXPECT_EQ(explained->memory_plan().arena_bytes, runs.memory_plan().arena_bytes) << decode;
        ASSERT_EQ(explained->choices().size(), runs.choices().size());
        for (size_t i = 0; i < runs.choices().size(); ++i)
          EXPECT_EQ(explained->choices()[i].kernel, runs.choices()[i].kernel) << "node " << i;
      }
    }
}

TEST(Engine, NotFiniteLogitsFailTheRequestAlone) {
  const auto model = models::model_from_config(golden("llama") + "/config.json");
  InferEngine engine(model, open_device("cpu"), {}, model->spec());
  engine.load_random(1, 10.0);
  Tensor huge = Tensor::on_host(DType::f32, Shape{model->info().hidden});
  std::fill_n(huge.view.as<float>(), model->info().hidden, 3e38f);
  engine.load_param("model.norm.weight", huge.view);  // the LM head's products overflow f32
  const InferEngine::Output& output = engine.forward({.input_ids = {1}, .input_lengths = {1}, .cache_lengths = {0}});
  EXPECT_EQ(output.output_ids[0], -1);
}

}  // namespace
}  // namespace eadem::engine
