// SPDX-License-Identifier: Apache-2.0
//
// Communicator: a group of ranks and the collectives that ops need, abstract, so that they can be ops. Implementations
// live in `distributed`.
//
// All ranks of the group call the same collectives in the same order, with buffers of the same dtype and number of
// elements (all_to_all_parts: of the same dtype, with parts that fit each other). Buffers are plain and contiguous, lie
// in the memory of `device` and are read and written in its order of work: a call may return before the data has moved,
// as a kernel may. Input and output do not overlap, except that all_reduce_sum and broadcast work in place. Sums take
// f32 or bf16, add in f32 in the order of the ranks and round once, so that every rank gets the same bits and a run can
// be repeated.
//
// A collective that another rank will never join throws RankFailed (a group in which one rank has failed is of no use
// any more). One thread at a time may use a communicator.
#pragma once

#include <span>

#include "eadem/core/device/device.h"
#include "eadem/core/mesh/mesh_axis.h"

namespace eadem {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // data [n] := sum over ranks.
  virtual void all_reduce_sum(Device& device, const TensorView& data) = 0;
  // gathered [size, n] := the parts [n] of all ranks.
  virtual void all_gather(Device& device, const TensorView& gathered, const TensorView& part) = 0;
  // part [n] := sum over ranks of data[rank, :], where data is [size, n].
  virtual void reduce_scatter_sum(Device& device, const TensorView& part, const TensorView& data) = 0;
  // received[r, :] := sent[rank, :] of rank r; both [size, n].
  virtual void all_to_all(Device& device, const TensorView& received, const TensorView& sent) = 0;
  // The elements received_parts[r] of received := the elements sent_parts[rank] of rank r's sent, for every rank r.
  // Parts are ranges of the elements and may be empty; those of `sent` may overlap, those of `received` may not. What
  // lies outside of them stays as it is. Two ranks must agree on the sizes of their parts.
  virtual void all_to_all_parts(Device& device, const TensorView& received, std::span<const PartRange> received_parts,
                                const TensorView& sent, std::span<const PartRange> sent_parts) = 0;
  // data [n] := the data of rank `root`.
  virtual void broadcast(Device& device, const TensorView& data, int root) = 0;
  // Sends to, or receives from, one other rank. The two calls meet; the rest of the group takes no part.
  virtual void send(Device& device, const TensorView& data, int to) = 0;
  virtual void recv(Device& device, const TensorView& data, int from) = 0;
};

// The communicator of a process that is alone: every collective is the identity.
class SingleRank final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce_sum(Device&, const TensorView&) override {}
  void all_gather(Device& device, const TensorView& gathered, const TensorView& part) override {
    device.copy(gathered.data, part.data, part.size_bytes());
  }
  void reduce_scatter_sum(Device& device, const TensorView& part, const TensorView& data) override {
    device.copy(part.data, data.data, data.size_bytes());
  }
  void all_to_all(Device& device, const TensorView& received, const TensorView& sent) override {
    device.copy(received.data, sent.data, sent.size_bytes());
  }
  void all_to_all_parts(Device& device, const TensorView& received, std::span<const PartRange> received_parts,
                        const TensorView& sent, std::span<const PartRange> sent_parts) override {
    EADEM_CHECK(received_parts.size() == 1 && sent_parts.size() == 1 && received_parts[0].size == sent_parts[0].size,
                "{} and {} parts of one rank", received_parts.size(), sent_parts.size());
    const auto size = static_cast<int64_t>(dtype_size(sent.dtype));
    device.copy(static_cast<std::byte*>(received.data) + received_parts[0].begin * size,
                static_cast<const std::byte*>(sent.data) + sent_parts[0].begin * size, sent_parts[0].size * size);
  }
  void broadcast(Device&, const TensorView&, int root) override { EADEM_CHECK(root == 0, "root {} of one rank", root); }
  void send(Device&, const TensorView&, int to) override { EADEM_UNREACHABLE("send to rank {} of one rank", to); }
  void recv(Device&, const TensorView&, int from) override {
    EADEM_UNREACHABLE("receive from rank {} of one rank", from);
  }
};

}  // namespace eadem
