// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/device/device.h"

#include <gtest/gtest.h>

#include <cstring>

#include "eadem/core/device/cpu_device.h"
#include "eadem/core/error.h"
#include "eadem/core/log.h"

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
  for (Isa isa : {Isa::neon, Isa::sse4}) {
    const std::vector<Isa> available = available_isas();
    if (std::find(available.begin(), available.end(), isa) != available.end()) continue;
    EXPECT_NE(message_of<Unsupported>([&] { isa_from_name(isa_name(isa)); }).find("available: "), std::string::npos);
  }
}

TEST(CpuDevice, OptionsAreHonoured) {
  for (Isa isa : available_isas()) {
    const auto device = open_device("cpu", {.num_threads = 3, .isa = isa_name(isa)});
    EXPECT_EQ(device->type(), DeviceType::cpu);
    EXPECT_EQ(static_cast<CpuDevice&>(*device).isa(), isa);
    EXPECT_EQ(device->description(), fmt::format("cpu ({}, 3 threads)", isa_name(isa)));
  }
  EXPECT_EQ(static_cast<CpuDevice&>(*open_device("cpu")).isa(), available_isas().front());
  EXPECT_THROW(open_device("cpu", {.isa = "mmx"}), InvalidArgument);
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
