// SPDX-License-Identifier: Apache-2.0
//
// The program's output: results go to stdout; progress, statistics and messages to stderr. Colour and progress bars
// appear only on a terminal. Text from files and models cannot control a terminal: control characters are shown as
// escapes (core/printable.h), always on stderr, and on stdout when it is a terminal.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "eadem/core/printable.h"

namespace eadem::cli {

bool stdin_is_terminal();
bool stdout_is_terminal();
bool stderr_is_terminal();

// Prints to stdout, made safe when stdout is a terminal. `text` must end between characters. `flush` is for text that
// somebody watches. Throws IoError when writing fails (a full disk).
void print(std::string_view text, bool flush = false);
// Prints to stderr, made safe.
void print_error(std::string_view text);
// Returns the text that print() writes to a terminal: printable(text), with the marks of bold() and dim_error() kept.
std::string shown_on_terminal(std::string_view text);

// Prints "eadem: …" on stderr.
template <typename... Args>
void note(fmt::format_string<Args...> format, Args&&... args) {
  print_error("eadem: " + fmt::format(format, std::forward<Args>(args)...) + "\n");
}

// Returns `text` if it is UTF-8, which JSON requires; otherwise with its stray bytes (of a path or a token) as \xNN.
std::string json_text(std::string_view text);

// The text in bold, or dimmed, when stdout (stderr) is a terminal.
std::string bold(std::string_view text);
std::string dim_error(std::string_view text);

// "1.24 B" (a count), "3.4 ms", "2 min 03 s". Bytes: core/printable.h.
std::string count_text(double count);
std::string seconds_text(double seconds);

// A line on stderr that is redrawn at most ten times a second; nothing when stderr is no terminal.
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
