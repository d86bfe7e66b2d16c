// SPDX-License-Identifier: Apache-2.0
//
// LineEditor: lines that a person types, with editing and a history that outlives the program (libedit).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace eadem::cli {

// How reading a line ended.
enum class LineEnd : uint8_t {
  line,         // with Enter
  end,          // Ctrl-D on an empty line, or the end of a file
  interrupted,  // a signal that interrupt.h listens for; what was typed so far is in `text`
};

struct Line {
  LineEnd how;
  std::string text;  // without the line end
};

// Reads from stdin. If stdin and stderr are a terminal, lines are edited and remembered in
// $XDG_STATE_HOME/eadem/history (~/.local/state/eadem/history); a history that cannot be read or written is no error.
// Otherwise plain lines are read, and a prompt is printed if stdin is a terminal. Only one may exist at a time, because
// the terminal has one state.
class LineEditor {
 public:
  LineEditor();
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  Line read(const std::string& prompt);
  // Adds a line to the history and writes the history to its file.
  void remember(const std::string& line);

 private:
  struct Editor;
  std::string prompt_;
  std::unique_ptr<Editor> editor_;  // null: plain lines
};

}  // namespace eadem::cli
