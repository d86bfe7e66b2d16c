// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/device/device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "eadem/core/device/cpu_device.h"
#include "eadem/core/error.h"
#include "eadem/core/log.h"
#include "eadem/kernels/backend.h"
#include "tests/core/fake_system.h"

namespace eadem {
namespace {

template <typename Kind, typename Action>
std::string message_of(Action&& action) {
  try {
    action();
  } catch (const Kind& error) {
    return error.what();
  }
  return "(not thrown)";
}

TEST(Isa, NamesRoundTrip) {
  const std::vector<Isa> available = available_isas();
  ASSERT_FALSE(available.empty());
  for (Isa isa : available) EXPECT_EQ(isa_from_name(isa_name(isa)), isa);
}

TEST(Isa, UnknownAndUnavailableAreToldApart) {
  EXPECT_NE(message_of<InvalidArgument>([] { isa_from_name("mmx"); }).find("'mmx'"), std::string::npos);
  for (Isa isa : {Isa::neon, Isa::neon_dotprod, Isa::sse4}) {
    const std::vector<Isa> available = available_isas();
    if (std::find(available.begin(), available.end(), isa) != available.end()) continue;
    EXPECT_NE(message_of<Unsupported>([&] { isa_from_name(isa_name(isa)); }).find("available: "), std::string::npos);
  }
}

// The order decides which chain of additions bf16 weights get where nobody names an instruction set.
TEST(Isa, DotProductsOfBf16ComeFirstOnlyWhereTheyAreFaster) {
#if defined(__x86_64__)
  const std::vector<Isa> available = available_isas();
  const auto dots = std::find(available.begin(), available.end(), Isa::avx512_bf16);
  if (dots == available.end()) GTEST_SKIP() << "no avx512_bf16 here";
  const auto without = std::find(available.begin(), available.end(), Isa::avx512_vnni);
  ASSERT_NE(without, available.end());
  EXPECT_EQ(dots > without, __builtin_cpu_is("intel") != 0);
  EXPECT_EQ(std::count(available.begin(), available.end(), Isa::avx512_bf16), 1);
#else
  GTEST_SKIP() << "of x86 processors";
#endif
}

TEST(CpuDevice, OptionsAreHonoured) {
  for (Isa isa : available_isas()) {
    const auto device = open_device("cpu", {.num_threads = 3, .isa = isa_name(isa)});
    EXPECT_EQ(device->backend(), "cpu");
    EXPECT_EQ(static_cast<CpuDevice&>(*device).isa(), isa);
    EXPECT_EQ(device->description(), fmt::format("cpu ({}, 3 threads)", isa_name(isa)));
  }
  EXPECT_EQ(static_cast<CpuDevice&>(*open_device("cpu")).isa(), available_isas().front());
  EXPECT_THROW(open_device("cpu", {.isa = "mmx"}), InvalidArgument);
}

TEST(CpuDevice, DecodeAndPrefillHaveThreadsOfTheirOwn) {
  const Topology topology = Topology::of_this_process();
  struct Case {
    int asked_decode, asked_prefill;  // 0: the default
    bool pin;
    int decode, prefill;
    const char* text;
  };
  const std::string isa(isa_name(available_isas().front()));
  for (const Case& c :
       {Case{2, 3, true, 2, 3, "2 threads, 3 for prefill"}, Case{3, 1, true, 3, 1, "3 threads, 1 for prefill"},
        Case{1, 2, false, 1, 2, "1 thread, 2 for prefill"}, Case{2, 0, true, 2, 2, "2 threads"},
        Case{0, 70, true, topology.default_threads(), 70, ", 70 for prefill"},
        Case{0, 0, true, topology.default_threads(), topology.default_threads(), "thread"}}) {
    CpuDevice device({.num_threads = c.asked_decode, .prefill_threads = c.asked_prefill, .pin = c.pin});
    EXPECT_EQ(device.decode_threads(), c.decode);
    EXPECT_EQ(device.prefill_threads(), c.prefill);
    EXPECT_EQ(device.pool().num_threads(), std::max(c.decode, c.prefill));
    EXPECT_EQ(device.pool().active_threads(), c.prefill) << "until a step says that it has few rows";
    device.set_step_kind(StepKind::decode);
    EXPECT_EQ(device.pool().active_threads(), c.decode);
    // Loading uses all of them, and leaves things as they were.
    std::atomic<int> count{0};
    device.host_parallel_for(100, [&](int64_t) { count.fetch_add(1); });
    device.host_parallel_shares(100, [&](int64_t) { count.fetch_add(1); });
    EXPECT_EQ(count.load(), 200);
    EXPECT_EQ(device.pool().active_threads(), c.decode);
    device.set_step_kind(StepKind::prefill);
    EXPECT_EQ(device.pool().active_threads(), c.prefill);
    EXPECT_NE(device.description().find(c.text), std::string::npos) << device.description();
  }
}

TEST(CpuDevice, SitsInSeveralNodesUnlessToldNotTo) {
  const Topology topology = two_node_topology();
  const std::string isa(isa_name(available_isas().front()));
  const CpuDevice device({.num_threads = 4, .prefill_threads = 8}, topology);
  EXPECT_EQ(device.num_nodes(), 2);
  EXPECT_EQ(device.description(), fmt::format("cpu ({}, 4 threads, 8 for prefill, 2 memory nodes)", isa));
  for (int w = 0; w < 8; ++w) EXPECT_EQ(device.pool().node_of(w), w / 2 % 2) << w;
  EXPECT_EQ(CpuDevice({.num_threads = 1, .prefill_threads = 8}, topology).num_nodes(), 1) << "one thread decodes";
  EXPECT_EQ(CpuDevice({.num_threads = 4, .pin = false}, topology).num_nodes(), 1);
  EXPECT_EQ(CpuDevice({.num_threads = 9}, topology).num_nodes(), 1) << "more threads than processors";
}

// Every byte of a buffer has one first writer, the worker that reads it.
TEST(CpuDevice, NewMemoryIsWrittenByWhoWillReadIt) {
  const Topology topology = two_node_topology();
  for (int threads : {2, 4, 5, 8}) {
    const CpuDevice device({.num_threads = threads, .prefill_threads = 8}, topology);
    for (int64_t size : {int64_t{1}, int64_t{64}, int64_t{4095}, int64_t{100000}, (int64_t{9} << 20) + 5})
      for (Placement placement : {Placement::shares, Placement::interleaved}) {
        const int64_t page = size >= 2 << 20 ? 2 << 20 : 4096;
        std::vector<int> writer(static_cast<size_t>(size), -1);
        for (int w = 0; w < threads; ++w)
          for (const ByteRange& range : device.first_written_by(w, size, placement))
            for (int64_t i = range.begin; i < range.end; ++i) {
              ASSERT_EQ(writer[static_cast<size_t>(i)], -1) << i << " of " << size;
              writer[static_cast<size_t>(i)] = w;
            }
        for (int64_t i = 0; i < size; ++i) {
          const int w = writer[static_cast<size_t>(i)];
          ASSERT_GE(w, 0) << i << " of " << size;
          if (placement == Placement::interleaved) {
            ASSERT_EQ(device.pool().node_of(w), i / page % 2) << "pages go round the nodes";
          } else {
            // Shares in the order of workers, rounded down to a line.
            ASSERT_GE(i, ThreadPool::share_begin(size, threads, w) / 64 * 64);
            ASSERT_TRUE(w + 1 == threads || i < ThreadPool::share_begin(size, threads, w + 1));
          }
        }
      }
  }
}

TEST(CpuDevice, FillsNewMemoryInNodes) {
  CpuDevice device({.num_threads = 4}, two_node_topology());
  for (Placement placement : {Placement::shares, Placement::interleaved})
    for (int64_t size : {int64_t{0}, int64_t{5}, int64_t{70001}, (int64_t{5} << 20) + 3}) {
      const Buffer buffer = device.allocate(size + 1);
      auto* bytes = static_cast<uint8_t*>(buffer.data());
      std::memset(bytes, 0xab, static_cast<size_t>(size + 1));
      device.fill_new(bytes, size, placement);
      EXPECT_EQ(std::count(bytes, bytes + size, 0), size);
      EXPECT_EQ(bytes[size], 0xab);
    }
}

// Loading gives each thread of decode its share and nobody else: by the numbers of the threads.
TEST(CpuDevice, SharesOfLoadingBelongToTheThreadsOfDecode) {
  CpuDevice device({.num_threads = 4, .prefill_threads = 8}, two_node_topology());
  std::vector<std::thread::id> worker_ids(4);
  device.pool().parallel_own(
      4, 4, [&](int64_t, int worker) { worker_ids[static_cast<size_t>(worker)] = std::this_thread::get_id(); });
  std::vector<std::thread::id> ran_by(256);
  device.host_parallel_shares(256, [&](int64_t i) { ran_by[static_cast<size_t>(i)] = std::this_thread::get_id(); });
  for (size_t i = 0; i < 256; ++i) EXPECT_EQ(ran_by[i], worker_ids[i / 64]) << i;
}

// One thread decodes, in one node, and the others prefill from both: what it reads is written by it alone.
TEST(CpuDevice, ThreadsOfPrefillWriteNothingForOneOfDecode) {
  CpuDevice device({.num_threads = 1, .prefill_threads = 8}, two_node_topology());
  std::vector<std::thread::id> ran_by(100);
  device.host_parallel_shares(100, [&](int64_t i) { ran_by[static_cast<size_t>(i)] = std::this_thread::get_id(); });
  EXPECT_EQ(ran_by, std::vector<std::thread::id>(100, std::this_thread::get_id()));
  for (Placement placement : {Placement::shares, Placement::interleaved}) {
    std::vector<uint8_t> bytes(3 << 20, 1);
    device.fill_new(bytes.data(), 3 << 20, placement);
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 0), 3 << 20);
  }
}

// The calling thread is one of the workers: it has its seat in loads and steps of few rows, and is free afterwards.
TEST(CpuDevice, TheCallerSitsWhileItWorks) {
  const std::vector<int> before = allowed_processors();
  FakeSystem system;  // this machine, with another node
  system.node(0, std::to_string(before[0]));
  system.node(1, before[0] == 0 ? "1-3" : "0");
  CpuDevice device({.num_threads = 2}, system.read({before[0], before[0] == 0 ? 1 : 0}));
  ASSERT_EQ(device.num_nodes(), 2);
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<int> in_load;
  device.host_parallel_shares(2, [&](int64_t) {
    if (std::this_thread::get_id() == caller) in_load = allowed_processors();
  });
  // The first seat is that of the first node.
  EXPECT_EQ(in_load, std::vector<int>({before[0]}));
  EXPECT_EQ(allowed_processors(), before);
  device.set_step_kind(StepKind::decode);
  device.set_step_kind(StepKind::decode);
  EXPECT_EQ(allowed_processors(), std::vector<int>({before[0]}));
  device.set_step_kind(StepKind::prefill);
  EXPECT_EQ(allowed_processors(), before);

  CpuDevice one_node({.num_threads = 2});
  if (one_node.num_nodes() == 1) {
    one_node.set_step_kind(StepKind::decode);
    EXPECT_EQ(allowed_processors(), before) << "where there is one node, the caller's thread is left alone";
  }
}

TEST(CpuDevice, MemoryIsAlignedZeroSizedToo) {
  const auto device = open_device("cpu", {.num_threads = 1});
  for (int64_t size : {int64_t{0}, int64_t{1}, int64_t{4096}, int64_t{3} << 20}) {
    const Buffer buffer = device->allocate(size);
    ASSERT_NE(buffer.data(), nullptr);
    EXPECT_GE(buffer.size_bytes(), size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    std::memset(buffer.data(), 7, static_cast<size_t>(size));
  }
}

// A model is hundreds of blocks: what each is rounded up by is memory that nothing uses.
TEST(CpuDevice, MemoryIsRoundedToSmallPages) {
  const auto device = open_device("cpu", {.num_threads = 1});
  for (int64_t size : {int64_t{0}, int64_t{1}, int64_t{4096}, (int64_t{2} << 20) - 1, (int64_t{9} << 20) + 1})
    EXPECT_LE(device->allocate(size).size_bytes(), std::max<int64_t>(size, 1) + 4095) << size;
}

TEST(CpuDevice, OutOfMemoryNamesTheSize) {
  const auto device = open_device("cpu", {.num_threads = 1});
  EXPECT_NE(message_of<OutOfMemory>([&] { device->allocate(int64_t{1} << 60); }).find("1152921504606846976 bytes"),
            std::string::npos);
}

TEST(CpuDevice, CopiesAndFills) {
  const auto device = open_device("cpu", {.num_threads = 1});
  const Tensor host = Tensor::on_host(DType::i32, Shape{5});
  for (int i = 0; i < 5; ++i) host.view.as<int32_t>()[i] = i * i;
  const Tensor there = copy_to_device(device, host.view);
  const Tensor back = copy_to_host(*device, there.view);
  EXPECT_EQ(std::memcmp(back.view.data, host.view.data, 20), 0);
  const Tensor other = allocate_tensor(*device, DType::i32, Shape{5});
  device->copy(other.view.data, there.view.data, 20);
  device->fill_zero(there.view.data, 20);
  EXPECT_EQ(copy_to_host(*device, there.view).view.as<int32_t>()[4], 0);
  EXPECT_EQ(copy_to_host(*device, other.view).view.as<int32_t>()[4], 16);
}

TEST(Device, UnknownNamesAreRefused) {
  for (const char* name : {"", "tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:99999999999999999999", "CPU"})
    EXPECT_NE(message_of<InvalidArgument>([&] { open_device(name); }).find(fmt::format("'{}'", name)),
              std::string::npos)
        << name;
}

TEST(Logger, FiltersByLevelAndReplacesItsSink) {
  std::vector<std::string> lines;
  const Logger logger(LogLevel::info, [&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  logger.log(LogLevel::debug, "not {}", "shown");
  logger.log(LogLevel::warning, "{} {}", "two", 2);
  EXPECT_EQ(lines, std::vector<std::string>{"two 2"});
  EXPECT_FALSE(Logger(LogLevel::off).enabled(LogLevel::error));
}

}  // namespace
}  // namespace eadem
