// SPDX-License-Identifier: Apache-2.0
//
// CheckedCommunicator: a communicator with the checks of arguments that all communicators share.
#pragma once

#include <string>
#include <string_view>

#include "eadem/core/mesh/mesh.h"

namespace eadem::distributed {

class CheckedCommunicator : public Communicator {
 protected:
  // Throws InvalidArgument, and makes the calls of the others fail: they must not wait for one that this rank will not
  // make.
  [[noreturn]] virtual void refuse(const std::string& reason) const = 0;

  void expect_summed(DType dtype) const {
    if (dtype != DType::f32 && dtype != DType::bf16)
      refuse(fmt::format("ranks cannot sum {}; expected f32 or bf16", dtype_name(dtype)));
  }
  void expect_times_size(std::string_view collective, const TensorView& all, const TensorView& part) const {
    if (all.dtype != part.dtype || all.num_elements() != part.num_elements() * size())
      refuse(fmt::format("{} on {} ranks: {} is not {} times {}", collective, size(), to_string(all), size(),
                         to_string(part)));
  }
  // One range of the elements for each rank.
  void expect_parts(const TensorView& tensor, std::span<const PartRange> parts) const {
    if (std::ssize(parts) != size() || tensor.encoding != nullptr)
      refuse(fmt::format("all_to_all_parts on {} ranks: {} parts of {}", size(), parts.size(), to_string(tensor)));
    for (const PartRange& part : parts)
      if (part.begin < 0 || part.size < 0 || part.begin + part.size > tensor.num_elements())
        refuse(fmt::format("all_to_all_parts: elements {} to {} of {}", part.begin, part.begin + part.size,
                           to_string(tensor)));
  }
  void expect_same_dtype(const TensorView& received, const TensorView& sent) const {
    if (received.dtype != sent.dtype)
      refuse(fmt::format("all_to_all_parts of {} into {}", to_string(sent), to_string(received)));
  }
  static std::string unlike_parts(int from, int64_t sent, int to, int64_t received) {
    return fmt::format("all_to_all_parts: rank {} sends {} elements to rank {}, which expects {}", from, sent, to,
                       received);
  }
  void expect_rank(int rank) const {
    if (rank < 0 || rank >= size()) refuse(fmt::format("there is no rank {} of {}", rank, size()));
  }
  void expect_other_rank(int other) const {
    expect_rank(other);
    if (other == rank()) refuse(fmt::format("rank {} cannot send to itself", other));
  }
};

}  // namespace eadem::distributed
