// SPDX-License-Identifier: Apache-2.0
//
// Property ring of the engine: a request's tokens are its own, bit for bit. Every comparison here is of bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "eadem/core/device/cpu_device.h"
#include "eadem/engine/llm.h"
#include "eadem/train/trainer.h"
#include "tests/core/fake_system.h"

namespace eadem::engine {
namespace {

namespace fs = std::filesystem;

std::string golden(const std::string& name) {
  return (fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / name).string();
}

// Tokens that depend on position and seed only.
std::vector<int32_t> tokens_of(int64_t count, int64_t vocab, int32_t seed) {
  std::vector<int32_t> result;
  for (int64_t i = 0; i < count; ++i) result.push_back(static_cast<int32_t>((7919 * i + 104729 * seed + 13) % vocab));
  return result;
}

struct EngineSetup {
  std::string model = golden("llama");
  int threads = 2;
  std::string isa;
  EngineOptions options;
};

std::unique_ptr<InferEngine> make_engine(const EngineSetup& setup) {
  EngineOptions options = setup.options;
  options.max_logit_rows = std::max<int64_t>(options.max_logit_rows, 128);
  return InferEngine::from_checkpoint(models::open_checkpoint(setup.model),
                                      open_device("cpu", {.num_threads = setup.threads, .isa = setup.isa}), options);
}

std::vector<float> values(const Tensor& tensor) {
  return {tensor.view.as<float>(), tensor.view.as<float>() + tensor.view.num_elements()};
}

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << what;
}

// Logits of every token of one sequence, run through the engine in chunks of the given sizes, alone.
std::vector<float> logits_in_chunks(InferEngine& engine, const std::vector<int32_t>& tokens,
                                    const std::vector<int>& chunks) {
  std::vector<float> result;
  const bool paged = engine.cache_spec().layout == modules::CacheLayout::paged;
  const int64_t block_size = engine.cache_spec().block_size;
  std::vector<int32_t> blocks;
  // Blocks in falling order: nothing may depend on where they lie.
  const auto needed = static_cast<int64_t>((static_cast<int64_t>(tokens.size()) + block_size - 1) / block_size);
  for (int64_t b = 0; b < needed; ++b) blocks.push_back(static_cast<int32_t>(engine.cache_spec().num_blocks - 1 - b));
  int32_t done = 0;
  for (int chunk : chunks) {
    InferEngine::Input input;
    input.input_ids.assign(tokens.begin() + done, tokens.begin() + done + chunk);
    input.input_lengths = {chunk};
    input.cache_lengths = {done};
    if (paged) input.block_tables = {blocks};
    input.all_logits = true;
    engine.forward(input);
    const std::vector<float> part = values(engine.logits());
    result.insert(result.end(), part.begin(), part.end());
    done += chunk;
  }
  EXPECT_EQ(static_cast<size_t>(done), tokens.size());
  return result;
}

class EveryModel : public testing::TestWithParam<const char*> {};

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
  for (int64_t block_size : {1, 5, 16, 64}) {
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
    DeviceOptions options;
    const Topology& topology;
  };
  for (const CacheConfig& cache :
       {CacheConfig(StaticKVCacheConfig{}), CacheConfig(StaticKVCacheConfig{.max_batch_size = 3}),
        CacheConfig(PagedKVCacheConfig{.max_kv_memory_bytes = 4 << 20, .block_size = 5})})
    for (const Case& c :
         {Case{{.num_threads = 1, .prefill_threads = 3}, here}, Case{{.num_threads = 3, .prefill_threads = 1}, here},
          Case{{.num_threads = 2, .prefill_threads = 2, .pin = false}, here}, Case{{.num_threads = 2}, two_nodes},
          Case{{.num_threads = 3, .prefill_threads = 8}, two_nodes},
          Case{{.num_threads = 8, .prefill_threads = 5}, two_nodes}}) {
      EngineOptions options;
      options.cache = cache;
      options.max_logit_rows = 128;
      const auto device = std::make_shared<CpuDevice>(c.options, c.topology);
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

TEST_P(EveryModel, TrainingForwardGivesTheBitsOfServing) {
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

    // And serving, from the cache: cross entropy recomputed from its logits in the order the loss op adds is another
    // program, so what is compared is the hidden states' consequence that both share, the greedy log-probability.
    EngineSetup setup{.model = golden(GetParam())};
    setup.options.hardware.weights = weights;
    const auto engine = make_engine(setup);
    const std::vector<float> first = logits_in_chunks(*engine, {tokens.begin(), tokens.begin() + 20}, {20});
    train::Trainer fresh(checkpoint.model, open_device("cpu"), {.weights = weights, .batch_tokens = 64});
    fresh.load(checkpoint);
    train::Batch labelled;
    train::clear(labelled);
    const int64_t vocab = checkpoint.model->info().vocab;
    train::append_piece(labelled, document, 0, 20);
    fresh.evaluate(labelled);
    const std::vector<float> losses = fresh.last_token_losses();
    for (int64_t t = 0; t < 20; ++t) {
      // The loss in double from the served logits: f32 logits of the same bits give the f32 loss within its own
      // rounding.
      const float* row = first.data() + t * vocab;
      double largest = row[0], sum = 0;
      for (int64_t v = 0; v < vocab; ++v) largest = std::max(largest, static_cast<double>(row[v]));
      for (int64_t v = 0; v < vocab; ++v) sum += std::exp(row[v] - largest);
      const double loss = largest + std::log(sum) - row[document[static_cast<size_t>(t) + 1]];
      // exp within 2 ulp, a sum of `vocab` positive terms, a logarithm and a difference, each in f32.
      const double bound =
          (static_cast<double>(vocab) + 8) * 0x1p-24 + 4 * 0x1p-24 * (std::abs(largest) + std::abs(loss) + 10);
      EXPECT_NEAR(losses[static_cast<size_t>(t)], loss, bound) << "token " << t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Transformers, EveryModel,
                         testing::Values("llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2"));

// What the scheduler gives a request: alone, and among others in every order.
std::vector<std::vector<int32_t>> schedule(InferEngine& engine, const std::vector<Scheduler::Request>& requests) {
  Scheduler scheduler(engine);
  std::map<Scheduler::RequestId, size_t> index;
  std::vector<std::vector<int32_t>> drawn(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) index[scheduler.add(requests[i])] = i;
  while (scheduler.step([&](const Scheduler::Drawn& d) {
    drawn[index.at(d.id)].push_back(d.token);
    return true;
  })) {
  }
  return drawn;
}

TEST(Batching, ARequestsTokensAreItsOwn) {
  for (const bool paged : {false, true}) {
    EngineSetup setup;
    setup.options.max_step_tokens = 24;  // prompts are cut, and mixed with the decoding of others
    if (paged)
      setup.options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 4, .max_batch_size = 4};
    else
      setup.options.cache = StaticKVCacheConfig{.max_batch_size = 4};
    const auto engine = make_engine(setup);
    std::vector<Scheduler::Request> requests;
    for (int i = 0; i < 9; ++i)
      requests.push_back({.prompt = tokens_of(3 + 11 * i % 50, engine->model().info().vocab, i),
                          .sampling = {.temperature = i % 3 == 0 ? 0.0f : 0.9f,
                                       .top_k = i % 2 ? 20 : 0,
                                       .top_p = 0.95f,
                                       .seed = 77 + i},
                          .max_tokens = 5 + i});
    std::vector<std::vector<int32_t>> alone;
    for (const Scheduler::Request& request : requests) alone.push_back(schedule(*engine, {request})[0]);
    EXPECT_EQ(schedule(*engine, requests), alone) << "in order";
    std::vector<Scheduler::Request> reversed(requests.rbegin(), requests.rend());
    std::vector<std::vector<int32_t>> reversed_alone(alone.rbegin(), alone.rend());
    EXPECT_EQ(schedule(*engine, reversed), reversed_alone) << "reversed";
  }
}

TEST(Batching, ATooLongPromptIsRefusedAlone) {
  EngineSetup setup;
  const auto engine = make_engine(setup);
  Scheduler scheduler(*engine);
  scheduler.add({.prompt = {1, 2, 3}, .max_tokens = 2});
  try {
    scheduler.add({.prompt = tokens_of(engine->max_sequence_length() + 1, engine->model().info().vocab, 1)});
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(engine->max_sequence_length() + 1)), std::string::npos)
        << error.what();
  }
  int drawn = 0;
  while (scheduler.step([&](const Scheduler::Drawn&) { return ++drawn > 0; })) {
  }
  EXPECT_EQ(drawn, 2);
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
  refused([](auto& i) { i.position_ids = {0, 5}; }, "position 5");
  refused([](auto& i) { i.slot_mapping = {0, 7}; }, "slot 7");
  refused([](auto& i) { i.block_tables = {{3}}; }, "block 3");
  refused([](auto& i) { i.sampling = {{.top_p = 0}}; }, "top_p");
  EXPECT_NO_THROW(engine->forward(good));
}

TEST(Engine, HooksFireWithTheValuesThatStepsMake) {
  EngineSetup setup;
  const auto engine = make_engine(setup);
  std::vector<int> layers;
  Shape shape;
  engine->hooks().register_hook("model.layers.*", [&](const std::string& name, const TensorView& tensor, int layer) {
    if (name.find("down_proj") != std::string::npos || name.ends_with(".add.y")) {
      layers.push_back(layer);
      shape = tensor.shape;
    }
  });
  ASSERT_TRUE(engine->hooks().has_hooks());
  engine->forward({.input_ids = {1, 2, 3}, .input_lengths = {3}, .cache_lengths = {0}});
  ASSERT_FALSE(layers.empty());
  EXPECT_EQ(layers.front(), 0);
  EXPECT_EQ(layers.back(), engine->model().info().layers - 1);
  EXPECT_EQ(shape, (Shape{3, engine->model().info().hidden}));
  engine->hooks().clear();
  layers.clear();
  engine->forward({.input_ids = {1, 2, 3}, .input_lengths = {3}, .cache_lengths = {0}});
  EXPECT_TRUE(layers.empty());
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

TEST(Batching, ACancelledStepChangesNoRequest) {
  EngineSetup setup;
  const auto engine = make_engine(setup);
  const Scheduler::Request request{.prompt = tokens_of(7, engine->model().info().vocab, 3), .max_tokens = 6};
  const std::vector<int32_t> alone = schedule(*engine, {request})[0];
  Scheduler scheduler(*engine);
  scheduler.add(request);
  std::vector<int32_t> drawn;
  const Scheduler::OnToken on_token = [&](const Scheduler::Drawn& d) {
    drawn.push_back(d.token);
    return true;
  };
  const std::atomic<bool> cancel = true;
  for (bool more = true; more;) {
    EXPECT_THROW(scheduler.step(on_token, &cancel), Cancelled);
    more = scheduler.step(on_token);
  }
  EXPECT_EQ(drawn, alone);
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
