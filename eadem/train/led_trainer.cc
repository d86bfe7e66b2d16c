// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/led_trainer.h"

#include <cstring>
#include <type_traits>

#include "eadem/train/rank_values.h"

namespace eadem::train {

namespace {

enum class Command : int32_t {
  load_param,
  load_random,
  step,
  evaluate,
  state_dict,
  gradient,
  write_model,
  write_checkpoint,
  load_checkpoint,
};

// A command and its values, in order.
class Message {
 public:
  explicit Message(Command command) { put(command); }
  template <typename T>
  requires std::is_trivially_copyable_v<T> Message& put(const T& value) { return put_bytes(&value, sizeof value); }
  Message& put_bytes(const void* data, int64_t size) {
    bytes_.append(static_cast<const char*>(data), static_cast<size_t>(size));
    return *this;
  }
  Message& put(const std::string& text) { return put_list(std::span(text)); }
  template <typename T>
  Message& put_list(std::span<const T> values) {
    put(std::ssize(values));
    return put_bytes(values.data(), static_cast<int64_t>(values.size_bytes()));
  }
  Message& put(const Batch& batch) {
    for (const auto* list : {&batch.token_ids, &batch.positions, &batch.labels, &batch.query_start, &batch.lengths})
      put_list(std::span<const int32_t>(*list));
    return put(batch.num_labels);
  }
  Message& put(const TensorView& tensor) {
    put(tensor.dtype).put(tensor.shape);
    return put_bytes(tensor.data, tensor.size_bytes());
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}
  template <typename T>
  T take() {
    T value;
    take_bytes(&value, sizeof value);
    return value;
  }
  template <typename List>
  List take_list() {
    List values(static_cast<size_t>(take<ptrdiff_t>()), typename List::value_type{});
    take_bytes(values.data(), static_cast<int64_t>(values.size() * sizeof(typename List::value_type)));
    return values;
  }
  std::string take_text() { return take_list<std::string>(); }
  Batch take_batch() {
    Batch batch;
    for (auto* list : {&batch.token_ids, &batch.positions, &batch.labels, &batch.query_start, &batch.lengths})
      *list = take_list<std::vector<int32_t>>();
    batch.num_labels = take<int64_t>();
    return batch;
  }
  Tensor take_tensor() {
    const auto dtype = take<DType>();
    const Tensor tensor = Tensor::on_host(dtype, take<Shape>());
    take_bytes(tensor.view.data, tensor.view.size_bytes());
    return tensor;
  }

 private:
  void take_bytes(void* to, int64_t size) {
    EADEM_CHECK(at_ + size <= std::ssize(bytes_), "a message of {} bytes ends before {}", bytes_.size(), at_ + size);
    if (size > 0) std::memcpy(to, bytes_.data() + at_, static_cast<size_t>(size));
    at_ += size;
  }

  const std::string& bytes_;
  int64_t at_ = 0;
};

// What the first rank has, on all; the others' `bytes` are replaced.
void broadcast(Device& device, Communicator& all, std::string& bytes) {
  int64_t size = std::ssize(bytes);
  const Tensor length = allocate_tensor(device, DType::i64, Shape{1});
  device.copy_from_host(length.view.data, &size, sizeof size);
  all.broadcast(device, length.view, 0);
  device.copy_to_host(&size, length.view.data, sizeof size);
  bytes.resize(static_cast<size_t>(size));
  const Tensor data = allocate_tensor(device, DType::u8, Shape{size});
  if (all.rank() == 0) device.copy_from_host(data.view.data, bytes.data(), size);
  all.broadcast(device, data.view, 0);
  if (all.rank() != 0) device.copy_to_host(bytes.data(), data.view.data, size);
}

// The passes of a step that are this rank's.
std::span<const Batch> own_part(const std::vector<Batch>& batches, const Mesh& mesh) {
  const int experts = mesh.size(MeshAxis::ep), ranks = mesh.size(MeshAxis::dp) * experts;
  const int rank = mesh.rank(MeshAxis::dp) * experts + mesh.rank(MeshAxis::ep);
  const PartRange own = part_of(std::ssize(batches), ranks, rank);
  return std::span(batches).subspan(static_cast<size_t>(own.begin), static_cast<size_t>(own.size));
}

// A rank may lack a parameter that no other has; then nobody begins a pass.
void require_all_loaded(const Trainer& trainer) {
  std::string lacking;
  try {
    trainer.require_all_loaded();
  } catch (const NotFound& error) {
    lacking = error.what();
  }
  if (!true_on_all_ranks(trainer.device(), trainer.mesh(), lacking.empty()))
    throw NotFound("{}", lacking.empty() ? "the trainer: a parameter of another stage of pp is not set" : lacking);
}

StepResult step(Trainer& trainer, const std::vector<Batch>& batches, double learning_rate) {
  require_all_loaded(trainer);
  return trainer.step(own_part(batches, trainer.mesh()), learning_rate);
}

std::pair<double, int64_t> evaluate(Trainer& trainer, const Batch& batch) {
  require_all_loaded(trainer);
  return trainer.evaluate(batch);
}

void carry_out(Trainer& trainer, Reader message) {
  switch (message.take<Command>()) {
    case Command::load_param: {
      const std::string name = message.take_text();
      return trainer.load_param(name, message.take_tensor().view);
    }
    case Command::load_random: {
      const auto seed = message.take<uint64_t>();
      return trainer.load_random(seed, message.take<double>());
    }
    case Command::step: {
      const auto rate = message.take<double>();
      std::vector<Batch> batches(static_cast<size_t>(message.take<ptrdiff_t>()));
      for (Batch& batch : batches) batch = message.take_batch();
      step(trainer, batches, rate);
      return;
    }
    case Command::evaluate: {
      evaluate(trainer, message.take_batch());
      return;
    }
    case Command::state_dict: {
      trainer.whole_state_dict();
      return;
    }
    case Command::gradient: {
      trainer.whole_gradient(message.take_text());
      return;
    }
    case Command::write_model: return write_model(trainer, {}, message.take_text());
    case Command::write_checkpoint: return write_checkpoint(trainer, {}, {}, message.take_text());
    case Command::load_checkpoint: {
      const std::string directory = message.take_text();
      return load_checkpoint(trainer, directory, verify_checkpoint(directory));
    }
  }
  EADEM_UNREACHABLE("an unknown command");
}

}  // namespace

LedTrainer::LedTrainer(std::unique_ptr<Trainer> trainer, std::shared_ptr<Communicator> all)
    : trainer_(std::move(trainer)), all_(std::move(all)) {}

void LedTrainer::tell(const std::string& message) {
  if (all_ == nullptr) return;
  std::string bytes = message;
  broadcast(trainer_->device(), *all_, bytes);
}

void LedTrainer::load_param(const std::string& name, const TensorView& whole) {
  if (all_ != nullptr) tell(Message(Command::load_param).put(name).put(whole).bytes());
  trainer_->load_param(name, whole);
}

void LedTrainer::load_random(uint64_t seed, double stddev) {
  tell(Message(Command::load_random).put(seed).put(stddev).bytes());
  trainer_->load_random(seed, stddev);
}

StepResult LedTrainer::step(const std::vector<Batch>& batches, double learning_rate) {
  const Mesh& mesh = trainer_->mesh();
  const int64_t data = mesh.size(MeshAxis::dp), experts = mesh.size(MeshAxis::ep);
  if (std::ssize(batches) % (data * experts) != 0)
    throw InvalidArgument(
        "the step has {} batches; {} ranks of dp and {} of ep, which divide them, need a multiple of {}",
        batches.size(), data, experts, data * experts);
  for (const Batch& batch : batches) trainer_->check(batch);
  Message message(Command::step);
  message.put(learning_rate).put(std::ssize(batches));
  for (const Batch& batch : batches) message.put(batch);
  tell(message.bytes());
  return train::step(*trainer_, batches, learning_rate);
}

std::pair<double, int64_t> LedTrainer::evaluate(const Batch& batch) {
  trainer_->check(batch);
  tell(Message(Command::evaluate).put(batch).bytes());
  return train::evaluate(*trainer_, batch);
}

std::vector<std::pair<std::string, Tensor>> LedTrainer::whole_state_dict() {
  tell(Message(Command::state_dict).bytes());
  return trainer_->whole_state_dict();
}

Tensor LedTrainer::whole_gradient(const std::string& parameter) {
  tell(Message(Command::gradient).put(parameter).bytes());
  return trainer_->whole_gradient(parameter);
}

void LedTrainer::write_model(const Companions& companions, const std::string& directory) {
  tell(Message(Command::write_model).put(directory).bytes());
  train::write_model(*trainer_, companions, directory);
}

void LedTrainer::write_checkpoint(const Companions& companions, const std::string& directory) {
  tell(Message(Command::write_checkpoint).put(directory).bytes());
  train::write_checkpoint(*trainer_, {.step = trainer_->num_steps()}, companions, directory);
}

void LedTrainer::load_checkpoint(const std::string& directory) {
  const RunState state = verify_checkpoint(directory);
  tell(Message(Command::load_checkpoint).put(directory).bytes());
  train::load_checkpoint(*trainer_, directory, state);
}

void follow_trainer(Trainer& trainer, Communicator& all) {
  std::string message;
  for (;;) {
    broadcast(trainer.device(), all, message);
    try {
      carry_out(trainer, Reader(message));
    } catch (const InvalidArgument&) {  // these are thrown on the first rank, too
    } catch (const NotFound&) {
    } catch (const DataCorrupted&) {
    } catch (const IoError&) {
    }
  }
}

}  // namespace eadem::train
