// SPDX-License-Identifier: Apache-2.0
//
// A directory like the kernel's /sys/devices/system, or like its root, for machines that are not there.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "eadem/core/machine/topology.h"

namespace eadem {

class FakeSystem {
 public:
  FakeSystem() {
    std::string name = (std::filesystem::temp_directory_path() / "eadem_system_XXXXXX").string();
    root_ = mkdtemp(name.data());
  }
  FakeSystem(const FakeSystem&) = delete;
  FakeSystem& operator=(const FakeSystem&) = delete;
  ~FakeSystem() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void node(int number, const std::string& list) const {
    write("node/node" + std::to_string(number) + "/cpulist", list + "\n");
  }
  void siblings(int processor, const std::string& list) const {
    write("cpu/cpu" + std::to_string(processor) + "/topology/thread_siblings_list", list + "\n");
  }
  // Two nodes of four processors, a core each.
  void two_nodes() const {
    node(0, "0-3");
    node(1, "4-7");
    write("cpu/online", "0-7\n");
    for (int id = 0; id < 8; ++id) siblings(id, std::to_string(id));
  }

  Topology read(const std::vector<int>& allowed, std::optional<double> quota = std::nullopt) const {
    return Topology::read(root_.string(), allowed, quota);
  }
  std::string root() const { return root_.string(); }

 private:
  std::filesystem::path root_;
};

inline std::vector<int> up_to(int count) {
  std::vector<int> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

inline Topology two_node_topology() {
  const FakeSystem system;
  system.two_nodes();
  return system.read(up_to(8));
}

}  // namespace eadem
