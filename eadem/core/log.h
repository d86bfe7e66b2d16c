// SPDX-License-Identifier: Apache-2.0
//
// One logger with levels and a sink that the host application can replace. Passed, never global.
#pragma once

#include <fmt/core.h>

#include <functional>
#include <string_view>

namespace eadem {

enum class LogLevel { debug, info, warning, error, off };

class Logger {
 public:
  using Sink = std::function<void(LogLevel, std::string_view message)>;

  // Writes to stderr. The sink must be callable from several threads at once.
  explicit Logger(LogLevel level = LogLevel::warning);
  Logger(LogLevel level, Sink sink) : level_(level), sink_(std::move(sink)) {}

  LogLevel level() const { return level_; }
  bool enabled(LogLevel level) const { return level >= level_ && level_ != LogLevel::off; }

  template <typename... Args>
  void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) const {
    if (enabled(level)) sink_(level, fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  LogLevel level_;
  Sink sink_;
};

}  // namespace eadem
