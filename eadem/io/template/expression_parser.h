// SPDX-License-Identifier: Apache-2.0
//
// Reads the expressions of chat templates.
#pragma once

#include <initializer_list>
#include <string>

#include "eadem/io/template/ast.h"
#include "eadem/io/template/token_cursor.h"

namespace eadem::io::chat {

class ExpressionParser : protected TokenCursor {
 protected:
  using TokenCursor::TokenCursor;

  // One expression, or a tuple of those that commas separate; the names `ends` end it.
  ExprPtr parse_tuple(bool with_condition, Names ends, bool in_parentheses = false);
  ExprPtr parse_expression();
  // Filters after `|`; the first one without it when `inline_first`. Without a base the text of a block is filtered.
  ExprPtr parse_filters(ExprPtr base, bool inline_first);

  struct {
    bool caller = false, varargs = false, kwargs = false;
  } mentioned_;  // in the macro being read

 private:
  struct OpName {
    std::string_view name;
    Op op;
  };

  ExprPtr make(ExprKind kind, int line) const;
  void deepen(Expr& expr, const ExprPtr& child) const;
  void adopt(Expr& expr, ExprPtr child) const;
  bool skip_any(std::initializer_list<OpName> names, Op& op);
  template <typename Parse, typename Skip>
  ExprPtr parse_list(ExprKind kind, int line, Parse parse, Skip skip);
  template <typename Parse, typename Skip>
  ExprPtr parse_chain(ExprKind kind, Parse parse, Skip skip);

  // By rising precedence.
  ExprPtr parse_or();
  ExprPtr parse_and();
  ExprPtr parse_not();
  ExprPtr parse_compare();
  ExprPtr parse_sum();
  ExprPtr parse_concat();
  ExprPtr parse_product();
  ExprPtr parse_power();
  ExprPtr parse_unary(bool with_filter);
  ExprPtr parse_primary();

  ExprPtr parse_name();
  ExprPtr parse_list_literal();
  ExprPtr parse_dict_literal();
  ExprPtr parse_postfix(ExprPtr expr);
  ExprPtr parse_attribute(ExprPtr base);
  ExprPtr parse_item(ExprPtr base);
  ExprPtr parse_call(ExprPtr callee);
  void parse_arguments(Expr& expr);
  ExprPtr parse_filters_and_tests(ExprPtr expr);
  std::string dotted_name();
  void check_named_argument(const Expr& expr) const;
  ExprPtr parse_test(ExprPtr base);
};

}  // namespace eadem::io::chat
