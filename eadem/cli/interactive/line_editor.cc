// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/interactive/line_editor.h"

#include <histedit.h>
#include <langinfo.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <cwchar>
#include <filesystem>
#include <iostream>
#include <iterator>

#include "eadem/cli/interrupt.h"
#include "eadem/cli/terminal.h"

namespace eadem::cli {

namespace {

namespace fs = std::filesystem;

constexpr int kHistoryLines = 1000;

// Returns an empty path if the user has no home.
fs::path history_file() {
  const auto variable = [](const char* name) -> fs::path {
    const char* value = std::getenv(name);
    return value != nullptr && value[0] == '/' ? value : "";
  };
  fs::path state = variable("XDG_STATE_HOME");
  if (const fs::path home = variable("HOME"); state.empty() && !home.empty()) state = home / ".local" / "state";
  return state.empty() ? state : state / "eadem" / "history";
}

// libedit converts bytes to characters by the locale. Our texts are UTF-8 in any locale.
void use_utf8() {
  if (std::setlocale(LC_CTYPE, "") == nullptr || std::strcmp(nl_langinfo(CODESET), "UTF-8") != 0)
    std::setlocale(LC_CTYPE, "C.UTF-8");
}

// Reads the next typed character. Returns 1, 0 at the end of input, or -1 with errno, which is EINTR after a signal.
int read_character(EditLine* /*edit*/, wchar_t* character) {
  std::mbstate_t state{};
  while (true) {
    pollfd waited[] = {{STDIN_FILENO, POLLIN, 0}, {interrupt_event(), POLLIN, 0}};
    if (poll(waited, std::size(waited), -1) < 0) return -1;
    if (interrupted()) {
      errno = EINTR;
      return -1;
    }
    char byte = 0;
    if (const ssize_t count = ::read(STDIN_FILENO, &byte, 1); count <= 0) return static_cast<int>(count);
    switch (std::mbrtowc(character, &byte, 1, &state)) {
      case static_cast<size_t>(-1): state = {}; continue;  // not UTF-8
      case static_cast<size_t>(-2): continue;              // more bytes of it follow
      case 0: *character = 'D' - '@'; return 1;            // what a Ctrl-D becomes that was typed ahead, in line mode
      default: return 1;
    }
  }
}

// After Ctrl-Z and fg, the terminal is in the shell's mode, so reading is started again.
void on_continue(int /*signal*/) {}

}  // namespace

struct LineEditor::Editor {
  explicit Editor(LineEditor& owner) {
    use_utf8();
    edit = el_init("eadem", stdin, stderr, stderr);
    if (edit == nullptr) throw IoError("the line editor does not start: {}", std::strerror(errno));
    el_set(edit, EL_CLIENTDATA, &owner);
    el_set(
        edit, EL_PROMPT, +[](EditLine* line) {
          void* data = nullptr;
          el_get(line, EL_CLIENTDATA, &data);
          return static_cast<LineEditor*>(data)->prompt_.data();
        });
    el_set(edit, EL_GETCFN, read_character);
    el_set(edit, EL_EDITOR, "emacs");
    // Keys of common terminals that libedit leaves unbound.
    const auto bind = [this](const char* keys, const char* command) {
      el_set(edit, EL_BIND, keys, command, static_cast<char*>(nullptr));
    };
    bind("^R", "em-inc-search-prev");
    bind("\\e[3~", "ed-delete-next-char");
    bind("\\e[1~", "ed-move-to-beg");
    bind("\\e[4~", "ed-move-to-end");
    bind("\\e[1;5C", "em-next-word");
    bind("\\e[1;5D", "ed-prev-word");
    el_source(edit, nullptr);  // the user's ~/.editrc
    past = history_init();
    if (past == nullptr) return;
    HistEvent event;
    history(past, &event, H_SETSIZE, kHistoryLines);
    history(past, &event, H_SETUNIQUE, 1);
    file = history_file();
    if (!file.empty()) history(past, &event, H_LOAD, file.c_str());
    el_set(edit, EL_HIST, history, past);
    struct sigaction action {};
    action.sa_handler = on_continue;
    sigemptyset(&action.sa_mask);
    sigaction(SIGCONT, &action, nullptr);
  }
  ~Editor() {
    el_end(edit);
    if (past != nullptr) history_end(past);
  }
  Editor(const Editor&) = delete;
  Editor& operator=(const Editor&) = delete;

  EditLine* edit;
  History* past = nullptr;
  fs::path file;
};

LineEditor::LineEditor() {
  if (stdin_is_terminal() && stderr_is_terminal()) editor_ = std::make_unique<Editor>(*this);
}

LineEditor::~LineEditor() = default;

Line LineEditor::read(const std::string& prompt) {
  prompt_ = prompt;
  std::string text;
  if (editor_ == nullptr) {
    if (stdin_is_terminal()) print_error(prompt_);
    if (std::getline(std::cin, text)) return {LineEnd::line, text};
    return {interrupted() ? LineEnd::interrupted : LineEnd::end, text};
  }
  print_error("");  // pending output goes to the terminal before the prompt
  EditLine* edit = editor_->edit;
  while (true) {
    el_set(edit, EL_PREP_TERM, 1);  // before the prompt: a key that answers it is never read in the old mode
    el_resize(edit);
    int count = 0;
    errno = 0;
    if (const char* line = el_gets(edit, &count); line != nullptr && count > 0) {
      text.assign(line, static_cast<size_t>(count));
      while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
      return {LineEnd::line, text};
    }
    if (count == 0 || errno != EINTR) return {LineEnd::end, {}};
    const LineInfo* typed = el_line(edit);
    text.assign(typed->buffer, typed->lastchar);
    print_error("\n");
    if (interrupted()) return {LineEnd::interrupted, text};
    el_push(edit, text.c_str());
  }
}

void LineEditor::remember(const std::string& line) {
  if (editor_ == nullptr || editor_->past == nullptr) return;
  HistEvent event;
  history(editor_->past, &event, H_ENTER, line.c_str());
  if (editor_->file.empty()) return;
  std::error_code ignored;
  if (const fs::path folder = editor_->file.parent_path(); fs::create_directories(folder, ignored))
    fs::permissions(folder, fs::perms::owner_all, ignored);
  history(editor_->past, &event, H_SAVE, editor_->file.c_str());
}

}  // namespace eadem::cli
