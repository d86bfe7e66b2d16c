// SPDX-License-Identifier: Apache-2.0
//
// From values to BlockParts, for every block type: minimize
//
//   sum_i  w[i] * (x[i] - (scale * sub_scale[g] * level[i] - min * sub_min[g]))^2
//
// over all that a block stores. There is no closed form; the search is coordinate descent from a good start:
//
//   1. Each group alone: real (scale, min). For some guesses of the step, round to levels, and solve the least squares
//      problem that remains with the levels fixed. The best guess wins.
//   2. The block's unit: the f16 scale (and min) for which the groups' scales lie nearest to integers.
//   3. Alternate: the best integers of each group near the rounded ones, trying every pair and requantizing; then least
//      squares for the unit with everything else fixed. Stop when the error, of the numbers as they will be stored,
//      no longer falls.
//
// A block is first multiplied by a power of two such that its largest value lies in [1, 2): nothing over- or
// underflows. Sums run over halves, then quarters: loops without a carried dependence that compilers vectorize, in one
// fixed order.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "eadem/core/encodings/block_encoding.h"

namespace eadem {

namespace {

constexpr float kMaxF16 = 65504;
// A weight of nothing would leave a value undefined; this is nothing next to the others.
constexpr float kLeastImportance = 0x1p-20f;

// The nearest integer, ties to even, for |value| < 2^22.
float nearest_integer(float value) { return (value + 0x1.8p23f) - 0x1.8p23f; }

// ---- Levels --------------------------------------------------------------------------------------------------------

// The integers from `low` to `high`.
struct EvenLevels {
  explicit EvenLevels(const BlockFormat& format)
      : zero(format.zero),
        low(static_cast<float>(-format.zero)),
        high(static_cast<float>((1 << format.code_bits) - 1 - format.zero)) {}

  // The nearest level of each.
  template <int kSize>
  void round(float* values) const {
    const float least = low, most = high;
    for (int i = 0; i < kSize; ++i) {
      float value = values[i];
      value = value < least ? least : value;
      value = value > most ? most : value;
      values[i] = nearest_integer(value);
    }
  }
  uint8_t code(float level) const { return static_cast<uint8_t>(static_cast<int>(level) + zero); }
  // The i-th level from the lower or the upper end.
  float from_low(int i) const { return low + static_cast<float>(i); }
  float from_high(int i) const { return high - static_cast<float>(i); }

  int zero;
  float low, high;
};

// The levels of a codebook of 16, sorted; levels that stand in it twice count once.
struct BookLevels {
  explicit BookLevels(const BlockFormat& format) {
    std::array<int, 16> order;
    for (int i = 0; i < 16; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return format.codebook[a] < format.codebook[b]; });
    for (int code : order) {
      const float level = format.codebook[code];
      if (count > 0 && levels[count - 1] == level) continue;
      levels[count++] = level;
      code_of[format.codebook[code] + 128] = static_cast<uint8_t>(code);
    }
    low = levels[0], high = levels[count - 1];
    for (int i = 0; i + 1 < count; ++i) {
      midpoints[i] = (levels[i] + levels[i + 1]) / 2;
      steps[i] = levels[i + 1] - levels[i];
    }
  }

  // Adds the steps whose midpoints lie below: exact, and without a branch.
  template <int kSize>
  void round(float* values) const {
    alignas(16) float levels_below[kSize];
    for (int i = 0; i < kSize; ++i) levels_below[i] = low;
    for (int step_idx = 0; step_idx + 1 < count; ++step_idx) {
      const float midpoint = midpoints[step_idx], step = steps[step_idx];
      for (int i = 0; i < kSize; ++i) levels_below[i] += values[i] > midpoint ? step : 0.0f;
    }
    for (int i = 0; i < kSize; ++i) values[i] = levels_below[i];
  }
  uint8_t code(float level) const { return code_of[static_cast<int>(level) + 128]; }
  float from_low(int i) const { return levels[i]; }
  float from_high(int i) const { return levels[count - 1 - i]; }

  int count = 0;
  float low, high;
  std::array<float, 16> levels{};
  std::array<float, 15> midpoints, steps;
  std::array<uint8_t, 256> code_of{};
};

// ---- One group -----------------------------------------------------------------------------------------------------

// Every fourth term together, then the four. The vector type (GCC, Clang) says what compilers do not find by
// themselves.
template <int kSize>
inline float sum(const float* terms) {
  using Four [[gnu::vector_size(16)]] = float;
  Four lanes, next;
  std::memcpy(&lanes, terms, sizeof lanes);
  for (int i = 4; i < kSize; i += 4) {
    std::memcpy(&next, terms + i, sizeof next);
    lanes += next;
  }
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// value ~ scale * level - min, with reals
struct Fit {
  float scale = 0, min = 0;
  float level_weight = 0;  // sum w level^2: what an error in the scale costs
};

template <typename Levels, int kSize>
class Group {
 public:
  Group() = default;
  // `x` and `w` are kSize values and weights.
  Group(const Levels& levels, const float* x, const float* w) : levels_(&levels), x_(x), w_(w) {
    alignas(16) float a[kSize], b[kSize];
    for (int i = 0; i < kSize; ++i) {
      a[i] = w[i];
      b[i] = w[i] * x[i];
    }
    sum_w_ = sum<kSize>(a);
    sum_wx_ = sum<kSize>(b);
    for (int i = 0; i < kSize; ++i) a[i] = b[i] = x[i];
    for (int half = kSize / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) {
        a[i] = a[half + i] < a[i] ? a[half + i] : a[i];
        b[i] = b[half + i] > b[i] ? b[half + i] : b[i];
      }
    low_ = a[0], high_ = b[0];
  }

  float low() const { return low_; }
  float sum_w() const { return sum_w_; }
  float sum_wx() const { return sum_wx_; }

  struct Moments {
    float level = 0, level2 = 0, x_level = 0;  // weighted sums
  };
  Moments moments(const float* level) const {
    alignas(16) float a[kSize], b[kSize], c[kSize];
    for (int i = 0; i < kSize; ++i) {
      a[i] = w_[i] * level[i];
      b[i] = a[i] * level[i];
      c[i] = a[i] * x_[i];
    }
    return {sum<kSize>(a), sum<kSize>(b), sum<kSize>(c)};
  }

  // The nearest levels by `scale` and `min`.
  void round(float* __restrict level, float inv_scale, float min) const {
    for (int i = 0; i < kSize; ++i) level[i] = (x_[i] + min) * inv_scale;
    levels_->template round<kSize>(level);
  }
  float error(const float* level, float scale, float min) const {
    alignas(16) float terms[kSize];
    for (int i = 0; i < kSize; ++i) {
      const float off = x_[i] - (scale * level[i] - min);
      terms[i] = w_[i] * off * off;
    }
    return sum<kSize>(terms);
  }

  // Guesses: the value farthest from zero lies on one of the last levels, of either end, or a quarter step beside one.
  Fit fit_scale() const {
    const float farthest = high_ > -low_ ? high_ : low_;
    Fit best;
    if (farthest == 0) return best;
    float best_gain = 0;  // how much scale * level lowers the sum of squares
    const auto guess = [&](float target) {
      alignas(16) float level[kSize];
      round(level, target / farthest, 0);
      const Moments m = moments(level);
      if (m.level2 > 0 && m.x_level * m.x_level > best_gain * m.level2) {
        best_gain = m.x_level * m.x_level / m.level2;
        best = {m.x_level / m.level2, 0, m.level2};
      }
    };
    for (const bool upper : {false, true}) {
      const auto end = [&](int i) { return upper ? levels_->from_high(i) : levels_->from_low(i); };
      for (int quarter = -4; quarter <= 8; ++quarter) {
        const int whole = std::max(quarter, 0) / 4;
        const float step = end(whole + 1) - end(whole);
        guess(end(whole) + step * static_cast<float>(quarter - 4 * whole) / 4);
      }
    }
    return best;
  }

  // `sign`: what min may be: 1: >= 0, -1: <= 0, 0: anything. Guesses: the values span some quarters of steps more or
  // fewer than there are, in the middle of the levels, from the first one up, or to the last one. (Guessing in the
  // middle alone, the error of q4_1 is 2 % larger; from -4 to 8 quarters, it is 0.2 % smaller and takes a quarter
  // longer.)
  Fit fit_scale_and_min(int sign) const {
    // Moments are taken of x - base: with a large common offset, those of x would cancel.
    const float base = sign > 0 ? std::min(low_, 0.0f) : sign < 0 ? std::max(low_, 0.0f) : low_;
    const float span = std::max(high_ - base, 0.0f);
    Fit best{0, -base, 0};
    if (span == 0) return best;
    alignas(16) float shifted[kSize];
    for (int i = 0; i < kSize; ++i) shifted[i] = x_[i] - base;
    const Group centered(*levels_, shifted, w_);
    float best_gain = -HUGE_VALF;
    const auto guess = [&](float target, float first) {
      alignas(16) float level[kSize];
      centered.round(level, target / span, first * span / target);
      const Moments m = centered.moments(level);
      const float det = sum_w_ * m.level2 - m.level * m.level;
      if (!(det > 0)) return;
      float scale = (sum_w_ * m.x_level - centered.sum_wx_ * m.level) / det;
      float min = (scale * m.level - centered.sum_wx_) / sum_w_;  // for the shifted values
      float offset = min - base;
      if (static_cast<float>(sign) * offset < 0) {
        // At the bound: x ~ scale * level.
        min = base, offset = 0;
        scale = (m.x_level + base * m.level) / m.level2;
      }
      if (!(scale > 0)) return;
      // sum w x^2 minus the error
      const float gain = 2 * scale * m.x_level - 2 * min * centered.sum_wx_ - scale * scale * m.level2 +
                         2 * scale * min * m.level - min * min * sum_w_;
      if (gain > best_gain) best_gain = gain, best = {scale, offset, m.level2};
    };
    for (int quarter = -2; quarter <= 6; ++quarter) {
      const float target = levels_->high - static_cast<float>(quarter) / 4;
      guess(target, (levels_->high - target) / 2);
      if (quarter != 0) guess(target, 0), guess(target, levels_->high - target);
    }
    return best;
  }

 private:
  const Levels* levels_ = nullptr;
  const float* x_ = nullptr;
  const float* w_ = nullptr;
  float sum_w_ = 0, sum_wx_ = 0, low_ = 0, high_ = 0;
};

// ---- One block -----------------------------------------------------------------------------------------------------

using GroupNumbers = std::array<float, kMaxGroups>;

// The unit for which `values` lie nearest to its integer multiples in [low, high], weighted; the farthest value is
// some integer of the last third of either end. Unused groups hold zeros.
float choose_unit(const GroupNumbers& values, const GroupNumbers& weights, int low, int high) {
  float farthest = 0;
  for (int i = 0; i < kMaxGroups; ++i)
    if (std::abs(values[i]) > std::abs(farthest)) farthest = values[i];
  if (farthest == 0) return 0;
  float best_unit = 0, best_error = HUGE_VALF;
  const float least = static_cast<float>(low), most = static_cast<float>(high);
  const auto guess = [&](int target) {
    const float unit = farthest / static_cast<float>(target), inv_unit = static_cast<float>(target) / farthest;
    alignas(16) float terms[kMaxGroups];
    for (int i = 0; i < kMaxGroups; ++i) {
      float multiple = values[i] * inv_unit;
      multiple = multiple < least ? least : multiple;
      multiple = multiple > most ? most : multiple;
      const float off = values[i] - unit * nearest_integer(multiple);
      terms[i] = weights[i] * off * off;
    }
    const float error = sum<kMaxGroups>(terms);
    if (error < best_error) best_error = error, best_unit = unit;
  };
  for (int target = high; 3 * target >= 2 * high && target > 0; --target) guess(target);
  for (int target = low; 3 * target <= 2 * low && target < 0; ++target) guess(target);
  return best_unit;
}

template <typename Levels, int kGroupSize>
class BlockQuantizer {
 public:
  explicit BlockQuantizer(const BlockFormat& format) : format_(format), levels_(format) {}

  // `x` and `w` are a block of values, not all of them zero, and of their weights in (0, 1].
  void quantize(BlockParts& parts, const float* x, const float* w) {
    const int size = format_.block_size;
    int exponent = 0;
    std::frexp(*std::max_element(x, x + size, [](float a, float b) { return std::abs(a) < std::abs(b); }), &exponent);
    down_ = std::ldexp(1.0, 1 - exponent);
    up_ = std::ldexp(1.0, exponent - 1);
    for (int i = 0; i < size; ++i) x_[i] = static_cast<float>(x[i] * down_);
    for (int i = 0; i < format_.num_groups(); ++i)
      groups_[i] = TheGroup(levels_, x_.data() + i * kGroupSize, w + i * kGroupSize);

    if (format_.scale == BlockFormat::Scale::power_of_two)
      search_exponent(exponent - 1);
    else
      search_scales();

    // Near the smallest f16, rounded scales may be worse than none.
    double nothing = 0;
    for (int i = 0; i < size; ++i) nothing += static_cast<double>(w[i]) * x_[i] * x_[i];
    if (best_.error >= nothing) return quantize_zeros(parts);

    parts.scale = static_cast<float>(best_.scale * up_);
    parts.min = static_cast<float>(best_.min * up_);
    for (int group = 0; group < format_.num_groups(); ++group) {
      parts.sub_scales[group] = static_cast<int8_t>(best_.sub_scales[group]);
      parts.sub_mins[group] = static_cast<uint8_t>(best_.sub_mins[group]);
    }
    for (int i = 0; i < size; ++i) parts.codes[i] = levels_.code(best_.level[i]);
  }

  // The parts of a block of zeros.
  void quantize_zeros(BlockParts& parts) const {
    parts.scale = format_.scale == BlockFormat::Scale::power_of_two ? 0x1p-128f : 0.0f;
    parts.min = 0;
    parts.sub_scales.fill(static_cast<int8_t>(std::clamp(0, format_.sub_scale_min, format_.sub_scale_max)));
    parts.sub_mins.fill(format_.sub_min_max > 1 ? 0 : 1);
    float zero[1] = {0};
    levels_.template round<1>(zero);
    parts.codes.fill(levels_.code(zero[0]));
  }

 private:
  using TheGroup = Group<Levels, kGroupSize>;

  // Everything that is stored, scales in multiples of the block's power of two.
  struct State {
    float scale = 0, min = 0;
    double error = HUGE_VAL;
    std::array<int, kMaxGroups> sub_scales{}, sub_mins{};
    alignas(16) std::array<float, kMaxBlockSize> level{};
  };

  // Rounds a scale to the f16 that the file will hold.
  float rounded(double scale) const {
    const double clamped = std::clamp(scale * up_, -double{kMaxF16}, double{kMaxF16});
    return static_cast<float>(f16_t::from_float(static_cast<float>(clamped)).to_float() * down_);
  }

  // The largest value lies in [1, 2): a scale of 1/8 reaches 1.5 and one of 1/4 reaches 3.
  void search_exponent(int exponent) {
    best_.error = HUGE_VAL;
    for (int guess = -5; guess <= -1; ++guess) {
      // 2^-128 … 2^124, of which the largest level is still finite
      const float scale = static_cast<float>(std::ldexp(1.0, std::clamp(guess + exponent, -128, 124) - exponent));
      assign(state_, scale, 0);
      if (state_.error < best_.error) best_ = state_;
    }
  }

  void search_scales() {
    const int num_groups = format_.num_groups();
    // A sub-min is not negative, so all mins of a block have one sign: that of its min.
    const bool all_positive = *std::min_element(x_.begin(), x_.begin() + format_.block_size) > 0;
    const int sign = format_.sub_min_max == 1 ? 0 : all_positive ? -1 : 1;
    GroupNumbers scale_weights{}, min_weights{};
    for (int i = 0; i < num_groups; ++i) {
      const TheGroup& g = groups_[i];
      const Fit fit = format_.has_min ? g.fit_scale_and_min(sign) : g.fit_scale();
      fitted_scales_[i] = fit.scale, scale_weights[i] = fit.level_weight;
      fitted_mins_[i] = fit.min, min_weights[i] = g.sum_w();
    }
    double scale = choose_unit(fitted_scales_, scale_weights, format_.sub_scale_min, format_.sub_scale_max);
    double min = format_.has_min ? choose_unit(fitted_mins_, min_weights, 0, format_.sub_min_max) : 0;

    best_.error = HUGE_VAL;
    for (int iteration = 0; iteration < kMaxIterations; ++iteration) {
      assign(state_, rounded(scale), rounded(min));
      const double before = best_.error;
      if (state_.error < before) best_ = state_;
      if (!(best_.error < kWorthwhile * before)) break;
      solve_units(scale, min);
    }
  }

  // Chooses the sub-scales, sub-mins and levels for the units `scale` and `min`.
  void assign(State& state, float scale, float min) const {
    state.scale = scale, state.min = min, state.error = 0;
    const bool fixed_scales = format_.sub_scale_min == format_.sub_scale_max, fixed_mins = format_.sub_min_max == 1;
    const auto multiple = [](float value, float unit) {
      return unit == 0 ? 0 : static_cast<int>(std::lround(std::clamp(value / unit, -1000.0f, 1000.0f)));
    };
    alignas(16) float level[kGroupSize];
    for (int i = 0; i < format_.num_groups(); ++i) {
      const TheGroup& g = groups_[i];
      const int s = fixed_scales ? 1 : multiple(fitted_scales_[i], scale);
      const int m = fixed_mins ? 1 : multiple(fitted_mins_[i], min);
      const int s_low = std::clamp(fixed_scales ? s : s - 1, format_.sub_scale_min, format_.sub_scale_max);
      const int s_high = std::clamp(fixed_scales ? s : s + 1, format_.sub_scale_min, format_.sub_scale_max);
      const int m_low = fixed_mins ? m : std::clamp(m - 1, 0, format_.sub_min_max);
      const int m_high = fixed_mins ? m : std::clamp(m + 1, 0, format_.sub_min_max);
      float best_error = HUGE_VALF;
      for (int sub_scale = s_low; sub_scale <= s_high; ++sub_scale)
        for (int sub_min = m_low; sub_min <= m_high; ++sub_min) {
          const float group_scale = scale * static_cast<float>(sub_scale),
                      group_min = min * static_cast<float>(sub_min);
          g.round(level, group_scale == 0 ? 0 : 1 / group_scale, group_min);
          const float error = g.error(level, group_scale, group_min);
          if (error < best_error) {
            best_error = error;
            state.sub_scales[i] = sub_scale, state.sub_mins[i] = sub_min;
            std::copy(level, level + kGroupSize, state.level.begin() + i * kGroupSize);
          }
        }
      state.error += best_error;
    }
  }

  // Least squares for the units with all that best_ holds besides them; left as they are where nothing determines them.
  void solve_units(double& scale, double& min) const {
    double aa = 0, ab = 0, bb = 0, xa = 0, xb = 0;  // a = sub_scale * level, b = sub_min
    for (int i = 0; i < format_.num_groups(); ++i) {
      const TheGroup& g = groups_[i];
      const typename TheGroup::Moments m = g.moments(best_.level.data() + i * kGroupSize);
      const double s = best_.sub_scales[i], b = best_.sub_mins[i];
      aa += s * s * m.level2, ab += s * b * m.level, bb += b * b * g.sum_w();
      xa += s * m.x_level, xb += b * g.sum_wx();
    }
    const double det = aa * bb - ab * ab;
    if (format_.has_min && det > 1e-6 * aa * bb) {
      scale = (xa * bb - xb * ab) / det;
      min = (xa * ab - xb * aa) / det;
    } else if (!format_.has_min && aa > 0) {
      scale = xa / aa;
    }
  }

  static constexpr int kMaxIterations = 4;
  static constexpr double kWorthwhile = 0.998;  // another iteration after one that left more of the error gains less

  const BlockFormat& format_;
  const Levels levels_;
  double down_ = 1, up_ = 1;
  alignas(16) std::array<float, kMaxBlockSize> x_;
  std::array<TheGroup, kMaxGroups> groups_;
  GroupNumbers fitted_scales_{}, fitted_mins_{};  // fitted for each group alone
  State state_, best_;
};

// ---- One row -------------------------------------------------------------------------------------------------------

// Above this a block's scales cannot follow.
float largest_value(const BlockFormat& format) {
  int low = 0, high = 0;
  for (int code = 0; code < 1 << format.code_bits; ++code) {
    low = std::min(low, format.level(static_cast<uint8_t>(code)));
    high = std::max(high, format.level(static_cast<uint8_t>(code)));
  }
  if (format.scale == BlockFormat::Scale::power_of_two) return 0x1p124f * static_cast<float>(high);
  if (format.has_min) return kMaxF16 * static_cast<float>(format.sub_min_max);
  return kMaxF16 * static_cast<float>(format.sub_scale_max * std::min(-low, high));
}

template <typename Levels, int kGroupSize>
void quantize_blocks(uint8_t* row, std::span<const float> values, std::span<const float> importance,
                     const BlockEncoding& encoding) {
  const BlockFormat& format = encoding.format();
  const size_t size = static_cast<size_t>(format.block_size);
  const float limit = largest_value(format);
  BlockQuantizer<Levels, kGroupSize> quantizer(format);
  alignas(16) std::array<float, kMaxBlockSize> weights;
  weights.fill(1);
  BlockParts parts;
  for (size_t begin = 0; begin < values.size(); begin += size, row += format.block_bytes) {
    float largest = 0, largest_importance = 0;
    for (size_t i = begin; i < begin + size; ++i) {
      if (!(std::abs(values[i]) <= limit))
        throw InvalidArgument("{}: value {} in column {}; its scales reach up to {}", format.name, values[i], i, limit);
      largest = std::max(largest, std::abs(values[i]));
    }
    if (!importance.empty()) {
      for (size_t i = begin; i < begin + size; ++i) {
        if (!(importance[i] >= 0 && importance[i] < HUGE_VALF))
          throw InvalidArgument("{}: importance {} of column {}", format.name, importance[i], i);
        largest_importance = std::max(largest_importance, importance[i]);
      }
      for (size_t i = 0; i < size; ++i)
        weights[i] =
            largest_importance == 0 ? 1.0f : std::max(importance[begin + i] / largest_importance, kLeastImportance);
    }
    if (largest == 0)
      quantizer.quantize_zeros(parts);
    else
      quantizer.quantize(parts, values.data() + begin, weights.data());
    encoding.pack(row, parts);
  }
}

}  // namespace

void BlockEncoding::quantize_row(uint8_t* row, std::span<const float> values, std::span<const float> importance) const {
  if (!is_writable()) throw Unsupported("{}: this type is read, but nothing quantizes to it", format_.name);
  EADEM_CHECK(values.size() % static_cast<size_t>(format_.block_size) == 0, "{} values in blocks of {}", values.size(),
              format_.block_size);
  EADEM_CHECK(importance.empty() || importance.size() == values.size(), "{} importances of {} values",
              importance.size(), values.size());
  EADEM_CHECK(format_.group_size == 32 || (format_.group_size == 16 && format_.codebook == nullptr),
              "{}: no quantizer for groups of {}", format_.name, format_.group_size);
  if (format_.codebook != nullptr) return quantize_blocks<BookLevels, 32>(row, values, importance, *this);
  if (format_.group_size == 16) return quantize_blocks<EvenLevels, 16>(row, values, importance, *this);
  return quantize_blocks<EvenLevels, 32>(row, values, importance, *this);
}

}  // namespace eadem
