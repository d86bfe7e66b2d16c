// SPDX-License-Identifier: Apache-2.0
//
// Traces: what is read, what is refused and how, how they are scaled, and which prompts begin alike.
#include "eadem/cli/bench/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>

#include "tests/support/refusal.h"

namespace eadem::cli {
namespace {

using test::refusal;

constexpr const char* kHeader = "TIMESTAMP,ContextTokens,GeneratedTokens\n";

std::string refused(const std::string& text) {
  return refusal([&] { parse_trace(text, "t.csv"); });
}

std::string refused_line(const std::string& line) {
  return refused(kHeader + ("2023-11-16 18:15:46,1,1\n" + line) + "\n2023-11-17 18:15:46,1,1\n");
}

std::string json_line(int64_t time, int64_t prompt, int64_t answer, const std::string& ids) {
  return fmt::format("{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": [{}]}}\n", time,
                     prompt, answer, ids);
}

Trace trace_of(std::vector<TraceRequest> requests, int64_t block_tokens = 0) {
  return {.block_tokens = block_tokens, .requests = std::move(requests)};
}

TEST(Trace, OfAzure) {
  const Trace trace = parse_trace(std::string(kHeader) +
                                      "2023-11-16 18:15:46.6805900,374,44\n"
                                      "2023-11-16 18:15:50.9951690,396,109\n"
                                      "2023-11-17 00:00:00,16777216,1\n",
                                  "t.csv");
  EXPECT_EQ(trace.block_tokens, 0);
  ASSERT_EQ(trace.requests.size(), 3U);
  EXPECT_EQ(trace.requests[0].seconds, 0);
  EXPECT_EQ(trace.requests[0].prompt_tokens, 374);
  EXPECT_EQ(trace.requests[0].generated_tokens, 44);
  EXPECT_DOUBLE_EQ(trace.requests[1].seconds, 4.314579);
  EXPECT_EQ(trace.requests[1].generated_tokens, 109);
  // 5 h 44 min 13.31941 s.
  EXPECT_DOUBLE_EQ(trace.requests[2].seconds, 5 * 3600 + 44 * 60 + 13.31941);
  EXPECT_EQ(trace.requests[2].prompt_tokens, 1 << 24);
}

TEST(Trace, TimesHaveZonesLeapYearsAndManyDigits) {
  const Trace trace = parse_trace(std::string(kHeader) +
                                      "2024-02-29 23:59:59.9Z,1,1\n"
                                      "2024-03-01 00:00:00.9000000004+00:00,1,1\n"
                                      "2024-03-01 02:00:01.9+02:00,1,1\n"
                                      "2024-02-29 18:30:02.9-05:30,1,1\n",
                                  "t.csv");
  for (size_t i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(trace.requests.at(i).seconds, static_cast<double>(i)) << i;
}

TEST(Trace, LinesEndAsTheyDoOnAnySystem) {
  for (const char* end : {"", "\n", "\r\n", "\n\n", "\r\n \r\n"}) {
    const std::string text = std::string(kHeader) + "2023-11-16 18:15:46,3,4\n2023-11-16 18:15:46,5,6" + end;
    std::string windows;
    for (const char c : text) windows += c == '\n' ? std::string("\r\n") : std::string(1, c);
    for (const std::string& each : {text, windows}) {
      const Trace trace = parse_trace(each, "t.csv");
      ASSERT_EQ(trace.requests.size(), 2U);
      EXPECT_EQ(trace.requests[1].prompt_tokens, 5);
      EXPECT_EQ(trace.requests[1].generated_tokens, 6);
    }
  }
}

TEST(Trace, OfMooncake) {
  const Trace trace = parse_trace(json_line(0, 513, 7, "0, 5") + json_line(27482, 1, 2, "9007199254740993"), "t.jsonl");
  EXPECT_EQ(trace.block_tokens, 512);
  ASSERT_EQ(trace.requests.size(), 2U);
  EXPECT_EQ(trace.requests[0].prompt_tokens, 513);
  EXPECT_EQ(trace.requests[0].blocks, (std::vector<int64_t>{0, 5}));
  EXPECT_DOUBLE_EQ(trace.requests[1].seconds, 27.482);
  EXPECT_EQ(trace.requests[1].generated_tokens, 2);
  EXPECT_EQ(trace.requests[1].blocks, (std::vector<int64_t>{9007199254740993}));
}

TEST(Trace, WithoutRequestsIsRefused) {
  for (const char* text : {"", "\n", "\r\n\r\n", "   \n\t"})
    EXPECT_EQ(refused(text), "DataCorrupted: t.csv: the file is empty; expected a trace");
  for (const char* text :
       {"TIMESTAMP,ContextTokens,GeneratedTokens", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\r\n"})
    EXPECT_EQ(refused(text), "DataCorrupted: t.csv: the trace has no request");
}

TEST(Trace, OfAnotherFormatIsRefusedByItsFirstLine) {
  EXPECT_EQ(refused("time,in,out\n1,2,3\n"),
            "DataCorrupted: t.csv:1: the line is 'time,in,out'; a trace begins with the line "
            "TIMESTAMP,ContextTokens,GeneratedTokens, or is of JSON objects");
  for (const char* text : {"[1]", "2023-11-16 18:15:46,1,1", "\nTIMESTAMP,ContextTokens,GeneratedTokens\n",
                           "\xEF\xBB\xBFTIMESTAMP,ContextTokens,GeneratedTokens\n",
                           "\x7f"
                           "ELF\x02"})
    EXPECT_HAS(refused(text), "t.csv:1: the line is ");
  EXPECT_HAS(refused(std::string("\0\x1b[2J", 5)), "'\\x00\\x1b[2J'");
}

TEST(Trace, LinesOfAnotherFormAreRefusedByPlaceAndValue) {
  for (const char* line : {"", "a", "1,2", "2023-11-16 18:15:46,1,1,1", ",,,"})
    EXPECT_EQ(refused_line(line), fmt::format("DataCorrupted: t.csv:3: the line is '{}'; expected "
                                              "TIMESTAMP,ContextTokens,GeneratedTokens",
                                              line));
  for (const char* time : {"",
                           "5",
                           "2023-11-16",
                           "2023-11-16T18:15:46",
                           "2023-02-29 18:15:46",
                           "2023-13-01 18:15:46",
                           "2023-00-01 18:15:46",
                           "2023-11-00 18:15:46",
                           "2023-11-31 18:15:46",
                           "2023-11-16 24:15:46",
                           "2023-11-16 18:60:46",
                           "2023-11-16 18:15:61",
                           "2023-11-16 18:15:46.",
                           "2023-11-16 18:15:46.x",
                           "2023-11-16 18:15:46+2",
                           "2023-11-16 18:15:46+24:00",
                           "2023-11-16 18:15:46 ",
                           " 2023-11-16 18:15:46",
                           "9999-11-16 18:15:46",
                           "0000-11-16 18:15:46",
                           "-023-11-16 18:15:46",
                           "2023-11-1618:15:46"})
    EXPECT_EQ(refused_line(std::string(time) + ",1,1"),
              fmt::format("DataCorrupted: t.csv:3: TIMESTAMP is '{}'; expected YYYY-MM-DD "
                          "hh:mm:ss[.fraction][Z|±hh:mm]",
                          time));
  for (const char* tokens : {"", "0", "-1", "x", "1.5", "1e3", "0x10", " 1", "1 ", "+1", "16777217",
                             "9223372036854775808", "99999999999999999999999999", "nan"}) {
    EXPECT_EQ(
        refused_line(fmt::format("2023-11-16 18:15:46,{},1", tokens)),
        fmt::format("DataCorrupted: t.csv:3: ContextTokens is '{}'; expected an integer in [1, 16777216]", tokens));
    EXPECT_EQ(
        refused_line(fmt::format("2023-11-16 18:15:46,1,{}", tokens)),
        fmt::format("DataCorrupted: t.csv:3: GeneratedTokens is '{}'; expected an integer in [1, 16777216]", tokens));
  }
}

TEST(Trace, TimesThatFallAreRefused) {
  EXPECT_EQ(refused_line("2023-11-16 18:15:45.9,1,1"),
            "DataCorrupted: t.csv:3: the time '2023-11-16 18:15:45.9' is before that of the line above, "
            "'2023-11-16 18:15:46'");
  EXPECT_EQ(refused(json_line(5, 1, 1, "0") + json_line(4, 1, 1, "0")),
            "DataCorrupted: t.csv:2: the time '4' is before that of the line above, '5'");
}

TEST(Trace, JsonOfAnotherFormIsRefusedByPlaceAndValue) {
  const std::string good = json_line(0, 1, 1, "0");
  EXPECT_HAS(refused(good + "[]\n"), "t.csv:2: the line is '[]'; expected a JSON object");
  EXPECT_HAS(refused(good + "\n" + good), "t.csv:2");
  EXPECT_HAS(refused(good + good + "{\"timestamp\": 0\n"), "t.csv:3");
  EXPECT_HAS(refused(good + "{}\n"), "t.csv:2: 'timestamp' is missing; expected");
  EXPECT_HAS(refused(json_line(-1, 1, 1, "0")),
             "t.csv:1: 'timestamp' is -1; expected an integer in [0, 9223372036854]");
  EXPECT_HAS(refused(json_line(std::numeric_limits<int64_t>::max(), 1, 1, "0")), "'timestamp' is 9223372036854775807");
  EXPECT_HAS(refused(json_line(0, 0, 1, "")), "t.csv:1: 'input_length' is 0; expected an integer in [1, 16777216]");
  EXPECT_HAS(refused(json_line(0, 16777217, 1, "")), "'input_length' is 16777217");
  EXPECT_HAS(refused(json_line(0, 1, 0, "0")), "t.csv:1: 'output_length' is 0; expected an integer in [1, 16777216]");
  EXPECT_HAS(refused(json_line(0, 1, 1, "-1")), "t.csv:1: 'hash_ids");
  EXPECT_HAS(refused(json_line(0, 1, 1, "1.5")), "t.csv:1: 'hash_ids");
  EXPECT_EQ(refused(json_line(0, 513, 1, "0")),
            "DataCorrupted: t.csv:1: hash_ids has 1 ids; input_length 513 is 2 blocks of 512");
  EXPECT_HAS(refused(json_line(0, 512, 1, "0, 1")), "hash_ids has 2 ids; input_length 512 is 1 blocks of 512");
  EXPECT_EQ(refused("{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [0], \"turn\": 2}"),
            "DataCorrupted: t.csv:1: the key 'turn' is unknown; expected timestamp, input_length, output_length and "
            "hash_ids");
}

TEST(Trace, FilesAreNamed) {
  EXPECT_HAS(refusal([] { read_trace("/nowhere/trace.csv"); }), "NotFound: /nowhere/trace.csv");
  EXPECT_HAS(refusal([] { read_trace("/tmp"); }), "IoError: cannot read /tmp");
}

TEST(Workload, IsScaled) {
  const Workload workload(trace_of({{0, 1, 1, {}}, {3, 17, 8, {}}, {5, 100, 1, {}}, {6, 32, 33, {}}, {9, 1, 1, {}}}),
                          {.requests = 4, .rate = 2, .divide = 8}, 9);
  EXPECT_EQ(workload.trace_requests(), 5);
  EXPECT_EQ(workload.left_out(), 1);  // 13 + 1 tokens
  EXPECT_EQ(workload.longest(), 9);
  EXPECT_FALSE(workload.has_blocks());
  ASSERT_EQ(workload.requests().size(), 3U);
  const std::vector<std::array<double, 3>> expected = {{0, 1, 1}, {1.5, 3, 1}, {3, 4, 5}};
  for (size_t i = 0; i < expected.size(); ++i) {
    const TraceRequest& request = workload.requests()[i];
    EXPECT_EQ(request.seconds, expected[i][0]);
    EXPECT_EQ(static_cast<double>(request.prompt_tokens), expected[i][1]);
    EXPECT_EQ(static_cast<double>(request.generated_tokens), expected[i][2]);
  }
}

TEST(Workload, OfWhichNothingFitsIsRefused) {
  EXPECT_EQ(refusal([] {
              Workload(trace_of({{0, 9, 2, {}}, {0, 8, 2, {}}}), {}, 9);
            }),
            "InvalidArgument: the shortest of 2 requests has 10 tokens; the model's context is 9");
}

TEST(Workload, PromptsBeginAlikeAsFarAsTheirBlocksDo) {
  for (const int64_t divide : {1, 3, 64, 512}) {
    const Workload workload(trace_of({{0, 1500, 1, {1, 2, 3}}, {0, 1536, 1, {1, 2, 4}}, {0, 700, 1, {1, 5}}}, 512),
                            {.divide = divide}, 4096);
    const std::vector<int32_t> a = workload.prompt(0, 32000), b = workload.prompt(1, 32000),
                               c = workload.prompt(2, 32000);
    EXPECT_EQ(std::ssize(a), (1500 + divide - 1) / divide);
    EXPECT_EQ(a, workload.prompt(0, 32000));
    // The first place of a divided prompt that lies in block 2, and in block 1.
    EXPECT_EQ(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin(), (1024 + divide - 1) / divide);
    EXPECT_EQ(std::mismatch(c.begin(), c.end(), a.begin()).first - c.begin(), (512 + divide - 1) / divide);
  }
}

TEST(Workload, PromptsWithoutBlocksAreTheirOwn) {
  const Workload workload(trace_of({{0, 4000, 1, {}}, {0, 4000, 1, {}}}), {}, 8192);
  const std::vector<int32_t> a = workload.prompt(0, 100), b = workload.prompt(1, 100);
  int64_t alike = 0;
  std::vector<int64_t> counts(100);
  for (size_t i = 0; i < a.size(); ++i) {
    alike += a[i] == b[i] ? 1 : 0;
    ASSERT_TRUE(a[i] >= 0 && a[i] < 100);
    ++counts[static_cast<size_t>(a[i])];
  }
  // Binomial of 4000 and 1/100: 40, with a deviation of 6.3; six deviations on both sides.
  EXPECT_GT(alike, 2);
  EXPECT_LT(alike, 78);
  for (const int64_t count : counts) {
    EXPECT_GT(count, 2);
    EXPECT_LT(count, 78);
  }
}

// Facts of the two files, counted by another program (Python's csv and json).
TEST(Trace, FilesOfTheirAuthors) {
  const std::string folder = EADEM_SHARED_DATA "/traces/";
  if (!std::filesystem::exists(folder + "AzureLLMInferenceTrace_conv.csv")) GTEST_SKIP() << folder << " is not there";
  const Trace trace = read_trace(folder + "AzureLLMInferenceTrace_conv.csv");
  ASSERT_EQ(trace.requests.size(), 19366U);
  int64_t prompt = 0, generated = 0, longest = 0;
  for (const TraceRequest& request : trace.requests) {
    prompt += request.prompt_tokens;
    generated += request.generated_tokens;
    longest = std::max(longest, request.prompt_tokens);
  }
  EXPECT_EQ(prompt, 22361870);
  EXPECT_EQ(generated, 4088665);
  EXPECT_EQ(longest, 14050);
  EXPECT_DOUBLE_EQ(trace.requests.back().seconds, 3501.721937);
}

}  // namespace
}  // namespace eadem::cli
