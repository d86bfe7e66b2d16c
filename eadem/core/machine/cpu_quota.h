// SPDX-License-Identifier: Apache-2.0
//
// How much processor time the control groups of this process allow it, as containers set it.
#pragma once

#include <optional>
#include <string>

namespace eadem {

// Processors' worth of time: the least of quota / period over the process's group and those above it, as far as they
// are mounted: cpu.max of cgroup v2, cpu.cfs_quota_us and cpu.cfs_period_us of v1. Null where there is no limit, or
// nothing that says so in a form that is known. `root` stands before every path: "" is this machine. Reads
// ROOT/proc/self/cgroup, ROOT/proc/self/mountinfo and below the mount points that the latter names.
std::optional<double> cpu_quota(const std::string& root = "");

}  // namespace eadem
