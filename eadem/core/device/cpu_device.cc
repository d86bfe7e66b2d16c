// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/device/cpu_device.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <cstring>

namespace eadem {

namespace {

// Mapped rather than malloc'ed: large blocks get huge pages, which saves a tenth of the read bandwidth that
// page walks cost, and go back to the system when freed.
void unmap(void* data, int64_t size_bytes, void*) { munmap(data, static_cast<size_t>(size_bytes)); }

}  // namespace

CpuDevice::CpuDevice(const DeviceOptions& options)
    : isa_(options.isa.empty() ? available_isas().front() : isa_from_name(options.isa)), pool_(options.num_threads) {}

std::string CpuDevice::description() const {
  return fmt::format("cpu ({}, {} thread{})", isa_name(isa_), pool_.num_threads(), pool_.num_threads() == 1 ? "" : "s");
}

MemoryInfo CpuDevice::memory() const {
  struct sysinfo info {};
  sysinfo(&info);
  const int64_t unit = info.mem_unit;
  return {static_cast<int64_t>(info.totalram) * unit, static_cast<int64_t>(info.freeram + info.bufferram) * unit};
}

DeviceRates CpuDevice::rates() const {
  const double threads = pool_.num_threads();
  return {.flops_per_second = threads * isa_lanes(isa_) * 4 * 2.0e9,  // two FMA pipes at 2 GHz
          .bytes_per_second = threads * 10.0e9,
          .launch_seconds = 2e-6};
}

Buffer CpuDevice::allocate(int64_t size_bytes) {
  EADEM_CHECK(size_bytes >= 0, "allocate {} bytes", size_bytes);
  constexpr int64_t kHugePage = 2 << 20;
  const int64_t rounded = size_bytes >= kHugePage ? (size_bytes + kHugePage - 1) / kHugePage * kHugePage
                                                  : (size_bytes + 4096) / 4096 * 4096;
  void* data = mmap(nullptr, static_cast<size_t>(rounded), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED)
    throw OutOfMemory("cannot allocate {} bytes of host memory ({} bytes free)", size_bytes, memory().free_bytes);
  if (rounded >= kHugePage) madvise(data, static_cast<size_t>(rounded), MADV_HUGEPAGE);
  return Buffer(data, rounded, unmap, nullptr);
}

void CpuDevice::copy_from_host(void* dst, const void* host, int64_t size_bytes) { copy(dst, host, size_bytes); }
void CpuDevice::copy_to_host(void* host, const void* src, int64_t size_bytes) { copy(host, src, size_bytes); }

void CpuDevice::copy(void* dst, const void* src, int64_t size_bytes) {
  if (size_bytes > 0) std::memmove(dst, src, static_cast<size_t>(size_bytes));
}

void CpuDevice::fill_zero(void* dst, int64_t size_bytes) {
  if (size_bytes > 0) std::memset(dst, 0, static_cast<size_t>(size_bytes));
}

}  // namespace eadem
