// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/options/arguments.h"

#include <fmt/ranges.h>
#include <getopt.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "eadem/cli/options/habits.h"
#include "eadem/cli/terminal.h"
#include "eadem/core/edit_distance.h"

namespace eadem::cli {

namespace {

std::vector<std::string> split_at(std::string_view text, char separator) {
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
  for (const std::string& word : split_at(text, ' ')) {
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

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return result;
}

const std::string& not_empty(const std::string& text, const std::string& what) {
  if (text.empty()) throw UsageError(fmt::format("{} is empty; it needs a value", what));
  return text;
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
  options_.push_back({section_, split_at(names, ','), kind, std::move(value), std::move(help), std::move(take)});
}

void Arguments::flag(std::string names, bool& target, std::string help) {
  add(std::move(names), Kind::flag, "", std::move(help), [&target](const std::string&) { target = true; });
}
void Arguments::option(std::string names, std::string value, std::string& target, std::string help) {
  const std::string what = split_at(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target, what](const std::string& text) { target = not_empty(text, what); });
}
void Arguments::option(std::string names, std::string value, std::optional<std::string>& target, std::string help) {
  const std::string what = split_at(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target, what](const std::string& text) { target = not_empty(text, what); });
}
void Arguments::text(std::string names, std::string value, std::optional<std::string>& target, std::string help) {
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target](const std::string& text) { target = text; });
}
void Arguments::option(std::string names, std::string value, int64_t& target, std::string help) {
  const std::string what = split_at(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target, what](const std::string& text) { target = parse_size(text, what); });
}
void Arguments::option(std::string names, std::string value, std::optional<int64_t>& target, std::string help) {
  const std::string what = split_at(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target, what](const std::string& text) { target = parse_size(text, what); });
}
void Arguments::option(std::string names, std::string value, std::optional<double>& target, std::string help) {
  const std::string what = split_at(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target, what](const std::string& text) { target = parse_number(text, what); });
}
void Arguments::option(std::string names, std::string value, double& target, std::string help) {
  const std::string what = split_at(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target, what](const std::string& text) { target = parse_number(text, what); });
}
void Arguments::list(std::string names, std::string value, std::vector<std::string>& target, std::string help) {
  const std::string what = split_at(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help),
      [&target, what](const std::string& text) { target.push_back(not_empty(text, what)); });
}
void Arguments::sizes(std::string names, std::string value, std::vector<int64_t>& target, std::string help) {
  const std::string what = split_at(names, ',').back();
  add(std::move(names), Kind::value, std::move(value), std::move(help), [&target, what](const std::string& text) {
    target.clear();
    for (const std::string& part : split_at(text, ',')) target.push_back(parse_size(part, what));
  });
}
void Arguments::choice(std::string names, std::vector<std::string> choices, std::string& target, std::string help) {
  const std::string what = split_at(names, ',').back(), shown = joined(choices, "|");
  add(std::move(names), Kind::value, shown, std::move(help), [&target, what, choices](const std::string& text) {
    const std::string word = lower(text);
    for (const std::string& choice : {word, std::string(our_type_name(word))})
      if (std::find(choices.begin(), choices.end(), choice) != choices.end()) {
        target = choice;
        return;
      }
    const std::optional<std::string> meant = did_you_mean(word, choices);
    throw UsageError(fmt::format("{} is '{}'; expected {}{}", what, text, joined(choices, ", "),
                                 meant ? fmt::format(" (did you mean '{}'?)", *meant) : ""));
  });
}

void Arguments::operand(std::string name, std::string& target, std::string help) {
  operands_.push_back(
      {std::move(name), true, false, std::move(help), [&target](const std::string& text) { target = text; }, {}});
}
void Arguments::operand(std::string name, std::optional<std::string>& target, std::string help, std::string names) {
  const auto take = [&target](const std::string& text) { target = text; };
  std::vector<std::string> options;
  if (!names.empty()) {
    options = split_at(names, ',');
    operand_options_.push_back({"", options, Kind::value, name, "", take});
  }
  operands_.push_back({std::move(name), false, false, std::move(help), take, std::move(options)});
}
void Arguments::rest(std::string name, std::vector<std::string>& target, std::string help, bool required) {
  operands_.push_back({std::move(name),
                       required,
                       true,
                       std::move(help),
                       [&target](const std::string& text) { target.push_back(text); },
                       {}});
}

void Arguments::example(std::string command, std::string what) {
  examples_.emplace_back(std::move(command), std::move(what));
}
void Arguments::note(std::string text) { notes_.push_back(std::move(text)); }

struct Arguments::Split {
  std::vector<std::pair<const Option*, std::string>> options;  // in the order given, with their values
  std::vector<std::string> operands;
  bool wants_help = false;
};

std::vector<std::pair<std::string, const Arguments::Option*>> Arguments::spellings() const {
  std::vector<std::pair<std::string, const Option*>> result;
  for (const std::vector<Option>* options : {&options_, &operand_options_})
    for (const Option& option : *options)
      for (const std::string& name : option.names) result.emplace_back(name, &option);
  const auto find = [&](std::string_view name) {
    return std::find_if(result.begin(), result.end(), [&](const auto& entry) { return entry.first == name; });
  };
  for (const OtherName& other : other_names()) {
    const auto ours = find(other.ours);
    if (ours != result.end() && find(other.name) == result.end())
      result.emplace_back(std::string(other.name), ours->second);
  }
  return result;
}

void Arguments::refuse_unknown(const std::string& word) const {
  const std::string name = word.substr(0, word.find('='));
  std::string dashed = name;
  std::replace(dashed.begin(), dashed.end(), '_', '-');
  for (const Advice& known : advice())
    if (dashed == known.name) throw UsageError(fmt::format("{}: {}", name, known.instead));
  std::vector<std::string> known = {"--help"}, begin_so;
  for (const Option& option : options_) known.insert(known.end(), option.names.begin(), option.names.end());
  for (const std::string& candidate : known)
    if (name.size() > 2 && candidate.starts_with(name)) begin_so.push_back(candidate);
  if (begin_so.size() > 1) throw UsageError(fmt::format("'{}' may be {}", name, joined(begin_so, ", ")));
  const std::optional<std::string> meant = name.starts_with("--") ? did_you_mean(name, known) : std::nullopt;
  throw UsageError(
      fmt::format("unknown option '{}'{}", name, meant ? fmt::format("; did you mean '{}'?", *meant) : ""));
}

Arguments::Split Arguments::split(std::span<const std::string> arguments) const {
  constexpr int kHelp = 256, kFirst = 257;  // what getopt_long returns for long options; short ones return themselves
  const std::vector<std::pair<std::string, const Option*>> names = spellings();
  std::string short_options = "-:h";  // operands come in order, and we print errors ourselves
  std::vector<::option> long_options = {{"help", no_argument, nullptr, kHelp}};
  for (const auto& [name, owner] : names) {
    const bool has_value = owner->kind == Kind::value;
    if (name.size() == 2) {
      short_options += name.substr(1) + (has_value ? ":" : "");
    } else {
      // An option's names have one value, so that a beginning that they share is not ambiguous.
      const auto first = std::find_if(names.begin(), names.end(), [&](const auto& e) { return e.second == owner; });
      long_options.push_back({name.c_str() + name.find_first_not_of('-'), has_value ? required_argument : no_argument,
                              nullptr, kFirst + static_cast<int>(first - names.begin())});
    }
  }
  long_options.push_back({});

  std::vector<std::string> words = {"eadem"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const auto is_known = [&](std::string_view name) {
    return std::any_of(names.begin(), names.end(), [&](const auto& entry) { return entry.first == name; });
  };

  Split split;
  optind = 0;  // GNU: begin anew
  opterr = 0;
  while (true) {
    // The argument that getopt_long reads next. `-name` with several letters is a long option if one has this name.
    const auto at = static_cast<size_t>(std::max(optind, 1));
    const std::string word = at < words.size() ? words[at] : "";
    if (word.starts_with("--")) {
      std::replace(words[at].begin(), words[at].begin() + static_cast<ptrdiff_t>(std::min(word.find('='), word.size())),
                   '_', '-');
    } else if (const std::string name = word.substr(0, word.find('=')); name.size() > 2 && name[0] == '-') {
      if (is_known(name)) {
        words[at].insert(0, "-");
        pointers[at] = words[at].data();
      } else if (std::any_of(advice().begin(), advice().end(),
                             [&](const Advice& known) { return known.name == name; })) {
        refuse_unknown(word);
      }
    }
    const int found = getopt_long(static_cast<int>(words.size()), pointers.data(), short_options.c_str(),
                                  long_options.data(), nullptr);
    if (found == -1) break;
    if (found == 1) {
      split.operands.emplace_back(optarg);
      continue;
    }
    if (found == 'h' || found == kHelp) {
      split.wants_help = true;
      return split;
    }
    const auto option_of = [&](int value) -> const Option* {
      if (value >= kFirst) return names[static_cast<size_t>(value - kFirst)].second;
      for (const auto& [name, owner] : names)
        if (name.size() == 2 && name[1] == value) return owner;
      return nullptr;
    };
    if (found == '?') {
      if (const Option* flag = option_of(optopt); optopt >= kFirst && flag != nullptr)
        throw UsageError(fmt::format("{} takes no value", flag->names.back()));
      refuse_unknown(word.starts_with("--") ? word : fmt::format("-{}", static_cast<char>(optopt)));
    }
    if (found == ':') throw UsageError(fmt::format("{} needs a value", option_of(optopt)->names.back()));
    split.options.emplace_back(option_of(found), optarg != nullptr ? optarg : "");
  }
  for (auto at = static_cast<size_t>(optind); at < words.size(); ++at) split.operands.push_back(words[at]);
  return split;
}

bool Arguments::parse(std::span<const std::string> arguments) {
  const Split split = this->split(arguments);
  if (split.wants_help) {
    print(help());
    return false;
  }
  for (const auto& [option, text] : split.options) option->take(text);
  const auto given_as_option = [&](const Operand& operand) {
    return !operand.names.empty() && std::any_of(split.options.begin(), split.options.end(), [&](const auto& given) {
      return given.first->names == operand.names;
    });
  };
  size_t next = 0;
  for (const Operand& operand : operands_) {
    if (given_as_option(operand)) continue;
    const size_t end = operand.many ? split.operands.size() : std::min(next + 1, split.operands.size());
    if (operand.required && end <= next) throw UsageError(fmt::format("{} is missing", operand.name));
    for (; next < end; ++next) operand.take(split.operands[next]);
  }
  if (next < split.operands.size()) throw UsageError(fmt::format("unexpected argument '{}'", split.operands[next]));
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
    // A long list of choices continues under its own beginning.
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
  for (const Operand& operand : operands_)
    row(operand.names.empty() ? operand.name : fmt::format("{0}, {1} {0}", operand.name, operand.names[0]),
        operand.help);
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
