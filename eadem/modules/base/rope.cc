// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace eadem::modules {

namespace {

void scale_llama3(const RopeScaling& s, std::vector<double>& inv_freq) {
  const double low_wavelength = s.original_max_positions / s.low_freq_factor;
  const double high_wavelength = s.original_max_positions / s.high_freq_factor;
  for (double& f : inv_freq) {
    const double wavelength = 2 * std::numbers::pi / f;
    if (wavelength > low_wavelength) {
      f /= s.factor;
    } else if (wavelength >= high_wavelength && low_wavelength > high_wavelength) {
      const double smooth =
          (s.original_max_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
      f = (1 - smooth) * f / s.factor + smooth * f;
    }
  }
}

// The (fractional) pair index whose wavelength turns `rotations` times within the original context.
double yarn_pair_of_rotations(const RopeConfig& config, double rotations) {
  const double dim = static_cast<double>(config.rotary_dim);
  return dim * std::log(config.scaling.original_max_positions / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(config.theta));
}

void scale_yarn(const RopeConfig& config, std::vector<double>& inv_freq) {
  const RopeScaling& s = config.scaling;
  double low = yarn_pair_of_rotations(config, s.beta_fast);
  double high = yarn_pair_of_rotations(config, s.beta_slow);
  if (s.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.rotary_dim - 1));
  if (low == high) high += 0.001;  // avoids a division by zero, as the paper's code does
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inv_freq[i] = inv_freq[i] / s.factor * ramp + inv_freq[i] * (1 - ramp);
  }
}

double yarn_attention_factor(const RopeScaling& s) {
  if (s.attention_factor) return *s.attention_factor;
  const auto mscale = [&](double weight) { return s.factor <= 1 ? 1.0 : 0.1 * weight * std::log(s.factor) + 1.0; };
  if (s.mscale.value_or(0) != 0 && s.mscale_all_dim.value_or(0) != 0)
    return mscale(*s.mscale) / mscale(*s.mscale_all_dim);
  return mscale(1.0);
}

double longrope_attention_factor(const RopeScaling& s) {
  if (s.attention_factor) return *s.attention_factor;
  return s.factor <= 1 ? 1.0 : std::sqrt(1 + std::log(s.factor) / std::log(s.original_max_positions));
}

}  // namespace

RopeFrequencies rope_frequencies(const RopeConfig& config, int64_t longest) {
  RopeFrequencies result;
  for (int64_t i = 0; i < config.rotary_dim / 2; ++i)
    result.inv_freq.push_back(
        std::pow(config.theta, -2.0 * static_cast<double>(i) / static_cast<double>(config.rotary_dim)));
  switch (config.scaling.kind) {
    case RopeScaling::Kind::none:
    case RopeScaling::Kind::dynamic: break;
    case RopeScaling::Kind::linear:
      for (double& f : result.inv_freq) f /= config.scaling.factor;
      break;
    case RopeScaling::Kind::llama3: scale_llama3(config.scaling, result.inv_freq); break;
    case RopeScaling::Kind::yarn:
      scale_yarn(config, result.inv_freq);
      result.attention_factor = yarn_attention_factor(config.scaling);
      break;
    case RopeScaling::Kind::longrope:
      for (size_t i = 0; i < result.inv_freq.size(); ++i)
        result.inv_freq[i] /=
            longest > config.scaling.short_positions() ? config.scaling.long_factor[i] : config.scaling.short_factor[i];
      result.attention_factor = longrope_attention_factor(config.scaling);
      break;
  }
  for (size_t i = 0; i < config.divisors.size(); ++i) result.inv_freq[i] /= config.divisors[i];
  if (config.rotated_pairs > 0) std::fill(result.inv_freq.begin() + config.rotated_pairs, result.inv_freq.end(), 0.0);
  return result;
}

void Rope::build_table(BuildContext& context) const {
  if (config_.rotary_dim == 0 || context.step.rope_tables.contains(config_.name)) return;
  const Graph::Scope scope(context.graph, config_.name);
  const RopeFrequencies frequencies = rope_frequencies(config_, context.longest_sequence);
  const auto half = static_cast<int64_t>(frequencies.inv_freq.size());
  Tensor inv_freq = Tensor::on_host(DType::f32, Shape{half});
  for (int64_t i = 0; i < half; ++i)
    inv_freq.view.as<float>()[i] =
        static_cast<float>((config_.inverse ? -1 : 1) * frequencies.inv_freq[static_cast<size_t>(i)]);
  const ValueId constant = context.graph.add_constant(context.graph.scoped_name("inv_freq"), std::move(inv_freq));
  context.step.rope_tables[config_.name] =
      context.graph.add1(std::make_shared<ops::RopeTable>(
                             kernels::RopeTableAttrs{static_cast<float>(frequencies.attention_factor), config_.stride}),
                         {context.step.positions, constant});
}

ValueId Rope::build(BuildContext& context, ValueId x) const {
  if (config_.rotary_dim == 0) return x;
  const auto table = context.step.rope_tables.find(config_.name);
  EADEM_CHECK(table != context.step.rope_tables.end(), "no table '{}'", config_.name);
  return context.graph.add1(
      std::make_shared<ops::Rope>(kernels::RopeAttrs{config_.style, config_.rotary_dim, config_.last}),
      {x, table->second});
}

}  // namespace eadem::modules
