// SPDX-License-Identifier: Apache-2.0
//
// TokenCursor: where a parser stands in the tokens of a chat template, and how it refuses what it finds there.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/core/error.h"
#include "eadem/io/template/lexer.h"
#include "eadem/io/text.h"

namespace eadem::io::chat {

constexpr int kMaxDepth = 200;

template <typename List>
bool contains(const List& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

class TokenCursor {
 protected:
  using Names = std::initializer_list<std::string_view>;

  TokenCursor(std::string_view source, const std::string& name)
      : name_(name), tokens_(tokenize_template(source, name)) {}

  const Token& current() const { return tokens_[pos_]; }
  const Token& next() { return tokens_[pos_ + 1 < tokens_.size() ? pos_++ : pos_]; }
  const Token& look() const { return tokens_[std::min(pos_ + 1, tokens_.size() - 1)]; }
  bool is_op(std::string_view op) const { return current().kind == TokenKind::op && current().text == op; }
  bool is_name(std::string_view name) const { return current().kind == TokenKind::name && current().text == name; }
  bool skip_op(std::string_view op) {
    const bool found = is_op(op);
    if (found) next();
    return found;
  }
  bool skip_name(std::string_view name) {
    const bool found = is_name(name);
    if (found) next();
    return found;
  }

  [[noreturn]] void fail(std::string_view what, int line) const { throw DataCorrupted("{}:{}: {}", name_, line, what); }
  [[noreturn]] void fail(std::string_view what) const { fail(what, current().line); }
  [[noreturn]] void unsupported(std::string_view what, std::string_view construct, int line) const {
    throw Unsupported("{}:{}: {} {} is not supported in chat templates", name_, line, what, quote(construct));
  }
  std::string describe() const {
    switch (current().kind) {
      case TokenKind::block_end: return "end of statement block";
      case TokenKind::print_end: return "end of print statement";
      case TokenKind::end: return "end of template";
      default: return quote(current().text);
    }
  }
  void expect_op(std::string_view op) {
    if (!skip_op(op)) fail(fmt::format("expected '{}', got {}", op, describe()));
  }
  std::string expect_name() {
    if (current().kind != TokenKind::name) fail(fmt::format("expected a name, got {}", describe()));
    return next().text;
  }
  void expect(TokenKind kind, std::string_view what) {
    if (current().kind != kind) fail(fmt::format("expected {}, got {}", what, describe()));
    next();
  }

  // Counts one level of nesting while it lives.
  class Level {
   public:
    explicit Level(TokenCursor& cursor) : cursor_(cursor) {
      if (++cursor_.depth_ > kMaxDepth) cursor_.fail(fmt::format("nested more than {} deep", kMaxDepth));
    }
    ~Level() { --cursor_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    TokenCursor& cursor_;
  };

  const std::string& name_;

 private:
  std::vector<Token> tokens_;
  size_t pos_ = 0;
  int depth_ = 0;
};

}  // namespace eadem::io::chat
