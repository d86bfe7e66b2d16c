// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/interactive/session.h"

#include <algorithm>
#include <utility>

#include "eadem/cli/interactive/line_editor.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/terminal.h"

namespace eadem::cli {

namespace {

std::string help_of(const Session& session) {
  std::string text;
  const auto row = [&](std::string_view name, std::string_view what) {
    text += fmt::format("  {:<18} {}\n", name, what);
  };
  for (const SessionCommand& command : session.commands)
    row(command.name + (command.value.empty() ? "" : " " + command.value), command.help);
  row("/help", "this list");
  row("/bye", "ends, as Ctrl-D does");
  row("//TEXT", "an input that begins with a slash");
  if (session.multi_line) {
    row("\"\"\"", "begins and ends an input of several lines");
    row("\\ at the end", "the input goes on in the next line");
  }
  row("Ctrl-C", "stops an answer, or clears the line; twice at an empty prompt ends");
  return text;
}

// Runs `work`. An error of type Shown is shown, and Cancelled is no error here.
template <typename Shown, typename Work>
void go_on_after(const Work& work) {
  try {
    work();
  } catch (const Cancelled&) {
  } catch (const Shown& error) {
    note("{}", error.what());
  }
}

void run_command(const Session& session, const std::string& line) {
  const size_t space = std::min(line.find(' '), line.size());
  const std::string_view name = std::string_view(line).substr(0, space);
  const std::string_view argument = std::string_view(line).substr(std::min(space + 1, line.size()));
  for (const SessionCommand& command : session.commands)
    if (name == command.name) return go_on_after<Error>([&] { command.run(argument); });
  if (name == "/help" || name == "/?")
    print_error(help_of(session));
  else
    note("'{}' is no command; /help lists them", name);
}

struct TypedInput {
  LineEnd how = LineEnd::line;
  std::string text;
  bool literal = false;  // no command, whatever it begins with
};

constexpr std::string_view kQuotes = "\"\"\"", kMorePrompt = "... ";

// Reads the lines after `input` up to one for which `is_last` returns true; it may change the lines.
void read_more(LineEditor& editor, TypedInput& input, const std::function<bool(std::string& line)>& is_last) {
  for (bool last = false; !last;) {
    Line line = editor.read(std::string(kMorePrompt));
    input.how = line.how;
    if (line.how == LineEnd::line) {
      editor.remember(line.text);
      last = is_last(line.text);
    } else {
      last = true;
    }
    input.text += "\n" + line.text;
  }
}

// Takes a mark off the end of a line. Returns whether it was there.
bool take_off(std::string& line, std::string_view mark) {
  if (!line.ends_with(mark)) return false;
  line.erase(line.size() - mark.size());
  return true;
}

TypedInput read_input(LineEditor& editor, const Session& session) {
  Line line = editor.read(session.prompt);
  TypedInput input{line.how, std::move(line.text)};
  if (input.how != LineEnd::line || input.text.empty()) return input;
  editor.remember(input.text);
  if (input.text.starts_with("//")) {
    input.text.erase(0, 1);
    input.literal = true;
  }
  if (!session.multi_line) return input;
  if (input.text.starts_with(kQuotes)) {
    input.text.erase(0, kQuotes.size());
    input.literal = true;
    const auto closes = [](std::string& text) { return take_off(text, kQuotes); };
    if (!closes(input.text)) read_more(editor, input, closes);
  } else if (take_off(input.text, "\\")) {
    read_more(editor, input, [](std::string& text) { return !take_off(text, "\\"); });
  }
  return input;
}

}  // namespace

int converse(const Session& session) {
  LineEditor editor;
  if (!session.greeting.empty()) note("{}", session.greeting);
  bool asked_to_leave = false;
  while (true) {
    const TypedInput input = read_input(editor, session);
    if (input.how == LineEnd::end) {
      print_error("\n");
      if (!input.text.empty()) note("the last input has no end, so it is not answered");
      return kOk;
    }
    if (input.how == LineEnd::interrupted) {
      if (!take_back_interrupt()) return kInterrupted;
      if (input.text.empty() && std::exchange(asked_to_leave, true)) return kInterrupted;
      if (input.text.empty()) note("Ctrl-C again, Ctrl-D or /bye ends");
      continue;
    }
    asked_to_leave = false;
    if (input.text.empty()) continue;
    if (input.text[0] != '/' || input.literal)
      go_on_after<InvalidArgument>([&] { session.answer(input.text); });
    else if (input.text == "/bye" || input.text == "/exit" || input.text == "/quit")
      return kOk;
    else
      run_command(session, input.text);
    if (interrupted() && !take_back_interrupt()) return kInterrupted;
  }
}

}  // namespace eadem::cli
