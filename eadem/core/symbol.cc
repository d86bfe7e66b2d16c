// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/symbol.h"

#include <algorithm>
#include <cctype>
#include <mutex>

#include "eadem/core/error.h"

namespace eadem {

namespace {

// The names of all symbols, by index. It only grows, and a name never moves.
struct SymbolNames {
  std::mutex mutex;
  std::array<std::string, kMaxSymbols> names = {"none", "tokens", "sequences", "logit_rows", "max_blocks", "penalties"};
  size_t size = 6;
};

SymbolNames& symbol_names() {
  static SymbolNames table;
  return table;
}

}  // namespace

Symbol Symbol::named(std::string_view name) {
  const auto is_word = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; };
  if (name.empty() || !std::all_of(name.begin(), name.end(), is_word) || name == "none")
    throw InvalidArgument("'{}' cannot name a symbol; expected letters, digits and underscores", name);
  SymbolNames& table = symbol_names();
  const std::scoped_lock lock(table.mutex);
  const auto end = table.names.begin() + static_cast<std::ptrdiff_t>(table.size);
  const auto found = std::find(table.names.begin(), end, name);
  if (found == end) {
    if (table.size == kMaxSymbols) throw InvalidArgument("symbol '{}' would be number {}", name, kMaxSymbols + 1);
    table.names[table.size++] = name;
  }
  return Symbol(static_cast<uint8_t>(found - table.names.begin()));
}

std::string_view Symbol::name() const {
  SymbolNames& table = symbol_names();
  const std::scoped_lock lock(table.mutex);
  return table.names[index_];
}

std::string to_string(const Dim& dim) {
  if (dim.is_fixed()) return std::to_string(dim.value);
  std::string text = dim.factor == 1 ? std::string() : fmt::format("{}*", dim.factor);
  text += dim.symbol.name();
  if (dim.value != 0) text += fmt::format("{:+}", dim.value);
  return text;
}

}  // namespace eadem
