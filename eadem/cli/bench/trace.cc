// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/bench/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <optional>

#include "eadem/core/error.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/json.h"
#include "eadem/io/text.h"

namespace eadem::cli {

namespace {

constexpr std::string_view kCsvHeader = "TIMESTAMP,ContextTokens,GeneratedTokens";
constexpr std::string_view kTimeForm = "YYYY-MM-DD hh:mm:ss[.fraction][Z|±hh:mm]";
constexpr int64_t kMostTraceTokens = 1 << 24;
constexpr int64_t kMooncakeBlock = 512;
constexpr int64_t kSecond = 1'000'000'000;  // nanoseconds

// A line with its place, for messages.
struct TraceLine {
  std::string_view text;
  std::string place;  // "trace.csv:3"
};

// Takes the lines of a text one by one, without their ends, LF or CRLF. Blank lines at the end of the text are no
// lines.
class TraceLines {
 public:
  TraceLines(std::string_view text, const std::string& file) : file_(file) {
    const size_t end = text.find_last_not_of("\r\n\t ");
    rest_ = end == std::string_view::npos ? std::string_view() : text.substr(0, end + 1);
  }

  std::optional<TraceLine> next() {
    if (rest_.empty()) return std::nullopt;
    const size_t end = rest_.find('\n');
    std::string_view text = rest_.substr(0, end);
    rest_ = end == std::string_view::npos ? std::string_view() : rest_.substr(end + 1);
    if (text.ends_with('\r')) text.remove_suffix(1);
    return TraceLine{text, fmt::format("{}:{}", file_, ++number_)};
  }

 private:
  const std::string& file_;
  std::string_view rest_;
  int64_t number_ = 0;
};

// Reads a number of exactly `digits` digits at the beginning of `text`, and drops it.
std::optional<int> take_digits(std::string_view& text, size_t digits) {
  int value = 0;
  if (text.size() < digits) return std::nullopt;
  for (const char c : text.substr(0, digits)) {
    if (c < '0' || c > '9') return std::nullopt;
    value = 10 * value + (c - '0');
  }
  text.remove_prefix(digits);
  return value;
}

bool take(std::string_view& text, char expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(1);
  return true;
}

// Like take_digits, for a number that `before` precedes and that is not more than `most`.
std::optional<int> take_part(std::string_view& text, char before, size_t digits, int most) {
  if (!take(text, before)) return std::nullopt;
  const std::optional<int> value = take_digits(text, digits);
  return value && *value <= most ? value : std::nullopt;
}

// Nanoseconds, of which those beyond nine digits are dropped.
std::optional<int64_t> take_fraction(std::string_view& text) {
  if (!take(text, '.')) return 0;
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  if (digits == 0) return std::nullopt;
  int64_t value = 0;
  for (size_t at = 0; at < 9; ++at) value = 10 * value + (at < digits ? text[at] - '0' : 0);
  text.remove_prefix(digits);
  return value;
}

// Minutes east of Greenwich.
std::optional<int> take_offset(std::string_view& text) {
  if (text.empty() || take(text, 'Z')) return 0;
  const int sign = text.front() == '-' ? -1 : 1;
  const std::optional<int> hours = take_part(text, sign < 0 ? '-' : '+', 2, 23);
  const std::optional<int> minutes = hours ? take_part(text, ':', 2, 59) : std::nullopt;
  return minutes ? std::optional(sign * (60 * *hours + *minutes)) : std::nullopt;
}

// Nanoseconds since 1970 of a time in kTimeForm. Years with four digits fit.
std::optional<int64_t> parse_time(std::string_view text) {
  const std::optional<int> year = take_digits(text, 4);
  if (!year || *year < 1700 || *year > 2200) return std::nullopt;
  const std::optional<int> month = take_part(text, '-', 2, 12);
  const std::optional<int> day = month ? take_part(text, '-', 2, 31) : std::nullopt;
  if (!day) return std::nullopt;
  const std::chrono::year_month_day date{std::chrono::year(*year), std::chrono::month(static_cast<unsigned>(*month)),
                                         std::chrono::day(static_cast<unsigned>(*day))};
  if (!date.ok()) return std::nullopt;
  const std::optional<int> hour = take_part(text, ' ', 2, 23);
  const std::optional<int> minute = hour ? take_part(text, ':', 2, 59) : std::nullopt;
  const std::optional<int> second = minute ? take_part(text, ':', 2, 60) : std::nullopt;  // 60: a leap second
  const std::optional<int64_t> fraction = second ? take_fraction(text) : std::nullopt;
  const std::optional<int> offset = fraction ? take_offset(text) : std::nullopt;
  if (!offset || !text.empty()) return std::nullopt;
  const int64_t days = std::chrono::sys_days(date).time_since_epoch().count();
  const int64_t minutes = 24 * 60 * days + 60 * *hour + *minute - *offset;
  return (60 * minutes + *second) * kSecond + *fraction;
}

int64_t parse_tokens(std::string_view text, std::string_view column, const std::string& place) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > kMostTraceTokens)
    throw DataCorrupted("{}: {} is {}; expected an integer in [1, {}]", place, column, io::quote(text),
                        kMostTraceTokens);
  return value;
}

// A trace under construction, whose times must not fall.
class TraceBuilder {
 public:
  void add(int64_t nanoseconds, std::string_view written, TraceRequest request, const std::string& place) {
    if (trace_.requests.empty()) first_ = last_ = nanoseconds;
    if (nanoseconds < last_)
      throw DataCorrupted("{}: the time {} is before that of the line above, {}", place, io::quote(written),
                          io::quote(last_written_));
    last_ = nanoseconds;
    last_written_ = written;
    request.seconds = static_cast<double>(nanoseconds - first_) / static_cast<double>(kSecond);
    trace_.requests.push_back(std::move(request));
  }
  Trace finish(int64_t block_tokens, const std::string& file) {
    if (trace_.requests.empty()) throw DataCorrupted("{}: the trace has no request", file);
    trace_.block_tokens = block_tokens;
    return std::move(trace_);
  }

 private:
  Trace trace_;
  int64_t first_ = 0, last_ = 0;
  std::string last_written_;
};

Trace parse_csv(TraceLines& lines, const std::string& file) {
  TraceBuilder builder;
  while (const std::optional<TraceLine> line = lines.next()) {
    const size_t first = line->text.find(','), last = line->text.rfind(',');
    if (std::count(line->text.begin(), line->text.end(), ',') != 2)
      throw DataCorrupted("{}: the line is {}; expected {}", line->place, io::quote(line->text), kCsvHeader);
    const std::string_view written = line->text.substr(0, first);
    const std::optional<int64_t> time = parse_time(written);
    if (!time) throw DataCorrupted("{}: TIMESTAMP is {}; expected {}", line->place, io::quote(written), kTimeForm);
    builder.add(
        *time, written,
        {.prompt_tokens = parse_tokens(line->text.substr(first + 1, last - first - 1), "ContextTokens", line->place),
         .generated_tokens = parse_tokens(line->text.substr(last + 1), "GeneratedTokens", line->place)},
        line->place);
  }
  return builder.finish(0, file);
}

Trace parse_mooncake(TraceLines& lines, std::optional<TraceLine> line, const std::string& file) {
  constexpr int64_t kMostMilliseconds = std::numeric_limits<int64_t>::max() / 1'000'000;
  TraceBuilder builder;
  for (; line; line = lines.next()) {
    const io::JsonReader reader = io::JsonReader::parse(line->text, line->place);
    if (!reader.value().is_object())
      throw DataCorrupted("{}: the line is {}; expected a JSON object", line->place, io::quote(line->text));
    const int64_t milliseconds = reader.integer("timestamp", 0, kMostMilliseconds);
    TraceRequest request{.prompt_tokens = reader.integer("input_length", 1, kMostTraceTokens),
                         .generated_tokens = reader.integer("output_length", 1, kMostTraceTokens),
                         .blocks = reader.integers("hash_ids", 0)};
    // Traces of other sources have the same keys and other units.
    if (const std::vector<std::string> unread = reader.unread_keys(); !unread.empty())
      throw DataCorrupted("{}: the key '{}' is unknown; expected timestamp, input_length, output_length and hash_ids",
                          line->place, unread.front());
    if (std::ssize(request.blocks) != (request.prompt_tokens + kMooncakeBlock - 1) / kMooncakeBlock)
      throw DataCorrupted("{}: hash_ids has {} ids; input_length {} is {} blocks of {}", line->place,
                          request.blocks.size(), request.prompt_tokens,
                          (request.prompt_tokens + kMooncakeBlock - 1) / kMooncakeBlock, kMooncakeBlock);
    builder.add(milliseconds * 1'000'000, fmt::to_string(milliseconds), std::move(request), line->place);
  }
  return builder.finish(kMooncakeBlock, file);
}

// SplitMix64: a bijection whose bits all depend on all bits. Source: Steele, Lea, Flood 2014, fig. 17.
uint64_t split_mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace

Trace parse_trace(std::string_view text, const std::string& file) {
  TraceLines lines(text, file);
  std::optional<TraceLine> first = lines.next();
  if (!first) throw DataCorrupted("{}: the file is empty; expected a trace", file);
  if (first->text.starts_with('{')) return parse_mooncake(lines, std::move(first), file);
  if (first->text == kCsvHeader) return parse_csv(lines, file);
  throw DataCorrupted("{}: the line is {}; a trace begins with the line {}, or is of JSON objects", first->place,
                      io::quote(first->text), kCsvHeader);
}

Trace read_trace(const std::string& path) {
  constexpr int64_t kMostBytes = 1 << 30;
  return parse_trace(io::read_file(path, kMostBytes), path);
}

Workload::Workload(Trace trace, const TraceScale& scale, int64_t context)
    : scale_(scale), block_tokens_(trace.block_tokens), trace_requests_(std::ssize(trace.requests)) {
  if (scale.requests > 0 && scale.requests < trace_requests_)
    trace.requests.resize(static_cast<size_t>(scale.requests));
  const auto divided = [&](int64_t tokens) { return (tokens + scale.divide - 1) / scale.divide; };
  int64_t shortest = std::numeric_limits<int64_t>::max();
  for (size_t index = 0; index < trace.requests.size(); ++index) {
    TraceRequest& request = trace.requests[index];
    request.seconds /= scale.rate;
    request.prompt_tokens = divided(request.prompt_tokens);
    request.generated_tokens = divided(request.generated_tokens);
    if (request.blocks.empty()) request.blocks = {static_cast<int64_t>(index)};
    const int64_t tokens = request.prompt_tokens + request.generated_tokens;
    shortest = std::min(shortest, tokens);
    if (tokens > context) continue;
    longest_ = std::max(longest_, tokens);
    requests_.push_back(std::move(request));
  }
  left_out_ = std::ssize(trace.requests) - std::ssize(requests_);
  if (requests_.empty())
    throw InvalidArgument("the shortest of {} requests has {} tokens; the model's context is {}", trace.requests.size(),
                          shortest, context);
}

std::vector<int32_t> Workload::prompt(size_t index, int64_t vocab) const {
  const TraceRequest& request = requests_.at(index);
  std::vector<int32_t> tokens(static_cast<size_t>(request.prompt_tokens));
  for (int64_t place = 0; place < request.prompt_tokens; ++place) {
    const int64_t block = has_blocks() ? place * scale_.divide / block_tokens_ : 0;
    const auto id = static_cast<uint64_t>(request.blocks[static_cast<size_t>(block)]);
    tokens[static_cast<size_t>(place)] =
        static_cast<int32_t>(split_mix(split_mix(id) + static_cast<uint64_t>(place)) % static_cast<uint64_t>(vocab));
  }
  return tokens;
}

}  // namespace eadem::cli
