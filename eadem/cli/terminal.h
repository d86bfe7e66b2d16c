// SPDX-License-Identifier: Apache-2.0
//
// What goes where: results to stdout; progress, statistics and messages to stderr. Colour and progress bars on a
// terminal only. What comes from files and models cannot steer a terminal: control characters are shown as escapes
// (core/printable.h), on stdout when it is a terminal, on stderr always.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace eadem::cli {

bool stdin_is_terminal();
bool stdout_is_terminal();
bool stderr_is_terminal();

// To stdout: as it is, or made safe when stdout is a terminal. `text` ends between characters. `flush` for text that
// somebody watches. Throws IoError when it cannot be written (a full disk).
void print(std::string_view text, bool flush = false);
// To stderr, made safe.
void print_error(std::string_view text);
// What print() writes to a terminal: printable(text), with the marks of bold() and dim_error() kept.
std::string shown_on_terminal(std::string_view text);

// "eadem: …" on stderr.
template <typename... Args>
void note(fmt::format_string<Args...> format, Args&&... args) {
  print_error("eadem: " + fmt::format(format, std::forward<Args>(args)...) + "\n");
}

// `text` itself where it is UTF-8, as JSON must be; else a path or a token with its stray bytes as \xNN.
std::string json_text(std::string_view text);

// The text in bold, or dimmed, when stdout (stderr) is a terminal.
std::string bold(std::string_view text);
std::string dim_error(std::string_view text);

// "1.2 MB" (powers of 1000), "1.24 B" (a count), "3.4 ms", "2 min 03 s".
std::string bytes_text(double bytes);
std::string count_text(double count);
std::string seconds_text(double seconds);

// A line on stderr that is drawn again and again, at most ten times a second; nothing when stderr is no terminal.
class ProgressBar {
 public:
  explicit ProgressBar(std::string what);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void update(double done, double total, std::string_view suffix = {});
  // Wipes the line, so that something else can be printed. The next update draws it again.
  void clear();

 private:
  std::string what_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace eadem::cli
