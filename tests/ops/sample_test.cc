// SPDX-License-Identifier: Apache-2.0
//
// What rows of `sample` ask for beside a draw: masks, forced tokens, the likeliest tokens, and typical_p as
// transformers has it (tests/data/sampling).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "eadem/io/json.h"
#include "eadem/kernels/sample.h"
#include "tests/ops/device_groups.h"
#include "tests/ops/op_cases.h"
#include "tests/ops/pass_calls.h"
#include "tests/support/values.h"
#include "tests/workloads/inputs.h"

namespace eadem::test {
namespace {

using kernels::kMostTopLogprobs;
using kernels::SampleRow;
using kernels::SampleSettings;

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// Rows of logits and what is asked of each; masks are words of which each row has two.
struct Rows {
  int64_t vocab;
  std::vector<std::vector<float>> logits;
  std::vector<SampleRow> rows;
  std::vector<uint32_t> masks = {};
};

// Calls check(outputs, label) for the reference and each kernel.
template <typename Check>
void for_each_result(const Rows& given, const Check& check) {
  ops::Workload row = op_cases("sample").front();
  row.inputs[0] = TensorType(DType::f32, {Symbol::logit_rows, given.vocab});
  row.symbols[Symbol::logit_rows] = std::ssize(given.rows);
  row.symbols[Symbol::penalties] = std::ssize(given.masks) / 2;
  std::vector<Tensor> in = workloads::make_inputs(*row.op, row.inputs, row.symbols, 1);
  for (size_t r = 0; r < given.rows.size(); ++r) {
    std::copy(given.logits[r].begin(), given.logits[r].end(), in[0].view.as<float>() + r * given.logits[r].size());
    static_cast<SampleRow*>(in[1].view.data)[r] = given.rows[r];
  }
  if (!given.masks.empty()) std::memcpy(in[2].view.data, given.masks.data(), given.masks.size() * sizeof(uint32_t));
  const std::optional<ExpectedCall> want = expected_call(row, kernels::Pass::inference, in, 1);
  check(want->expected, std::string("reference"));
  for (const DeviceGroup& group : device_groups())
    for (const kernels::Kernel* kernel : row.op->kernels(kernels::backend_of(*group.devices[0]))) {
      if (kernel->pass != kernels::Pass::inference) continue;
      if (!kernel->can_handle(want->call.request(*group.devices[0])).accepted) continue;
      std::vector<ops::RefTensor> got;
      for (const Tensor& each : run_kernel(*group.devices[0], *kernel, want->call, {}, group.name))
        got.push_back(widen(each.view));
      check(got, group.name);
    }
}

int32_t token_of(const std::vector<ops::RefTensor>& out, size_t row) { return static_cast<int32_t>(out[0].data[row]); }

TEST(SampleRows, MasksAllowWhatTheirBitsSay) {
  const std::vector<float> logits = {1, 4, 3, -1, 2};
  const std::vector<float> broken = {1, kNan, 3, -1, 2};
  const auto masked = [](int32_t begin, SampleSettings settings = {}) {
    return SampleRow{.settings = settings, .allowed_begin = begin};
  };
  const Rows given{.vocab = 5,
                   .logits = {logits, logits, logits, logits, logits, broken, logits},
                   .rows = {masked(0),
                            masked(1),
                            masked(2, {.temperature = 100, .seed = 3}),
                            masked(3),
                            {},
                            masked(0),
                            masked(1, {.temperature = 1, .top_k = 1})},
                   // The words of pairs 0 … 3; bits behind the vocabulary say nothing.
                   .masks = {0b11101, 0, 0b11001, 0, 0b01000, 0, 0xffffffe0, 0xffffffff}};
  for_each_result(given, [&](const std::vector<ops::RefTensor>& out, const std::string& label) {
    const int32_t tokens[] = {2, 4, 3, -1, 1, -1, 4};  // nothing allowed, and NaN that a mask would hide: refused
    double sum = 0;
    for (float logit : logits) sum += std::exp(static_cast<double>(logit));
    for (size_t r = 0; r < given.rows.size(); ++r) {
      EXPECT_EQ(token_of(out, r), tokens[r]) << label << ", row " << r;
      if (tokens[r] < 0) continue;
      // A difference of logits below 8 and a logarithm of a sum of five, in f32: a few units of 2^-22 each.
      EXPECT_NEAR(out[1].data[r], static_cast<double>(logits[static_cast<size_t>(tokens[r])]) - std::log(sum), 0x1p-19)
          << label << ", row " << r;
    }
  });
}

TEST(SampleRows, ForcedTokensAreTheModelsWhateverTheSettingsSay) {
  const std::vector<float> logits = {1, 4, 3, -1, 2}, masked = {1, -kInf, 3, -1, 2}, broken = {1, kNan, 3, -1, 2};
  const Rows given{.vocab = 5,
                   .logits = {logits, logits, masked, broken},
                   .rows = {{.forced = 3},
                            {.settings = {.temperature = 1, .top_k = 1}, .position = 7, .forced = 0},
                            {.forced = 1},
                            {.forced = 2}}};
  for_each_result(given, [&](const std::vector<ops::RefTensor>& out, const std::string& label) {
    double sum = 0;
    for (float logit : logits) sum += std::exp(static_cast<double>(logit));
    EXPECT_EQ(token_of(out, 0), 3) << label;
    EXPECT_NEAR(out[1].data[0], -1 - std::log(sum), 0x1p-19) << label;  // as above
    EXPECT_EQ(token_of(out, 1), 0) << label;
    EXPECT_NEAR(out[1].data[1], 1 - std::log(sum), 0x1p-19) << label;
    EXPECT_EQ(token_of(out, 2), 1) << label;
    EXPECT_EQ(out[1].data[2], -HUGE_VAL) << label;
    EXPECT_EQ(token_of(out, 3), -1) << label;
  });
}

TEST(SampleRows, TheLikeliestTokensStandInFallingOrderAndTiesByIndex) {
  std::vector<float> many(40), equal(40, 1.0f);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<float>((i * 7) % 10);  // each value four times
  std::vector<float> few(40, -kInf);
  few[7] = 2;
  few[3] = 5;
  const auto top = [](int32_t count, SampleSettings settings = {}) {
    settings.top_logprobs = count;
    return SampleRow{.settings = settings};
  };
  const Rows given{.vocab = 40,
                   .logits = {many, equal, few, many, many},
                   .rows = {top(20), top(3), top(4), top(0), top(1, {.temperature = 2, .top_k = 3})}};
  for_each_result(given, [&](const std::vector<ops::RefTensor>& out, const std::string& label) {
    const auto token = [&](size_t row, size_t i) {
      return static_cast<int32_t>(out[2].data[row * kMostTopLogprobs + i]);
    };
    const auto logprob = [&](size_t row, size_t i) { return out[3].data[row * kMostTopLogprobs + i]; };
    for (size_t i = 0; i + 1 < 20; ++i) {
      const float a = many[static_cast<size_t>(token(0, i))], b = many[static_cast<size_t>(token(0, i + 1))];
      EXPECT_TRUE(a > b || (a == b && token(0, i) < token(0, i + 1))) << label << " " << i;
      EXPECT_EQ(a, 9 - static_cast<float>(i / 4)) << label;
    }
    EXPECT_EQ(logprob(0, 0), out[1].data[0]) << label << ": the greedy token is the likeliest one";
    for (size_t i = 0; i < 20; ++i) {
      EXPECT_EQ(token(1, i), i < 3 ? static_cast<int32_t>(i) : -1) << label;
      EXPECT_EQ(std::isnan(logprob(1, i)), i >= 3) << label;
      EXPECT_EQ(token(3, i), -1) << label;
      EXPECT_EQ(token(4, i), i == 0 ? 7 : -1) << label;  // 7 * 7 % 10 = 9
    }
    const int32_t expected[] = {3, 7, 0, 1};
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(token(2, i), expected[i]) << label;
    EXPECT_EQ(logprob(2, 2), -HUGE_VAL) << label;
  });
}

TEST(SampleRows, FewerTokensThanAreListed) {
  const Rows given{.vocab = 2, .logits = {{0, 0}}, .rows = {{.settings = {.top_logprobs = 5}}}};
  for_each_result(given, [&](const std::vector<ops::RefTensor>& out, const std::string& label) {
    const double tokens[] = {0, 1, -1, -1, -1};
    for (size_t i = 0; i < 5; ++i) EXPECT_EQ(out[2].data[i], tokens[i]) << label;
    EXPECT_NEAR(out[3].data[1], -std::log(2.0), 0x1p-22) << label;
  });
}

// Draws of many seeds meet exactly the tokens that transformers' TypicalLogitsWarper keeps, since none of these is less
// likely than a hundredth: 3000 draws miss one with a probability below 10^-13.
TEST(SampleRows, TypicalKeepsWhatTransformersKeeps) {
  const io::JsonReader golden = io::JsonReader::read(EADEM_SOURCE_DIR "/tests/data/sampling/sampling.json");
  constexpr int64_t kDraws = 3000;
  for (const io::JsonReader& each : golden.elements("typical")) {
    const std::vector<double> values = each.numbers("logits");
    const std::vector<float> logits(values.begin(), values.end());
    std::set<int64_t> kept;
    for (const int64_t token : each.integers("kept", 0)) kept.insert(token);
    Rows given{.vocab = std::ssize(logits), .logits = {}, .rows = {}};
    for (int64_t r = 0; r < kDraws; ++r) {
      given.logits.push_back(logits);
      given.rows.push_back(
          {.settings = {.temperature = 1, .typical_p = static_cast<float>(each.number("typical_p"))}, .position = r});
    }
    for_each_result(given, [&](const std::vector<ops::RefTensor>& out, const std::string& label) {
      EXPECT_EQ(std::set<int64_t>(out[0].data.begin(), out[0].data.end()), kept) << label;
    });
  }
}

}  // namespace
}  // namespace eadem::test
