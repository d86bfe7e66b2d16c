// SPDX-License-Identifier: Apache-2.0
//
// eadem: the command line. Finds the command, and turns its exceptions into a message and an exit code.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>
#include <vector>

#include "eadem/cli/commands.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/terminal.h"
#include "eadem/core/error.h"

namespace eadem::cli {
namespace {

struct Command {
  const char* group;
  const char* name;
  const char* summary;
  int (*run)(CommandLine arguments);
};

constexpr Command kCommands[] = {
    {"Use a model", "run", "generate text, streaming; asks for one text after another without a prompt", run},
    {"Use a model", "chat", "talk with a model that has a chat template; Ctrl-C stops an answer", chat},
    {"Use a model", "perplexity", "how well a model predicts a text", perplexity},
    {"Understand a model", "inspect", "architecture, parameters, tensors, tokenizer, memory needed", inspect},
    {"Understand a model", "explain", "kernel, precision and cost of every op, and why", explain},
    {"Understand a model", "bench", "speed of reading prompts and of decoding, against the machine's limits", bench},
    {"Make a model", "train", "train or fine-tune from a recipe", train},
    {"Make a model", "tokenizer", "train a tokenizer; encode and decode", tokenizer},
    {"Make a model", "convert", "between safetensors and GGUF", convert},
    {"Machine", "doctor", "what this machine can do, and what is missing", doctor},
};

std::string overview() {
  std::string text = "eadem " EADEM_VERSION
                     " — trains and runs transformer language models with the same code\n\n"
                     "Usage: eadem COMMAND [OPTIONS] [ARGUMENTS]\n";
  std::string group;
  for (const Command& command : kCommands) {
    if (group != command.group) text += fmt::format("\n{}:\n", command.group);
    group = command.group;
    text += fmt::format("  {:<12} {}\n", command.name, command.summary);
  }
  text +=
      "\n`eadem COMMAND --help` shows options and examples; `eadem --version` the version.\n"
      "Without MODEL, commands use the bundled model 'stories', and chats 'chat'. Results go to stdout, everything "
      "else to stderr.\n"
      "Exit codes: 0 done, 1 failed, 2 bad usage, 130 stopped by Ctrl-C or SIGTERM.\n\n"
      "Examples:\n"
      "  eadem run -p \"Once upon a time\"              a story by the bundled model\n"
      "  eadem run model.gguf -f prompt.txt -n 100    100 tokens after a prompt from a file\n"
      "  eadem explain path/to/model --json           what would run, for programs\n";
  return text;
}

int dispatch(const std::vector<std::string>& arguments, std::string& command_name) {
  if (arguments.empty()) {
    print_error(overview());
    return kUsage;
  }
  const std::string& first = arguments[0];
  std::vector<std::string> rest(arguments.begin() + 1, arguments.end());
  if (first == "--version" || first == "version") {
    print("eadem " EADEM_VERSION "\n");
    return kOk;
  }
  if (first == "--help" || first == "-h" || (first == "help" && rest.empty())) {
    print(overview());
    return kOk;
  }
  std::string wanted = first;
  if (first == "help") {
    wanted = rest[0];
    rest.assign(rest.begin() + 1, rest.end());
    rest.emplace_back("--help");
  }
  for (const Command& command : kCommands)
    if (wanted == command.name) {
      command_name = wanted;
      return command.run(rest);
    }
  std::vector<std::string> names = {"--help", "--version", "help"};
  for (const Command& command : kCommands) names.emplace_back(command.name);
  const std::optional<std::string> meant = did_you_mean(wanted, names);
  throw UsageError(fmt::format("unknown {} '{}'{}", wanted.starts_with("-") ? "option" : "command", wanted,
                               meant ? fmt::format("; did you mean '{}'?", *meant) : ""));
}

int failed(std::string_view message) {
  print_error(fmt::format("eadem: error: {}\n", message));
  return kFailed;
}

// A file that is opened while standard input, output or error is closed would become that stream.
void open_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(stream, F_GETFD) < 0) (void)open("/dev/null", O_RDWR);  // takes the lowest number that is free
}

int guarded_main(const std::vector<std::string>& arguments) {
  std::string command;
  try {
    const int code = dispatch(arguments, command);
    print("", true);  // Flushes stdout: on a full disk the result must be an error, not cut short.
    return code;
  } catch (const UsageError& error) {
    print_error(
        fmt::format("eadem: error: {}\nSee `eadem {}{}--help`.\n", error.what(), command, command.empty() ? "" : " "));
    return kUsage;
  } catch (const Cancelled& error) {
    note("{}", error.what());
    return kInterrupted;
  } catch (const Error& error) {
    return failed(error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    return failed(fmt::format("{}: {}", error.path1().string(), error.code().message()));
  } catch (const std::bad_alloc&) {
    return failed("out of memory");
  } catch (const std::exception& error) {
    return failed(fmt::format("unexpected: {}", error.what()));
  }
}

}  // namespace
}  // namespace eadem::cli

int main(int argc, char** argv) {
  eadem::cli::open_closed_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond a limit on files fails, and says so
  return eadem::cli::guarded_main({argv + 1, argv + argc});
}
