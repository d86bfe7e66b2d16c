// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/rank_channel.h"

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

namespace eadem::engine {

namespace {

// What comes before a tensor that a rank shows.
struct Shown {
  int64_t tag;
  DType dtype;
  Shape shape;
};

// What a rank reports of a task.
struct Outcome {
  int64_t value = 0;
  int32_t failed = 0;
  std::array<char, 500> reason{};
};

}  // namespace

TensorView RankChannel::bytes(int64_t begin, int64_t size) { return {message_.data() + begin, DType::u8, Shape{size}}; }

void RankChannel::begin(RankCommand command) {
  if (!usable_) throw RankFailed("the ranks have parted since a call ended early on rank 0; make a new engine");
  message_.clear();
  put(int64_t{0});  // the length, once it is known
  put(command);
}

void RankChannel::put_bytes(const void* bytes, int64_t size_bytes) {
  const auto* const first = static_cast<const std::byte*>(bytes);
  message_.insert(message_.end(), first, first + size_bytes);
}

void RankChannel::tell() {
  const auto length = static_cast<int64_t>(message_.size());
  std::memcpy(message_.data(), &length, sizeof length);
  if (length < kFirstBytes) message_.resize(kFirstBytes);
  ranks_->broadcast(*device_, bytes(0, kFirstBytes), 0);
  if (length > kFirstBytes) ranks_->broadcast(*device_, bytes(kFirstBytes, length - kFirstBytes), 0);
}

RankCommand RankChannel::receive() {
  message_.resize(kFirstBytes);
  ranks_->broadcast(*device_, bytes(0, kFirstBytes), 0);
  taken_ = 0;
  const auto length = take<int64_t>();
  if (length > kFirstBytes) {
    message_.resize(static_cast<size_t>(length));
    ranks_->broadcast(*device_, bytes(kFirstBytes, length - kFirstBytes), 0);
  }
  return take<RankCommand>();
}

void RankChannel::take_bytes(void* bytes, int64_t size_bytes) {
  EADEM_CHECK(taken_ + size_bytes <= std::ssize(message_), "{} bytes at {} of a message of {}", size_bytes, taken_,
              message_.size());
  if (size_bytes > 0) std::memcpy(bytes, message_.data() + taken_, static_cast<size_t>(size_bytes));
  taken_ += size_bytes;
}

void RankChannel::show(const TensorView& host, int64_t tag) {
  EADEM_CHECK(host.encoding == nullptr && host.is_contiguous(), "rank {} shows {}", rank(), to_string(host));
  Shown shown{tag, host.dtype, host.shape};
  ranks_->send(*device_, TensorView(&shown, DType::u8, Shape{sizeof shown}), 0);
  ranks_->send(*device_, TensorView(host.data, DType::u8, Shape{host.size_bytes()}), 0);
}

Tensor RankChannel::see(int from, int64_t tag) {
  Shown shown{};
  const bool was_usable = std::exchange(usable_, false);  // unless all of it has come
  ranks_->recv(*device_, TensorView(&shown, DType::u8, Shape{sizeof shown}), from);
  if (shown.tag != tag) throw RankFailed("rank {} shows value {}; rank 0 looks at value {}", from, shown.tag, tag);
  Tensor seen = Tensor::on_host(shown.dtype, shown.shape);
  ranks_->recv(*device_, TensorView(seen.view.data, DType::u8, Shape{seen.view.size_bytes()}), from);
  usable_ = was_usable;
  return seen;
}

void RankChannel::together(const char* what, const std::function<int64_t()>& task) {
  Outcome own;
  std::exception_ptr failure;
  try {
    own.value = task();
  } catch (const Cancelled&) {
    usable_ = false;
    throw;
  } catch (const std::exception& error) {
    failure = std::current_exception();
    own.failed = 1;
    std::strncpy(own.reason.data(), error.what(), own.reason.size() - 1);
  }
  std::vector<Outcome> all(static_cast<size_t>(size()));
  const auto view = [](void* data, size_t count) {
    return TensorView(data, DType::u8, Shape{static_cast<int64_t>(count * sizeof(Outcome))});
  };
  ranks_->all_gather(*device_, view(all.data(), all.size()), view(&own, 1));
  if (failure) std::rethrow_exception(failure);
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank].failed != 0) throw TaskFailed("{}, rank {}: {}", what, rank, all[rank].reason.data());
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank].value != all[0].value)
      throw TaskFailed("{}: rank 0 has {}, rank {} has {}", what, all[0].value, rank, all[rank].value);
}

}  // namespace eadem::engine
