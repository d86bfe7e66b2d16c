// SPDX-License-Identifier: Apache-2.0
//
// The CUDA device: opening, memory, ordered copies. Without a device only its absence is tested. (Which kernels a card
// runs: capability_test.cc.)
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "eadem/core/error.h"
#include "eadem/kernels/backend.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/linear/cublas_lt.h"

namespace eadem {
namespace {

std::vector<uint8_t> pattern(int64_t size, uint8_t first) {
  std::vector<uint8_t> bytes(static_cast<size_t>(size));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(first + i * 7 + i / 251);
  return bytes;
}

TEST(CudaDevice, AnIndexOutOfRangeIsNotFound) {
  const std::string name = fmt::format("cuda:{}", num_cuda_devices());
  try {
    open_device(name);
    FAIL() << "opened " << name;
  } catch (const NotFound& error) {
    EXPECT_NE(std::string(error.what()).find("'" + name + "'"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("driver"), std::string::npos) << error.what();
  }
}

TEST(CudaDevice, AFailedCallNamesTheErrorTheCallAndThePlace) {
  const auto failing_call = [] { return cudaErrorInvalidValue; };
  try {
    EADEM_CUDA_CALL(failing_call());
    FAIL();
  } catch (const DeviceError& error) {
    for (const char* part : {"cudaErrorInvalidValue", "failing_call()", "cuda_device_test.cc"})
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(CudaDevice, AMissingLibraryIsNamedWithThePlacesThatWereSearched) {
  try {
    open_cublas_lt("libcublasLt.so.0", "/no/such/folder");
    FAIL();
  } catch (const DeviceError& error) {
    for (const char* part : {"cuBLASLt", "libcublasLt.so.0", "/no/such/folder", "LD_LIBRARY_PATH"})
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
  try {
    open_cublas_lt("libm.so.6", "");
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_EQ(std::string(error.what()), "libm.so.6 has no cublasLtCreate");
  }
}

class OpenCudaDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
    device_ = open_device("cuda");
  }

  std::vector<uint8_t> read(const void* src, int64_t size) {
    std::vector<uint8_t> bytes(static_cast<size_t>(size), 0xcd);
    device_->copy_to_host(bytes.data(), src, size);
    return bytes;
  }

  std::shared_ptr<Device> device_;
};

TEST_F(OpenCudaDevice, DescribesItself) {
  EXPECT_EQ(device_->backend(), "cuda");
  EXPECT_EQ(device_->description().rfind("cuda:0 (", 0), 0u) << device_->description();
  const auto& cuda = static_cast<const CudaDevice&>(*device_);
  EXPECT_EQ(cuda.runs_hopper_kernels(), cuda.hopper_refusal().empty());
  EXPECT_EQ(device_->description().find("generic kernels") == std::string::npos, cuda.runs_hopper_kernels());
  EXPECT_FALSE(device_->host_accessible());
  EXPECT_GT(device_->memory().free_bytes, 0);
  EXPECT_LE(device_->memory().free_bytes, device_->memory().total_bytes);
  EXPECT_GT(device_->rates().flops_per_second, 1e12);
  EXPECT_GT(device_->rates().bytes_per_second, 1e10);
}

// Sizes about those of the staging memory (2 halves of 2 MiB), and above it.
TEST_F(OpenCudaDevice, CopiesRoundTrip) {
  constexpr int64_t kMiB = 1 << 20;
  for (const int64_t size :
       {int64_t{0}, int64_t{1}, int64_t{3}, kMiB, 2 * kMiB - 1, 2 * kMiB, 2 * kMiB + 1, 9 * kMiB + 5}) {
    const Buffer a = device_->allocate(size), b = device_->allocate(size);
    ASSERT_NE(a.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % 64, 0u);
    std::vector<uint8_t> host = pattern(size, 11);
    const std::vector<uint8_t> expected = host;
    device_->copy_from_host(a.data(), host.data(), size);
    std::fill(host.begin(), host.end(), uint8_t{0xee});  // it may be reused when the call returns
    device_->copy(b.data(), a.data(), size);
    device_->fill_zero(a.data(), size);
    EXPECT_EQ(read(b.data(), size), expected) << size;
    EXPECT_EQ(read(a.data(), size), std::vector<uint8_t>(static_cast<size_t>(size), 0)) << size;
  }
}

// Sizes and addresses about those that a kernel copies: whole words of four bytes, up to 64 KiB.
TEST_F(OpenCudaDevice, SmallCopiesRoundTrip) {
  constexpr int64_t kMost = 64 << 10, kSpare = 64;
  const Buffer host = device_->allocate_on_host(kMost + kSpare);
  auto* const result = static_cast<uint8_t*>(host.data());
  const std::unique_ptr<Event> done = device_->make_event();
  for (const int64_t size :
       {int64_t{1}, int64_t{4}, int64_t{12}, int64_t{13}, int64_t{1028}, kMost - 4, kMost, kMost + 4})
    for (const int64_t offset : {0, 2, 4, 12}) {
      const std::vector<uint8_t> bytes = pattern(size, static_cast<uint8_t>(offset));
      const Buffer memory = device_->allocate(size + kSpare);
      device_->fill_zero(memory.data(), size + kSpare);
      auto* const on_device = static_cast<uint8_t*>(memory.data()) + offset;
      std::memset(result, 0xee, kMost + kSpare);
      device_->copy_from_host(on_device, bytes.data(), size);
      device_->copy_to_host_later(result + offset, on_device, size);
      done->record();
      done->wait();
      EXPECT_EQ(std::memcmp(result + offset, bytes.data(), static_cast<size_t>(size)), 0) << size << " at " << offset;
      for (int64_t i = 0; i < offset; ++i) ASSERT_EQ(result[i], 0xee) << size << " at " << offset;
      for (int64_t i = offset + size; i < kMost + kSpare; ++i) ASSERT_EQ(result[i], 0xee) << size << " at " << offset;
      const std::vector<uint8_t> around = read(memory.data(), size + kSpare);
      for (int64_t i = 0; i < offset; ++i) ASSERT_EQ(around[static_cast<size_t>(i)], 0) << size << " at " << offset;
      for (int64_t i = offset + size; i < size + kSpare; ++i)
        ASSERT_EQ(around[static_cast<size_t>(i)], 0) << size << " at " << offset;
    }
}

// More copies in flight than the staging memory holds, out of one host buffer.
TEST_F(OpenCudaDevice, ManySmallCopiesKeepTheirOrder) {
  constexpr int64_t kSize = 300'001, kCopies = 64;
  const Buffer all = device_->allocate(kSize * kCopies);
  std::vector<uint8_t> host(kSize);
  for (int64_t i = 0; i < kCopies; ++i) {
    std::fill(host.begin(), host.end(), static_cast<uint8_t>(i + 1));
    device_->copy_from_host(static_cast<uint8_t*>(all.data()) + i * kSize, host.data(), kSize);
  }
  const std::vector<uint8_t> result = read(all.data(), kSize * kCopies);
  for (int64_t i = 0; i < kSize * kCopies; ++i)
    ASSERT_EQ(result[static_cast<size_t>(i)], static_cast<uint8_t>(i / kSize + 1)) << i;
}

TEST_F(OpenCudaDevice, MemoryThatIsNotThereIsOutOfMemoryAndSurvivable) {
  const int64_t size = 4 * device_->memory().total_bytes;
  try {
    device_->allocate(size);
    FAIL() << "allocated " << size;
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(size)), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("free"), std::string::npos) << error.what();
  }
  const std::vector<uint8_t> bytes = pattern(1000, 3);
  const Buffer buffer = device_->allocate(1000);
  device_->copy_from_host(buffer.data(), bytes.data(), 1000);
  EXPECT_EQ(read(buffer.data(), 1000), bytes);
}

TEST_F(OpenCudaDevice, FreedMemoryComesBack) {
  const int64_t size = device_->memory().free_bytes / 4 * 3;
  for (int i = 0; i < 3; ++i) device_->allocate(size);  // one at a time is all there is room for
}

}  // namespace
}  // namespace eadem
