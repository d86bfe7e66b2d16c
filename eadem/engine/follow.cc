// SPDX-License-Identifier: Apache-2.0
//
// The engines of several ranks: what rank 0 tells, and how the others follow.
#include <cstring>

#include "eadem/engine/infer_engine.h"

namespace eadem::engine {

namespace {

// Runs a task of all ranks on one that follows. Rank 0 knows when it fails on any, and decides how to go on.
template <typename Task>
void and_go_on(const Task& task) {
  try {
    task();
  } catch (const TaskFailed&) {
  } catch (const RankFailed&) {
    throw;
  } catch (const Error&) {
  }
}

}  // namespace

InferEngine::~InferEngine() {
  if (!leads() || !channel_->is_usable()) return;
  try {
    channel_->begin(RankCommand::end);
    channel_->tell();
  } catch (const Error&) {
    // The others have failed, or never came to follow: they end with the group.
  }
}

SequenceStates& InferEngine::sequence_states() {
  if (channel_ != nullptr)
    throw Unsupported("states per sequence are divided over {} ranks; they cannot be saved or restored",
                      channel_->size());
  return sequence_states_;
}

// Runs a task that all ranks run now.
void InferEngine::together(const char* what, const std::function<void()>& task) {
  if (channel_ == nullptr) return task();
  channel_->together(what, [&] {
    task();
    // A rank with another number of blocks or snapshots would write where another one lies.
    return plan_.spec.num_snapshots == 0 ? plan_.spec.num_blocks
                                         : plan_.spec.num_blocks + (plan_.spec.num_snapshots << 40);
  });
}

// --- Rank 0.

void InferEngine::tell_step(Plan plan, const StepProgram& program) {
  channel_->begin(RankCommand::step);
  channel_->put(program.kind);
  descriptor_->put(*channel_);
  if (cache_spec().num_slots > 0) {
    for (const StepSequence& sequence : plan) channel_->put(state_preparation(sequence));
    channel_->put(SequenceStates::Preparation());
  }
  channel_->tell();
}

void InferEngine::tell_param(const std::string& name, const TensorView& whole) {
  if (whole.encoding != nullptr || !whole.is_contiguous())
    throw Unsupported("'{}' is {}; several ranks take plain contiguous tensors", name, to_string(whole));
  channel_->begin(RankCommand::load_param);
  channel_->put_text(name);
  channel_->put(whole.dtype);
  channel_->put(whole.shape);
  channel_->put_bytes(whole.data, whole.size_bytes());
  channel_->tell();
}

void InferEngine::tell_hooks() {
  channel_->begin(RankCommand::hooks);
  hooks_.put(*channel_);
  channel_->tell();
}

std::vector<InferEngine::StateDict> InferEngine::state_dict_by_rank() {
  std::vector<StateDict> dicts = {state_dict()};
  if (!leads()) return dicts;
  channel_->begin(RankCommand::state_dict);
  channel_->tell();
  for (int rank = 1; rank < channel_->size(); ++rank) {
    StateDict& dict = dicts.emplace_back();
    for (const auto& [name, own] : dicts[0]) dict.emplace_back(name, channel_->see(rank, std::ssize(dict)));
  }
  return dicts;
}

InferEngine::StateDict InferEngine::whole_state_dict() {
  const std::vector<StateDict> dicts = state_dict_by_rank();
  StateDict whole;
  for (size_t i = 0; i < dicts[0].size(); ++i) {
    const auto& [name, own] = dicts[0][i];
    const Sharding& sharding = parameters_->type(name).sharding;
    if (sharding.kind != Sharding::Kind::sharded || dicts.size() == 1) {
      whole.emplace_back(name, own);
      continue;
    }
    const Shape shape = parameters_->whole_shape(name);
    const Tensor joined = Tensor::on_host(own.dtype(), shape);
    int64_t outer = 1;
    for (int axis = 0; axis < sharding.axis; ++axis) outer *= shape[axis];
    auto* to = static_cast<std::byte*>(joined.view.data);
    for (int64_t o = 0; o < outer; ++o)
      for (const StateDict& dict : dicts) {
        const TensorView& part = dict[i].second.view;
        const int64_t run = part.size_bytes() / outer;
        std::memcpy(to, static_cast<const std::byte*>(part.data) + o * run, static_cast<size_t>(run));
        to += run;
      }
    whole.emplace_back(name, joined);
  }
  return whole;
}

// --- The others.

void InferEngine::follow() {
  EADEM_CHECK(channel_ != nullptr && channel_->rank() > 0, "the engine of rank 0 follows nobody");
  for (;;) {
    switch (channel_->receive()) {
      case RankCommand::step: follow_step(); break;
      case RankCommand::reset_cache: reset_cache(); break;
      case RankCommand::new_cache: and_go_on([&] { reset_cache(channel_->take<CacheConfig>()); }); break;
      case RankCommand::load_param: follow_param(); break;
      case RankCommand::load_random: {
        const auto seed = channel_->take<uint64_t>();
        load_random(seed, channel_->take<double>());
        break;
      }
      case RankCommand::state_dict: show_parameters(); break;
      case RankCommand::hooks: hooks_.take(*channel_); break;
      case RankCommand::disable_fusions: {
        std::vector<std::string> names(static_cast<size_t>(channel_->take<ptrdiff_t>()));
        for (std::string& name : names) name = channel_->take_text();
        and_go_on([&] { disable_fusions(names); });
        break;
      }
      case RankCommand::end: return;
      case RankCommand::start: EADEM_UNREACHABLE("rank 0 makes an engine before it has ended the one before");
    }
  }
}

void InferEngine::follow_step() {
  if (!all_loaded_) {
    parameters_->require_all_loaded("the engine");
    all_loaded_ = true;
  }
  const auto kind = channel_->take<StepKind>();
  const StepProgram& program = kind == StepKind::decode ? programs_->decode() : programs_->prefill();
  descriptor_->take(program.layout, *channel_);
  descriptor_->upload();
  if (cache_spec().num_slots > 0)
    for (auto each = channel_->take<SequenceStates::Preparation>(); each.slot >= 0;
         each = channel_->take<SequenceStates::Preparation>())
      sequence_states_.prepare(each);
  run_program(program, nullptr);
}

void InferEngine::follow_param() {
  const std::string name = channel_->take_text();
  const auto dtype = channel_->take<DType>();
  const auto shape = channel_->take<Shape>();
  const Tensor whole = Tensor::on_host(dtype, shape);
  channel_->take_bytes(whole.view.data, whole.view.size_bytes());
  and_go_on([&] { load_param(name, whole.view); });
}

void InferEngine::show_parameters() {
  int64_t index = 0;
  for (const std::string& name : parameters_->names()) channel_->show(parameters_->to_host(name).view, index++);
}

void follow_engines(
    const std::shared_ptr<Communicator>& ranks, const std::shared_ptr<Device>& device,
    const std::function<std::unique_ptr<InferEngine>(const CacheConfig& cache, int64_t draft_tokens)>& make) {
  RankChannel channel(ranks, device);
  for (;;) {
    const RankCommand command = channel.receive();
    EADEM_CHECK(command == RankCommand::start, "command {} before an engine", static_cast<int>(command));
    const auto cache = channel.take<CacheConfig>();
    make(cache, channel.take<int64_t>())->follow();
  }
}

}  // namespace eadem::engine
