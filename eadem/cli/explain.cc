// SPDX-License-Identifier: Apache-2.0
//
// eadem explain: which kernels would run for a model on a device, and why.
#include <algorithm>
#include <map>

#include "eadem/cli/commands.h"
#include "eadem/cli/explain_ranks.h"
#include "eadem/cli/load_llm.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/options/model_options.h"
#include "eadem/cli/terminal.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/io/json.h"
#include "eadem/pipeline/passes/precision.h"

namespace eadem::cli {

namespace {

using io::JsonValue;
using pipeline::Program;

// The engine refuses more tokens in a step, sequences in a batch, or tokens in a context.
constexpr int64_t kMostTokens = int64_t{1} << 24;

// One op of the program, as it is shown.
struct StepText {
  int layer;
  int first_layer;  // of several layers in one op the first, else -1; `layer` is the last
  std::string scope;
  std::string op;      // "linear"
  std::string kernel;  // "" when no kernel accepts, "view" when nothing runs
  std::string types;   // "f32 [tokens, 64], bf16/packed [64, 64] -> f32 [tokens, 64]"
  double flops = 0, bytes = 0, roofline_seconds = 0, modelled_us = 0;
  const Decision* decision = nullptr;
};

// Ports of an op with more inputs are shown by type: those of whole layers.
constexpr size_t kMostPortsInOrder = 16;

std::string types_text(const pipeline::KernelChoice& choice) {
  const bool by_type = choice.inputs.size() > kMostPortsInOrder;
  const auto list = [&](const std::vector<TensorType>& types) {
    std::vector<std::pair<std::string, int>> texts;
    for (const TensorType& type : types) {
      if (type.rank() == 0) continue;  // an optional port that nothing is connected to
      const auto same = [text = to_string(type)](const auto& other) { return other.first == text; };
      const auto found = by_type ? std::find_if(texts.begin(), texts.end(), same) : texts.end();
      if (found == texts.end())
        texts.emplace_back(to_string(type), 1);
      else
        ++found->second;
    }
    std::string text;
    for (const auto& [type, count] : texts)
      text += (text.empty() ? "" : ", ") + (count > 1 ? fmt::format("{} x {}", count, type) : type);
    return text;
  };
  return list(choice.inputs) + " -> " + list(choice.outputs);
}

std::vector<StepText> steps_of(const Program& program, const DeviceRates& rates) {
  std::vector<StepText> steps;
  for (size_t n = 0; n < program.graph().nodes().size(); ++n) {
    const pipeline::Node& node = program.graph().nodes()[n];
    const pipeline::KernelChoice& choice = program.choices()[n];
    StepText step{
        .layer = node.layer, .first_layer = node.first_layer, .scope = node.scope, .op = std::string(node.op->name())};
    if (const std::string attributes = node.op->attrs_text(); !attributes.empty()) step.op += " (" + attributes + ")";
    if (node.op->is_view()) {
      step.kernel = "view";
    } else {
      step.kernel = choice.kernel != nullptr ? std::string(choice.kernel->name) : "";
      step.types = types_text(choice);
      step.flops = choice.cost.flops;
      step.bytes = choice.cost.bytes;
      step.roofline_seconds = std::max(step.flops / rates.flops_per_second, step.bytes / rates.bytes_per_second);
      if (choice.decision.chosen) step.modelled_us = choice.decision.answers[*choice.decision.chosen].verdict.cost_us;
      step.decision = &choice.decision;
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

// Returns `text` with the number of layer `layer` replaced by a placeholder, so that equal layers have equal texts.
std::string without_layer(std::string text, int layer) {
  if (layer < 0) return text;
  const std::string number = "layers." + std::to_string(layer);
  for (size_t at = text.find(number); at != std::string::npos; at = text.find(number, at)) {
    const size_t end = at + number.size();
    if (end < text.size() && text[end] != '.') {
      at = end;
      continue;
    }
    text.replace(at, number.size(), "layers.N");
  }
  return text;
}

// Returns `text` with the numbers of all layers replaced, so that what is said of each layer is one text.
std::string without_layers(std::string text) {
  for (size_t at = text.find("layers."); at != std::string::npos; at = text.find("layers.", at + 7)) {
    size_t end = at + 7;
    while (end < text.size() && text[end] >= '0' && text[end] <= '9') ++end;
    text.replace(at, end - at, "layers.N");
  }
  return text;
}

std::string decision_text(const Decision& decision, const std::string& indent) {
  std::string text;
  for (const Decision::Answer& answer : decision.answers)
    if (!answer.verdict.accepted)
      text += fmt::format("{}{}: no, {}\n", indent, answer.candidate, answer.verdict.reason);
  return text;
}

std::string step_text(const StepText& step) {
  const std::string scope = step.first_layer >= 0 ? step.scope : without_layer(step.scope, step.layer);
  if (step.kernel == "view") return fmt::format("  {:<34} {:<40} view: nothing runs\n", scope, step.op);
  std::string text = fmt::format("  {:<34} {:<40} {:<18} {:>8} flop {:>8} {:>8}\n", scope, step.op,
                                 step.kernel.empty() ? "NO KERNEL" : step.kernel, count_text(step.flops),
                                 bytes_text(step.bytes), seconds_text(step.roofline_seconds));
  text += fmt::format("      {}\n", step.types);
  return text + decision_text(*step.decision, "      ");
}

// Prints the steps in order; equal neighbouring layers are printed once, with their number.
std::string steps_text(const std::vector<StepText>& steps, bool all) {
  std::map<int, std::string> layers;
  for (const StepText& step : steps)
    if (step.layer >= 0 && step.first_layer < 0) layers[step.layer] += step_text(step);
  std::string text;
  int printed = -1;
  for (const StepText& step : steps) {
    if (step.layer < 0) {
      text += step_text(step);
    } else if (step.first_layer >= 0) {
      text += bold(fmt::format("layers {}–{} (one op)\n", step.first_layer, step.layer)) + step_text(step);
      printed = step.layer;
    } else if (step.layer > printed) {
      int last = step.layer;
      while (!all && layers.contains(last + 1) && layers.at(last + 1) == layers.at(step.layer)) ++last;
      text += bold(last == step.layer
                       ? fmt::format("layer {}\n", last)
                       : fmt::format("layers {}–{} ({}x the same)\n", step.layer, last, last - step.layer + 1)) +
              layers.at(step.layer);
      printed = last;
    }
  }
  return text;
}

// A place of a model with a configuration of its own, by role and layer; equal ones are printed once.
struct Place {
  std::string name;
  const HardwareConfig* config;
};

std::vector<Place> places_of(const modules::AutoHardwareConfig& hardware, int64_t layers, bool all) {
  std::vector<Place> places;
  for (modules::Role role : modules::kRoles) {
    places.push_back({std::string(role_name(role)), &hardware.of(role)});
    const bool per_layer = role != modules::Role::embedding && role != modules::Role::lm_head;
    for (int layer = 0; per_layer && layer < layers; ++layer)
      if (all || !diff(hardware.of(role), hardware.of(role, layer)).empty())
        places.push_back({fmt::format("{} of layer {}", role_name(role), layer), &hardware.of(role, layer)});
  }
  return places;
}

std::string config_text(const std::vector<Place>& places) {
  std::string text;
  for (const Place& place : places) {
    text += fmt::format("  {}\n", place.name);
    for (const OptionText& option : options(*place.config))
      text += fmt::format("    {:<32} {:<6} {} ({})\n", option.path, option.value, source_name(option.source),
                          option.set_by);
  }
  return text;
}

JsonValue config_json(const std::vector<Place>& places) {
  JsonValue json = JsonValue::object();
  for (const Place& place : places) {
    JsonValue list = JsonValue::object();
    for (const OptionText& option : options(*place.config))
      list.set(option.path, JsonValue::object()
                                .set("value", option.value)
                                .set("source", std::string(source_name(option.source)))
                                .set("set_by", json_text(option.set_by)));
    json.set(place.name, std::move(list));
  }
  return json;
}

JsonValue decision_json(const Decision& decision) {
  JsonValue answers = JsonValue::array();
  for (const Decision::Answer& answer : decision.answers) {
    JsonValue json = JsonValue::object().set("candidate", answer.candidate).set("accepted", answer.verdict.accepted);
    if (answer.verdict.accepted)
      json.set("modelled_us", answer.verdict.cost_us);
    else
      json.set("reason", answer.verdict.reason);
    answers.push_back(std::move(json));
  }
  JsonValue json = JsonValue::object().set("subject", decision.subject);
  json.set("chosen", decision.chosen ? JsonValue(decision.answers[*decision.chosen].candidate) : JsonValue(nullptr));
  return json.set("answers", std::move(answers));
}

std::string factories_text(const std::vector<Decision>& decisions, bool all) {
  // Decisions of different layers that differ in the layer alone are shown once.
  std::vector<std::pair<std::string, int>> folded;
  for (const Decision& decision : decisions) {
    const std::string text = all ? to_string(decision) : without_layers(to_string(decision));
    // Continuation lines are indented by the subject's length, which a folded number may change.
    std::string unindented;
    for (size_t i = 0; i < text.size(); ++i)
      if (!(text[i] == ' ' && (unindented.empty() || unindented.back() == '\n'))) unindented += text[i];
    const auto found =
        std::find_if(folded.begin(), folded.end(), [&](const auto& entry) { return entry.first == unindented; });
    if (found == folded.end())
      folded.emplace_back(unindented, 1);
    else
      ++found->second;
  }
  std::string result;
  for (const auto& [text, count] : folded) {
    std::string indented;
    bool first = true;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = text.find('\n', begin);
      indented += (first ? "  " : "      ") + text.substr(begin, end - begin);
      if (first && count > 1) indented += fmt::format("  ({}x)", count);
      indented += "\n";
      first = false;
      begin = end + 1;
    }
    result += indented;
  }
  return result;
}

std::string fusions_text(const std::vector<pipeline::FusionDecision>& decisions, bool all) {
  std::vector<std::pair<std::string, int>> folded;
  for (const pipeline::FusionDecision& decision : decisions) {
    const bool is_of_several = decision.scope.find("layers.") != decision.scope.rfind("layers.");
    const auto folded_text = [&](const std::string& of) { return all || is_of_several ? of : without_layers(of); };
    const std::string text = fmt::format("  {:<26} {:<34} {}", decision.fusion, folded_text(decision.scope),
                                         decision.applied ? "applied" : "not applied: " + folded_text(decision.reason));
    const auto found = std::find_if(folded.begin(), folded.end(), [&](const auto& e) { return e.first == text; });
    if (found == folded.end())
      folded.emplace_back(text, 1);
    else
      ++found->second;
  }
  std::string result;
  for (const auto& [text, count] : folded) result += text + (count > 1 ? fmt::format("  ({}x)", count) : "") + "\n";
  return result.empty() ? "  none matched\n" : result;
}

JsonValue program_json(const Program& program, const std::vector<StepText>& steps) {
  JsonValue list = JsonValue::array();
  for (const StepText& step : steps) {
    JsonValue json = JsonValue::object().set("scope", step.scope).set("layer", step.layer).set("op", step.op);
    if (step.first_layer >= 0) json.set("first_layer", step.first_layer);
    json.set("kernel", step.kernel.empty() ? JsonValue(nullptr) : JsonValue(step.kernel)).set("types", step.types);
    json.set("flops", step.flops).set("bytes", step.bytes).set("roofline_seconds", step.roofline_seconds);
    if (step.decision != nullptr) json.set("decision", decision_json(*step.decision));
    list.push_back(std::move(json));
  }
  JsonValue fusions = JsonValue::array();
  for (const pipeline::FusionDecision& decision : program.fusion_decisions())
    fusions.push_back(JsonValue::object()
                          .set("fusion", decision.fusion)
                          .set("scope", decision.scope)
                          .set("applied", decision.applied)
                          .set("reason", decision.reason));
  const pipeline::RoundingCount rounding = pipeline::count_rounding(program.graph(), program.environment().bounds);
  JsonValue rounded = JsonValue::object()
                          .set("values", rounding.values)
                          .set("readers", rounding.readers)
                          .set("bytes", rounding.bytes)
                          .set("bytes_if_alone", rounding.bytes_if_alone);
  JsonValue memory = JsonValue::object()
                         .set("arena_bytes", program.memory_plan().arena_bytes)
                         .set("bytes_without_reuse", program.memory_plan().bytes_without_reuse);
  const SymbolValues& bounds = program.environment().bounds;
  JsonValue json = JsonValue::object();
  json.set("tokens", bounds[Symbol::tokens]).set("sequences", bounds[Symbol::sequences]);
  json.set("complete", program.is_complete()).set("steps", std::move(list)).set("fusions", std::move(fusions));
  json.set("rounded_activations", std::move(rounded));
  return json.set("memory_plan", std::move(memory));
}

// The rounding of activations for products; empty where there is none.
std::string rounding_text(const Program& program) {
  const pipeline::RoundingCount count = pipeline::count_rounding(program.graph(), program.environment().bounds);
  if (count.readers == 0) return bold("rounded activations\n") + "  none: products multiply activations as they are\n";
  return bold("rounded activations\n") + fmt::format("  {} values, {}, read by {} products (each for itself: {})\n",
                                                     count.values, bytes_text(count.bytes), count.readers,
                                                     bytes_text(count.bytes_if_alone));
}

std::string program_text(const std::string& name, const Program& program, const std::vector<StepText>& steps,
                         bool all) {
  double flops = 0, bytes = 0, seconds = 0;
  int missing = 0;
  for (const StepText& step : steps) {
    flops += step.flops;
    bytes += step.bytes;
    seconds += step.roofline_seconds;
    missing += step.kernel.empty() ? 1 : 0;
  }
  const SymbolValues& bounds = program.environment().bounds;
  std::string text =
      bold(fmt::format("\n{}: a step of up to {} tokens of {} sequence{}\n", name, bounds[Symbol::tokens],
                       bounds[Symbol::sequences], bounds[Symbol::sequences] == 1 ? "" : "s"));
  text +=
      fmt::format("  {:<34} {:<40} {:<18} {:>13} {:>8} {:>8}\n", "scope", "op", "kernel", "work", "bytes", "roofline");
  text += steps_text(steps, all);
  text += fmt::format("  together: {} flop, {} moved at least, {} at the device's nominal rates\n", count_text(flops),
                      bytes_text(bytes), seconds_text(seconds));
  if (missing > 0)
    text += fmt::format("  {} of {} ops have NO KERNEL on {}: this device cannot run the model\n", missing,
                        steps.size(), program.environment().device->description());
  text += rounding_text(program);
  text += bold("fusions\n") + fusions_text(program.fusion_decisions(), all);
  const pipeline::MemoryPlan& plan = program.memory_plan();
  text += fmt::format("{}  activations {} (without reuse {})\n", bold("memory plan\n"),
                      bytes_text(static_cast<double>(plan.arena_bytes)),
                      bytes_text(static_cast<double>(plan.bytes_without_reuse)));
  return text;
}

struct ExplainOptions {
  ModelOptions model;
  bool json = false, decode = false, prefill = false, all = false, diff_mode = false;
  int64_t batch = 1;
  std::optional<int64_t> tokens, context, rank;
};

// Returns nothing when help was asked for.
std::optional<ExplainOptions> parse_explain(CommandLine command_line) {
  ExplainOptions options;
  Arguments arguments(
      "explain",
      "Shows what would run for a model and why: the resolved hardware configuration with the source of "
      "each value, the factories' choices, kernel, types, work and roofline time of every op with the "
      "refusals, fusions, and the memory plan; with --tp or --ep, what each rank would hold. Reads no weights.");
  options.model.add_operand(arguments);
  arguments.flag("--decode", options.decode, "only steps that draw one token per sequence");
  arguments.flag("--prefill", options.prefill, "only steps that read prompts");
  arguments.option("--tokens", "N", options.tokens,
                   "tokens of a prefill step (default: 512 on a CPU, else 2048, or as many as the KV cache holds)");
  arguments.option("--batch", "N", options.batch, "sequences (default: 1)");
  arguments.option("--context", "N", options.context, "tokens that the KV cache holds (default: the model's context)");
  arguments.flag("--all", options.all, "every layer, also when layers are the same");
  arguments.flag("--diff-mode", options.diff_mode, "only what differs between the modes performance and accuracy");
  arguments.flag("--json", options.json, "one JSON object");
  options.model.add_device(arguments);
  options.model.add_ranks(arguments);
  arguments.option("--rank", "R", options.rank, "whose programs of the ranks of --tp or --ep are shown (default: 0)");
  options.model.add_precision(arguments);
  arguments.note(
      "MODEL may also be a config.json without weights. The roofline time is the larger of work and bytes over "
      "the device's nominal rates; `eadem doctor` measures them.");
  arguments.example("eadem explain model.gguf --decode", "the steps of decoding one token");
  arguments.example("eadem explain path/to/model --device cuda", "which ops lack a kernel on a GPU");
  arguments.example("eadem explain path/to/model --tp 2", "what each of two ranks would hold");
  arguments.example("eadem explain path/to/model --diff-mode", "what --mode accuracy changes");
  if (!arguments.parse(command_line)) return std::nullopt;
  options.model.check_ranks();
  if (options.rank && options.model.ranks() == 1) throw UsageError("--rank is for --tp or --ep; there is one rank");
  if (options.rank && (*options.rank < 0 || *options.rank >= options.model.ranks()))
    throw UsageError(fmt::format("--rank is {}; expected 0 to {}", *options.rank, options.model.ranks() - 1));
  const auto in_range = [](const char* name, std::optional<int64_t> value) {
    if (value && (*value < 1 || *value > kMostTokens))
      throw UsageError(fmt::format("{} is {}; expected 1 to {}", name, *value, kMostTokens));
  };
  in_range("--tokens", options.tokens);
  in_range("--batch", options.batch);
  in_range("--context", options.context);
  return options;
}

// Returns the options of the engine to describe. Refuses sizes that the model's context or the cache cannot hold.
engine::EngineOptions engine_options_of(const ExplainOptions& options, const models::ModelInfo& info,
                                        const Device& device) {
  const int64_t context = options.context.value_or(info.default_context());
  if (context > info.max_positions)
    throw InvalidArgument("--context is {}; the model's context is {} tokens", context, info.max_positions);
  const int64_t cached = options.batch * context;  // tokens; no step has more
  if (options.tokens.value_or(1) > cached)
    throw InvalidArgument("--tokens is {}; the KV cache holds {}: --batch {} sequences of {}", *options.tokens, cached,
                          options.batch, context);
  engine::EngineOptions result = options.model.engine_options();
  result.max_num_batched_tokens = options.tokens.value_or(std::min(engine::default_step_tokens(device), cached));
  result.cache = engine::PagedKVCacheConfig{.max_batch_size = options.batch, .max_cache_len = context};
  return options_of_rank(std::move(result), static_cast<int>(options.model.ranks()),
                         static_cast<int>(options.rank.value_or(0)));
}

// --diff-mode: prints the settings that differ between the modes.
void print_mode_differences(const ExplainOptions& options, const modules::AutoHardwareConfig& performance,
                            const modules::AutoHardwareConfig& accuracy, int64_t layers) {
  const std::vector<Place> a = places_of(performance, layers, true), b = places_of(accuracy, layers, true);
  JsonValue differences = JsonValue::object();
  for (size_t i = 0; i < a.size(); ++i) {
    const std::string lines = diff(*a[i].config, *b[i].config);
    const bool in_layer = a[i].name.find(" of layer ") != std::string::npos;
    if (lines.empty() || (in_layer && !options.all)) continue;
    differences.set(a[i].name, lines);
    if (!options.json) print(fmt::format("{}\n{}", a[i].name, lines) + (lines.ends_with("\n") ? "" : "\n"));
  }
  if (options.json)
    print(to_json(differences) + "\n");
  else if (differences.as_object().empty())
    print("performance and accuracy resolve to the same configuration here\n");
}

}  // namespace

int explain(CommandLine command_line) {
  const std::optional<ExplainOptions> parsed = parse_explain(command_line);
  if (!parsed) return kOk;
  const ExplainOptions& options = *parsed;
  const models::Checkpoint checkpoint = open_described(options.model.model);
  const modules::ModelSpec spec = models::spec_of(checkpoint);
  const int64_t layers = checkpoint.model->info().layers;
  check_division(options.model, *checkpoint.model);
  const std::shared_ptr<Device> device = options.model.open(static_cast<int>(options.rank.value_or(0)));
  const engine::EngineOptions engine_options = engine_options_of(options, checkpoint.model->info(), *device);
  const auto resolve = [&](HardwareMode mode) {
    return modules::AutoHardwareConfig::from_model_spec(spec, *device, mode, engine_options.hardware, "command line");
  };
  if (options.diff_mode) {
    print_mode_differences(options, resolve(HardwareMode::performance), resolve(HardwareMode::accuracy), layers);
    return kOk;
  }

  const modules::AutoHardwareConfig hardware = resolve(options.model.hardware_mode());
  const std::vector<Place> places = places_of(hardware, layers, options.all);
  const int64_t context = options.context.value_or(checkpoint.model->info().default_context());
  const Mesh mesh = engine_options.mesh();
  const models::BuiltGraph built = models::build_inference_graph(
      *checkpoint.model, {.device = device.get(),
                          .hardware = &hardware,
                          .cache = {.layout = modules::CacheLayout::contiguous,
                                    .num_blocks = options.batch,
                                    .block_size = context,
                                    .num_slots = options.batch},
                          .num_ranks = mesh.size(MeshAxis::tp),
                          .rank = mesh.rank(MeshAxis::tp),
                          .expert_ranks = mesh.size(MeshAxis::ep),
                          .expert_rank = mesh.rank(MeshAxis::ep),
                          .longest_sequence = context,
                          .deterministic_across_tp = engine_options.deterministic_across_tp});
  const modules::CacheSpec cache = engine::plan_cache(engine::cache_request(checkpoint, *device, engine_options)).spec;
  const std::string refusal(engine::why_no_prefix_caching(engine_options.cache, cache));
  JsonValue output = JsonValue::object();
  if (options.json) {
    output.set("prefix_caching", refusal.empty() ? "yes" : "no: " + refusal);
    output.set("model", json_text(checkpoint.path))
        .set("device", device->description())
        .set("mode", options.model.mode);
    output.set("hardware", config_json(places));
    if (options.model.ranks() > 1) output.set("ranks", ranks_json(plan_ranks(checkpoint, device, engine_options)));
    JsonValue factories = JsonValue::array();
    for (const Decision& decision : built.decisions) factories.push_back(decision_json(decision));
    output.set("factories", std::move(factories));
  } else {
    print(bold(fmt::format("{} on {}, mode {}\n", checkpoint.path, device->description(), options.model.mode)));
    print(bold("hardware configuration\n") + config_text(places));
    print(bold("prefix caching\n") + fmt::format("  {}\n", refusal.empty()
                                                               ? "prompts begin with blocks that others have computed"
                                                               : "no: " + refusal));
    if (options.model.ranks() > 1) print(ranks_text(plan_ranks(checkpoint, device, engine_options)));
    print(bold("factories\n") + factories_text(built.decisions, options.all));
  }
  engine::ProgramSet programs =
      engine::InferEngine::compile_for_explain(*checkpoint.model, device, engine_options, spec);
  const engine::StepProgram* filled_up = programs.filled_up_program_for(options.batch);
  for (const engine::StepProgram* each : {filled_up, &programs.decode(), &programs.prefill()}) {
    const bool is_decode = each != &programs.prefill();
    if (each == nullptr || (options.decode != options.prefill && is_decode != options.decode)) continue;
    const Program& program = *each->program;
    const std::vector<StepText> steps = steps_of(program, device->rates());
    const std::string name = !is_decode          ? "prefill"
                             : each != filled_up ? "decode"
                                                 : fmt::format("decode of {}", each->layout.bounds()[Symbol::tokens]);
    if (options.json)
      output.set(name, program_json(program, steps));
    else
      print(program_text(name, program, steps, options.all));
  }
  if (options.json) print(to_json(output) + "\n");
  return kOk;
}

}  // namespace eadem::cli
