// SPDX-License-Identifier: Apache-2.0
//
// Engines of several ranks, which are processes: they draw the tokens of one rank, again and again with the same bits;
// every command of an engine reaches all of them; and a rank that dies ends the call, not the process.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <thread>

#include "eadem/engine/speculation/draft_model.h"
#include "eadem/engine/speculation/mtp_head.h"
#include "eadem/engine/speculation/speculation_options.h"
#include "eadem/models/mtp_model.h"
#include "tests/engine/forked_engines.h"
#include "tests/engine/speculation/speculating_loop.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace {

TEST(Ranks, DrawTheTokensOfOneRankWithTheSameBitsEachTime) {
  struct Row {
    std::string model;
    int ranks;
  };
  // Experts; key-value heads that do not divide; states of each sequence; windows; latent attention.
  for (const Row& row : {Row{"llama", 2},
                         {"llama", 4},
                         {"qwen3", 4},
                         {"qwen3_moe", 2},
                         {"qwen3_moe", 4},
                         {"lfm2", 3},
                         {"falcon_h1", 2},
                         {"granitemoehybrid", 2},
                         {"longcat_flash", 3},
                         {"qwen3_next_all", 2},
                         {"gemma4", 2},
                         {"deepseek_v3", 2}}) {
    SCOPED_TRACE(fmt::format("{} on {} ranks", row.model, row.ranks));
    Drawn one;
    {
      EngineOptions options = accurate();
      options.max_num_batched_tokens = 16;
      one = draw(*from(golden(row.model))(one_thread(), options));
    }
    const Make make = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
      options.max_num_batched_tokens = 16;
      return from(golden(row.model))(device, options);
    };
    const auto ranks = fork_ranks(row.ranks, make);
    Drawn first;
    for (int engine = 0; engine < 2; ++engine) {
      const auto made = make(one_thread(), on(*ranks));
      for (int run = 0; run < 2; ++run) {
        const Drawn drawn = draw(*made);
        EXPECT_EQ(drawn.tokens, one.tokens);
        if (engine == 0 && run == 0) first = drawn;
        EXPECT_TRUE(drawn.logprobs == first.logprobs) << "engine " << engine << ", run " << run;
        made->reset_cache();
      }
    }
  }
}

// Ranks that divide experts compute everything else alike. Long steps and steps of one token; from plain files, from
// packs, in both modes.
TEST(Ranks, DividedExpertsDrawTheBitsOfOneRank) {
  namespace fs = std::filesystem;
  const fs::path packs = fs::temp_directory_path() / fmt::format("eadem_expert_packs_{}", ::getpid());
  struct Row {
    std::string model;
    int ranks;
    HardwareMode mode = HardwareMode::accuracy;
    bool packed = false;
  };
  for (const Row& row : {Row{"qwen3_moe", 2},
                         {"qwen3_moe", 3, HardwareMode::performance},
                         {"qwen3_moe", 4, HardwareMode::performance, true},
                         {"deepseek_v3", 3},
                         {"qwen2_moe", 2, HardwareMode::performance},
                         {"qwen3_next_all", 3}}) {
    SCOPED_TRACE(fmt::format("{} on {} ranks", row.model, row.ranks));
    const Make make = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
      options.max_num_batched_tokens = 16;
      options.mode = row.mode;
      options.divide = MeshAxis::ep;
      if (row.packed) options.pack_cache = packs.string();
      return from(golden(row.model))(device, options);
    };
    EngineOptions alone = accurate();
    const Drawn one = draw(*make(one_thread(), alone));
    for (int run = 0; run < (row.packed ? 2 : 1); ++run) {
      const auto ranks = fork_ranks(row.ranks, make);
      const auto engine = make(one_thread(), on(*ranks));
      EXPECT_TRUE(draw(*engine) == one);
      engine->reset_cache();
      EXPECT_TRUE(draw(*engine) == one) << "again";
    }
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(packs), fs::directory_iterator()), 2 * 5)
      << "a pack and its stamp of one rank, and of each of four";
  fs::remove_all(packs);
}

TEST(Ranks, DividedExpertsTakeCommandsAndRefuseModelsWithoutExperts) {
  const auto config = models::open_config(golden("qwen3_moe"));
  const Make make = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
    options.divide = MeshAxis::ep;
    return std::make_unique<InferEngine>(config.model, device, options, models::spec_of(config));
  };
  const auto use = [&](InferEngine& engine) {
    std::vector<Drawn> drawn;
    engine.load_random(3, 0.1);
    drawn.push_back(draw(engine));
    const char* name = "model.layers.2.mlp.experts.up_proj.weight";
    Tensor whole = Tensor::on_host(DType::f32, engine.parameters().whole_shape(name));
    for (int64_t i = 0; i < whole.view.num_elements(); ++i)
      whole.view.as<float>()[i] = static_cast<float>(i * 37 % 101 - 50) / 64;
    engine.load_param(name, whole.view);
    engine.reset_cache();
    drawn.push_back(draw(engine));
    return drawn;
  };
  const std::vector<Drawn> one = use(*make(one_thread(), accurate()));
  EXPECT_FALSE(one[0] == one[1]) << "experts matter";
  {
    const auto ranks = fork_ranks(3, make);
    const auto engine = make(one_thread(), on(*ranks));
    EXPECT_TRUE(use(*engine) == one);
    // This rank's part: three of eight experts.
    for (const auto& [name, tensor] : engine->state_dict()) {
      if (name != "model.layers.2.mlp.experts.up_proj.weight") continue;
      EXPECT_EQ(tensor.shape()[0], 3);
    }
  }
  const Make dense = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
    options.divide = MeshAxis::ep;
    return from(golden("llama"))(device, options);
  };
  const auto ranks = fork_ranks(2, dense);
  EXPECT_HAS(test::refusal([&] { dense(one_thread(), on(*ranks)); }),
             "InvalidArgument: 2 ranks to divide experts; the model has none");
}

// States per sequence go back on every rank, whether these divide them or each has all of them.
TEST(Ranks, ProposedTokensChangeNoToken) {
  for (const MeshAxis divide : {MeshAxis::tp, MeshAxis::ep}) {
    const Make make = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
      options.divide = divide;
      return from(golden("qwen3_next_all"))(device, options);
    };
    const auto one = make(one_thread(), accurate());
    const std::vector<GenerationRequest> requests = {{.prompt = tokens_of(9, 64, 1), .max_tokens = 20},
                                                     {.prompt = tokens_of(5, 64, 2), .max_tokens = 20}};
    const SpeculatingRun plain = run_requests(*one, requests);
    const auto ranks = fork_ranks(2, make);
    EngineOptions speculating = on(*ranks);
    speculating.draft_tokens = 4;
    const auto engine = make(one_thread(), speculating);
    const SpeculatingRun run = run_requests(*engine, requests, from_answers(plain.answers, 4, 63));
    for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(run.answers[i].tokens, plain.answers[i].tokens) << i;
    EXPECT_GT(run.accepted, 10);
    EXPECT_GT(run.proposed, run.accepted);
    EXPECT_LT(run.steps, plain.steps);
  }
}

// Runs requests side by side with what the proposer proposes, if there is one.
SpeculatingRun run_with(InferEngine& engine, const std::vector<GenerationRequest>& requests, Proposer* proposer) {
  engine.reset_cache();
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
      if (proposer != nullptr && each.most > 0)
        proposals.push_back(
            {.id = each.id, .tokens = each.tokens, .request = each.request, .depth = std::min<int64_t>(3, each.most)});
    if (proposer != nullptr) proposer->propose(proposals);
    for (const Proposal& each : proposals) scheduler.propose(each.id, each.drafts);
    const std::span<const StepSequence> plan = scheduler.plan(engine.cache_contents());
    const InferEngine::Output& output = engine.forward(plan);
    if (proposer != nullptr) proposer->see(scheduler.planned(), plan, engine);
    for (const StepEvent& event : scheduler.commit(output.output_ids, output.logprobs)) {
      if (event.sampled) {
        run.answers[index.at(event.id)].tokens.push_back(event.token);
        run.answers[index.at(event.id)].logprobs.push_back(event.logprob);
      }
      if (event.state == RequestState::finished && proposer != nullptr) proposer->end(event.id);
    }
  }
  run.proposed = scheduler.proposed_tokens();
  return run;
}

// The model's own head is whole on rank 0, whatever the ranks divide; the others follow the model's steps alone. It
// proposes what it would beside one rank, where that has the same hidden states: over ep.
TEST(Ranks, AHeadProposesOnTheFirstOfThem) {
  struct Row {
    const char* model;
    MeshAxis divide;
    int ranks;
  };
  for (const Row& row : {Row{"deepseek_v3_mtp", MeshAxis::tp, 2},
                         {"deepseek_v3_mtp", MeshAxis::ep, 2},
                         {"glm4_moe_mtp", MeshAxis::tp, 3},
                         {"deepseek_v4_mtp", MeshAxis::ep, 2},
                         {"qwen3_next_mtp", MeshAxis::tp, 2},
                         {"qwen3_next_mtp", MeshAxis::ep, 2}}) {
    SCOPED_TRACE(fmt::format("{} over {}", row.model, mesh_axis_name(row.divide)));
    const models::Checkpoint checkpoint = models::open_checkpoint(golden(row.model));
    const Make make = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
      options.divide = row.divide;
      return from(golden(row.model))(device, options);
    };
    const auto head_beside = [&](const InferEngine& engine) {
      EngineOptions options = accurate();
      options.cache = StaticKVCacheConfig{.max_batch_size = 4, .max_cache_len = 64};
      return std::make_unique<MtpHead>(
          InferEngine::from_checkpoint(models::mtp_checkpoint(checkpoint), engine.device(), options), engine, 0.1);
    };
    const auto ranks = fork_ranks(row.ranks, make);
    EngineOptions options = on(*ranks);
    options.draft_tokens = 8;
    const auto engine = make(one_thread(), options);
    const int64_t vocab = engine->model().info().vocab;
    const std::vector<GenerationRequest> requests = {
        {.prompt = tokens_of(9, vocab, 1), .max_tokens = 30},
        {.prompt = tokens_of(5, vocab, 2), .sampling = {.temperature = 0.8f, .seed = 3}, .max_tokens = 30}};
    const SpeculatingRun plain = run_with(*engine, requests, nullptr);
    const auto head = head_beside(*engine);
    const SpeculatingRun run = run_with(*engine, requests, head.get());
    expect_same_answers(run, plain, row.model);
    EXPECT_GT(run.proposed, 0);
    if (row.divide == MeshAxis::ep) {
      EngineOptions alone = accurate();
      alone.draft_tokens = 8;
      const auto one = make(one_thread(), alone);
      const auto its_head = head_beside(*one);
      const SpeculatingRun expected = run_with(*one, requests, its_head.get());
      expect_same_answers(run, expected, row.model);
      EXPECT_EQ(run.proposed, expected.proposed);
    }
    // An LLM makes its own.
    EXPECT_NE(make_speculator(SpeculationOptions::of("mtp", 4), checkpoint, *engine, io::Tokenizer::from_file(kStories),
                              Logger(LogLevel::warning), {}),
              nullptr);
  }
}

// A draft model is whole on rank 0, too. Where it is the model itself, nearly all that it proposes is right; another
// model's random weights propose other tokens.
TEST(Ranks, ADraftModelProposesOnTheFirstOfThem) {
  struct Row {
    const char *model, *draft;
    MeshAxis divide;
  };
  for (const Row& row : {Row{"llama", "llama", MeshAxis::tp},
                         {"qwen3_next_all", "qwen3_next_all", MeshAxis::tp},
                         {"qwen3_next_all", "falcon_h1", MeshAxis::tp},
                         {"qwen3_next_all", "qwen3_next_all", MeshAxis::ep},
                         {"qwen3_moe", "qwen3_moe", MeshAxis::ep}}) {
    SCOPED_TRACE(fmt::format("{} for {} over {}", row.draft, row.model, mesh_axis_name(row.divide)));
    const Make make = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
      options.divide = row.divide;
      options.draft_tokens = 8;
      return from(golden(row.model))(device, options);
    };
    const auto ranks = fork_ranks(2, make);
    const auto engine = make(one_thread(), on(*ranks)), one = make(one_thread(), accurate());
    const int64_t vocab = engine->model().info().vocab;
    const auto draft_beside = [&](const InferEngine& its_model) {
      EngineOptions options = accurate();
      options.draft_tokens = 1;  // for those with states
      options.cache = StaticKVCacheConfig{.max_batch_size = 4, .max_cache_len = 64};
      return std::make_unique<DraftModel>(from(golden(row.draft))(its_model.device(), options), vocab, 0.1);
    };
    const std::vector<GenerationRequest> requests = {
        {.prompt = tokens_of(9, vocab, 1), .max_tokens = 30},
        {.prompt = tokens_of(5, vocab, 2), .sampling = {.temperature = 0.8f, .seed = 3}, .max_tokens = 30}};
    const SpeculatingRun plain = run_with(*engine, requests, nullptr);
    const auto draft = draft_beside(*engine);
    const SpeculatingRun run = run_with(*engine, requests, draft.get());
    expect_same_answers(run, plain, row.model);
    EXPECT_GT(run.proposed, 30);
    if (row.divide == MeshAxis::ep) {
      const auto its_draft = draft_beside(*one);
      const SpeculatingRun expected = run_with(*one, requests, its_draft.get());
      expect_same_answers(run, expected, row.model);
      EXPECT_EQ(run.proposed, expected.proposed);
    }
  }
}

// Snapshots of states per sequence are kept and loaded on every rank, whether these divide them or each has all of
// them.
TEST(Ranks, PrefixesOfModelsWithStatesChangeNoToken) {
  for (const MeshAxis divide : {MeshAxis::tp, MeshAxis::ep}) {
    const Make make = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
      options.divide = divide;
      options.cache =
          PagedKVCacheConfig{.block_size = 4, .max_batch_size = 2, .max_cache_len = 64, .state_snapshots = 6};
      return from(golden("qwen3_next_all"))(device, options);
    };
    const auto one = make(one_thread(), accurate());
    const std::vector<GenerationRequest> requests = {{.prompt = tokens_of(41, 64, 1), .max_tokens = 10},
                                                     {.prompt = tokens_of(41, 64, 1), .max_tokens = 5},
                                                     {.prompt = tokens_of(33, 64, 2), .max_tokens = 10}};
    const auto run = [&](InferEngine& engine, int64_t& reused) {
      SchedulerLimits limits = engine.limits();
      limits.snapshot_distance = 8;
      Scheduler scheduler(limits);
      std::vector<int32_t> tokens;
      for (int round = 0; round < 2; ++round) {
        for (const GenerationRequest& request : requests) scheduler.add(request);
        while (!scheduler.is_idle()) {
          const InferEngine::Output& output = engine.forward(scheduler.plan(engine.cache_contents()));
          for (const StepEvent& event : scheduler.commit(output.output_ids, output.logprobs))
            if (event.sampled) tokens.push_back(event.token);
        }
      }
      reused = scheduler.reused_tokens();
      return tokens;
    };
    int64_t reused_by_one = 0, reused = 0;
    const std::vector<int32_t> expected = run(*one, reused_by_one);
    const auto ranks = fork_ranks(2, make);
    const auto engine = make(one_thread(), on(*ranks));
    EXPECT_EQ(run(*engine, reused), expected);
    EXPECT_EQ(reused, reused_by_one);
    EXPECT_GE(reused, 40 + 40 + 40 + 32);
  }
}

TEST(Ranks, TellStoriesToSeveralCallers) {
  const std::vector<std::string> prompts = {"Once upon a time", "The dog", "Lily and Tom went to the", "It was"};
  std::vector<std::vector<int32_t>> one;
  {
    LLM llm(kStories, one_thread(), accurate());
    for (const Completion& each : llm.generate(prompts, params(30))) one.push_back(each.token_ids);
  }
  for (const int size : {1, 2, 3}) {
    SCOPED_TRACE(fmt::format("{} ranks", size));
    const auto ranks = fork_ranks(size, from(kStories));
    LLM llm(kStories, one_thread(), on(*ranks));
    std::vector<std::vector<int32_t>> drawn(prompts.size());
    std::vector<std::thread> callers;
    for (size_t i = 0; i < prompts.size(); ++i)
      callers.emplace_back([&, i] { drawn[i] = llm.generate({prompts[i]}, params(30))[0].token_ids; });
    for (std::thread& caller : callers) caller.join();
    EXPECT_EQ(drawn, one);
    const auto sampled = [&] { return llm.generate(prompts, params(20, 0.8)); };
    const auto once = sampled(), again = sampled();
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ(once[i].token_ids, again[i].token_ids);
      EXPECT_EQ(once[i].logprobs, again[i].logprobs);
    }
  }
}

TEST(Ranks, PenaltiesAndBiasesAreThoseOfOneRank) {
  SamplingParams penalized = params(30);
  penalized.repetition_penalty = 1.3;
  penalized.frequency_penalty = 0.2;
  penalized.logit_bias = {{100, 2.0f}, {17, -100.0f}};
  const auto tokens = [&](const EngineOptions& options) {
    return LLM(kStories, one_thread(), options).generate({"Once upon a time"}, penalized)[0].token_ids;
  };
  const std::vector<int32_t> one = tokens(accurate());
  const auto ranks = fork_ranks(2, from(kStories));
  EXPECT_EQ(tokens(on(*ranks)), one);
}

TEST(Ranks, EveryCommandReachesAll) {
  const auto config = models::open_config(golden("llama"));
  const Make make = [&](const std::shared_ptr<Device>& device, const EngineOptions& options) {
    return std::make_unique<InferEngine>(config.model, device, options, models::spec_of(config));
  };
  const auto use = [&](InferEngine& engine) {
    std::vector<Drawn> drawn;
    engine.load_random(3, 0.1);
    drawn.push_back(draw(engine));
    engine.reset_cache(StaticKVCacheConfig{.max_batch_size = 2, .max_cache_len = 40});
    drawn.push_back(draw(engine));
    for (const char* name : {"model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"}) {
      Tensor whole = Tensor::on_host(DType::f32, engine.parameters().whole_shape(name));
      for (int64_t i = 0; i < whole.view.num_elements(); ++i)
        whole.view.as<float>()[i] = static_cast<float>(i * 37 % 101 - 50) / 256;
      engine.load_param(name, whole.view);
      engine.reset_cache();
      drawn.push_back(draw(engine));
    }
    // What is refused is refused everywhere, and the engine goes on.
    Tensor wrong = Tensor::on_host(DType::f32, Shape{3});
    std::fill_n(wrong.view.as<float>(), 3, 1.0f);
    EXPECT_HAS(test::refusal([&] { engine.load_param("model.norm.weight", wrong.view); }), "InvalidArgument");
    EXPECT_HAS(test::refusal([&] { engine.reset_cache(StaticKVCacheConfig{.max_cache_len = 1 << 20}); }),
               "InvalidArgument");
    InferEngine::Input input{.input_ids = {1 << 20}, .input_lengths = {1}, .cache_lengths = {0}};
    EXPECT_HAS(test::refusal([&] { engine.forward(input); }), "the vocabulary has");
    engine.reset_cache();
    EXPECT_EQ(draw(engine).tokens, drawn.back().tokens);
    return drawn;
  };
  const std::vector<Drawn> one = use(*make(one_thread(), accurate()));
  EXPECT_NE(one[1].tokens, one[2].tokens) << "parameters matter";
  const auto ranks = fork_ranks(2, make);
  const auto engine = make(one_thread(), on(*ranks));
  const std::vector<Drawn> two = use(*engine);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_EQ(two[i].tokens, one[i].tokens) << i;
  // Whole logits and hidden states.
  EXPECT_EQ(engine->logits().shape()[1], config.model->info().vocab);
  EXPECT_EQ(engine->hidden_states().shape()[1], config.model->info().hidden);
  EXPECT_LT(engine->parameters().size_bytes(), make(one_thread(), accurate())->parameters().size_bytes());

  EXPECT_HAS(test::refusal([&] { engine->sequence_states(); }), "Unsupported: states per sequence are divided");
}

// Parts of a value, one after another along `axis`.
std::vector<float> joined(const std::vector<Tensor>& parts, int axis) {
  std::vector<float> result;
  int64_t outer = 1;
  for (int i = 0; i < axis; ++i) outer *= parts[0].shape()[i];
  for (int64_t o = 0; o < outer; ++o)
    for (const Tensor& part : parts) {
      const int64_t run = part.view.num_elements() / outer;
      result.insert(result.end(), part.view.as<float>() + o * run, part.view.as<float>() + (o + 1) * run);
    }
  return result;
}

Tensor copy_of(const TensorView& view) {
  Tensor copy = Tensor::on_host(view.dtype, view.shape);
  std::memcpy(copy.view.data, view.data, static_cast<size_t>(view.size_bytes()));
  return copy;
}

TEST(Ranks, HooksSeeWhatEveryRankMakes) {
  const Make whole = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
    options.disabled_fusions = {"all"};
    return from(golden("llama"))(device, options);
  };
  const InferEngine::Input input{
      .input_ids = {1, 2, 3}, .input_lengths = {3}, .cache_lengths = {0}, .block_tables = {{0, 1, 2, 3}}};
  // In the first layer nothing was summed up over ranks yet: queries, keys and values have one rank's bits.
  const std::string pattern = "model.layers.0.self_attn.[qkv]_proj.reshape.y";
  std::map<std::string, std::vector<Tensor>> one, two;
  const auto into = [](std::map<std::string, std::vector<Tensor>>& seen) {
    return [&seen](const std::string& name, const TensorView& tensor, int layer) {
      EXPECT_EQ(layer, 0);
      seen[name].push_back(copy_of(tensor));
    };
  };
  {
    const auto engine = whole(one_thread(), accurate());
    engine->hooks().register_hook(pattern, into(one));
    engine->forward(input);
  }
  ASSERT_EQ(one.size(), 3u);
  const auto ranks = fork_ranks(2, whole);
  const auto engine = whole(one_thread(), on(*ranks));
  const std::vector<int32_t> expected = engine->forward(input).output_ids;
  const auto id = engine->hooks().register_hook(pattern, into(two));
  int second = 0, fails = 0;
  engine->hooks().register_hook(
      "model.norm.*", [&](const std::string&, const TensorView& tensor, int) { second += tensor.shape[0] == 3; }, 1);
  engine->reset_cache();
  EXPECT_EQ(engine->forward(input).output_ids, expected);
  EXPECT_EQ(second, 1);
  ASSERT_EQ(two.size(), 3u);
  for (const auto& [name, parts] : two) {
    SCOPED_TRACE(name);
    ASSERT_EQ(parts.size(), 2u);
    EXPECT_EQ(parts[0].shape()[1] * 2, one.at(name)[0].shape()[1]) << "heads are divided";
    expect_same_bits(joined(parts, 1), joined(one.at(name), 1), name);
  }
  // A rank that does not exist; an exception, which ends the step on every rank; a hook that is gone.
  EXPECT_HAS(test::refusal([&] { engine->hooks().register_hook("model.norm.*", {}, 2); }),
             "InvalidArgument: hook on 'model.norm.*' of rank 2; expected 0 to 1");
  const auto fails_id = engine->hooks().register_hook(
      "model.layers.1.*", [&](const std::string&, const TensorView&, int) { ++fails, throw NotFound("nothing"); });
  engine->reset_cache();
  EXPECT_HAS(test::refusal([&] { engine->forward(input); }), "NotFound: nothing");
  EXPECT_EQ(fails, 1);
  engine->hooks().remove(fails_id);
  engine->hooks().remove(id);
  two.clear();
  engine->reset_cache();
  EXPECT_EQ(engine->forward(input).output_ids, expected);
  EXPECT_TRUE(two.empty());
  EXPECT_EQ(second, 2) << "none in the step that ended before";
}

TEST(Ranks, AFusionIsSwitchedOffOnAll) {
  const auto ranks = fork_ranks(2, from(golden("llama")));
  const auto engine = from(golden("llama"))(one_thread(), on(*ranks));
  const std::vector<int32_t> before = draw(*engine).tokens[1];
  const std::string name = engine->hooks().names().fused.begin()->first;
  std::vector<Shape> shapes;
  const auto see = [&](const std::string&, const TensorView& tensor, int) { shapes.push_back(tensor.shape); };
  EXPECT_HAS(test::refusal([&] { engine->hooks().register_hook(name, see); }), "a fusion keeps that value inside");
  engine->unfuse(name);
  engine->hooks().register_hook(name, see);
  EXPECT_EQ(draw(*engine).tokens[1], before);
  EXPECT_GE(shapes.size(), 2u);
}

TEST(Ranks, ParametersComeBackByRankAndWhole) {
  InferEngine::StateDict one;
  {
    const auto engine = from(golden("llama"))(one_thread(), accurate());
    one = engine->state_dict();
    EXPECT_EQ(engine->state_dict_by_rank().size(), 1u);
  }
  for (const int size : {2, 4}) {  // with 4 ranks, key-value heads do not divide
    const auto ranks = fork_ranks(size, from(golden("llama")));
    const auto engine = from(golden("llama"))(one_thread(), on(*ranks));
    const std::vector<InferEngine::StateDict> parts = engine->state_dict_by_rank();
    const InferEngine::StateDict whole = engine->whole_state_dict();
    ASSERT_EQ(std::ssize(parts), size);
    ASSERT_EQ(whole.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) {
      SCOPED_TRACE(one[i].first);
      EXPECT_EQ(whole[i].first, one[i].first);
      EXPECT_EQ(whole[i].second.shape(), one[i].second.shape());
      expect_same_bits(values(whole[i].second), values(one[i].second), one[i].first);
      int64_t elements = 0;
      for (const InferEngine::StateDict& part : parts) {
        EXPECT_EQ(part[i].first, one[i].first);
        elements += part[i].second.view.num_elements();
      }
      const bool is_divided = engine->parameters().type(one[i].first).sharding.kind == Sharding::Kind::sharded;
      EXPECT_EQ(elements, one[i].second.view.num_elements() * (is_divided ? 1 : size)) << "exactly its part";
    }
  }
}

TEST(Ranks, ACancelledCallLeavesTheEngineInOrder) {
  const auto ranks = fork_ranks(2, from(kStories));
  LLM llm(kStories, one_thread(), on(*ranks));
  std::atomic<bool> cancel{false};
  int pieces = 0;
  const auto on_text = [&](size_t, std::string_view) { cancel = ++pieces == 3; };
  const Completion cut = llm.generate({"Once upon a time"}, params(40), on_text, &cancel)[0];
  EXPECT_EQ(cut.finish_reason, FinishReason::cancelled);
  const Completion whole = llm.generate({"Once upon a time"}, params(40))[0];
  ASSERT_LT(cut.token_ids.size(), whole.token_ids.size());
  EXPECT_TRUE(std::equal(cut.token_ids.begin(), cut.token_ids.end(), whole.token_ids.begin()));
  EXPECT_EQ(whole.token_ids.size(), 40u);
}

TEST(Ranks, WhatFailsOnOneRankNamesIt) {
  const Make no_memory = [&](const std::shared_ptr<Device>& device, const EngineOptions& options) {
    if (options.rank() == 1) throw OutOfMemory("5 bytes of 4");
    return from(golden("llama"))(device, options);
  };
  {
    const auto ranks = fork_ranks(2, no_memory);
    EXPECT_HAS(test::refusal([&] { no_memory(one_thread(), on(*ranks)); }),
               fmt::format("RankFailed: rank 1 (process {}): 5 bytes of 4", ranks->processes()[0]));
  }
  // Ranks with other caches than rank 0: their engines cannot be used together.
  const Make other = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
    if (options.rank() == 1) options.cache = PagedKVCacheConfig{.max_batch_size = 1, .max_cache_len = 16};
    return from(golden("llama"))(device, options);
  };
  const auto ranks = fork_ranks(2, other);
  EXPECT_HAS(test::refusal([&] { other(one_thread(), on(*ranks)); }), "RankFailed: making the engine: rank 0 has");
}

TEST(Ranks, HeadsThatDoNotDivideAreRefusedByAll) {
  const auto ranks = fork_ranks(3, from(golden("llama")));
  const std::string refusal = test::refusal([&] { from(golden("llama"))(one_thread(), on(*ranks)); });
  EXPECT_HAS(refusal, "InvalidArgument");
  EXPECT_HAS(refusal, "4");
  EXPECT_HAS(refusal, "3");
}

TEST(Ranks, ARankThatIsKilledEndsTheCallAndNotTheProcess) {
  std::vector<int32_t> before;
  for (const bool kills : {false, true, false}) {
    const auto ranks = fork_ranks(3, from(kStories), {.silence_limit_s = 2});
    LLM llm(kStories, one_thread(), on(*ranks));
    if (!kills) {
      const std::vector<int32_t> tokens = llm.generate({"Once upon a time"}, params(20))[0].token_ids;
      if (before.empty()) before = tokens;
      EXPECT_EQ(tokens, before);
      continue;
    }
    int pieces = 0;
    const auto on_text = [&](size_t, std::string_view) {
      if (++pieces == 3) kill(ranks->processes()[1], SIGKILL);
    };
    const std::string expected = fmt::format("RankFailed: rank 2 (process {}) died", ranks->processes()[1]);
    EXPECT_HAS(test::refusal([&] { llm.generate({"Once upon a time"}, params(200), on_text); }), expected);
    EXPECT_HAS(test::refusal([&] { llm.generate({"Again"}, params(1)); }), expected);
  }
}

}  // namespace
}  // namespace eadem::engine
