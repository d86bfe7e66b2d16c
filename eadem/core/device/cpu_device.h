// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "eadem/core/device/device.h"
#include "eadem/core/machine/thread_pool.h"

namespace eadem {

// Bytes [begin, end) of a buffer.
struct ByteRange {
  int64_t begin;
  int64_t end;

  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

// The host processor: a thread pool and the instruction set its kernels use.
class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const DeviceOptions& options = {});
  // Places threads by `topology` instead of this machine's.
  CpuDevice(const DeviceOptions& options, const Topology& topology);

  Isa isa() const { return isa_; }
  ThreadPool& pool() { return pool_; }
  const ThreadPool& pool() const { return pool_; }
  // Numbers of threads for decode steps (few rows) and for everything else. The pool has the larger number.
  int decode_threads() const { return decode_threads_; }
  int prefill_threads() const { return prefill_threads_; }
  // Memory nodes that decode reads from.
  int num_nodes() const { return pool_.num_nodes(decode_threads_); }
  // The byte ranges of a new allocation of `size_bytes` that worker `worker` < decode_threads() writes first, so that
  // they lie on its node. Placement::interleaved deals out pages, huge ones where the allocation has them.
  std::vector<ByteRange> first_written_by(int worker, int64_t size_bytes, Placement placement) const;

  std::string_view backend() const override { return "cpu"; }
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
  void host_parallel_for(int64_t num_tasks, FunctionRef<void(int64_t)> task) override;
  void host_parallel_shares(int64_t num_tasks, FunctionRef<void(int64_t)> task) override;
  void fill_new(void* dst, int64_t size_bytes, Placement placement) override;
  // `decode` binds the calling thread to the first seat until the next call with `prefill`, which must come from the
  // same thread.
  void set_step_kind(StepKind kind) override;

 private:
  Isa isa_;
  int decode_threads_;
  int prefill_threads_;
  ThreadPool pool_;
  std::optional<ThreadPool::CallerSeat> caller_seat_;
};

}  // namespace eadem
