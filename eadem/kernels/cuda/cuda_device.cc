// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/cuda_device.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "eadem/kernels/cuda/capability.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/cublas_lt.h"

namespace eadem {

namespace detail {

void cuda_failed(cudaError_t error, const char* call, const char* file, int line) {
  (void)cudaGetLastError();  // clears the error: a caller that survives it must not see it twice
  const std::string message =
      fmt::format("{} ({}) from {} at {}:{}", cudaGetErrorName(error), cudaGetErrorString(error), call, file, line);
  if (error == cudaErrorMemoryAllocation) throw OutOfMemory(message);
  throw DeviceError(message);
}

void cublas_failed(cublasStatus_t status, const char* call, const char* file, int line) {
  throw DeviceError("{} ({}) from {} at {}:{}", cublas_lt().GetStatusName(status), cublas_lt().GetStatusString(status),
                    call, file, line);
}

}  // namespace detail

namespace {

constexpr int64_t kMatmulWorkspaceBytes = 32 << 20;  // what the cuBLAS documentation advises for Hopper

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  EADEM_CUDA_CALL(cudaDeviceGetAttribute(&value, which, index));
  return value;
}

// Dense bf16 operations of one multiprocessor per clock.
double tensor_flops_per_clock(int major, int minor) {
  if (major >= 10) return 8192;
  if (major == 9) return 4096;
  if (major == 8 && minor == 0) return 2048;
  return 1024;
}

DeviceRates rates_of(int index) {
  // A virtual GPU may report a clock of 0. The substitute values keep modelled costs finite and in proportion.
  const double core_hz = 1e3 * std::max(attribute(cudaDevAttrClockRate, index), 1'000'000);
  const double memory_hz = 1e3 * std::max(attribute(cudaDevAttrMemoryClockRate, index), 1'000'000);
  const double bus_bytes = attribute(cudaDevAttrGlobalMemoryBusWidth, index) / 8.0;
  const double flops_per_clock = tensor_flops_per_clock(attribute(cudaDevAttrComputeCapabilityMajor, index),
                                                        attribute(cudaDevAttrComputeCapabilityMinor, index));
  return {.flops_per_second = 0.7 * core_hz * attribute(cudaDevAttrMultiProcessorCount, index) * flops_per_clock,
          .bytes_per_second = 0.9 * 2.0 * memory_hz * std::max(bus_bytes, 8.0),  // two transfers a clock
          .launch_seconds = 3e-6};
}

class CudaRecording final : public Recording {
 public:
  explicit CudaRecording(cudaGraphExec_t graph) : graph_(graph) {}
  cudaGraphExec_t graph() const { return graph_.get(); }

 private:
  CudaHandle<cudaGraphExec_t, cudaGraphExecDestroy> graph_;
};

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(CudaDevice& device) : device_(device) {
    const cudaStream_t unused = device_.stream();  // makes the device current
    (void)unused;
    cudaEvent_t event = nullptr;
    EADEM_CUDA_CALL(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    event_.reset(event);
  }
  void record() override { EADEM_CUDA_CALL(cudaEventRecord(event_.get(), device_.stream())); }
  void wait() override { EADEM_CUDA_CALL(cudaEventSynchronize(event_.get())); }

 private:
  CudaDevice& device_;
  CudaHandle<cudaEvent_t, cudaEventDestroy> event_;
};

// Freeing waits for work that may still read the memory. Like CudaDestroy, it drops errors.
void free_device_memory(void* data, int64_t, void*) { (void)cudaFree(data); }
void free_host_memory(void* data, int64_t, void*) { (void)cudaFreeHost(data); }

}  // namespace

int num_cuda_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();  // no driver or no device: an answer, not a failure
  return 0;
}

std::shared_ptr<Device> open_cuda_device(int index) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    throw NotFound("device 'cuda:{}' not found: the CUDA driver (libcuda.so.1) offers no device: {} ({})", index,
                   cudaGetErrorName(error), cudaGetErrorString(error));
  }
  if (index < 0 || index >= count)
    throw NotFound("device 'cuda:{}' not found: the CUDA driver shows {} device{} (indices 0 to {})", index, count,
                   count == 1 ? "" : "s", count - 1);
  return std::make_shared<CudaDevice>(index);
}

CudaDevice::CudaDevice(int index) : index_(index) {
  make_current();
  cudaDeviceProp properties{};
  EADEM_CUDA_CALL(cudaGetDeviceProperties(&properties, index));
  name_ = properties.name;
  rates_ = rates_of(index);
  multiprocessors_ = properties.multiProcessorCount;
  kernels::cuda::Capability capability{.card = 10 * properties.major + properties.minor,
                                       .has_hopper_kernels = kernels::cuda::has_hopper_kernels()};
  EADEM_CUDA_CALL(kernels::cuda::find_code_capability(capability.code));
  if (const std::string refused = refusal(capability); !refused.empty())
    throw Unsupported("device 'cuda:{}' ({}): {}", index, name_, refused);
  hopper_refusal_ = kernels::cuda::hopper_refusal(capability);

  cudaStream_t stream = nullptr;
  EADEM_CUDA_CALL(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stream_.reset(stream);

  void* memory = nullptr;
  EADEM_CUDA_CALL(cudaHostAlloc(&memory, 2 * kStagingHalfBytes, cudaHostAllocDefault));
  staging_.memory.reset(memory);
  for (auto& done : staging_.done) {
    cudaEvent_t event = nullptr;
    EADEM_CUDA_CALL(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    done.reset(event);
  }

  matmul_ = std::make_unique<CudaMatmul>(allocate(kMatmulWorkspaceBytes));
}

CudaDevice::~CudaDevice() {
  // Work in flight may still use the staging memory and the workspace, so it is waited for.
  (void)cudaSetDevice(index_);
  (void)cudaStreamSynchronize(stream_.get());
}

void CudaDevice::make_current() const { EADEM_CUDA_CALL(cudaSetDevice(index_)); }

cudaStream_t CudaDevice::stream() {
  make_current();
  if (num_results_ > 0) {
    const std::span<const kernels::cuda::SmallCopy> copies(results_.data(),
                                                           static_cast<size_t>(std::exchange(num_results_, 0)));
    EADEM_CUDA_CALL(kernels::cuda::launch_small_copies(copies, stream_.get()));
  }
  return stream_.get();
}

std::string CudaDevice::description() const {
  return runs_hopper_kernels() ? fmt::format("cuda:{} ({})", index_, name_)
                               : fmt::format("cuda:{} ({}; generic kernels, since {})", index_, name_, hopper_refusal_);
}

MemoryInfo CudaDevice::memory() const {
  make_current();
  size_t free_bytes = 0, total_bytes = 0;
  EADEM_CUDA_CALL(cudaMemGetInfo(&free_bytes, &total_bytes));
  return {static_cast<int64_t>(total_bytes), static_cast<int64_t>(free_bytes)};
}

unsigned* CudaDevice::counters(int64_t count) {
  const int64_t size_bytes = count * static_cast<int64_t>(sizeof(unsigned));
  if (counters_.empty() || counters_.back().size_bytes() < size_bytes) {
    counters_.push_back(allocate(size_bytes));
    fill_zero(counters_.back().data(), size_bytes);
  }
  return static_cast<unsigned*>(counters_.back().data());
}

void CudaDevice::host_parallel_for(int64_t num_tasks, FunctionRef<void(int64_t)> task) {
  if (host_threads_ == nullptr) host_threads_ = std::make_unique<ThreadPool>(0, /*pin=*/false);
  host_threads_->parallel_for(num_tasks, [&](int64_t index, int) { task(index); });
}

Buffer CudaDevice::allocate(int64_t size_bytes) {
  EADEM_CHECK(size_bytes >= 0, "allocate {} bytes", size_bytes);
  make_current();
  // cudaMalloc aligns to 256 bytes. An empty tensor gets an address, too, because null means "not connected".
  const int64_t rounded = std::max<int64_t>(size_bytes, 1);
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(rounded));
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw OutOfMemory("{}: cannot allocate {} bytes of device memory ({} bytes free)", description(), size_bytes,
                      memory().free_bytes);
  }
  EADEM_CUDA_CALL(error);
  return Buffer(data, rounded, free_device_memory, nullptr);
}

void CudaDevice::copy_from_host(void* dst, const void* host, int64_t size_bytes) {
  if (size_bytes == 0) return;
  const cudaStream_t stream = this->stream();
  const size_t size = static_cast<size_t>(size_bytes);
  if (size_bytes > kStagingHalfBytes) {
    EADEM_CUDA_CALL(cudaMemcpyAsync(dst, host, size, cudaMemcpyHostToDevice, stream));
    EADEM_CUDA_CALL(cudaStreamSynchronize(stream));
    return;
  }
  if (staging_.used_bytes + size_bytes > kStagingHalfBytes) {
    EADEM_CUDA_CALL(cudaEventRecord(staging_.done[staging_.half].get(), stream));
    staging_.half = 1 - staging_.half;
    staging_.used_bytes = 0;
    // This returns at once if the half was never used.
    EADEM_CUDA_CALL(cudaEventSynchronize(staging_.done[staging_.half].get()));
  }
  char* staged = static_cast<char*>(staging_.memory.get()) + staging_.half * kStagingHalfBytes + staging_.used_bytes;
  std::memcpy(staged, host, size);
  if (const kernels::cuda::SmallCopy copy{dst, staged, size_bytes}; kernels::cuda::is_small(copy))
    EADEM_CUDA_CALL(kernels::cuda::launch_small_copies({&copy, 1}, stream));
  else
    EADEM_CUDA_CALL(cudaMemcpyAsync(dst, staged, size, cudaMemcpyHostToDevice, stream));
  staging_.used_bytes += (size_bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

void CudaDevice::copy_to_host(void* host, const void* src, int64_t size_bytes) {
  const cudaStream_t stream = this->stream();
  if (size_bytes > 0)
    EADEM_CUDA_CALL(cudaMemcpyAsync(host, src, static_cast<size_t>(size_bytes), cudaMemcpyDeviceToHost, stream));
  EADEM_CUDA_CALL(cudaStreamSynchronize(stream));
}

void CudaDevice::copy(void* dst, const void* src, int64_t size_bytes) {
  if (size_bytes == 0 || dst == src) return;
  EADEM_CUDA_CALL(cudaMemcpyAsync(dst, src, static_cast<size_t>(size_bytes), cudaMemcpyDeviceToDevice, stream()));
}

void CudaDevice::fill_zero(void* dst, int64_t size_bytes) {
  if (size_bytes == 0) return;
  EADEM_CUDA_CALL(cudaMemsetAsync(dst, 0, static_cast<size_t>(size_bytes), stream()));
}

void CudaDevice::synchronize() { EADEM_CUDA_CALL(cudaStreamSynchronize(stream())); }

Buffer CudaDevice::allocate_on_host(int64_t size_bytes) {
  make_current();
  const int64_t rounded = std::max<int64_t>(size_bytes, 1);
  void* data = nullptr;
  EADEM_CUDA_CALL(cudaHostAlloc(&data, static_cast<size_t>(rounded), cudaHostAllocDefault));
  return Buffer(data, rounded, free_host_memory, nullptr);
}

void CudaDevice::copy_to_host_later(void* host, const void* src, int64_t size_bytes) {
  if (size_bytes == 0) return;
  const kernels::cuda::SmallCopy copy{host, src, size_bytes};
  if (!kernels::cuda::is_small(copy)) {
    EADEM_CUDA_CALL(cudaMemcpyAsync(host, src, static_cast<size_t>(size_bytes), cudaMemcpyDeviceToHost, stream()));
    return;
  }
  if (num_results_ == std::ssize(results_)) (void)stream();
  results_[static_cast<size_t>(num_results_++)] = copy;
}

std::unique_ptr<Event> CudaDevice::make_event() { return std::make_unique<CudaEvent>(*this); }

std::unique_ptr<Recording> CudaDevice::record(FunctionRef<void()> issue) {
  make_current();
  EADEM_CUDA_CALL(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  cudaGraph_t recorded = nullptr;
  try {
    issue();
  } catch (...) {
    (void)cudaStreamEndCapture(stream(), &recorded);
    if (recorded != nullptr) (void)cudaGraphDestroy(recorded);
    (void)cudaGetLastError();
    throw;
  }
  EADEM_CUDA_CALL(cudaStreamEndCapture(stream(), &recorded));
  const CudaHandle<cudaGraph_t, cudaGraphDestroy> graph(recorded);
  cudaGraphExec_t executable = nullptr;
  EADEM_CUDA_CALL(cudaGraphInstantiate(&executable, graph.get(), 0));
  return std::make_unique<CudaRecording>(executable);
}

void CudaDevice::replay(const Recording& recording) {
  make_current();
  EADEM_CUDA_CALL(cudaGraphLaunch(static_cast<const CudaRecording&>(recording).graph(), stream()));
}

}  // namespace eadem
