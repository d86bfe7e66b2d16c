// SPDX-License-Identifier: Apache-2.0
//
// The hardware configuration of a model option by option, and what the factories choose from it.
#include <gtest/gtest.h>

#include <functional>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/modules/modules.h"
#include "tests/support/refusal.h"

namespace eadem::modules {
namespace {

ModelSpec small_spec() {
  return {.hidden = 32, .ffn = 48, .layers = 4, .heads = 4, .kv_heads = 2, .head_dim = 8, .vocab = 64};
}

std::shared_ptr<Device> cpu() { return open_device("cpu", {.num_threads = 1}); }

template <typename T>
void expect_leaf(const ConfigOption<T>& option, const std::type_identity_t<T>& value, OptionSource source,
                 const std::string& set_by) {
  EXPECT_EQ(option.value, value);
  EXPECT_EQ(source_name(option.source), source_name(source));
  EXPECT_EQ(option.set_by, set_by);
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Unsupported& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

TEST(AutoHardwareConfig, ModeDefaultsSayThatTheModeSetThem) {
  const auto device = cpu();
  const auto accuracy = AutoHardwareConfig::from_model_spec(small_spec(), *device, HardwareMode::accuracy);
  const auto performance = AutoHardwareConfig::from_model_spec(small_spec(), *device, HardwareMode::performance);
  for (Role role : kRoles) {
    SCOPED_TRACE(role_name(role));
    const auto& exact = accuracy.of(role).precision;
    EXPECT_EQ(exact.weights.value, DType::f32);
    expect_leaf(exact.activations, DType::f32, OptionSource::mode_default, "accuracy");
    expect_leaf(exact.kv_cache, DType::f32, OptionSource::mode_default, "accuracy");
    expect_leaf(exact.matmul_input, MatmulInput::f32, OptionSource::mode_default, "accuracy");
    const auto& fast = performance.of(role).precision;
    expect_leaf(fast.matmul_input, MatmulInput::int8, OptionSource::mode_default, "performance");
    expect_leaf(fast.activations, device->preferred_activations(), OptionSource::mode_default, "performance");
    if (role == Role::norm)
      expect_leaf(fast.weights, DType::f32, OptionSource::module_override, "RmsNorm");
    else
      expect_leaf(fast.weights, DType::bf16, OptionSource::mode_default, "performance");
    expect_leaf(accuracy.of(role).memory.kv_block_size, int64_t{16}, OptionSource::generic_default, "eadem");
  }
}

// Policy < checkpoint < argument, each on its own option: who is not spoken to keeps what it had.
TEST(AutoHardwareConfig, EachLeafFollowsThePrecedenceAlone) {
  const auto device = cpu();
  ModelSpec spec = small_spec();
  spec.checkpoint_type = DType::f16;
  spec.checkpoint_source = "model.safetensors";
  const std::vector<PolicyRule> policy = {
      {Role::attention, 0, 3, {.weights = DType::f32, .activations = DType::bf16, .kv_block_size = 64}}};

  const auto files = AutoHardwareConfig::from_model_spec(spec, *device, HardwareMode::performance, {}, "", policy);
  const HardwareConfig& by_file = files.of(Role::attention, 1);
  expect_leaf(by_file.precision.weights, DType::f16, OptionSource::checkpoint, "model.safetensors");
  expect_leaf(by_file.precision.activations, DType::bf16, OptionSource::model_policy, "model policy");
  expect_leaf(by_file.memory.kv_block_size, int64_t{64}, OptionSource::model_policy, "model policy");
  // The cache holds what is computed unless somebody says otherwise.
  expect_leaf(by_file.precision.kv_cache, DType::bf16, OptionSource::mode_default, "performance");

  const auto arguments = AutoHardwareConfig::from_model_spec(
      spec, *device, HardwareMode::performance, {.weights = DType::bf16, .kv_cache = DType::f16}, "--weights", policy);
  const HardwareConfig& by_argument = arguments.of(Role::attention, 1);
  expect_leaf(by_argument.precision.weights, DType::bf16, OptionSource::explicit_argument, "--weights");
  expect_leaf(by_argument.precision.kv_cache, DType::f16, OptionSource::explicit_argument, "--weights");
  expect_leaf(by_argument.precision.activations, DType::bf16, OptionSource::model_policy, "model policy");

  // Norms keep their weights exact whatever the file stores and the argument says.
  expect_leaf(arguments.of(Role::norm, 1).precision.weights, DType::f32, OptionSource::module_override, "RmsNorm");
  expect_leaf(arguments.of(Role::norm, 1).precision.kv_cache, DType::f16, OptionSource::explicit_argument, "--weights");
}

TEST(AutoHardwareConfig, ExplicitValuesNameTheirFlag) {
  const auto device = cpu();
  const HardwareOverrides overrides = {.weights = {DType::bf16, "--dtype"},
                                       .activations = DType::f32,
                                       .matmul_input = {MatmulInput::bf16, "--matmul-input"}};
  const auto config = AutoHardwareConfig::from_model_spec(small_spec(), *device, HardwareMode::performance, overrides,
                                                          "engine options");
  const HardwareConfig& mlp = config.of(Role::mlp, 1);
  expect_leaf(mlp.precision.weights, DType::bf16, OptionSource::explicit_argument, "--dtype");
  expect_leaf(mlp.precision.activations, DType::f32, OptionSource::explicit_argument, "engine options");
  expect_leaf(mlp.precision.matmul_input, MatmulInput::bf16, OptionSource::explicit_argument, "--matmul-input");
  EXPECT_EQ(config.of(Role::norm, 1).precision.weights.set_by, "RmsNorm");
}

TEST(AutoHardwareConfig, PolicyRulesApplyToTheirRoleAndLayersOnly) {
  const auto device = cpu();
  const std::vector<PolicyRule> policy = {{Role::mlp, 1, 2, {.weights = DType::f16}}};
  const auto config =
      AutoHardwareConfig::from_model_spec(small_spec(), *device, HardwareMode::accuracy, {}, "", policy);
  for (int layer = -1; layer < 4; ++layer) {
    const bool ruled = layer == 1 || layer == 2;
    EXPECT_EQ(config.of(Role::mlp, layer).precision.weights.value, ruled ? DType::f16 : DType::f32) << layer;
    EXPECT_EQ(config.of(Role::attention, layer).precision.weights.value, DType::f32) << layer;
  }
  // A role that has no layers answers with its one configuration for every layer.
  EXPECT_EQ(&config.of(Role::embedding, 3), &config.of(Role::embedding));
}

TEST(MatmulInput, HasNames) {
  for (MatmulInput input : {MatmulInput::f32, MatmulInput::bf16, MatmulInput::int8})
    EXPECT_EQ(matmul_input_from_name(matmul_input_name(input)), input);
  EXPECT_THROW(matmul_input_from_name("fp8"), InvalidArgument);
  EXPECT_TRUE(may_round_to(MatmulInput::bf16, MatmulInput::int8));
  EXPECT_FALSE(may_round_to(MatmulInput::int8, MatmulInput::bf16));
}

TEST(HardwareConfigLeaf, TheWeakerDoesNotReplaceTheStronger) {
  ConfigOption<DType> option{DType::f32};
  option.set(DType::bf16, OptionSource::explicit_argument, "--weights");
  option.set(DType::f16, OptionSource::checkpoint, "model.safetensors");
  expect_leaf(option, DType::bf16, OptionSource::explicit_argument, "--weights");
  option.set(DType::f16, OptionSource::explicit_argument, "caller");
  expect_leaf(option, DType::f16, OptionSource::explicit_argument, "caller");
}

TEST(HardwareConfigDiff, ListsExactlyTheLeavesThatDiffer) {
  HardwareConfig a, b;
  EXPECT_EQ(diff(a, b), "");
  HardwareOverrides{.weights = DType::bf16}.apply_to(a, OptionSource::checkpoint, "model.safetensors");
  HardwareOverrides{.fuse_residual = false}.apply_to(b, OptionSource::explicit_argument, "--no-fuse");
  EXPECT_EQ(diff(a, b),
            "precision.weights: bf16 (checkpoint, model.safetensors) | f32 (generic default, eadem)\n"
            "compute.fuse_residual: true (generic default, eadem) | false (explicit argument, --no-fuse)\n");
  // Equal values from different hands are no difference.
  HardwareOverrides{.weights = DType::bf16}.apply_to(b, OptionSource::explicit_argument, "--weights");
  EXPECT_EQ(diff(a, b).find("precision.weights"), std::string::npos);
  HardwareOverrides{.rounded_weights = Fp8Encoding::find("fp8_e4m3_block128")}.apply_to(
      b, OptionSource::explicit_argument, "recipe");
  EXPECT_NE(diff(a, b).find("precision.rounded_weights: none (generic default, eadem) | fp8_e4m3_block128 (explicit "
                            "argument, recipe)"),
            std::string::npos);
  EXPECT_EQ(diff(a, b).find("precision.rounded_head"), std::string::npos);
  HardwareOverrides{.rounded_head = &Fp8TensorEncoding::of(Fp8Format::Kind::e4m3, true)}.apply_to(
      b, OptionSource::explicit_argument, "recipe");
  EXPECT_NE(diff(a, b).find("precision.rounded_head: none (generic default, eadem) | fp8_e4m3_delayed (explicit "
                            "argument, recipe)"),
            std::string::npos);
  EXPECT_EQ(options(a).size(), 11u);
}

TEST(AutoHardwareConfig, ComputeLeavesNameTheFusionsTheySwitchOff) {
  const auto device = cpu();
  const auto disabled = [&](const HardwareOverrides& overrides) {
    return AutoHardwareConfig::from_model_spec(small_spec(), *device, HardwareMode::accuracy, overrides)
        .disabled_fusions();
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(disabled({}), Names{});
  EXPECT_EQ(disabled({.fuse_gated_activation = false}), Names{"linear_gated_activation"});
  EXPECT_EQ(disabled({.fuse_residual = false}), (Names{"add_rms_norm", "linear_add"}));
  EXPECT_EQ(disabled({.fuse_rope_append = false}),
            (Names{"rope_append_attention", "rope_qk_append", "rope_kv_append"}));
}

// The decisions that factories add to one graph.
struct Built {
  explicit Built(const CacheSpec& cache = {})
      : device(cpu()),
        hardware(AutoHardwareConfig::from_model_spec(small_spec(), *device, HardwareMode::accuracy)),
        context{.graph = graph, .device = *device, .hardware = hardware, .cache = cache} {
    context.step.query_start = graph.add_input("query_start", TensorType(DType::i32, {Dim(Symbol::sequences, 1)}));
    context.step.kv_length = graph.add_input("kv_length", TensorType(DType::i32, {Symbol::sequences}));
    context.step.groups = {
        {.block_table = graph.add_input("block_table", TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})),
         .slots = graph.add_input("slots", TensorType(DType::i64, {Symbol::tokens}))}};
  }

  std::string chosen() const {
    const Decision& decision = context.decisions.at(0);
    return decision.answers.at(decision.chosen.value()).candidate;
  }

  std::shared_ptr<Device> device;
  AutoHardwareConfig hardware;
  Graph graph;
  BuildContext context;
};

TEST(LinearFactory, RecordsHowWeightsAreStored) {
  for (const DType weights : {DType::f32, DType::bf16, DType::f16}) {
    Built built;
    HardwareConfig hardware;
    hardware.precision.weights.value = weights;
    const ValueId x = built.graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, 32}));
    LinearFactory::build(built.context, {.name = "proj", .in = 32, .out = 16, .hardware = &hardware}, x);
    EXPECT_EQ(built.chosen(), dtype_name(weights));
    EXPECT_EQ(built.context.decisions[0].subject, "linear proj");
  }
}

TEST(LinearFactory, RefusesWeightsThatNoProductReads) {
  for (DType weights : {DType::i32, DType::f64}) {
    Built built;
    HardwareConfig hardware;
    hardware.precision.weights.value = weights;
    const ValueId x = built.graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, 32}));
    const std::string message = message_of(
        [&] { LinearFactory::build(built.context, {.name = "proj", .in = 32, .out = 16, .hardware = &hardware}, x); });
    EXPECT_HAS(message, "linear proj");
    EXPECT_HAS(message, fmt::format("weights are {}", dtype_name(weights)));
    EXPECT_TRUE(built.context.decisions.empty());
  }
}

// An encoding is divided between ranks only where its blocks or groups are.
TEST(LinearFactory, RefusesWeightsThatRanksCannotDivide) {
  const auto message_for = [](const Encoding& encoding, Parallel parallel, int64_t in, int64_t out) {
    Built built;
    built.context.num_ranks = 2;
    HardwareConfig hardware;
    hardware.precision.weights.value = WeightType(DType::f32, &encoding);
    const ValueId x = built.graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, in}));
    return message_of([&] {
      LinearFactory::build(built.context,
                           {.name = "proj", .in = in, .out = out, .parallel = parallel, .hardware = &hardware}, x);
    });
  };
  EXPECT_HAS(message_for(*BlockEncoding::find("q4_k"), Parallel::row, 256, 16),
             "128 values are not whole blocks of 256");
}

TEST(AttentionFactory, BuildsByWhetherThereIsACache) {
  struct Case {
    CacheSpec cache;
    int64_t window;
    const char *strategy, *reason;
  };
  const CacheSpec none, contiguous{CacheLayout::contiguous, 2, 32}, paged{CacheLayout::paged, 8, 16};
  for (const Case& c :
       {Case{none, 0, "direct", "keys of the step"}, Case{none, 8, "direct", "keys of the step, a window of 8"},
        Case{contiguous, 0, "cached", "a contiguous cache"},
        Case{contiguous, 8, "cached", "a contiguous cache, a window of 8"}, Case{paged, 0, "cached", "a paged cache"},
        Case{paged, 8, "cached", "a paged cache, a window of 8"}}) {
    Built built(c.cache);
    const ValueId q = built.graph.add_input("q", TensorType(DType::f32, {Symbol::tokens, 4, 8}));
    const ValueId k = built.graph.add_input("k", TensorType(DType::f32, {Symbol::tokens, 2, 8}));
    const ValueId v = built.graph.add_input("v", TensorType(DType::f32, {Symbol::tokens, 2, 8}));
    AttentionFactory::build(built.context, {.heads = 4, .kv_heads = 2, .head_dim = 8, .window = c.window, .layer = 0},
                            {q, k, v});
    EXPECT_EQ(built.chosen(), c.strategy);
    const Decision& decision = built.context.decisions[0];
    EXPECT_EQ(decision.answers[decision.chosen.value()].verdict.reason, c.reason);
    for (const Decision::Answer& answer : decision.answers) EXPECT_FALSE(answer.verdict.reason.empty());
  }
}

TEST(BuildContext, RanksMustDivideWhatTheyShare) {
  Built built;
  built.context.num_ranks = 2;
  EXPECT_EQ(built.context.share(6, "attention heads"), 3);
  try {
    built.context.share(3, "attention heads");
    FAIL() << "3 heads on 2 ranks";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "3 attention heads do not divide into 2 tensor-parallel ranks");
  }
}

}  // namespace
}  // namespace eadem::modules
