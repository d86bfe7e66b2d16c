// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/core/device/device.h"
#include "eadem/core/thread_pool.h"

namespace eadem {

// The host processor: a thread pool and the instruction set its kernels use.
class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const DeviceOptions& options = {});

  Isa isa() const { return isa_; }
  ThreadPool& pool() { return pool_; }
  const ThreadPool& pool() const { return pool_; }

  DeviceType type() const override { return DeviceType::cpu; }
  std::string description() const override;
  MemoryInfo memory() const override;
  DeviceRates rates() const override;
  bool host_accessible() const override { return true; }
  Buffer allocate(int64_t size_bytes) override;
  void copy_from_host(void* dst, const void* host, int64_t size_bytes) override;
  void copy_to_host(void* host, const void* src, int64_t size_bytes) override;
  void copy(void* dst, const void* src, int64_t size_bytes) override;
  void fill_zero(void* dst, int64_t size_bytes) override;
  void synchronize() override {}
  void host_parallel_for(int64_t num_tasks, FunctionRef<void(int64_t)> task) override {
    pool_.parallel_for(num_tasks, [&](int64_t index, int) { task(index); });
  }

 private:
  Isa isa_;
  ThreadPool pool_;
};

}  // namespace eadem
