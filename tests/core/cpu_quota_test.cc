// SPDX-License-Identifier: Apache-2.0
//
// Quotas of processor time from files like the kernel's, and the threads that a device has by them.
#include "eadem/core/machine/cpu_quota.h"

#include <gtest/gtest.h>

#include "eadem/core/device/cpu_device.h"
#include "tests/core/fake_system.h"

namespace eadem {
namespace {

constexpr const char* kV2Mount = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
constexpr const char* kV1Mounts =
    "24 30 0:21 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "25 30 0:22 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n";

class CpuQuota : public testing::Test {
 protected:
  void process(const std::string& groups, const std::string& mounts) const {
    system_.write("proc/self/cgroup", groups);
    system_.write("proc/self/mountinfo", "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts);
  }
  void v2(const std::string& group, const std::string& text) const {
    system_.write("sys/fs/cgroup" + group + "/cpu.max", text);
  }
  void v1(const std::string& group, const std::string& quota, const std::string& period) const {
    system_.write("sys/fs/cgroup/cpu,cpuacct" + group + "/cpu.cfs_quota_us", quota + "\n");
    system_.write("sys/fs/cgroup/cpu,cpuacct" + group + "/cpu.cfs_period_us", period + "\n");
  }
  std::optional<double> quota() const { return cpu_quota(system_.root()); }

  FakeSystem system_;
};

TEST_F(CpuQuota, NothingToReadIsNoLimit) {
  EXPECT_EQ(quota(), std::nullopt);
  process("0::/\n", kV2Mount);  // the root has no cpu.max
  EXPECT_EQ(quota(), std::nullopt);
}

TEST_F(CpuQuota, TheLeastOfAGroupAndThoseAboveIt) {
  process("0::/pod/box\n", kV2Mount);
  v2("/pod/box", "max 100000\n");
  EXPECT_EQ(quota(), std::nullopt);
  v2("/pod", "350000 100000\n");
  EXPECT_EQ(quota(), 3.5);
  v2("/pod/box", "100000 50000\n");
  EXPECT_EQ(quota(), 2.0);
  v2("/pod/other", "1000 100000\n");  // of a neighbour
  EXPECT_EQ(quota(), 2.0);
}

TEST_F(CpuQuota, VersionOne) {
  process("5:cpuset:/box\n4:cpu,cpuacct:/box\n0::/\n", kV1Mounts);
  v1("", "-1", "100000");
  v1("/box", "-1", "100000");
  EXPECT_EQ(quota(), std::nullopt);
  v1("/box", "50000", "100000");
  EXPECT_EQ(quota(), 0.5);
}

TEST_F(CpuQuota, AContainerSeesItsGroupAtTheMountPoint) {
  const std::string mounted = "25 30 0:22 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n";
  v1("", "200000", "100000");
  v1("/part", "100000", "100000");
  process("4:cpu,cpuacct:/docker/abc\n", mounted);
  EXPECT_EQ(quota(), 2.0);
  process("4:cpu,cpuacct:/docker/abc/part\n", mounted);
  EXPECT_EQ(quota(), 1.0);
  process("4:cpu,cpuacct:/docker/abcd/part\n", mounted);  // not below what is mounted
  EXPECT_EQ(quota(), 2.0);
  process("4:cpu,cpuacct:/../elsewhere\n", mounted);
  EXPECT_EQ(quota(), 2.0);
}

TEST_F(CpuQuota, PathsWithSpaces) {
  process("0::/\n", "30 23 0:26 / /sys/fs/cgroup/a\\040b rw - cgroup2 cgroup2 rw\n");
  v2("/a b", "400000 100000\n");
  EXPECT_EQ(quota(), 4.0);
}

TEST_F(CpuQuota, WhatIsNoQuotaIsNoLimit) {
  process("0::/x\nnonsense\n1:cpu\n:\n", std::string(kV2Mount) + "30 23 - cgroup2\n-\n\n");
  for (const char* text : {"", "\n", "100000", "0 100000", "-5 100000", "100000 0", "1e5 100000",
                           "99999999999999999999 1", "200000 100000 7"}) {
    v2("/x", text);
    EXPECT_EQ(quota(), std::nullopt) << text;
  }
}

TEST(DefaultThreads, AreOnePerCoreAsFarAsTheQuotaGoes) {
  const FakeSystem system;
  system.two_nodes();
  struct Case {
    std::optional<double> quota;
    int threads;
  };
  for (const Case& c : {Case{std::nullopt, 8}, {100.0, 8}, {8.0, 8}, {7.9, 7}, {2.0, 2}, {1.5, 1}, {0.1, 1}}) {
    const Topology topology = system.read(up_to(8), c.quota);
    EXPECT_EQ(topology.num_cores(), 8);
    EXPECT_EQ(topology.default_threads(), c.threads) << c.quota.value_or(0);
    EXPECT_EQ(CpuDevice({.pin = false}, topology).decode_threads(), c.threads);
    EXPECT_EQ(CpuDevice({.num_threads = 4, .pin = false}, topology).decode_threads(), 4);  // who asks is heard
  }
}

}  // namespace
}  // namespace eadem
