// SPDX-License-Identifier: Apache-2.0
//
// Arguments: the options and operands of one command, its help text, and the checks that every command shares.
//
// Splitting is that of getopt_long: --name value, --name=value, -n value, -nvalue, flags together (-qv), names
// shortened as far as they stay unique, options anywhere between operands, and operands alone after `--`. Beyond it,
// `_` in a name is `-`, and names that other programs use are understood (habits.h). One thread at a time may parse.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace eadem::cli {

// Exit codes of the program.
inline constexpr int kOk = 0;
inline constexpr int kFailed = 1;
inline constexpr int kUsage = 2;
inline constexpr int kInterrupted = 130;

// A mistake in the program's arguments; ends the program with kUsage.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Returns the word of `known` that is closest to `word`, if one is close enough to be meant.
std::optional<std::string> did_you_mean(std::string_view word, std::span<const std::string> known);

// "512", "4k", "2M", "1G": powers of 1024. Throws UsageError naming `what`.
int64_t parse_size(std::string_view text, std::string_view what);
double parse_number(std::string_view text, std::string_view what);

class Arguments {
 public:
  // `name`: "run", "tokenizer train". `summary`: what the command does, one or more sentences.
  Arguments(std::string name, std::string summary);

  // Begins a section of the help, `title`, for the options that are added after it.
  void section(std::string title);

  // `names` lists the option's names, "-p,--prompt"; messages use the last one. `value` is the placeholder of the value
  // in the help. Sizes and counts take k, M and G. Only `text` takes an empty value (`--stop=`).
  void flag(std::string names, bool& target, std::string help);
  void option(std::string names, std::string value, std::string& target, std::string help);
  void option(std::string names, std::string value, std::optional<std::string>& target, std::string help);
  // A text that may be empty.
  void text(std::string names, std::string value, std::optional<std::string>& target, std::string help);
  void option(std::string names, std::string value, int64_t& target, std::string help);
  void option(std::string names, std::string value, std::optional<int64_t>& target, std::string help);
  void option(std::string names, std::string value, std::optional<double>& target, std::string help);
  void option(std::string names, std::string value, double& target, std::string help);
  // May be given several times; each value is taken as it is.
  void list(std::string names, std::string value, std::vector<std::string>& target, std::string help);
  // Takes sizes separated by commas.
  void sizes(std::string names, std::string value, std::vector<int64_t>& target, std::string help);
  // Takes one of `choices`, which are lower-case, in any case, and the names that other programs give to data types.
  void choice(std::string names, std::vector<std::string> choices, std::string& target, std::string help);

  // Operands are taken in order; a rest takes all that follow. Option `names` may give an operand instead.
  void operand(std::string name, std::string& target, std::string help);
  void operand(std::string name, std::optional<std::string>& target, std::string help, std::string names = "");
  void rest(std::string name, std::vector<std::string>& target, std::string help, bool required = true);

  // Adds a line to the help's examples.
  void example(std::string command, std::string what);
  // Adds a paragraph after the options.
  void note(std::string text);

  // Reads the arguments into the targets. Returns false when help was asked for and printed. Throws UsageError.
  bool parse(std::span<const std::string> arguments);

  std::string help() const;

 private:
  enum class Kind : uint8_t { flag, value };
  struct Option {
    std::string section;
    std::vector<std::string> names;  // "-p", "--prompt"
    Kind kind;
    std::string value;
    std::string help;
    std::function<void(const std::string&)> take;
  };
  struct Operand {
    std::string name;
    bool required;
    bool many;
    std::string help;
    std::function<void(const std::string&)> take;
    std::vector<std::string> names;  // "-m", "--model"; empty without
  };
  struct Split;  // what a command line consists of
  Split split(std::span<const std::string> arguments) const;
  // Every name of an option, ours and those of other programs.
  std::vector<std::pair<std::string, const Option*>> spellings() const;
  [[noreturn]] void refuse_unknown(const std::string& word) const;
  void add(std::string names, Kind kind, std::string value, std::string help,
           std::function<void(const std::string&)> take);

  std::string name_;
  std::string summary_;
  std::string section_ = "Options";
  std::vector<Option> options_;
  std::vector<Option> operand_options_;  // options that give an operand; not listed in the help
  std::vector<Operand> operands_;
  std::vector<std::pair<std::string, std::string>> examples_;
  std::vector<std::string> notes_;
};

}  // namespace eadem::cli
