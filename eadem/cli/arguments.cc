// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/arguments.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "eadem/cli/terminal.h"

namespace eadem::cli {

namespace {

// Levenshtein's distance, with a swap of neighbours as one step.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i)
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == separator)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

// `text` in lines of at most `width` columns; lines after the first are indented.
std::string wrapped(std::string_view text, size_t indent, size_t width) {
  std::string result;
  size_t column = indent;
  for (const std::string& word : split(text, ' ')) {
    if (column > indent && column + 1 + word.size() > width) {
      result += "\n" + std::string(indent, ' ');
      column = indent;
    } else if (column > indent) {
      result += ' ';
      ++column;
    }
    result += word;
    column += word.size();
  }
  return result;
}

std::string joined(const std::vector<std::string>& parts, std::string_view separator) {
  return fmt::format("{}", fmt::join(parts, separator));
}

constexpr size_t kHelpWidth = 110;
constexpr size_t kHelpColumn = 30;

}  // namespace

std::optional<std::string> did_you_mean(std::string_view word, std::span<const std::string> known) {
  std::optional<std::string> best;
  size_t least = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& candidate : known) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < least) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

int64_t parse_size(std::string_view text, std::string_view what) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  const std::string_view unit(rest, static_cast<size_t>(end - rest));
  int shift = -1;
  for (const auto& [name, bits] : {std::pair<std::string_view, int>{"", 0}, {"k", 10}, {"K", 10}, {"M", 20}, {"G", 30}})
    if (unit == name) shift = bits;
  if (error == std::errc::result_out_of_range) throw UsageError(fmt::format("{} is {}: too large", what, text));
  if (error != std::errc() || shift < 0)
    throw UsageError(fmt::format("{} is '{}'; expected an integer such as 512, 4k, 2M or 1G", what, text));
  if (std::abs(static_cast<double>(value)) * std::ldexp(1.0, shift) >= 0x1p62)
    throw UsageError(fmt::format("{} is {}: too large", what, text));
  return value * (int64_t{1} << shift);
}

double parse_number(std::string_view text, std::string_view what) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || !std::isfinite(value))
    throw UsageError(fmt::format("{} is '{}'; expected a number", what, text));
  return value;
}

Arguments::Arguments(std::string name, std::string summary) : name_(std::move(name)), summary_(std::move(summary)) {}

void Arguments::section(std::string title) { section_ = std::move(title); }

void Arguments::add(std::string names, Kind kind, std::string value, std::string help,
                    std::function<void(const std::string&)> take) {
  options_.push_back({section_, split(names, ','), kind, std::move(value), std::move(help), std::move(take)});
}

void Arguments::flag(std::string names, bool& target, std::string help) {
  add(std::move(names), Kind::flag, "", std::move(help), [&target](const std::string&) { target = true; });
}
void Arguments::option(std::string names, std::string value, std::string& target, std::string help) {
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target](const std::string& text) { target = text; });
}
void Arguments::option(std::string names, std::string value, std::optional<std::string>& target, std::string help) {
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target](const std::string& text) { target = text; });
}
void Arguments::option(std::string names, std::string value, int64_t& target, std::string help) {
  const std::string what = split(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target, what](const std::string& text) { target = parse_size(text, what); });
}
void Arguments::option(std::string names, std::string value, std::optional<int64_t>& target, std::string help) {
  const std::string what = split(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target, what](const std::string& text) { target = parse_size(text, what); });
}
void Arguments::option(std::string names, std::string value, std::optional<double>& target, std::string help) {
  const std::string what = split(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target, what](const std::string& text) { target = parse_number(text, what); });
}
void Arguments::option(std::string names, std::string value, double& target, std::string help) {
  const std::string what = split(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target, what](const std::string& text) { target = parse_number(text, what); });
}
void Arguments::list(std::string names, std::string value, std::vector<std::string>& target, std::string help) {
  add(std::move(names), Kind::list, std::move(value), std::move(help),
      [&target](const std::string& text) { target.push_back(text); });
}
void Arguments::sizes(std::string names, std::string value, std::vector<int64_t>& target, std::string help) {
  const std::string what = split(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help), [&target, what](const std::string& text) {
    target.clear();
    for (const std::string& part : split(text, ',')) target.push_back(parse_size(part, what));
  });
}
void Arguments::choice(std::string names, std::vector<std::string> choices, std::string& target, std::string help) {
  const std::string what = split(names, ',').back(), shown = joined(choices, "|");
  add(std::move(names), Kind::value, shown, std::move(help), [&target, what, choices](const std::string& text) {
    if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
      const std::optional<std::string> meant = did_you_mean(text, choices);
      throw UsageError(fmt::format("{} is '{}'; expected {}{}", what, text, joined(choices, ", "),
                                   meant ? fmt::format(" (did you mean '{}'?)", *meant) : ""));
    }
    target = text;
  });
}

void Arguments::operand(std::string name, std::string& target, std::string help) {
  operands_.push_back(
      {std::move(name), true, false, std::move(help), [&target](const std::string& text) { target = text; }});
}
void Arguments::operand(std::string name, std::optional<std::string>& target, std::string help) {
  operands_.push_back(
      {std::move(name), false, false, std::move(help), [&target](const std::string& text) { target = text; }});
}
void Arguments::rest(std::string name, std::vector<std::string>& target, std::string help, bool required) {
  operands_.push_back({std::move(name), required, true, std::move(help),
                       [&target](const std::string& text) { target.push_back(text); }});
}

void Arguments::example(std::string command, std::string what) {
  examples_.emplace_back(std::move(command), std::move(what));
}
void Arguments::note(std::string text) { notes_.push_back(std::move(text)); }

bool Arguments::parse(std::span<const std::string> arguments) {
  CLI::App app;
  bool wants_help = false;
  app.set_help_flag("");
  app.add_flag("-h,--help", wants_help);
  app.allow_extras();
  std::vector<CLI::Option*> parsed;
  for (const Option& option : options_) {
    const std::string names = joined(option.names, ",");
    if (option.kind == Kind::flag) {
      parsed.push_back(app.add_flag(names));
    } else {
      CLI::Option* added = app.add_option(names);
      added->expected(1)->allow_extra_args(false);
      added->multi_option_policy(option.kind == Kind::list ? CLI::MultiOptionPolicy::TakeAll
                                                           : CLI::MultiOptionPolicy::TakeLast);
      parsed.push_back(added);
    }
  }
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::ArgumentMismatch& error) {
    if (std::find(arguments.begin(), arguments.end(), "--help") == arguments.end())
      throw UsageError(fmt::format("{} needs a value",
                                   std::string_view(error.what()).substr(0, std::string_view(error.what()).find(':'))));
    wants_help = true;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (wants_help) {
    print(help());
    return false;
  }

  // What CLI11 left: operands, and options that nobody knows.
  std::vector<std::string> operands;
  bool only_operands = false;
  for (const std::string& extra : app.remaining()) {
    if (extra == "--" && !only_operands) {
      only_operands = true;
      continue;
    }
    if (!only_operands && extra.size() > 1 && extra[0] == '-') {
      const std::string word = extra.substr(0, extra.find('='));
      std::vector<std::string> known = {"--help"};
      for (const Option& option : options_) known.insert(known.end(), option.names.begin(), option.names.end());
      const std::optional<std::string> meant = word.starts_with("--") ? did_you_mean(word, known) : std::nullopt;
      throw UsageError(
          fmt::format("unknown option '{}'{}", word, meant ? fmt::format("; did you mean '{}'?", *meant) : ""));
    }
    operands.push_back(extra);
  }
  for (size_t i = 0; i < options_.size(); ++i)
    for (const std::string& text : parsed[i]->results()) options_[i].take(text);
  size_t next = 0;
  for (const Operand& operand : operands_) {
    const size_t end = operand.many ? operands.size() : std::min(next + 1, operands.size());
    if (operand.required && end <= next) throw UsageError(fmt::format("{} is missing", operand.name));
    for (; next < end; ++next) operand.take(operands[next]);
  }
  if (next < operands.size()) throw UsageError(fmt::format("unexpected argument '{}'", operands[next]));
  return true;
}

std::string Arguments::help() const {
  std::string text = "Usage: eadem " + name_;
  if (!options_.empty()) text += " [OPTIONS]";
  for (const Operand& operand : operands_) {
    const bool spelled_out = operand.name.find(' ') != std::string::npos;  // "[MODEL] FILE"
    const std::string shown = operand.name + (operand.many && !spelled_out ? "…" : "");
    text += operand.required ? " " + shown : " [" + shown + "]";
  }
  text += "\n\n" + wrapped(summary_, 0, kHelpWidth) + "\n";
  const auto row = [&](std::string left, const std::string& help) {
    // A long list of choices goes on below itself.
    const size_t indent = left.find(' ') + 1;
    for (size_t begin = 0; left.size() - begin + 2 > kHelpWidth;) {
      const size_t bar = left.rfind('|', begin + kHelpWidth - 3);
      if (bar == std::string::npos || bar <= begin + indent) break;
      begin = bar + 2;
      left.insert(bar + 1, "\n" + std::string(indent + 2, ' '));
    }
    std::string line = "  " + left;
    line += line.size() + 2 > kHelpColumn ? "\n" + std::string(kHelpColumn, ' ')
                                          : std::string(kHelpColumn - line.size(), ' ');
    text += line + wrapped(help, kHelpColumn, kHelpWidth) + "\n";
  };
  if (!operands_.empty()) text += "\n";
  for (const Operand& operand : operands_) row(operand.name, operand.help);
  std::string section;
  for (const Option& option : options_) {
    if (option.section != section) text += "\n" + option.section + ":\n";
    section = option.section;
    row(joined(option.names, ", ") + (option.value.empty() ? "" : " " + option.value), option.help);
  }
  for (const std::string& note : notes_) text += "\n" + wrapped(note, 0, kHelpWidth) + "\n";
  if (!examples_.empty()) text += "\nExamples:\n";
  for (const auto& [command, what] : examples_)
    text += "  " + command + "\n      " + wrapped(what, 6, kHelpWidth) + "\n";
  return text;
}

}  // namespace eadem::cli
