// SPDX-License-Identifier: Apache-2.0
//
// One rank of a model that serves or trains: its part of the graph, of the parameters and of the states, without an
// engine. Weights are random, the same for any number of ranks, or a checkpoint's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "eadem/distributed/thread_communicator.h"
#include "eadem/kernels/sample.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/config/model_config.h"
#include "eadem/models/graphs.h"
#include "eadem/ops/parallel/collectives.h"
#include "eadem/ops/parallel/expert_exchange.h"
#include "eadem/pipeline/program.h"

namespace eadem::test {

inline std::string golden(const std::string& name) { return EADEM_SOURCE_DIR "/tests/data/golden/" + name; }

// A small model whose attention and MLP have biases everywhere.
struct SmallModel {
  int vocab = 512, hidden = 48, ffn = 40, layers = 2, heads = 6, kv_heads = 2;
  bool bias = true, tied = false;

  std::shared_ptr<const models::Model> make() const {
    const std::filesystem::path path =
        std::filesystem::temp_directory_path() /
        fmt::format("eadem_small_{}_{}_{}_{}_{}_{}.json", ::getpid(), vocab, heads, kv_heads, layers, tied);
    std::ofstream(path) << fmt::format(
        R"({{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": {}, "hidden_size": {},
             "intermediate_size": {}, "num_hidden_layers": {}, "num_attention_heads": {}, "num_key_value_heads": {},
             "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
             "hidden_act": "silu", "attention_bias": {}, "mlp_bias": {}, "tie_word_embeddings": {}}})",
        vocab, hidden, ffn, layers, heads, kv_heads, bias, bias, tied);
    auto model = models::model_from_config(path.string());
    std::filesystem::remove(path);
    return model;
  }
};

// The model of a golden whose config.json has other numbers under these keys.
inline std::shared_ptr<const models::Model> changed_model(const std::string& name,
                                                          const std::map<std::string, int64_t>& numbers) {
  const std::string file = golden(name) + "/config.json";
  io::JsonValue json = io::JsonReader::read(file).value();
  for (const auto& [key, number] : numbers) json.set(key, number);
  return models::model_from_config(io::JsonReader::parse(io::to_json(json), file));
}

// State-space layers of 12 heads, which 2, 3 and 4 ranks divide, as they divide those of attention.
inline std::shared_ptr<const models::Model> state_space_model(const std::string& name, int64_t groups) {
  if (name == "falcon_h1_norm")  // the norm stands before the gate
    return changed_model(name, {{"mamba_n_heads", 12},
                                {"mamba_d_head", 4},
                                {"mamba_d_ssm", 48},
                                {"mamba_n_groups", groups},
                                {"num_attention_heads", 12},
                                {"num_key_value_heads", 12}});
  return changed_model("granitemoehybrid", {{"mamba_n_heads", 12},
                                            {"mamba_d_head", 6},
                                            {"mamba_n_groups", groups},
                                            {"num_attention_heads", 12},
                                            {"num_key_value_heads", 12}});
}

inline std::vector<kernels::SampleRow> sample_rows(int64_t rows, bool greedy) {
  std::vector<kernels::SampleRow> result(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; ++i) {
    kernels::SampleRow& row = result[static_cast<size_t>(i)];
    row.position = i;
    row.settings.seed = 17;
    row.settings.temperature = greedy ? 0.0f : 0.8f;
    if (i % 3 == 1) row.settings.top_k = 20;
    if (i % 3 == 2) row.settings.top_p = 0.9f;
  }
  return result;
}

struct Served {
  std::vector<float> logits;   // of this rank, or whole
  std::vector<int32_t> token;  // one per row
  std::vector<float> logprob;
  int64_t state_bytes = 0, parameter_bytes = 0, layout_bytes = 0;
  std::vector<Decision> decisions;
  std::map<std::string, int> ops;  // how often each op stands in the compiled graph
  double sent_bytes = 0;           // of all collectives, as their ops say
};

inline std::vector<int32_t> prompt(int64_t vocab) {
  std::vector<int32_t> ids = {3, 14, 15, 92, 65, 35, 89, 79};
  for (int32_t& id : ids) id = static_cast<int32_t>(id * 7 % vocab);
  return ids;
}

// Prefills one prompt and draws a token after each of its tokens, as this rank. On a stage that has no logits the
// result holds none. `load` fills the store. The spec is the model's, unless one is given.
template <typename Load>
Served serve(const models::Model& model, const Mesh& mesh, bool greedy, const Load& load,
             HardwareMode mode = HardwareMode::accuracy, const std::optional<modules::ModelSpec>& spec = {},
             bool deterministic_across_tp = false) {
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto hardware = modules::AutoHardwareConfig::from_model_spec(spec ? *spec : model.spec(), *device, mode);
  models::BuiltGraph built = models::build_inference_graph(
      model, {.device = device.get(),
              .hardware = &hardware,
              .cache = {.layout = modules::CacheLayout::contiguous, .num_blocks = 1, .block_size = 32, .num_slots = 1},
              .num_ranks = mesh.size(MeshAxis::tp),
              .rank = mesh.rank(MeshAxis::tp),
              .expert_ranks = mesh.size(MeshAxis::ep),
              .expert_rank = mesh.rank(MeshAxis::ep),
              .deterministic_across_tp = deterministic_across_tp});
  const std::vector<int32_t> ids = prompt(model.info().vocab);
  const auto tokens = static_cast<int64_t>(ids.size());
  pipeline::Environment environment{.device = device, .mesh = mesh, .whole_outputs = {"logits"}};
  environment.bounds[Symbol::tokens] = tokens;
  environment.bounds[Symbol::sequences] = 1;
  environment.bounds[Symbol::logit_rows] = tokens;
  environment.bounds[Symbol::max_blocks] = 1;
  auto parameters = std::make_shared<pipeline::ParameterStore>(device, mesh);
  if (deterministic_across_tp) parameters->encode_before_cutting();
  pipeline::Program program(std::move(built.graph), environment, parameters);
  program.require_complete();
  load(*parameters);
  Served result;
  for (const pipeline::Node& node : program.graph().nodes()) {
    ++result.ops[std::string(node.op->name())];
    if (const auto* collective = dynamic_cast<const ops::Collective*>(node.op.get()))
      result.sent_bytes += collective->wire_bytes(program.graph().types_of(node.inputs), environment.bounds);
    if (const auto* exchange = dynamic_cast<const ops::ExpertExchange*>(node.op.get()))
      result.sent_bytes += exchange->wire_bytes(program.graph().types_of(node.inputs), environment.bounds);
  }
  std::map<std::string, Tensor> states;
  for (const auto& [name, id] : program.states()) {
    const TensorType& type = program.graph().value(id).type;
    states[name] = allocate_tensor(*device, type.dtype, type.bind({}));
    device->fill_zero(states[name].view.data, states[name].view.size_bytes());  // no token yet
    program.bind_state(name, states[name].view);
    result.state_bytes += states[name].view.size_bytes();
  }
  result.parameter_bytes = parameters->num_parameters() * 4;
  result.layout_bytes = parameters->size_bytes();
  result.decisions = std::move(built.decisions);

  const auto set = [&](const char* name, const auto& values) {
    program.set_input(program.input(name), values.data(), static_cast<int64_t>(values.size() * sizeof(values[0])));
  };
  std::vector<int32_t> positions(ids.size());
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i);
  set("token_ids", ids);
  set("positions", positions);
  set("query_start", std::vector<int32_t>{0, static_cast<int32_t>(tokens)});
  set("kv_length", std::vector<int32_t>{static_cast<int32_t>(tokens)});
  set("block_table", std::vector<int32_t>{0});
  set("state_slots", std::vector<int32_t>{0});
  set("slots", std::vector<int64_t>(positions.begin(), positions.end()));
  set("logit_rows", positions);
  set("sample_rows", sample_rows(tokens, greedy));
  program.run(environment.bounds);

  const auto has_output = [&](const char* name) {
    for (const pipeline::GraphOutput& output : program.graph().outputs())
      if (output.name == name) return true;
    return false;
  };
  if (!has_output("logits")) return result;
  const auto read = [&]<typename T>(const char* name, std::vector<T>& values) {
    const pipeline::ValueId id = program.output(name);
    values.resize(static_cast<size_t>(program.view(id).num_elements()));
    program.read(id, values.data());
  };
  read("logits", result.logits);
  read("token", result.token);
  read("logprob", result.logprob);
  return result;
}

inline auto random_weights(uint64_t seed) {
  return [seed](pipeline::ParameterStore& store) { models::load_random(store, seed, 0.15); };
}
inline auto weights_of(const models::Checkpoint& checkpoint, bool one_stage = false) {
  return [&checkpoint, one_stage](pipeline::ParameterStore& store) {
    models::load_weights(store, checkpoint, {}, {.one_stage = one_stage});
  };
}

// The largest magnitude.
inline double largest_of(const std::vector<float>& values) {
  double largest = 0;
  for (float value : values) largest = std::max(largest, std::abs(static_cast<double>(value)));
  return largest;
}

// How far two ways to compute a value may lie apart that add the same terms in another grouping. The terms of each
// product's sums are regrouped; a partial sum of n terms carries roundings of 2^-24 of its size, whose signs vary, so
// that sqrt(n) of them are added; `products` of them follow one another on the way to the result, and 8 covers the
// spread and what norms and softmax magnify.
inline double regrouping_bound(double terms, double products, double largest) {
  return 8 * std::sqrt(terms) * 0x1p-24 * products * largest;
}

}  // namespace eadem::test
