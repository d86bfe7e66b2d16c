// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/program_set.h"

#include <algorithm>

namespace eadem::engine {

using pipeline::Program;

ProgramSet::ProgramSet(Options options, std::shared_ptr<pipeline::ParameterStore> parameters)
    : options_(std::move(options)), parameters_(std::move(parameters)) {
  options_.environment.arena = std::make_shared<pipeline::Arena>();
  std::vector<Program::Source> sources;
  for (const SymbolValues& bounds : {options_.prefill_bounds, options_.decode_bounds}) {
    pipeline::Environment environment = options_.environment;
    environment.bounds = bounds;
    // On a device that records, steps run these programs while hooks are registered, and recorded programs else. Hooks
    // see no value inside of an op, so that whole layers in one op are for recorded programs.
    environment.joins_layers = !environment.device->records();
    sources.push_back({options_.make_graph(), std::move(environment)});
  }
  std::vector<std::unique_ptr<Program>> compiled =
      Program::compile(std::move(sources), parameters_, options_.before_allocation);
  programs_.push_back(step_program(std::move(compiled[0]), StepKind::prefill));
  programs_.push_back(step_program(std::move(compiled[1]), StepKind::decode));
  filled_up_.resize(static_cast<size_t>(options_.decode_bounds[Symbol::sequences]) + 1);
}

std::unique_ptr<StepProgram> ProgramSet::step_program(std::unique_ptr<Program> program, StepKind kind) const {
  auto result = std::make_unique<StepProgram>();
  if (program->is_complete() && options_.bind_states) options_.bind_states(*program);
  result->layout = StepLayout(*program, options_.cache);
  result->hidden = program->output("hidden");
  result->mtp_hidden = result->hidden;
  for (const pipeline::GraphOutput& output : program->graph().outputs())
    if (output.name == "mtp_hidden") result->mtp_hidden = output.value;
  result->logits = program->output("logits");
  result->token = program->output("token");
  result->logprob = program->output("logprob");
  result->top_token = program->output("top_token");
  result->top_logprob = program->output("top_logprob");
  for (const pipeline::Node& node : program->graph().nodes())
    if (node.op->name() == "sample") result->sampled_logits = node.inputs[0];
  result->kind = kind;
  result->program = std::move(program);
  return result;
}

int64_t ProgramSet::step_bytes() const { return std::max(prefill().layout.size_bytes(), decode().layout.size_bytes()); }

void ProgramSet::bind(void* step_data, void* sampled) {
  step_data_ = step_data;
  sampled_ = sampled;
  for (const auto& program : programs_) bind(*program);
}

void ProgramSet::bind(StepProgram& program) const {
  if (step_data_ == nullptr || !program.program->is_complete()) return;
  program.layout.bind(*program.program, step_data_);
  program.program->bind_input(program.program->input("sampled"), sampled_);
  program.program->bind_output(program.token, sampled_);
}

const StepProgram& ProgramSet::program_for(int64_t tokens, int64_t logit_rows) const {
  const SymbolValues& bounds = decode().layout.bounds();
  return tokens <= bounds[Symbol::tokens] && logit_rows <= bounds[Symbol::logit_rows] ? decode() : prefill();
}

int64_t ProgramSet::bucket_of(int64_t sequences, int64_t most) {
  int64_t bucket = 1;
  while (bucket < sequences && bucket < 8) bucket *= 2;
  if (bucket < sequences) bucket = (sequences + 7) / 8 * 8;
  return std::min(bucket, most);
}

const StepProgram* ProgramSet::filled_up_program_for(int64_t sequences) {
  if (!options_.environment.device->records()) return nullptr;
  const int64_t bucket = bucket_of(sequences, options_.decode_bounds[Symbol::sequences]);
  if (bucket != sequences && options_.cache.num_slots > 0)
    return nullptr;  // no slot for sequences that nobody asked for
  const StepProgram*& found = filled_up_[static_cast<size_t>(bucket)];
  if (found != nullptr) return found;
  pipeline::Environment environment = options_.environment;
  environment.bounds = options_.decode_bounds;
  for (Symbol symbol : {Symbol::tokens, Symbol::sequences, Symbol::logit_rows}) environment.bounds[symbol] = bucket;
  environment.record = true;
  auto program = step_program(std::make_unique<Program>(options_.make_graph(), std::move(environment), parameters_),
                              StepKind::decode);
  program->filled_up = true;
  bind(*program);
  found = program.get();
  programs_.push_back(std::move(program));
  return found;
}

}  // namespace eadem::engine
