// SPDX-License-Identifier: Apache-2.0
//
// A device owns memory and runs kernels in order. Everything above `kernels` talks to this interface and
// cannot tell one device from another.
//
// Work on a device is ordered: kernels, copies and fills take effect in the order they were issued. Calls
// come from one thread at a time per device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/core/function_ref.h"
#include "eadem/core/log.h"
#include "eadem/core/machine/isa.h"
#include "eadem/core/tensor.h"
#include "eadem/core/tensor_type.h"

namespace eadem {

struct MemoryInfo {
  int64_t total_bytes;
  int64_t free_bytes;
};

// Nominal rates for modelled costs, not measurements.
struct DeviceRates {
  double flops_per_second;
  double bytes_per_second;
  double launch_seconds;  // fixed cost of one kernel
};

// Steps of few rows read every weight for a handful of products and wait for memory; everything else computes.
enum class StepKind : uint8_t { decode, prefill };

// The threads that will read new memory, on a machine with several memory nodes.
enum class Placement : uint8_t {
  shares,       // each host thread reads a contiguous share of its own, in the order of threads
  interleaved,  // anyone may read anything
};

// Work of a device that was recorded once. It refers to the memory that it was recorded with, whose contents it reads
// anew each time.
class Recording {
 public:
  virtual ~Recording() = default;
};

// A point in the order of a device's work, which the host can wait for. Belongs to one device.
class Event {
 public:
  virtual ~Event() = default;
  virtual void record() = 0;  // the point is after all work given so far
  virtual void wait() = 0;    // returns when the device has reached the point; at once if none was recorded
};

class Device {
 public:
  virtual ~Device() = default;

  // The backend that the device belongs to: "cpu", "cuda".
  virtual std::string_view backend() const = 0;
  // A text for people: "cpu (avx512, 2 threads)", "cuda:0 (NVIDIA H100 80GB HBM3)".
  virtual std::string description() const = 0;
  virtual MemoryInfo memory() const = 0;
  virtual DeviceRates rates() const = 0;
  // True if the host may read and write the device's memory through plain pointers.
  virtual bool host_accessible() const = 0;

  // The dtype in which this device's kernels compute activations at their best speed.
  virtual DType preferred_activations() const { return DType::f32; }

  // Uninitialized memory, at least 64-byte aligned. Throws OutOfMemory with the sizes asked for and free.
  virtual Buffer allocate(int64_t size_bytes) = 0;

  // The host memory may be reused when the call returns. `copy_to_host` waits for all earlier work.
  virtual void copy_from_host(void* dst, const void* host, int64_t size_bytes) = 0;
  virtual void copy_to_host(void* host, const void* src, int64_t size_bytes) = 0;
  virtual void copy(void* dst, const void* src, int64_t size_bytes) = 0;  // within the device
  virtual void fill_zero(void* dst, int64_t size_bytes) = 0;
  virtual void synchronize() = 0;

  // Memory of the host for copy_to_host_later; 64-byte aligned and page-locked where that matters.
  virtual Buffer allocate_on_host(int64_t size_bytes);
  // Copies to memory of allocate_on_host, which has the bytes once the device has reached an event that is recorded
  // after this call.
  virtual void copy_to_host_later(void* host, const void* src, int64_t size_bytes) {
    copy_to_host(host, src, size_bytes);
  }
  virtual std::unique_ptr<Event> make_event();

  // Whether calls return before the work is done, so that the host can do something else meanwhile.
  virtual bool is_asynchronous() const { return false; }
  // Whether `record` makes recordings.
  virtual bool records() const { return false; }
  // Records the work that `issue` gives this device, which does not run then, so that `replay` can give it at once.
  // `issue` gives the device kernels, copies within the device and fills; it allocates nothing, copies nothing from or
  // to the host and does not wait. Whatever it throws is thrown again, and nothing is recorded.
  virtual std::unique_ptr<Recording> record(FunctionRef<void()> issue);
  // Gives the recorded work to the device, in its order of work. The recording must be one of this device.
  virtual void replay(const Recording& recording);

  // Host work in parallel where the device brings host threads with it (the CPU), else in order. For loading and
  // packing; not a kernel. Tasks must not throw.
  virtual void host_parallel_for(int64_t num_tasks, FunctionRef<void(int64_t index)> task) {
    for (int64_t index = 0; index < num_tasks; ++index) task(index);
  }
  // Runs tasks on the threads, and in the static partition, that decode steps use (Placement::shares), so that memory
  // which a task is the first to write lies near the thread that will read it.
  virtual void host_parallel_shares(int64_t num_tasks, FunctionRef<void(int64_t index)> task) {
    host_parallel_for(num_tasks, task);
  }
  // Sets memory to 0 that was never written, and so decides where its pages lie.
  virtual void fill_new(void* dst, int64_t size_bytes, Placement) { fill_zero(dst, size_bytes); }

  // States whether the following kernels compute steps of few rows (decode) or of many (prefill), until the next call;
  // prefill at first. It changes no result: a CPU may use another number of threads.
  virtual void set_step_kind(StepKind) {}
};

// For opening a device: kernels/backend.h.
struct DeviceOptions {
  int num_threads = 0;  // CPU: of steps of few rows (decode); 0: one per core that this process may use, in its quota
  int prefill_threads = 0;    // CPU: of everything else; 0 means as many
  bool pin = true;            // CPU: binds threads to processors and places weights and caches in their memory nodes
  std::string_view isa = {};  // CPU: empty means the best available
  Logger log = Logger();      // takes a warning when the system refuses to create so many threads
};

// A new tensor on `device` with uninitialized contents: plain, or in the planes of the type's encoding.
Tensor allocate_tensor(Device& device, DType dtype, const Shape& shape);
Tensor allocate_tensor(Device& device, const TensorType& type, const SymbolValues& symbols);
// Sets every byte of a tensor on `device`, in all of its planes, to 0.
void fill_zero(Device& device, const TensorView& view);
// Sets every byte of a tensor that was never written to 0, which decides where its pages lie (Device::fill_new).
void fill_new(Device& device, const TensorView& view, Placement placement);
// A copy of a plain contiguous host tensor.
Tensor copy_to_device(const std::shared_ptr<Device>& device, const TensorView& host);
// A host copy of a contiguous device tensor, in its encoding.
Tensor copy_to_host(Device& device, const TensorView& view);

}  // namespace eadem
