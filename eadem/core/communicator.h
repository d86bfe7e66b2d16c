// SPDX-License-Identifier: Apache-2.0
//
// The collectives that ops need, abstract, so that they can be ops. Implementations live in `distributed`.
#pragma once

#include "eadem/core/device/device.h"

namespace eadem {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // data := sum over ranks, in rank order, so that every rank gets the same bits. In the device's order of work.
  virtual void all_reduce_sum(Device& device, const TensorView& data) = 0;
};

// The communicator of a process that is alone: every collective is the identity.
class SingleRank final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce_sum(Device&, const TensorView&) override {}
};

// The device and the communicator that a kernel or pipeline runs with. It is passed, never global.
struct Context {
  Device& device;
  Communicator& communicator;
};

}  // namespace eadem
