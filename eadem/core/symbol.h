// SPDX-License-Identifier: Apache-2.0
//
// Symbols: the extents that change from step to step, by name, and dimensions that are linear in one of them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace eadem {

// An extent that changes from step to step. Symbols of one name are one symbol, whichever graph declares them. A
// symbol is a small number, so it costs nothing to copy, compare and look up.
class Symbol {
 public:
  constexpr Symbol() = default;
  // The symbol of this name: a word of letters, digits and underscores. Throws InvalidArgument for any other text, and
  // when the process has kMaxSymbols symbols already. Thread-safe.
  static Symbol named(std::string_view name);

  std::string_view name() const;
  constexpr uint8_t index() const { return index_; }
  friend constexpr bool operator==(Symbol, Symbol) = default;

  // The extents of a step of a language model.
  static const Symbol none;        // of dimensions that are fixed
  static const Symbol tokens;      // packed tokens of all sequences of a step
  static const Symbol sequences;   // sequences of a step
  static const Symbol logit_rows;  // rows whose logits are wanted
  static const Symbol max_blocks;  // width of the block table
  static const Symbol penalties;   // tokens whose logits a sampling penalty changes, summed over the logit rows

 private:
  constexpr explicit Symbol(uint8_t index) : index_(index) {}
  uint8_t index_ = 0;
};

inline constexpr Symbol Symbol::none{0};
inline constexpr Symbol Symbol::tokens{1};
inline constexpr Symbol Symbol::sequences{2};
inline constexpr Symbol Symbol::logit_rows{3};
inline constexpr Symbol Symbol::max_blocks{4};
inline constexpr Symbol Symbol::penalties{5};

inline constexpr int kMaxSymbols = 32;

// The value of each symbol in one step, or its upper bound in a shape bucket. A symbol that was not set is 0.
struct SymbolValues {
  std::array<int64_t, kMaxSymbols> values{};
  constexpr int64_t& operator[](Symbol symbol) { return values[symbol.index()]; }
  constexpr int64_t operator[](Symbol symbol) const { return values[symbol.index()]; }
  friend bool operator==(const SymbolValues&, const SymbolValues&) = default;
};

// An extent: `value`, or factor * symbol + value (`sequences + 1`, `8 * tokens`).
struct Dim {
  int64_t value = 0;
  int64_t factor = 0;  // 0 if and only if the symbol is none
  Symbol symbol;

  constexpr Dim() = default;
  constexpr Dim(int64_t value) : value(value) {}  // implicit: {tokens, 64}
  constexpr Dim(Symbol symbol, int64_t plus = 0)  // implicit, likewise
      : value(plus), factor(symbol == Symbol::none ? 0 : 1), symbol(symbol) {}

  constexpr bool is_fixed() const { return factor == 0; }
  constexpr int64_t bind(const SymbolValues& symbols) const { return factor * symbols[symbol] + value; }

  friend constexpr Dim operator*(int64_t times, Dim dim) {
    dim.value *= times;
    dim.factor *= times;
    if (times == 0) dim.symbol = Symbol::none;
    return dim;
  }
  friend constexpr Dim operator+(Dim dim, int64_t plus) {
    dim.value += plus;
    return dim;
  }
  friend constexpr bool operator==(const Dim&, const Dim&) = default;
};

// "64", "tokens", "sequences+1", "8*tokens"
std::string to_string(const Dim& dim);

}  // namespace eadem
