// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/device/cpu_device.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cstring>
#include <fstream>

namespace eadem {

namespace {

// Mapped rather than malloc'ed: large blocks get huge pages, which saves a tenth of the read bandwidth that
// page walks cost, and go back to the system when freed.
void unmap(void* data, int64_t size_bytes, void*) { munmap(data, static_cast<size_t>(size_bytes)); }

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 2 << 20;

// What the system can give without swapping: free pages, and those of files that it can read again. Negative: it does
// not say.
int64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (int64_t value = 0; file >> name >> value; file >> unit)
    if (name == "MemAvailable:") return value * 1024;
  return -1;
}

std::vector<Seat> seats(const DeviceOptions& options, const Topology& topology, int decode_threads, int all_threads) {
  if (!options.pin) return std::vector<Seat>(static_cast<size_t>(all_threads));
  return topology.seats(decode_threads, all_threads);
}

}  // namespace

CpuDevice::CpuDevice(const DeviceOptions& options) : CpuDevice(options, Topology::of_this_process()) {}

CpuDevice::CpuDevice(const DeviceOptions& options, const Topology& topology)
    : isa_(options.isa.empty() ? available_isas().front() : isa_from_name(options.isa)),
      decode_threads_(options.num_threads > 0 ? options.num_threads : topology.default_threads()),
      prefill_threads_(options.prefill_threads > 0 ? options.prefill_threads : decode_threads_),
      pool_(seats(options, topology, decode_threads_, std::max(decode_threads_, prefill_threads_)), options.log) {
  decode_threads_ = std::min(decode_threads_, pool_.num_threads());
  prefill_threads_ = std::min(prefill_threads_, pool_.num_threads());
  set_step_kind(StepKind::prefill);
}

std::string CpuDevice::description() const {
  std::string text =
      fmt::format("cpu ({}, {} thread{}", isa_name(isa_), decode_threads_, decode_threads_ == 1 ? "" : "s");
  if (prefill_threads_ != decode_threads_) text += fmt::format(", {} for prefill", prefill_threads_);
  if (num_nodes() > 1) text += fmt::format(", {} memory nodes", num_nodes());
  return text + ")";
}

MemoryInfo CpuDevice::memory() const {
  struct sysinfo info {};
  sysinfo(&info);
  const int64_t unit = info.mem_unit, available = available_bytes();
  return {static_cast<int64_t>(info.totalram) * unit,
          available >= 0 ? available : static_cast<int64_t>(info.freeram + info.bufferram) * unit};
}

DeviceRates CpuDevice::rates() const {
  const double threads = pool_.num_threads();
  return {.flops_per_second = threads * isa_lanes(isa_) * 4 * 2.0e9,  // two FMA pipes at 2 GHz
          .bytes_per_second = threads * 10.0e9,
          .launch_seconds = 2e-6};
}

Buffer CpuDevice::allocate(int64_t size_bytes) {
  EADEM_CHECK(size_bytes >= 0, "allocate {} bytes", size_bytes);
  // Whole small pages: in whole huge ones a block would cost half of one more, a tenth of a model whose matrices are
  // few of them. Every block asks for huge pages, small ones, too, so that those allocated one after another become one
  // mapping and huge pages go across their borders.
  const int64_t rounded = (std::max<int64_t>(size_bytes, 1) + kPage - 1) / kPage * kPage;
  void* data = mmap(nullptr, static_cast<size_t>(rounded), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED)
    throw OutOfMemory("cannot allocate {} bytes of host memory ({} bytes free)", size_bytes, memory().free_bytes);
  madvise(data, static_cast<size_t>(rounded), MADV_HUGEPAGE);
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

void CpuDevice::fill_new(void* dst, int64_t size_bytes, Placement placement) {
  if (pool_.num_nodes(pool_.num_threads()) == 1) return fill_zero(dst, size_bytes);
  auto* const bytes = static_cast<std::byte*>(dst);
  const ThreadPool::CallerSeat seat(pool_);
  pool_.parallel_own(decode_threads_, decode_threads_, [&](int64_t, int worker) {
    for (const ByteRange& range : first_written_by(worker, size_bytes, placement))
      std::memset(bytes + range.begin, 0, static_cast<size_t>(range.end - range.begin));
  });
}

void CpuDevice::set_step_kind(StepKind kind) {
  const bool few = kind == StepKind::decode;
  pool_.set_active_threads(few ? decode_threads_ : prefill_threads_);
  if (!few)
    caller_seat_.reset();
  else if (!caller_seat_)
    caller_seat_.emplace(pool_);
}

std::vector<ByteRange> CpuDevice::first_written_by(int worker, int64_t size_bytes, Placement placement) const {
  const int64_t page = size_bytes >= kHugePage ? kHugePage : kPage;  // the page size that `allocate` asks for
  if (placement == Placement::shares) {
    const auto begin = [&](int w) { return ThreadPool::share_begin(size_bytes, decode_threads_, w) / 64 * 64; };
    return {{begin(worker), worker + 1 == decode_threads_ ? size_bytes : begin(worker + 1)}};
  }
  // Pages go round the nodes, and those of a node round its workers.
  int peers = 0, place = 0;
  for (int w = 0; w < decode_threads_; ++w) {
    if (pool_.node_of(w) != pool_.node_of(worker)) continue;
    if (w < worker) ++place;
    ++peers;
  }
  // The nodes of the first workers, in the order of workers.
  int node = 0;
  for (int w = 1; w <= worker; ++w) node += pool_.node_of(w) != pool_.node_of(w - 1) ? 1 : 0;
  std::vector<ByteRange> ranges;
  for (int64_t at = (place * num_nodes() + node) * page; at < size_bytes; at += peers * num_nodes() * page)
    ranges.push_back({at, std::min(size_bytes, at + page)});
  return ranges;
}

void CpuDevice::host_parallel_for(int64_t num_tasks, FunctionRef<void(int64_t)> task) {
  const int active = pool_.active_threads();
  pool_.set_active_threads(pool_.num_threads());
  pool_.parallel_for(num_tasks, [&](int64_t index, int) { task(index); });
  pool_.set_active_threads(active);
}

void CpuDevice::host_parallel_shares(int64_t num_tasks, FunctionRef<void(int64_t)> task) {
  // If all threads run on one node, it does not matter which of them writes.
  if (pool_.num_nodes(pool_.num_threads()) == 1) return host_parallel_for(num_tasks, task);
  const ThreadPool::CallerSeat seat(pool_);
  pool_.parallel_own(num_tasks, decode_threads_, [&](int64_t index, int) { task(index); });
}

}  // namespace eadem
