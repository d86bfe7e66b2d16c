// SPDX-License-Identifier: Apache-2.0
//
// RankChannel: how the engine of rank 0 tells those of the other ranks what to run.
//
// Rank 0 plans alone. It tells each command to all ranks at once, and they carry it out in the same order, so that
// their collectives meet.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "eadem/core/mesh/mesh.h"

namespace eadem::engine {

enum class RankCommand : int32_t {
  start,        // make an engine with this cache
  step,         // run a step
  reset_cache,  // empty the cache
  new_cache,    // replace it
  load_param,
  load_random,
  state_dict,       // show the parameters
  hooks,            // fire these hooks
  disable_fusions,  // compile again without them
  end,              // of the engine
};

// A task has failed on another rank. All ranks know, and the group goes on.
class TaskFailed : public RankFailed {
 public:
  using RankFailed::RankFailed;
};

class RankChannel {
 public:
  RankChannel(std::shared_ptr<Communicator> ranks, std::shared_ptr<Device> device)
      : ranks_(std::move(ranks)), device_(std::move(device)) {}

  int rank() const { return ranks_->rank(); }
  int size() const { return ranks_->size(); }
  const std::shared_ptr<Communicator>& ranks() const { return ranks_; }

  // Rank 0: a command, its values in order, and `tell`, which returns when all ranks have it. Allocates nothing once
  // the longest message was told. `begin` throws RankFailed when nothing can be told any more.
  void begin(RankCommand command);
  template <typename T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    put_bytes(&value, sizeof value);
  }
  void put_bytes(const void* bytes, int64_t size_bytes);
  void put_text(std::string_view text) {
    put(std::ssize(text));
    put_bytes(text.data(), std::ssize(text));
  }
  void tell();

  // The others: the next command, and its values in order.
  RankCommand receive();
  template <typename T>
  T take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    take_bytes(&value, sizeof value);
    return value;
  }
  void take_bytes(void* bytes, int64_t size_bytes);
  std::string take_text() {
    std::string text(static_cast<size_t>(take<ptrdiff_t>()), ' ');
    take_bytes(text.data(), std::ssize(text));
    return text;
  }

  // All ranks: runs `task`, which returns a number that must be the same on all, and returns when it has succeeded on
  // every rank. Throws the error of this rank's task, else TaskFailed with that of another. Only Cancelled is thrown
  // at once, without waiting for the others; nothing can be told any more then.
  void together(const char* what, const std::function<int64_t()>& task);
  bool is_usable() const { return usable_; }

  // The others: lets rank 0 see a tensor on the host. `tag` is something that both sides know of it. Rank 0: what
  // `rank` shows. Throws RankFailed when the tags differ; after that, or without memory for the tensor, nothing can be
  // told any more.
  void show(const TensorView& host, int64_t tag);
  Tensor see(int rank, int64_t tag);

 private:
  static constexpr int64_t kFirstBytes = 4096;  // of a message, told at once; the rest follows

  TensorView bytes(int64_t begin, int64_t size);

  std::shared_ptr<Communicator> ranks_;
  std::shared_ptr<Device> device_;
  std::vector<std::byte> message_;  // its length, the command, the values
  int64_t taken_ = 0;
  bool usable_ = true;
};

}  // namespace eadem::engine
