// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "eadem/core/error.h"
#include "eadem/core/printable.h"
#include "eadem/io/text.h"

namespace eadem::cli {

namespace {

constexpr std::string_view kBold = "\x1b[1m", kDim = "\x1b[2m", kPlain = "\x1b[0m";
constexpr std::string_view kClearLine = "\r\x1b[K";

// Text that was printed and is not yet written to stdout. It replaces stdio's buffer, because stdio drops the rest of a
// text when a signal interrupts the write; this class writes it again.
class Output {
 public:
  // Throws IoError when writing fails.
  void add(std::string_view text, bool flush) {
    constexpr size_t kMost = 1 << 16;
    const std::lock_guard lock(mutex_);
    waiting_ += text;
    if (flush || waiting_.size() >= kMost) write_waiting();
    if (const int failure = std::exchange(failure_, 0); failure != 0)
      throw IoError("cannot write to standard output: {}", std::strerror(failure));
  }
  // Leaves a failure to the next `add`.
  void flush() {
    const std::lock_guard lock(mutex_);
    write_waiting();
  }

 private:
  void write_waiting() {
    std::string_view rest = waiting_;
    while (!rest.empty()) {
      const ssize_t count = write(STDOUT_FILENO, rest.data(), rest.size());
      if (count >= 0) {
        rest.remove_prefix(static_cast<size_t>(count));
      } else if (errno != EINTR) {
        failure_ = errno;
        break;
      }
    }
    waiting_.clear();
  }

  std::mutex mutex_;
  std::string waiting_;
  int failure_ = 0;  // the last one, until it is thrown
};

Output& output() {
  static Output all;
  return all;
}

void write_error(std::string_view text) {
  output().flush();  // if stdout and stderr are one terminal, their output stays in the order of writing
  std::fwrite(text.data(), 1, text.size(), stderr);
}

int terminal_width() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

bool stdin_is_terminal() { return isatty(STDIN_FILENO) != 0; }
bool stdout_is_terminal() { return isatty(STDOUT_FILENO) != 0; }
bool stderr_is_terminal() { return isatty(STDERR_FILENO) != 0; }

std::string shown_on_terminal(std::string_view text) {
  // The marks only change the weight of letters, so a file that contains one does no harm.
  std::string result;
  while (!text.empty()) {
    size_t end = text.size(), length = 0;
    for (std::string_view mark : {kBold, kDim, kPlain})
      if (const size_t at = text.find(mark); at < end) end = at, length = mark.size();
    result += printable(text.substr(0, end));
    result += text.substr(end, length);
    text.remove_prefix(end + length);
  }
  return result;
}

void print(std::string_view text, bool flush) {
  if (stdout_is_terminal())
    output().add(shown_on_terminal(text), true);  // line editing writes there too
  else
    output().add(text, flush);
}

void print_error(std::string_view text) { write_error(shown_on_terminal(text)); }

std::string json_text(std::string_view text) { return io::is_valid_utf8(text) ? std::string(text) : printable(text); }

std::string bold(std::string_view text) {
  return stdout_is_terminal() ? fmt::format("{}{}{}", kBold, text, kPlain) : std::string(text);
}
std::string dim_error(std::string_view text) {
  return stderr_is_terminal() ? fmt::format("{}{}{}", kDim, text, kPlain) : std::string(text);
}

std::string count_text(double count) {
  constexpr const char* kUnits[] = {"", " k", " M", " B", " T"};
  size_t unit = 0;
  while (unit + 1 < std::size(kUnits) && count >= 999.5) {
    count /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f}", count) : fmt::format("{:.3g}{}", count, kUnits[unit]);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.3g} ms", seconds * 1e3);
  if (seconds < 100) return fmt::format("{:.3g} s", seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
}

ProgressBar::ProgressBar(std::string what) : what_(printable(what)) {}
ProgressBar::~ProgressBar() { clear(); }

void ProgressBar::update(double done, double total, std::string_view suffix) {
  if (!stderr_is_terminal()) return;
  const auto now = std::chrono::steady_clock::now();
  if (shown_ && now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  const double fraction = total > 0 ? std::clamp(done / total, 0.0, 1.0) : 0.0;
  const std::string right = fmt::format(" {:3.0f} % {}", fraction * 100, printable(suffix));
  const int width = std::clamp(terminal_width() - static_cast<int>(what_.size() + right.size()) - 4, 0, 40);
  const int filled = static_cast<int>(fraction * width);
  write_error(fmt::format("{}{} [{:#<{}}{:.<{}}]{}", kClearLine, what_, "", filled, "", width - filled, right));
  std::fflush(stderr);
  shown_ = true;
}

void ProgressBar::clear() {
  if (shown_) write_error(kClearLine);
  shown_ = false;
}

}  // namespace eadem::cli
