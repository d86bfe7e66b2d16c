// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/interactive/session.h"

#include <algorithm>
#include <utility>

#include "eadem/cli/arguments.h"
#include "eadem/cli/interactive/line_editor.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/terminal.h"

namespace eadem::cli {

namespace {

std::string help_of(const Session& session) {
  std::string text;
  const auto row = [&](std::string_view name, std::string_view what) {
    text += fmt::format("  {:<12} {}\n", name, what);
  };
  for (const SessionCommand& command : session.commands) row(command.name, command.help);
  row("/help", "this list");
  row("/bye", "ends, as Ctrl-D does");
  row("//TEXT", "an input that begins with a slash");
  row("Ctrl-C", "stops an answer, or clears the line; twice at an empty prompt ends");
  return text;
}

// Runs `work`. InvalidArgument is shown, and Cancelled is no error here.
template <typename Work>
void go_on_after(const Work& work) {
  try {
    work();
  } catch (const Cancelled&) {
  } catch (const InvalidArgument& error) {
    note("{}", error.what());
  }
}

void run_command(const Session& session, const std::string& line) {
  const size_t space = std::min(line.find(' '), line.size());
  const std::string_view name = std::string_view(line).substr(0, space);
  const std::string_view argument = std::string_view(line).substr(std::min(space + 1, line.size()));
  for (const SessionCommand& command : session.commands)
    if (name == command.name) return go_on_after([&] { command.run(argument); });
  if (name == "/help" || name == "/?")
    print_error(help_of(session));
  else
    note("'{}' is no command; /help lists them", name);
}

}  // namespace

int converse(const Session& session) {
  LineEditor editor(session.prompt);
  if (!session.greeting.empty()) note("{}", session.greeting);
  bool asked_to_leave = false;
  while (true) {
    const Line line = editor.read();
    if (line.how == LineEnd::end) {
      print_error("\n");
      return kOk;
    }
    if (line.how == LineEnd::interrupted) {
      if (!take_back_interrupt()) return kInterrupted;
      if (line.text.empty() && std::exchange(asked_to_leave, true)) return kInterrupted;
      if (line.text.empty()) note("Ctrl-C again, Ctrl-D or /bye ends");
      continue;
    }
    asked_to_leave = false;
    if (line.text.empty()) continue;
    editor.remember(line.text);
    const bool literal = line.text.starts_with("//");
    if (line.text == "/bye" || line.text == "/exit" || line.text == "/quit") return kOk;
    if (line.text[0] == '/' && !literal)
      run_command(session, line.text);
    else
      go_on_after([&] { session.answer(line.text.substr(literal ? 1 : 0)); });
    if (interrupted() && !take_back_interrupt()) return kInterrupted;
  }
}

}  // namespace eadem::cli
