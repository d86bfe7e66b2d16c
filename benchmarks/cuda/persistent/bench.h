// SPDX-License-Identifier: Apache-2.0
//
// PersistentBench: operands on the device, and launches of the persistent kernel that are checked or timed. Not
// thread-safe. Errors of CUDA are std::runtime_error.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "benchmarks/cuda/persistent/layers.h"

namespace eadem::persistent {

class PersistentBench {
 public:
  // `layers`: at most kMostLayers. Throws if the first device is none that the kernel can run on.
  PersistentBench(int layers, int narrow, int wide);
  ~PersistentBench();

  const std::string& device_name() const { return device_name_; }
  // Runs `layers` layers, at least as many as in earlier calls, and returns how many values of x differ in any bit from
  // those of the plain kernels.
  int wrong_values(int layers);
  // Microseconds of each of `launches` launches, after two more.
  std::vector<double> time(Mode mode, int launches);

 private:
  template <typename T>
  T* allocate(int64_t count);
  void launch(Mode mode, cudaEvent_t before, cudaEvent_t after);

  std::string device_name_;
  std::vector<std::shared_ptr<void>> memory_;
  std::shared_ptr<CUstream_st> stream_;
  int layers_ = 0;
  uint32_t next_epoch_ = 1;  // words begin with 0
  Params params_ = {};
  float* plain_x_ = nullptr;  // [kHidden] after plain_layers_ layers
  int plain_layers_ = 0;
  PlainRoom room_ = {};
};

}  // namespace eadem::persistent
