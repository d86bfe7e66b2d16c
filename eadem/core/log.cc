// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

#include "eadem/core/printable.h"

namespace eadem {

namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::debug: return spdlog::level::debug;
    case LogLevel::info: return spdlog::level::info;
    case LogLevel::warning: return spdlog::level::warn;
    case LogLevel::error: return spdlog::level::err;
    case LogLevel::off: return spdlog::level::off;
  }
  return spdlog::level::err;
}

}  // namespace

Logger::Logger(LogLevel level) : level_(level) {
  auto backend = std::make_shared<spdlog::logger>("eadem", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  backend->set_pattern("%^%l%$: %v");
  backend->set_level(spdlog::level::trace);  // filtering is ours
  sink_ = [backend](LogLevel message_level, std::string_view message) {
    backend->log(to_spdlog(message_level), printable(message));  // a message may quote a file
  };
}

}  // namespace eadem
