// SPDX-License-Identifier: Apache-2.0
//
// StepCosts: what steps of decoding sequences take, as measured: plain ones by the number of sequences, those with
// proposed tokens by the number of rows. Between measured numbers of rows it interpolates.
//
// A measurement moves a value by an eighth of the way, and counts as half or twice the value at most, so that a step
// that the machine interrupted does not spoil it. Not thread-safe; it reads no clock.
#pragma once

#include <cstdint>
#include <map>

namespace eadem::engine {

class StepCosts {
 public:
  // A step of so many sequences, with so many rows in all, took so long.
  void observe(int64_t sequences, int64_t rows, double seconds);

  bool knows_plain(int64_t sequences) const { return plain_.contains(sequences); }
  // Seconds of a step without proposed tokens, which was measured.
  double plain(int64_t sequences) const { return plain_.at(sequences).seconds; }
  // Seconds of a step with so many rows, to be expected: as long as nothing else is known, a further row takes an
  // eighth of a plain step. knows_plain(sequences) holds.
  double expected(int64_t sequences, int64_t rows) const;
  // The same at worst: a further row takes as long as a plain step, and fewer rows no longer than more.
  double worst(int64_t sequences, int64_t rows) const;

 private:
  struct Value {
    double seconds = 0;
    int64_t count = 0;  // of measurements, up to 8
    void observe(double measured);
  };
  // What was measured nearest to a number of rows.
  struct Near {
    int64_t below_rows = 0, above_rows = 0;
    double below = 0, above = 0;  // seconds; none above: above_rows is 0
  };
  Near near(int64_t sequences, int64_t rows) const;

  std::map<int64_t, Value> plain_;    // by sequences
  std::map<int64_t, Value> drafted_;  // by rows
};

}  // namespace eadem::engine
