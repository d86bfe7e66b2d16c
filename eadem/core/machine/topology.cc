// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/machine/topology.h"

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "eadem/core/error.h"
#include "eadem/core/machine/cpu_quota.h"

namespace eadem {

namespace {

// The kernel numbers fewer processors and nodes than this.
constexpr int kMaxId = 1 << 16;
// A list of processors is at most a page.
constexpr std::streamsize kMaxListBytes = 1 << 16;

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::string text(static_cast<size_t>(kMaxListBytes), '\0');
  file.read(text.data(), kMaxListBytes);
  text.resize(static_cast<size_t>(file.gcount()));
  return text.substr(0, text.find('\n'));
}

// The ids of "0-3,8,10-11"; none of an empty text. Null for anything else.
std::optional<std::vector<int>> ids_of(std::string_view text) {
  std::vector<int> ids;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&](int& value) {
    const auto [next, code] = std::from_chars(at, end, value);
    if (code != std::errc() || value < 0 || value >= kMaxId) return false;
    at = next;
    return true;
  };
  while (at < end) {
    int first = 0;
    if (!number(first)) return std::nullopt;
    int last = first;
    if (at < end && *at == '-') {
      ++at;
      if (!number(last)) return std::nullopt;
    }
    if (last < first || ids.size() > static_cast<size_t>(kMaxId)) return std::nullopt;
    for (int id = first; id <= last; ++id) ids.push_back(id);
    if (at < end && (*at++ != ',' || at == end)) return std::nullopt;
  }
  return ids;
}

// The numbers of ROOT's entries "node<N>", in order; null when there is no such directory.
std::optional<std::vector<int>> node_numbers(const std::string& root) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(root.c_str()), closedir);
  if (directory == nullptr) return std::nullopt;
  std::vector<int> numbers;
  while (const dirent* entry = readdir(directory.get())) {
    std::string_view name = entry->d_name;
    if (!name.starts_with("node")) continue;
    name.remove_prefix(4);
    int number = 0;
    const auto [end, code] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (code == std::errc() && end == name.data() + name.size() && number >= 0 && number < kMaxId)
      numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

// The node of each of `ids`, numbered from 0 in order. Throws DataCorrupted with what is wrong.
std::map<int, int> nodes_of(const std::string& root, const std::vector<int>& ids) {
  const std::optional<std::vector<int>> numbers = node_numbers(root);
  if (!numbers) throw DataCorrupted("there is no directory {}", root);
  std::map<int, int> node_of;  // holds the system's numbers at first
  for (int number : *numbers) {
    const std::string path = fmt::format("{}/node{}/cpulist", root, number);
    const std::optional<std::string> text = first_line(path);
    if (!text) throw DataCorrupted("{} cannot be read", path);
    const std::optional<std::vector<int>> list = ids_of(*text);
    if (!list) throw DataCorrupted("{}: '{:.64}' is no list of processors", path, *text);
    for (int id : *list)
      if (const auto [at, inserted] = node_of.try_emplace(id, number); !inserted)
        throw DataCorrupted("{}: processor {} is in node {} as well", path, id, at->second);
  }
  std::map<int, int> result;
  std::set<int> used;
  for (int id : ids) {
    const auto found = node_of.find(id);
    if (found == node_of.end()) throw DataCorrupted("{}: processor {} is in no node", root, id);
    result[id] = found->second;
    used.insert(found->second);
  }
  for (auto& [id, node] : result) node = static_cast<int>(std::distance(used.begin(), used.find(node)));
  return result;
}

// Adds to `processors` as many more as `count` says, each to the node that has given the smallest part of its own of
// those left with the lowest `sibling`; node by node.
void spread(std::vector<Processor>& left, int num_nodes, int count, std::vector<std::vector<int>>& given,
            std::vector<Seat>& seats) {
  std::vector<std::vector<Seat>> chosen(static_cast<size_t>(num_nodes));
  for (int n = 0; n < count; ++n) {
    const int level = std::min_element(left.begin(), left.end(), [](const Processor& a, const Processor& b) {
                        return a.sibling < b.sibling;
                      })->sibling;
    if (static_cast<int>(given.size()) <= level) given.resize(static_cast<size_t>(level) + 1);
    std::vector<int>& taken = given[static_cast<size_t>(level)];
    taken.resize(static_cast<size_t>(num_nodes));
    std::vector<int> there(static_cast<size_t>(num_nodes));
    for (const Processor& p : left)
      if (p.sibling == level) ++there[static_cast<size_t>(p.node)];
    int best = -1;
    for (int node = 0; node < num_nodes; ++node) {
      const auto at = static_cast<size_t>(node);
      if (there[at] == 0) continue;
      // taken / (taken + there), compared without division
      const auto b = static_cast<size_t>(std::max(best, 0));
      if (best < 0 || taken[at] * (taken[b] + there[b]) < taken[b] * (taken[at] + there[at])) best = node;
    }
    const auto seat = std::find_if(left.begin(), left.end(),
                                   [&](const Processor& p) { return p.sibling == level && p.node == best; });
    chosen[static_cast<size_t>(best)].push_back({seat->id, best});
    ++taken[static_cast<size_t>(best)];
    left.erase(seat);
  }
  for (const std::vector<Seat>& node : chosen) seats.insert(seats.end(), node.begin(), node.end());
}

}  // namespace

std::vector<int> allowed_processors() {
  std::vector<int> result;
  for (int size = CPU_SETSIZE; size <= kMaxId && result.empty(); size *= 4) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(size));
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(size));
    CPU_ZERO_S(bytes, set);
    if (sched_getaffinity(0, bytes, set) == 0)
      for (int id = 0; id < size; ++id)
        if (CPU_ISSET_S(static_cast<size_t>(id), bytes, set)) result.push_back(id);
    CPU_FREE(set);
  }
  if (result.empty()) result.push_back(0);
  return result;
}

Topology Topology::read(const std::string& root, const std::vector<int>& allowed, std::optional<double> quota) {
  Topology result;
  result.quota_ = quota;
  std::vector<int> ids = allowed;
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  EADEM_CHECK(!ids.empty(), "no processor is allowed");

  const std::string online_path = root + "/cpu/online";
  if (const std::optional<std::string> text = first_line(online_path)) {
    std::vector<int> online = ids_of(*text).value_or(std::vector<int>());
    std::sort(online.begin(), online.end());
    std::vector<int> both;
    std::set_intersection(ids.begin(), ids.end(), online.begin(), online.end(), std::back_inserter(both));
    if (both.empty())
      result.notes_.push_back(
          fmt::format("{}: '{:.64}' names none of this process's processors; all are used", online_path, *text));
    else
      ids = std::move(both);
  }

  std::map<int, int> nodes;
  try {
    nodes = nodes_of(root + "/node", ids);
  } catch (const DataCorrupted& error) {
    result.notes_.push_back(fmt::format("{}; one memory node is assumed", error.what()));
    nodes.clear();
  }

  std::map<int, int> siblings;  // processors seen so far, by core
  bool cores_known = true;
  for (int id : ids) {
    int core = id;
    const std::string path = fmt::format("{}/cpu/cpu{}/topology/thread_siblings_list", root, id);
    const std::optional<std::string> text = first_line(path);
    const std::optional<std::vector<int>> list = text ? ids_of(*text) : std::nullopt;
    if (list && std::find(list->begin(), list->end(), id) != list->end()) {
      core = *std::min_element(list->begin(), list->end());
    } else if (cores_known) {
      cores_known = false;
      result.notes_.push_back(
          fmt::format("{} {}; a core to each processor is assumed", path,
                      text ? fmt::format("is '{:.64}', no list with {}", *text, id) : "cannot be read"));
    }
    result.processors_.push_back({id, nodes.empty() ? 0 : nodes[id], core, siblings[core]++});
    result.num_nodes_ = std::max(result.num_nodes_, result.processors_.back().node + 1);
  }
  return result;
}

Topology Topology::of_this_process() { return read("/sys/devices/system", allowed_processors(), cpu_quota()); }

int Topology::num_cores() const {
  return static_cast<int>(std::count_if(processors_.begin(), processors_.end(),
                                        [](const Processor& processor) { return processor.sibling == 0; }));
}

int Topology::default_threads() const {
  const int cores = num_cores();
  return quota_ && *quota_ < cores ? std::max(1, static_cast<int>(*quota_)) : cores;
}

std::vector<Seat> Topology::seats(int first, int all) const {
  EADEM_CHECK(first >= 1 && first <= all, "{} of {} seats", first, all);
  std::vector<Seat> seats;
  if (all > static_cast<int>(processors_.size())) {
    seats.resize(static_cast<size_t>(all));
    return seats;
  }
  std::vector<Processor> left = processors_;
  std::vector<std::vector<int>> given;
  spread(left, num_nodes_, first, given, seats);
  spread(left, num_nodes_, all - first, given, seats);
  return seats;
}

}  // namespace eadem
