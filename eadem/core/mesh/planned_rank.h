// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/core/mesh/communicator.h"

namespace eadem {

// A rank of a group that nobody runs: programs are compiled with it to be shown, and each of its collectives aborts.
class PlannedRank final : public Communicator {
 public:
  PlannedRank(int size, int rank) : size_(size), rank_(rank) {
    EADEM_CHECK(rank >= 0 && rank < size, "rank {} of {}", rank, size);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void all_reduce_sum(Device&, const TensorView&) override { refuse(); }
  void all_gather(Device&, const TensorView&, const TensorView&) override { refuse(); }
  void reduce_scatter_sum(Device&, const TensorView&, const TensorView&) override { refuse(); }
  void all_to_all(Device&, const TensorView&, const TensorView&) override { refuse(); }
  void all_to_all_parts(Device&, const TensorView&, std::span<const PartRange>, const TensorView&,
                        std::span<const PartRange>) override {
    refuse();
  }
  void broadcast(Device&, const TensorView&, int) override { refuse(); }
  void send(Device&, const TensorView&, int) override { refuse(); }
  void recv(Device&, const TensorView&, int) override { refuse(); }

 private:
  [[noreturn]] void refuse() const { EADEM_UNREACHABLE("rank {} of {} was planned, not run", rank_, size_); }

  int size_, rank_;
};

}  // namespace eadem
