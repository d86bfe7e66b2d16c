// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/machine/cpu_quota.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

namespace eadem {

namespace {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    parts.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

std::optional<int64_t> number(std::string_view text) {
  int64_t value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<std::string> line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

std::optional<double> ratio(std::string_view quota, std::string_view period) {
  const std::optional<int64_t> time = number(quota), of = number(period);
  if (!time || !of || *time <= 0 || *of <= 0) return std::nullopt;
  return static_cast<double>(*time) / static_cast<double>(*of);
}

// The quota that one control group states, in processors; nothing if it states none.
std::optional<double> quota_of(const std::string& group) {
  if (const std::optional<std::string> line = line_of(group + "/cpu.max")) {  // "max 100000", "150000 100000"
    const std::vector<std::string> words = split(*line, ' ');
    return words.size() == 2 ? ratio(words[0], words[1]) : std::nullopt;
  }
  const std::optional<std::string> quota = line_of(group + "/cpu.cfs_quota_us"),
                                   period = line_of(group + "/cpu.cfs_period_us");
  return quota && period ? ratio(*quota, *period) : std::nullopt;
}

// A hierarchy of groups, or the part of one that is mounted.
struct Mount {
  std::string group;  // the group that is visible at the mount point
  std::string point;
  bool is_v2;
};

// "\040" in a path of mountinfo is the character of that octal number.
std::string unescaped(std::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto is_digit = [&](size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '7'; };
    if (text[i] == '\\' && is_digit(i + 1) && is_digit(i + 2) && is_digit(i + 3)) {
      result += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
      i += 3;
    } else {
      result += text[i];
    }
  }
  return result;
}

bool has_cpu(const std::string& controllers) {
  const std::vector<std::string> names = split(controllers, ',');
  return std::find(names.begin(), names.end(), "cpu") != names.end();
}

// Lines "ID PARENT MAJOR:MINOR GROUP POINT OPTIONS [TAG …] - TYPE SOURCE OPTIONS".
std::vector<Mount> mounts_in(const std::string& path) {
  std::vector<Mount> mounts;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> words = split(line, ' ');
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (dash - words.begin() < 6 || words.end() - dash < 4) continue;
    const bool is_v2 = dash[1] == "cgroup2";
    if (is_v2 || (dash[1] == "cgroup" && has_cpu(dash[3])))
      mounts.push_back({unescaped(words[3]), unescaped(words[4]), is_v2});
  }
  return mounts;
}

}  // namespace

std::optional<double> cpu_quota(const std::string& root) {
  std::optional<double> least;
  const auto limit = [&](std::optional<double> quota) {
    if (quota && (!least || *quota < *least)) least = quota;
  };
  const std::vector<Mount> mounts = mounts_in(root + "/proc/self/mountinfo");
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "ID:CONTROLLERS:GROUP"; of v2 "0::GROUP"
    const size_t first = line.find(':'), second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !has_cpu(controllers)) continue;
    for (const Mount& mount : mounts) {
      if (mount.is_v2 != controllers.empty()) continue;
      // Walks from the process's group up to the mounted part of the hierarchy.
      std::string below = line.substr(second + 1);
      const std::string above = mount.group == "/" ? "" : mount.group;
      const bool inside = below.starts_with(above) && (below.size() == above.size() || below[above.size()] == '/') &&
                          below.find("/..") == std::string::npos;
      below = inside ? below.substr(above.size()) : "";
      for (;;) {
        limit(quota_of(root + mount.point + below));
        if (below.empty()) break;
        below.resize(below.rfind('/'));
      }
    }
  }
  return least;
}

}  // namespace eadem
