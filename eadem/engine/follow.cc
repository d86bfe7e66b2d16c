// SPDX-License-Identifier: Apache-2.0
//
// The engines of several ranks: what rank 0 tells, and how the others follow.
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
    return plan_.spec.num_blocks;  // a rank with another number would write where another block lies
  });
}

// --- Rank 0.

void InferEngine::tell_step(Plan plan, const StepProgram& program) {
  channel_->begin(RankCommand::step);
  channel_->put(program.kind);
  descriptor_->put(*channel_);
  if (cache_spec().num_slots > 0) {
    for (const StepSequence& sequence : plan)
      if (sequence.cached == 0) channel_->put(sequence.state_slot);
    channel_->put(int32_t{-1});
  }
  channel_->tell();
}

void InferEngine::tell_param(const std::string& name, const TensorView& whole) {
  if (whole.encoding != nullptr || !whole.is_contiguous())
    throw Unsupported("'{}' is {}; several ranks take plain contiguous tensors", name, to_string(whole));
  channel_->begin(RankCommand::load_param);
  channel_->put(std::ssize(name));
  channel_->put_bytes(name.data(), std::ssize(name));
  channel_->put(whole.dtype);
  channel_->put(whole.shape);
  channel_->put_bytes(whole.data, whole.size_bytes());
  channel_->tell();
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
    for (auto slot = channel_->take<int32_t>(); slot >= 0; slot = channel_->take<int32_t>())
      sequence_states_.reset(slot);
  run_program(program, nullptr);
}

void InferEngine::follow_param() {
  std::string name(static_cast<size_t>(channel_->take<ptrdiff_t>()), ' ');
  channel_->take_bytes(name.data(), std::ssize(name));
  const auto dtype = channel_->take<DType>();
  const auto shape = channel_->take<Shape>();
  const Tensor whole = Tensor::on_host(dtype, shape);
  channel_->take_bytes(whole.view.data, whole.view.size_bytes());
  and_go_on([&] { load_param(name, whole.view); });
}

void follow_engines(const std::shared_ptr<Communicator>& ranks, const std::shared_ptr<Device>& device,
                    const std::function<std::unique_ptr<InferEngine>(const CacheConfig&)>& make) {
  RankChannel channel(ranks, device);
  for (;;) {
    const RankCommand command = channel.receive();
    EADEM_CHECK(command == RankCommand::start, "command {} before an engine", static_cast<int>(command));
    make(channel.take<CacheConfig>())->follow();
  }
}

}  // namespace eadem::engine
