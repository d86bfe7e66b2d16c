// SPDX-License-Identifier: Apache-2.0
//
// The interactive loop of every command that talks with a person: inputs, commands that begin with a slash, and Ctrl-C.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace eadem::cli {

struct SessionCommand {
  std::string name;   // "/save"
  std::string value;  // the placeholder of its argument in the help, or empty
  std::string help;
  // `argument`: what follows the name and a space. An Error is shown and the session goes on.
  std::function<void(std::string_view argument)> run;
};

struct Session {
  std::string prompt = "> ";
  std::string greeting;  // one line, before the first prompt
  // An input may have several lines: those between two """, and those that follow a line with a backslash at its end.
  bool multi_line = false;
  // Answers one input, which is not empty. Ctrl-C sets interrupt_flag(); `answer` then returns, or throws Cancelled,
  // and the session goes on with the next input. InvalidArgument is shown and the session goes on; other errors end it.
  std::function<void(const std::string& input)> answer;
  std::vector<SessionCommand> commands;  // beside /help and /bye
};

// Reads inputs and answers them until /bye, Ctrl-D, the end of stdin, two Ctrl-C at an empty prompt, or SIGTERM.
// Returns the exit code: kInterrupted after the last two. Call listen_for_interrupt() before.
int converse(const Session& session);

}  // namespace eadem::cli
