// SPDX-License-Identifier: Apache-2.0
//
// Rotary frequencies against those that transformers computes in double precision (tests/data/golden/README.md).
#include "eadem/modules/base/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "eadem/io/json.h"

namespace eadem::modules {
namespace {

RopeScaling::Kind kind_of(const std::string& name) {
  if (name == "linear") return RopeScaling::Kind::linear;
  if (name == "dynamic") return RopeScaling::Kind::dynamic;
  if (name == "llama3") return RopeScaling::Kind::llama3;
  if (name == "yarn") return RopeScaling::Kind::yarn;
  EXPECT_EQ(name, "default");
  return RopeScaling::Kind::none;
}

RopeConfig config_of(const io::JsonReader& entry) {
  const io::JsonReader rope = entry.object("rope_parameters");
  RopeConfig config;
  config.theta = rope.number("rope_theta");
  config.rotary_dim = entry.integer("head_dim", 2);
  RopeScaling& s = config.scaling;
  s.kind = kind_of(rope.string("rope_type"));
  s.factor = rope.optional_number("factor").value_or(1.0);
  s.original_max_positions = rope.optional_number("original_max_position_embeddings").value_or(0.0);
  s.low_freq_factor = rope.optional_number("low_freq_factor").value_or(s.low_freq_factor);
  s.high_freq_factor = rope.optional_number("high_freq_factor").value_or(s.high_freq_factor);
  s.beta_fast = rope.optional_number("beta_fast").value_or(s.beta_fast);
  s.beta_slow = rope.optional_number("beta_slow").value_or(s.beta_slow);
  s.attention_factor = rope.optional_number("attention_factor");
  s.mscale = rope.optional_number("mscale");
  s.mscale_all_dim = rope.optional_number("mscale_all_dim");
  s.truncate = rope.optional_boolean("truncate").value_or(true);
  return config;
}

TEST(RopeFrequencies, MatchTransformersInDoublePrecision) {
  const io::JsonReader golden = io::JsonReader::read(std::string(EADEM_SOURCE_DIR) + "/tests/data/golden/rope.json");
  const double epsilon = std::numeric_limits<double>::epsilon();
  const std::vector<std::string> names = golden.keys();
  ASSERT_EQ(names.size(), 11u);
  for (const std::string& name : names) {
    const io::JsonReader entry = golden.object(name);
    const RopeConfig config = config_of(entry);
    EXPECT_TRUE(entry.object("rope_parameters").unread_keys().empty()) << name;
    const std::vector<double> expected = entry.numbers("inv_freq");
    const RopeFrequencies actual = rope_frequencies(config);

    // theta^-x: a rounding of the exponent counts ln(theta) times, and the power and its reciprocal round themselves.
    // Where a ramp blends f with f / factor, an error of the ramp (six operations) moves the result by up to f, which
    // is `factor` times as much in relation to the smallest result. Both sides have these errors.
    const double tolerance = 2 * epsilon * ((std::log(config.theta) + 2) + 6 * config.scaling.factor);
    ASSERT_EQ(actual.inv_freq.size(), expected.size()) << name;
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(actual.inv_freq[i], expected[i], tolerance * expected[i]) << name << " pair " << i;
    EXPECT_NEAR(actual.attention_factor, entry.number("attention_factor"), 8 * epsilon) << name;
  }
}

TEST(RopeFrequencies, DivisorsApplyAfterTheScaling) {
  RopeConfig config{.theta = 10000.0, .rotary_dim = 4, .scaling = {.kind = RopeScaling::Kind::linear, .factor = 2.0}};
  const RopeFrequencies plain = rope_frequencies(config);
  config.divisors = {1.0, 8.0};
  const RopeFrequencies divided = rope_frequencies(config);
  EXPECT_EQ(divided.inv_freq[0], plain.inv_freq[0]);
  EXPECT_EQ(divided.inv_freq[1], plain.inv_freq[1] / 8.0);
}

}  // namespace
}  // namespace eadem::modules
