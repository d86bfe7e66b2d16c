// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/thread_communicator.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>

#include "eadem/distributed/checked_communicator.h"
#include "eadem/distributed/rank_sum.h"

namespace eadem::distributed {

namespace {

// The operands that one rank brings to a collective.
struct Offer {
  std::string_view collective;
  TensorView in, out;
  int root = 0;
  std::span<const PartRange> received, sent = {};  // of all_to_all_parts

  bool matches(const Offer& other) const {
    return collective == other.collective && in.dtype == other.in.dtype && root == other.root &&
           (!sent.empty() || in.num_elements() == other.in.num_elements());
  }
  std::string text() const {
    return fmt::format("{} of {} {}, root {}", collective, in.num_elements(), dtype_name(in.dtype), root);
  }
};

}  // namespace

struct ThreadGroup::Shared {
  explicit Shared(int size)
      : mailboxes(static_cast<size_t>(size) * static_cast<size_t>(size)), offers(static_cast<size_t>(size)) {}

  int size() const { return static_cast<int>(offers.size()); }

  void fail(const std::string& reason) {
    const std::scoped_lock lock(mutex);
    if (!failed) failure = reason;
    failed = true;
    changed.notify_all();
  }

  // A message that one rank has sent and another has not yet received.
  std::optional<TensorView>& mailbox(int from, int to) { return mailboxes[static_cast<size_t>(from * size() + to)]; }

  void throw_if_failed() const {
    if (failed) throw RankFailed("{}", failure);
  }

  // Returns when every rank has arrived. Throws RankFailed when one never will.
  void meet() {
    std::unique_lock lock(mutex);
    throw_if_failed();
    const uint64_t meeting = meetings;
    if (++arrived == size()) {
      arrived = 0;
      ++meetings;
      changed.notify_all();
      return;
    }
    changed.wait(lock, [&] { return failed || meetings != meeting; });
    if (meetings == meeting) throw_if_failed();
  }

  // Returns when every rank has arrived. Only for ranks that have met before and all come, whatever fails meanwhile:
  // one that left would take away buffers that others still read.
  void leave() {
    std::unique_lock lock(mutex);
    const uint64_t meeting = meetings;
    if (++arrived == size()) {
      arrived = 0;
      ++meetings;
      changed.notify_all();
    } else {
      changed.wait(lock, [&] { return meetings != meeting; });
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  int arrived = 0;        // guarded by mutex, as all below but `offers`
  uint64_t meetings = 0;  // how often all ranks have met
  std::vector<std::optional<TensorView>> mailboxes;
  bool failed = false;
  std::string failure;
  std::vector<Offer> offers;  // a rank writes its own before a meeting; all read after it
};

namespace {

std::byte* bytes_of(const TensorView& view) { return static_cast<std::byte*>(view.data); }

}  // namespace

class ThreadCommunicator final : public CheckedCommunicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup::Shared> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return shared_->size(); }

  // Each rank sums one part of the elements and writes it to all ranks: nobody else reads or writes that part.
  void all_reduce_sum(Device&, const TensorView& data) override {
    collect({"all_reduce", data, data}, [&] {
      const PartRange own = part_of(data.num_elements(), size(), rank_);
      with_summed_dtype(data.dtype, [&]<typename T>(T) {
        const auto part = [&](int rank) { return static_cast<const T*>(offer(rank).in.data); };
        sum_parts<T>(own.begin, own.begin + own.size, size(), part, [&](int64_t first, const T* values, int64_t count) {
          for (int rank = 0; rank < size(); ++rank)
            std::copy_n(values, count, static_cast<T*>(offer(rank).out.data) + first);
        });
      });
    });
  }

  void all_gather(Device&, const TensorView& gathered, const TensorView& part) override {
    expect_times_size("all_gather", gathered, part);
    collect({"all_gather", part, gathered}, [&] {
      for (int rank = 0; rank < size(); ++rank)
        copy(bytes_of(gathered) + rank * part.size_bytes(), offer(rank).in.data, part.size_bytes());
    });
  }

  void reduce_scatter_sum(Device&, const TensorView& part, const TensorView& data) override {
    expect_times_size("reduce_scatter", data, part);
    collect({"reduce_scatter", data, part}, [&] {
      const int64_t count = part.num_elements();
      with_summed_dtype(data.dtype, [&]<typename T>(T) {
        const auto own = [&](int rank) { return static_cast<const T*>(offer(rank).in.data) + rank_ * count; };
        sum_parts<T>(0, count, size(), own, [&](int64_t first, const T* values, int64_t n) {
          std::copy_n(values, n, static_cast<T*>(part.data) + first);
        });
      });
    });
  }

  void all_to_all(Device&, const TensorView& received, const TensorView& sent) override {
    if (sent.num_elements() % size() != 0 || received.num_elements() != sent.num_elements())
      refuse(fmt::format("all_to_all of {} into {} on {} ranks", to_string(sent), to_string(received), size()));
    collect({"all_to_all", sent, received}, [&] {
      const int64_t bytes = sent.size_bytes() / size();
      for (int rank = 0; rank < size(); ++rank)
        copy(bytes_of(received) + rank * bytes, bytes_of(offer(rank).in) + rank_ * bytes, bytes);
    });
  }

  void all_to_all_parts(Device&, const TensorView& received, std::span<const PartRange> received_parts,
                        const TensorView& sent, std::span<const PartRange> sent_parts) override {
    expect_parts(received, received_parts);
    expect_parts(sent, sent_parts);
    expect_same_dtype(received, sent);
    collect(
        {.collective = "all_to_all_parts", .in = sent, .out = received, .received = received_parts, .sent = sent_parts},
        [&] {
          const auto size = static_cast<int64_t>(dtype_size(sent.dtype));
          for (int rank = 0; rank < this->size(); ++rank) {
            const PartRange &to = received_parts[static_cast<size_t>(rank)],
                            &from = offer(rank).sent[static_cast<size_t>(rank_)];
            copy(bytes_of(received) + to.begin * size, bytes_of(offer(rank).in) + from.begin * size, to.size * size);
          }
        });
  }

  void broadcast(Device&, const TensorView& data, int root) override {
    expect_rank(root);
    collect({"broadcast", data, data, root}, [&] {
      if (rank_ != root) copy(data.data, offer(root).in.data, data.size_bytes());
    });
  }

  void send(Device&, const TensorView& data, int to) override {
    expect_other_rank(to);
    std::unique_lock lock(shared_->mutex);
    shared_->throw_if_failed();
    std::optional<TensorView>& mailbox = shared_->mailbox(rank_, to);
    mailbox = data;
    shared_->changed.notify_all();
    shared_->changed.wait(lock, [&] { return shared_->failed || !mailbox; });
    if (mailbox) shared_->throw_if_failed();
  }

  void recv(Device&, const TensorView& data, int from) override {
    expect_other_rank(from);
    std::unique_lock lock(shared_->mutex);
    std::optional<TensorView>& mailbox = shared_->mailbox(from, rank_);
    shared_->changed.wait(lock, [&] { return shared_->failed || mailbox; });
    shared_->throw_if_failed();
    if (mailbox->dtype != data.dtype || mailbox->num_elements() != data.num_elements()) {
      const std::string reason =
          fmt::format("rank {} sends {}; rank {} expects {}", from, to_string(*mailbox), rank_, to_string(data));
      lock.unlock();
      refuse(reason);
    }
    copy(data.data, mailbox->data, data.size_bytes());
    mailbox.reset();
    shared_->changed.notify_all();
  }

 private:
  // Shows this rank's buffers to the others, runs `task`, and keeps everyone's buffers in place until all have ended.
  template <typename Task>
  void collect(const Offer& own, const Task& task) {
    shared_->offers[static_cast<size_t>(rank_)] = own;
    shared_->meet();
    try {
      if (const std::string reason = difference(own); !reason.empty()) throw InvalidArgument("{}", reason);
      task();
    } catch (...) {
      shared_->leave();
      throw;
    }
    shared_->leave();
  }

  // What keeps the ranks from carrying out their calls; empty if nothing does. Every rank sees a difference, from rank
  // 0's offer or from its own, and all see unlike parts of any two; none goes on.
  std::string difference(const Offer& own) const {
    for (int rank = 0; rank < size(); ++rank)
      if (!own.matches(offer(rank)))
        return fmt::format("rank {} calls {}; rank {} calls {}", rank_, own.text(), rank, offer(rank).text());
    if (own.sent.empty()) return "";
    for (int from = 0; from < size(); ++from)
      for (int to = 0; to < size(); ++to) {
        const int64_t sent = offer(from).sent[static_cast<size_t>(to)].size,
                      received = offer(to).received[static_cast<size_t>(from)].size;
        if (sent != received) return unlike_parts(from, sent, to, received);
      }
    return "";
  }

  [[noreturn]] void refuse(const std::string& reason) const override {
    shared_->fail(reason);
    throw InvalidArgument("{}", reason);
  }

  const Offer& offer(int rank) const { return shared_->offers[static_cast<size_t>(rank)]; }

  static void copy(void* to, const void* from, int64_t size_bytes) {
    if (size_bytes > 0) std::memcpy(to, from, static_cast<size_t>(size_bytes));
  }

  std::shared_ptr<ThreadGroup::Shared> shared_;
  int rank_;
};

ThreadGroup::ThreadGroup(int size) {
  if (size < 1) throw InvalidArgument("a group of {} ranks; expected at least one", size);
  shared_ = std::make_shared<Shared>(size);
}

ThreadGroup::~ThreadGroup() = default;

std::shared_ptr<Communicator> ThreadGroup::communicator(int rank) const {
  if (rank < 0 || rank >= shared_->size()) throw InvalidArgument("there is no rank {} of {}", rank, shared_->size());
  return std::make_shared<ThreadCommunicator>(shared_, rank);
}

void ThreadGroup::fail(const std::string& reason) { shared_->fail(reason); }

}  // namespace eadem::distributed
