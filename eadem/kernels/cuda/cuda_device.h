// SPDX-License-Identifier: Apache-2.0
//
// The CUDA device as its kernels use it: one stream that orders all work, the cuBLASLt handle and its workspace. Only
// kernels/cuda, its tests and its benchmarks include this header.
//
// Calls on one device must not overlap in time; they may come from different threads.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/core/machine/thread_pool.h"
#include "eadem/kernels/cuda/linear/cuda_matmul.h"
#include "eadem/kernels/cuda/small_copy.h"

namespace eadem {

namespace detail {
// Throws DeviceError (OutOfMemory for cudaErrorMemoryAllocation) naming the error, the call and the place.
[[noreturn]] void cuda_failed(cudaError_t error, const char* call, const char* file, int line);
[[noreturn]] void cublas_failed(cublasStatus_t status, const char* call, const char* file, int line);
}  // namespace detail

#define EADEM_CUDA_CALL(call)                                               \
  do {                                                                      \
    const cudaError_t eadem_error = (call);                                 \
    if (eadem_error != cudaSuccess) [[unlikely]]                            \
      ::eadem::detail::cuda_failed(eadem_error, #call, __FILE__, __LINE__); \
  } while (false)

#define EADEM_CUBLAS_CALL(call)                                                \
  do {                                                                         \
    const cublasStatus_t eadem_status = (call);                                \
    if (eadem_status != CUBLAS_STATUS_SUCCESS) [[unlikely]]                    \
      ::eadem::detail::cublas_failed(eadem_status, #call, __FILE__, __LINE__); \
  } while (false)

// A CUDA or cuBLASLt object that destroys itself. Errors from destroying it are dropped, because a destructor cannot
// throw, and a device that failed reports it again in the next call.
template <auto kDestroy>
struct CudaDestroy {
  template <typename Handle>
  void operator()(Handle* handle) const {
    (void)kDestroy(handle);
  }
};
template <typename Handle, auto kDestroy>
using CudaHandle = std::unique_ptr<std::remove_pointer_t<Handle>, CudaDestroy<kDestroy>>;

// The number of CUDA devices; 0 without a driver.
int num_cuda_devices();

// Throws NotFound when there is no such device; the message says how many there are. Else throws as CudaDevice does.
std::shared_ptr<Device> open_cuda_device(int index);

class CudaDevice final : public Device {
 public:
  // `index` is in [0, num_cuda_devices()). Throws Unsupported for a device that runs no kernel of this program,
  // DeviceError or OutOfMemory.
  explicit CudaDevice(int index);
  ~CudaDevice() override;

  // Returns the device's only stream and makes the device current for the calling thread.
  cudaStream_t stream();
  // Returns at least `count` counters that are zero whenever no kernel runs: kernels that count leave zeros. They stay
  // where they are as long as the device lives.
  unsigned* counters(int64_t count);
  // Matrix products through cuBLASLt. It keeps their plans.
  CudaMatmul& matmul() { return *matmul_; }
  int multiprocessors() const { return multiprocessors_; }
  // Why the device runs none of the kernels for Hopper; empty if it does. All others it runs.
  const std::string& hopper_refusal() const { return hopper_refusal_; }
  bool runs_hopper_kernels() const { return hopper_refusal_.empty(); }

  std::string_view backend() const override { return "cuda"; }
  // "cuda:0 (NVIDIA H100 80GB HBM3)". Where the kernels for Hopper do not run, it says "generic kernels", and why.
  std::string description() const override;
  MemoryInfo memory() const override;
  // Rates computed from the device's attributes: 0.7 of the dense bf16 rate and 0.9 of the memory bandwidth, which
  // large products and copies reach (750 TFLOP/s and 3.0 TB/s on an H100 SXM). f32 products run at about 0.08 of the
  // bf16 rate.
  DeviceRates rates() const override { return rates_; }
  bool host_accessible() const override { return false; }
  // On a thread per core; they are created by the first call, since only loading needs them.
  void host_parallel_for(int64_t num_tasks, FunctionRef<void(int64_t index)> task) override;
  DType preferred_activations() const override { return DType::bf16; }
  Buffer allocate(int64_t size_bytes) override;
  // Small copies go through pinned staging memory and return at once; large ones return when the copy is complete.
  void copy_from_host(void* dst, const void* host, int64_t size_bytes) override;
  void copy_to_host(void* host, const void* src, int64_t size_bytes) override;
  void copy(void* dst, const void* src, int64_t size_bytes) override;
  void fill_zero(void* dst, int64_t size_bytes) override;
  void synchronize() override;
  Buffer allocate_on_host(int64_t size_bytes) override;
  void copy_to_host_later(void* host, const void* src, int64_t size_bytes) override;
  std::unique_ptr<Event> make_event() override;
  // CUDA graphs: one launch for all kernels.
  bool is_asynchronous() const override { return true; }
  bool records() const override { return true; }
  std::unique_ptr<Recording> record(FunctionRef<void()> issue) override;
  void replay(const Recording& recording) override;

 private:
  // Two halves of pinned memory that are filled in turn. A half is refilled only after all copies out of it are
  // complete.
  struct Staging {
    CudaHandle<void*, cudaFreeHost> memory;  // [2 * kStagingHalfBytes]
    std::array<CudaHandle<cudaEvent_t, cudaEventDestroy>, 2> done;
    int half = 0;
    int64_t used_bytes = 0;  // bytes used in the current half
  };
  static constexpr int64_t kStagingHalfBytes = 2 << 20, kStagingAlignment = 64;

  void make_current() const;

  int index_;
  std::string name_;
  DeviceRates rates_{};
  std::string hopper_refusal_;
  int multiprocessors_ = 0;
  CudaHandle<cudaStream_t, cudaStreamDestroy> stream_;
  Staging staging_;
  // Copies to the host that the next work for the stream takes along, one launch for all of them.
  std::array<kernels::cuda::SmallCopy, kernels::cuda::kMostSmallCopies> results_{};
  int num_results_ = 0;
  std::vector<Buffer> counters_;  // each has more than the one before
  std::unique_ptr<CudaMatmul> matmul_;
  std::unique_ptr<ThreadPool> host_threads_;
};

}  // namespace eadem
