// SPDX-License-Identifier: Apache-2.0
//
// Whole layers in one op: which graphs have a decoder_layer, which layers are joined, and that both compute what the
// ops of the model compute, step by step, in double precision.
#include "eadem/fusions/decoder_layers.h"

#include <gtest/gtest.h>

#include <map>

#include "eadem/core/device/device.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/ops/all_ops.h"
#include "eadem/pipeline/passes/join_layers.h"
#include "eadem/pipeline/passes/type_inference.h"
#include "eadem/pipeline/program.h"
#include "tests/support/compare.h"
#include "tests/support/values.h"
#include "tests/workloads/inputs.h"

namespace eadem::pipeline {
namespace {

using kernels::RopeStyle;
using Ports = kernels::DecoderLayerPorts;
using Names = std::vector<std::string>;

constexpr int64_t kBlocks = 5, kBlockSize = 4, kBlocksOfSequence = 3;

// A model's layers, of which each has the numbers of `model`, but for what is said of one of them.
struct ModelShape {
  int layers = 1;
  int64_t hidden = 24, heads = 4, kv_heads = 2, head_dim = 8, ffn = 40;
  const Encoding* encoding = nullptr;  // of the weights
  DType out_dtype = DType::f32;        // of products
  bool residual_first = true;
  // One of the layers (-1: all of them) is another.
  int odd_layer = -1;
  bool qkv_bias = false, out_bias = false, down_bias = false;
  bool qk_norm = false, norm_behind_attention = false, norm_behind_mlp = false;
  bool parallel = false;     // attention and MLP read one norm
  bool narrow_key = false;   // the product of keys rounds its input no further than to bf16
  bool other_table = false;  // rotates by another table
  bool is_plain = false;     // its weights have no encoding
  float eps = 1e-5f;
  // The value of that name is an output of the graph: "q", "k", "mixed", "sum", "mlp_in", "y".
  std::string taken;
};

// The layers as modules build them: reshapes in the scopes of projections, rotations in scopes of their own.
class Model {
 public:
  explicit Model(const ModelShape& shape) : shape_(shape) {
    const ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, shape.hidden}));
    ValueId y = x;
    for (int layer = 0; layer < shape.layers; ++layer) y = add_layer(layer, y);
    graph.mark_output("hidden", y);
  }

  Graph graph;

 private:
  bool is_odd(int layer) const { return shape_.odd_layer < 0 || shape_.odd_layer == layer; }

  ValueId input(const char* name, const TensorType& type) {
    const auto found = graph.find(name);
    return found ? *found : graph.add_input(name, type);
  }
  ValueId table(const char* name) { return input(name, TensorType(DType::f32, {Symbol::tokens, shape_.head_dim})); }

  ValueId norm(const char* name, ValueId x, int64_t width, float eps) {
    const Graph::Scope scope(graph, name);
    return graph.add1(std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{eps}),
                      {x, graph.add_parameter(graph.scoped_name("weight"), TensorType(DType::f32, {width}))});
  }
  ValueId linear(const char* name, ValueId x, int64_t in, int64_t out, bool bias,
                 MatmulInput input = MatmulInput::int8) {
    const Graph::Scope scope(graph, name);
    const Encoding* encoding = in_odd_layer_ && shape_.is_plain ? nullptr : shape_.encoding;
    const ValueId weight =
        graph.add_parameter(graph.scoped_name("weight"), TensorType(DType::f32, {out, in}, encoding));
    const ValueId b = bias ? graph.add_parameter(graph.scoped_name("bias"), TensorType(DType::f32, {out})) : kNoValue;
    return graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias, shape_.out_dtype, input}),
                      {x, weight, b});
  }
  ValueId reshape(const char* name, ValueId x, std::vector<int64_t> trailing) {
    const Graph::Scope scope(graph, name);
    return graph.add1(std::make_shared<ops::Reshape>(std::move(trailing)), {x});
  }
  ValueId rotate(const char* name, ValueId x, ValueId table) {
    const Graph::Scope scope(graph, name);
    return graph.add1(std::make_shared<ops::Rope>(kernels::RopeAttrs{RopeStyle::rotate_half, shape_.head_dim}),
                      {x, table});
  }
  ValueId add(ValueId residual, ValueId x) {
    return graph.add1(std::make_shared<ops::Add>(),
                      shape_.residual_first ? std::vector{residual, x} : std::vector{x, residual});
  }
  ValueId taken(const char* name, int layer, ValueId value) {
    if (shape_.taken == name && is_odd(layer)) graph.mark_output(name, value);
    return value;
  }

  ValueId attention(int layer, ValueId normed) {
    const ModelShape& s = shape_;
    const Graph::Scope scope(graph, "self_attn");
    const bool odd = is_odd(layer);
    const ValueId angles = table(odd && s.other_table ? "other_table" : "table");
    const auto each = [&](const char* name, int64_t heads, MatmulInput input) {
      const ValueId flat = linear(name, normed, s.hidden, heads * s.head_dim, odd && s.qkv_bias, input);
      return reshape(name, flat, {heads, s.head_dim});
    };
    const auto key_input = odd && s.narrow_key ? MatmulInput::bf16 : MatmulInput::int8;
    ValueId q = taken("q", layer, each("q_proj", s.heads, MatmulInput::int8));
    if (odd && s.qk_norm) q = norm("q_norm", q, s.head_dim, s.eps);
    q = rotate("q_rope", q, angles);
    ValueId k = taken("k", layer, each("k_proj", s.kv_heads, key_input));
    if (odd && s.qk_norm) k = norm("k_norm", k, s.head_dim, s.eps);
    k = rotate("k_rope", k, angles);
    const ValueId v = each("v_proj", s.kv_heads, MatmulInput::int8);

    const TensorType cache(DType::f32, {kBlocks, s.kv_heads, kBlockSize, s.head_dim});
    const std::vector<ValueId> caches =
        graph.add(std::make_shared<ops::KvAppend>(), {k, v, input("slots", TensorType(DType::i64, {Symbol::tokens})),
                                                      graph.add_state(fmt::format("cache_k.{}", layer), cache),
                                                      graph.add_state(fmt::format("cache_v.{}", layer), cache)});
    const kernels::AttentionAttrs attrs{.heads = s.heads,
                                        .kv_heads = s.kv_heads,
                                        .head_dim = s.head_dim,
                                        .scale = 0.35f,
                                        .source = kernels::KvSource::cached};
    const ValueId mixed = graph.add1(std::make_shared<ops::Attention>(attrs),
                                     {q, caches[0], caches[1], input("query_start", TensorType(DType::i32, {2})),
                                      input("kv_length", TensorType(DType::i32, {1})),
                                      input("block_table", TensorType(DType::i32, {1, kBlocksOfSequence}))});
    const ValueId flat = reshape("", taken("mixed", layer, mixed), {s.heads * s.head_dim});
    return linear("o_proj", flat, s.heads * s.head_dim, s.hidden, odd && s.out_bias);
  }

  ValueId mlp(int layer, ValueId normed) {
    const Graph::Scope scope(graph, "mlp");
    const ValueId gate = linear("gate_proj", normed, shape_.hidden, shape_.ffn, false),
                  up = linear("up_proj", normed, shape_.hidden, shape_.ffn, false);
    const ValueId gated = graph.add1(std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{}), {gate, up});
    return linear("down_proj", gated, shape_.ffn, shape_.hidden, is_odd(layer) && shape_.down_bias);
  }

  ValueId add_layer(int layer, ValueId x) {
    const Graph::Scope scope(graph, fmt::format("layers.{}", layer), layer);
    const bool odd = in_odd_layer_ = is_odd(layer);
    const float eps = odd ? shape_.eps : 1e-5f;
    const ValueId normed = norm("input_norm", x, shape_.hidden, eps);
    ValueId attended = attention(layer, normed);
    if (odd && shape_.norm_behind_attention) attended = norm("attention_norm", attended, shape_.hidden, eps);
    const ValueId sum = taken("sum", layer, add(x, attended));
    const ValueId mlp_in =
        taken("mlp_in", layer, odd && shape_.parallel ? normed : norm("mlp_norm", sum, shape_.hidden, eps));
    ValueId made = mlp(layer, mlp_in);
    if (odd && shape_.norm_behind_mlp) made = norm("post_norm", made, shape_.hidden, eps);
    return taken("y", layer, add(sum, made));
  }

  ModelShape shape_;
  bool in_odd_layer_ = false;
};

SymbolValues one_token() {
  SymbolValues symbols;
  symbols[Symbol::tokens] = 1;
  return symbols;
}

// The device that computes by definition has kernels for every fusion.
const Device& reference_device() {
  static const std::shared_ptr<Device> reference = open_device("reference");
  return *reference;
}

Names ops_of(const Graph& graph) {
  Names names;
  for (const Node& node : graph.nodes()) names.emplace_back(node.op->name());
  return names;
}

// Fuses, and returns the decisions about decoder_layer.
std::vector<FusionDecision> fuse_layers(Graph& graph, Names disabled = {}) {
  infer_types(graph);
  std::vector<FusionDecision> decisions =
      fuse(graph, reference_device(), one_token(), {.disabled = std::move(disabled)});
  std::erase_if(decisions, [](const FusionDecision& decision) { return decision.fusion != "decoder_layer"; });
  return decisions;
}

std::vector<FusionDecision> join(Graph& graph, const Names& disabled = {}) {
  fuse_layers(graph);
  return join_layers(graph, reference_device(), one_token(), disabled);
}

TEST(DecoderLayer, ALayerOfALlamaIsOneOp) {
  for (const bool residual_first : {true, false}) {
    Graph graph = Model({.layers = 2, .residual_first = residual_first}).graph;
    const std::vector<FusionDecision> decisions = fuse_layers(graph);
    ASSERT_EQ(ops_of(graph), (Names{"decoder_layer", "decoder_layer"}));
    ASSERT_EQ(decisions.size(), 2u);
    EXPECT_TRUE(decisions[1].applied);
    EXPECT_EQ(decisions[1].scope, "layers.1");

    const Node &first = graph.nodes()[0], &second = graph.nodes()[1];
    EXPECT_EQ(first.scope, "layers.0");
    EXPECT_EQ(first.layer, 0);
    EXPECT_EQ(first.first_layer, -1);
    Names names;
    for (const ValueId id : second.inputs) names.push_back(graph.value(id).name);
    EXPECT_EQ(names,
              (Names{graph.value(first.outputs[0]).name, "table", "slots", "query_start", "kv_length", "block_table",
                     "layers.1.input_norm.weight", "layers.1.self_attn.q_proj.weight",
                     "layers.1.self_attn.k_proj.weight", "layers.1.self_attn.v_proj.weight", "cache_k.1", "cache_v.1",
                     "layers.1.self_attn.o_proj.weight", "layers.1.mlp_norm.weight", "layers.1.mlp.gate_proj.weight",
                     "layers.1.mlp.up_proj.weight", "layers.1.mlp.down_proj.weight"}));
    EXPECT_EQ(second.outputs[0], graph.outputs()[0].value);
  }
}

TEST(DecoderLayer, OtherLayersStayApart) {
  const std::pair<const char*, ModelShape> others[] = {{"bias of q, k, v", {.qkv_bias = true}},
                                                       {"bias of the output", {.out_bias = true}},
                                                       {"bias of the MLP", {.down_bias = true}},
                                                       {"norms of q and k", {.qk_norm = true}},
                                                       {"norm behind attention", {.norm_behind_attention = true}},
                                                       {"norm behind the MLP", {.norm_behind_mlp = true}},
                                                       {"attention beside the MLP", {.parallel = true}},
                                                       {"q is an output", {.taken = "q"}},
                                                       {"k is an output", {.taken = "k"}},
                                                       {"what is attended to is an output", {.taken = "mixed"}},
                                                       {"the sum is an output", {.taken = "sum"}},
                                                       {"what the MLP reads is an output", {.taken = "mlp_in"}}};
  for (const auto& [name, shape] : others) {
    SCOPED_TRACE(name);
    Graph graph = Model(shape).graph;
    EXPECT_TRUE(fuse_layers(graph).empty());
  }
}

TEST(DecoderLayer, ALayerThatIsAnOutputIsOneOp) {
  Graph graph = Model({.layers = 2, .odd_layer = 0, .taken = "y"}).graph;
  fuse_layers(graph);
  EXPECT_EQ(ops_of(graph), (Names{"decoder_layer", "decoder_layer"}));
}

TEST(DecoderLayer, ProductsThatRoundDifferentlyAreARefusal) {
  Graph graph = Model({.narrow_key = true}).graph;
  const std::vector<FusionDecision> decisions = fuse_layers(graph);
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_FALSE(decisions[0].applied);
  EXPECT_EQ(decisions[0].reason, "attributes of the matched ops do not fit");
}

// Where decoder_layer is switched off, the other fusions match the ops of the layer.
TEST(DecoderLayer, SwitchedOffItLeavesTheOtherFusionsTheirPlaces) {
  Graph graph = Model({}).graph;
  const std::vector<FusionDecision> decisions = fuse_layers(graph, {"decoder_layer"});
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].reason, "switched off");
  EXPECT_EQ(ops_of(graph), (Names{"rms_norm", "linear_qkv", "reshape", "reshape", "reshape", "rope_append_attention",
                                  "reshape", "linear_add", "rms_norm", "linear_gated_activation", "linear_add"}));
}

TEST(JoinLayers, LayersAreOneOp) {
  Graph graph = Model({.layers = 3}).graph;
  Graph apart = graph;
  fuse_layers(apart);
  const std::vector<FusionDecision> decisions = join(graph);
  ASSERT_EQ(ops_of(graph), Names{"decoder_layers"});
  const Node& node = graph.nodes()[0];
  EXPECT_EQ(dynamic_cast<const fusions::DecoderLayers&>(*node.op).layers(), 3u);
  EXPECT_EQ(node.scope, "layers.0 - layers.2");
  EXPECT_EQ(node.first_layer, 0);
  EXPECT_EQ(node.layer, 2);

  // Its ports are those of the layers.
  ASSERT_EQ(node.inputs.size(), Ports::input(3, Ports::OfLayer{}));
  ASSERT_EQ(Ports::layers(node.inputs.size()), 3u);
  for (size_t port = 0; port < Ports::kSharedInputs; ++port)
    EXPECT_EQ(node.inputs[port], apart.nodes()[0].inputs[port]);
  for (size_t layer = 0; layer < 3; ++layer) {
    for (size_t port = 0; port < Ports::kLayerInputs; ++port) {
      const auto of_layer = static_cast<Ports::OfLayer>(port);
      EXPECT_EQ(node.inputs[Ports::input(layer, of_layer)], apart.nodes()[layer].inputs[Ports::input(0, of_layer)]);
    }
    for (const auto port : {Ports::kCacheK, Ports::kCacheV})
      EXPECT_EQ(node.outputs[Ports::output(layer, port)], apart.nodes()[layer].outputs[Ports::output(0, port)]);
  }
  EXPECT_EQ(node.outputs[0], apart.nodes()[2].outputs[0]);

  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_TRUE(decisions[0].applied);
  EXPECT_EQ(decisions[0].fusion, "decoder_layers");
  EXPECT_EQ(decisions[0].scope, node.scope);
  EXPECT_EQ(decisions[0].kept_inside,
            (Names{apart.value(apart.nodes()[0].outputs[0]).name, apart.value(apart.nodes()[1].outputs[0]).name}));
}

TEST(JoinLayers, OneLayerStaysAsItIs) {
  Graph graph = Model({}).graph;
  EXPECT_TRUE(join(graph).empty());
  EXPECT_EQ(ops_of(graph), Names{"decoder_layer"});
}

TEST(JoinLayers, AnOutputBetweenLayersEndsARun) {
  Graph graph = Model({.layers = 5, .odd_layer = 1, .taken = "y"}).graph;
  const std::vector<FusionDecision> decisions = join(graph);
  ASSERT_EQ(ops_of(graph), (Names{"decoder_layers", "decoder_layers"}));
  EXPECT_EQ(graph.nodes()[0].scope, "layers.0 - layers.1");
  EXPECT_EQ(graph.nodes()[1].scope, "layers.2 - layers.4");
  EXPECT_EQ(decisions.size(), 2u);
}

TEST(JoinLayers, ALayerWithOtherAttributesIsNotJoined) {
  for (const ModelShape& shape : {ModelShape{.layers = 4, .odd_layer = 1, .eps = 1e-3f},
                                  ModelShape{.layers = 4, .odd_layer = 1, .other_table = true}}) {
    Graph graph = Model(shape).graph;
    join(graph);
    ASSERT_EQ(ops_of(graph), (Names{"decoder_layer", "decoder_layer", "decoder_layers"}));
    EXPECT_EQ(graph.nodes()[2].scope, "layers.2 - layers.3");
  }
}

// A file may keep some of its layers in more bits.
TEST(JoinLayers, LayersWithWeightsOfOtherTypesAreJoined) {
  Graph graph = Model({.layers = 3,
                       .hidden = 32,
                       .ffn = 64,
                       .encoding = GroupEncoding::find("int4_g32_f16"),
                       .odd_layer = 1,
                       .is_plain = true})
                    .graph;
  join(graph);
  EXPECT_EQ(ops_of(graph), Names{"decoder_layers"});
}

TEST(JoinLayers, ALayerOfOtherOpsIsNotJoined) {
  Graph graph = Model({.layers = 4, .odd_layer = 0, .qk_norm = true}).graph;
  join(graph);
  EXPECT_EQ(graph.nodes().back().op->name(), "decoder_layers");
  EXPECT_EQ(graph.nodes().back().scope, "layers.1 - layers.3");
}

TEST(JoinLayers, ARunGrowsAsFarAsAKernelTakesIt) {
  // A layer has 40 Mi numbers, of which the reference device takes 128 Mi in one op.
  const ModelShape shape{.layers = 7, .hidden = 2048, .heads = 16, .kv_heads = 16, .head_dim = 128, .ffn = 4096};
  Graph graph = Model(shape).graph;
  const std::vector<FusionDecision> decisions = join(graph);
  ASSERT_EQ(ops_of(graph), (Names{"decoder_layers", "decoder_layers", "decoder_layer"}));
  EXPECT_EQ(graph.nodes()[0].scope, "layers.0 - layers.2");
  EXPECT_EQ(graph.nodes()[1].scope, "layers.3 - layers.5");
  Names scopes;
  for (const FusionDecision& decision : decisions) scopes.push_back(decision.scope);
  EXPECT_EQ(scopes,
            (Names{"layers.0 - layers.2", "layers.0 - layers.3", "layers.3 - layers.5", "layers.3 - layers.6"}));
  EXPECT_TRUE(decisions[0].applied);
  EXPECT_FALSE(decisions[1].applied);
  EXPECT_NE(decisions[1].reason.find("in double"), std::string::npos) << decisions[1].reason;
}

TEST(JoinLayers, WhereNoKernelTakesTwoEachStaysAlone) {
  // A layer has 112 Mi numbers.
  Graph graph = Model({.layers = 2, .hidden = 4096, .heads = 32, .kv_heads = 8, .head_dim = 128, .ffn = 6144}).graph;
  const std::vector<FusionDecision> decisions = join(graph);
  EXPECT_EQ(ops_of(graph), (Names{"decoder_layer", "decoder_layer"}));
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_FALSE(decisions[0].applied);
  EXPECT_EQ(graph.nodes()[1].scope, "layers.1");
}

TEST(JoinLayers, JoinedLayersCanBeSwitchedOff) {
  for (const char* name : {"decoder_layers", "all"}) {
    Graph graph = Model({.layers = 2}).graph;
    const std::vector<FusionDecision> decisions = join(graph, {name});
    EXPECT_EQ(ops_of(graph), (Names{"decoder_layer", "decoder_layer"}));
    ASSERT_EQ(decisions.size(), 1u);
    EXPECT_EQ(decisions[0].reason, "switched off");
  }
}

// Computes a graph op by op with the ops' references. States keep what was written.
class Interpreter {
 public:
  explicit Interpreter(const Graph& graph, uint64_t seed = 3) : graph_(graph) {
    for (const Value& value : graph.values()) {
      if (value.kind == Value::Kind::parameter) {
        tensors_[value.name] = parameter(value, ++seed);
        values_[value.name] = test::widen(tensors_[value.name].view);
      } else if (value.kind == Value::Kind::state) {
        values_[value.name] = test::widen(workloads::random_tensor(value.type.dtype, value.type.bind({}), ++seed).view);
      }
    }
  }

  const std::map<std::string, Tensor>& parameters() const { return tensors_; }
  void set(const std::string& name, test::RefTensor value) { values_[name] = std::move(value); }
  const test::RefTensor& get(const std::string& name) const { return values_.at(name); }

  // Runs a step, after which get(name of an output or a state) is what it made.
  void run() {
    std::map<ValueId, test::RefTensor> made;
    std::map<ValueId, std::string> state_of;  // values that are a state, changed
    const auto value_of = [&](ValueId id) -> test::RefTensor {
      if (id == kNoValue) return {};
      const auto found = made.find(id);
      return found != made.end() ? found->second : values_.at(graph_.value(id).name);
    };
    for (const Node& node : graph_.nodes()) {
      std::vector<test::RefTensor> inputs, outputs;
      for (const ValueId id : node.inputs) inputs.push_back(value_of(id));
      const std::vector<ops::Port> ports = node.op->outputs();
      for (size_t i = 0; i < ports.size(); ++i) {
        const bool is_state = ports[i].role == ops::Port::Role::state;
        if (!is_state) {
          outputs.push_back(test::zeros(graph_.value(node.outputs[i]).type.bind(one_token())));
          continue;
        }
        const auto input = static_cast<size_t>(node.op->inference_alias(static_cast<int>(i)));
        outputs.push_back(inputs[input]);
        state_of[node.outputs[i]] = graph_.value(node.inputs[input]).name;
      }
      node.op->reference(Pass::inference, inputs, outputs);
      for (size_t i = 0; i < outputs.size(); ++i) made[node.outputs[i]] = std::move(outputs[i]);
    }
    for (const auto& [id, state] : state_of) values_[state] = made.at(id);
    for (const GraphOutput& output : graph_.outputs()) values_[output.name] = made.at(output.value);
  }

 private:
  static Tensor parameter(const Value& value, uint64_t seed) {
    Tensor plain = workloads::random_tensor(DType::f32, value.type.bind({}), seed);
    if (value.type.encoding == nullptr) return plain;
    Tensor encoded = Tensor::on_host(DType::f32, plain.shape(), *value.type.encoding);
    value.type.encoding->encode(encoded.view, plain.view);
    return encoded;
  }

  const Graph& graph_;
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, test::RefTensor> values_;
};

constexpr int64_t kSequenceBlocks[kBlocksOfSequence] = {3, 0, 4};

// The inputs of the step whose token has position `position`, by name, as host tensors.
std::map<std::string, Tensor> step_inputs(const ModelShape& shape, int64_t position) {
  const auto numbers = [](DType dtype, const Shape& dims, std::vector<double> data) {
    return test::narrow({dims, std::move(data)}, dtype);
  };
  std::vector<double> angles;
  for (int64_t i = 0; i < shape.head_dim; ++i) {
    const double angle = static_cast<double>(position) * std::pow(10.0, -static_cast<double>(i % (shape.head_dim / 2)));
    angles.push_back(i < shape.head_dim / 2 ? std::cos(angle) : std::sin(angle));
  }
  const int64_t slot = kSequenceBlocks[position / kBlockSize] * kBlockSize + position % kBlockSize;
  std::map<std::string, Tensor> inputs;
  inputs["x"] = workloads::random_tensor(DType::f32, Shape{1, shape.hidden}, 100 + static_cast<uint64_t>(position));
  inputs["table"] = numbers(DType::f32, Shape{1, shape.head_dim}, angles);
  inputs["slots"] = numbers(DType::i64, Shape{1}, {static_cast<double>(slot)});
  inputs["query_start"] = numbers(DType::i32, Shape{2}, {0, 1});
  inputs["kv_length"] = numbers(DType::i32, Shape{1}, {static_cast<double>(position + 1)});
  inputs["block_table"] =
      numbers(DType::i32, Shape{1, kBlocksOfSequence}, {kSequenceBlocks, kSequenceBlocks + kBlocksOfSequence});
  return inputs;
}

constexpr int64_t kPositions = 10;  // in three blocks

TEST(DecoderLayers, TheReferenceIsThatOfTheModelsOps) {
  for (const int layers : {1, 3}) {
    const ModelShape shape{.layers = layers};
    Graph plain = Model(shape).graph, fused = plain;
    infer_types(plain);
    join(fused);
    ASSERT_EQ(ops_of(fused), Names{layers == 1 ? "decoder_layer" : "decoder_layers"});
    Interpreter expected(plain), actual(fused);
    for (int64_t position = 0; position < kPositions; ++position) {
      SCOPED_TRACE(fmt::format("{} layers, position {}", layers, position));
      for (const auto& [name, tensor] : step_inputs(shape, position)) {
        expected.set(name, test::widen(tensor.view));
        actual.set(name, test::widen(tensor.view));
      }
      expected.run();
      actual.run();
      EXPECT_CLOSE(actual.get("hidden"), expected.get("hidden"), test::Tolerance::exact());
      for (int layer = 0; layer < layers; ++layer)
        for (const char* cache : {"cache_k", "cache_v"}) {
          const std::string name = fmt::format("{}.{}", cache, layer);
          EXPECT_CLOSE(actual.get(name), expected.get(name), test::Tolerance::exact());
        }
    }
  }
}

// A program whose one op is the layers, on the device that computes by definition: the numbers of the model's ops,
// rounded once. Caches are rounded where a step ends.
TEST(DecoderLayers, AProgramOfThemComputesTheModel) {
  for (const Encoding* encoding :
       {static_cast<const Encoding*>(nullptr), static_cast<const Encoding*>(GroupEncoding::find("int4_g32_f16"))}) {
    const ModelShape shape{.layers = 3, .hidden = 32, .ffn = 64, .encoding = encoding};
    Graph plain = Model(shape).graph;
    const std::shared_ptr<Device> own = open_device("reference");
    const auto parameters = std::make_shared<ParameterStore>(own);
    Program program(plain, {.device = own, .mesh = {}, .mode = Mode::inference, .bounds = one_token()}, parameters);
    ASSERT_EQ(ops_of(program.graph()), Names{"decoder_layers"});
    infer_types(plain);
    Interpreter expected(plain);
    for (const auto& [name, tensor] : expected.parameters()) parameters->load(name, tensor.view, "test");
    std::map<std::string, Tensor> states;
    for (const auto& [name, id] : program.states()) {
      states[name] = test::narrow(expected.get(name), DType::f32);
      program.bind_state(name, states[name].view);
    }
    for (int64_t position = 0; position < kPositions; ++position) {
      for (const auto& [name, tensor] : step_inputs(shape, position)) {
        expected.set(name, test::widen(tensor.view));
        program.set_input(program.input(name), tensor.view.data, tensor.view.size_bytes());
      }
      expected.run();
      program.run(one_token());
      EXPECT_TRUE(test::same_bits(program.view(program.output("hidden")),
                                  test::narrow(expected.get("hidden"), DType::f32).view))
          << position;
      for (const auto& [name, state] : states) {
        const Tensor rounded = test::narrow(expected.get(name), DType::f32);
        EXPECT_TRUE(test::same_bits(state.view, rounded.view)) << name << " " << position;
        expected.set(name, test::widen(rounded.view));
      }
    }
  }
}

TEST(DecoderLayers, PortsAreThoseOfTheLayers) {
  const kernels::DecoderLayerAttrs attrs{
      .attention = {.rope = {RopeStyle::rotate_half, 8},
                    .attention = {.heads = 4, .kv_heads = 2, .head_dim = 8, .source = kernels::KvSource::cached}}};
  const fusions::DecoderLayers three(attrs, 3);
  const std::vector<ops::Port> in = three.inputs(), out = three.outputs();
  ASSERT_EQ(in.size(), Ports::kSharedInputs + 3 * Ports::kLayerInputs);
  ASSERT_EQ(out.size(), 1 + 3 * Ports::kLayerOutputs);
  EXPECT_EQ(in[Ports::kBlockTable].name, "block_table");
  EXPECT_EQ(in[Ports::input(2, Ports::kDownWeight)].name, "down_weight.2");
  EXPECT_EQ(in[Ports::input(1, Ports::kQWeight)].role, ops::Port::Role::parameter);
  EXPECT_EQ(three.inference_alias(0), -1);
  for (size_t layer = 0; layer < 3; ++layer)
    for (const auto port : {Ports::kCacheK, Ports::kCacheV}) {
      EXPECT_EQ(out[Ports::output(layer, port)].role, ops::Port::Role::state);
      EXPECT_EQ(three.inference_alias(static_cast<int>(Ports::output(layer, port))),
                static_cast<int>(Ports::input(layer, port)));
    }
}

TEST(DecoderLayers, OnlyLayersWithTheSameAttributesJoin) {
  const kernels::DecoderLayerAttrs attrs{
      .attention = {.rope = {RopeStyle::rotate_half, 8}, .attention = {.heads = 4, .kv_heads = 2, .head_dim = 8}}};
  const fusions::DecoderLayer one(attrs);
  const fusions::DecoderLayers two(attrs, 2);
  EXPECT_EQ(dynamic_cast<const fusions::DecoderLayers&>(*fusions::join_decoder_layers(two, one)).layers(), 3u);
  EXPECT_EQ(dynamic_cast<const fusions::DecoderLayers&>(*fusions::join_decoder_layers(two, two)).layers(), 4u);
  EXPECT_EQ(fusions::join_decoder_layers(one, ops::Add()), nullptr);
  kernels::DecoderLayerAttrs other = attrs;
  other.gated.kind = kernels::ActivationKind::gelu;
  EXPECT_EQ(fusions::join_decoder_layers(one, fusions::DecoderLayer(other)), nullptr);
}

// The joined op has the types and the work of its layers. What they share is read once; nothing between them is moved.
TEST(DecoderLayers, TypesAndCostsAreThoseOfTheLayers) {
  Graph graph = Model({.layers = 3}).graph, apart = graph;
  fuse_layers(apart);
  join(graph);
  ops::Cost expected;
  for (const Node& node : apart.nodes())
    expected += node.op->cost(Pass::inference, apart.types_of(node.inputs), apart.types_of(node.outputs), one_token());
  const Node& node = graph.nodes()[0];
  const std::vector<TensorType> in = graph.types_of(node.inputs), out = graph.types_of(node.outputs);
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], apart.value(node.outputs[i]).type) << i;
  for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(node.op->wanted_dtype(in, static_cast<int>(i)), in[i].dtype) << i;
  const ops::Cost cost = node.op->cost(Pass::inference, in, out, one_token());
  EXPECT_DOUBLE_EQ(cost.flops, expected.flops);
  double shared = 0;
  for (const auto port : {Ports::kTable, Ports::kSlots, Ports::kQueryStart, Ports::kKvLength, Ports::kBlockTable})
    shared += static_cast<double>(in[port].size_bytes(one_token()));
  const double between = static_cast<double>(in[Ports::kX].size_bytes(one_token()));
  EXPECT_DOUBLE_EQ(cost.bytes, expected.bytes - 2 * (shared + 2 * between));

  std::vector<TensorType> wrong = in;
  wrong[Ports::input(2, Ports::kDownWeight)] = TensorType(DType::f32, {40, 24});
  EXPECT_THROW((void)node.op->infer_types(wrong), InvalidArgument);
}

}  // namespace
}  // namespace eadem::pipeline
