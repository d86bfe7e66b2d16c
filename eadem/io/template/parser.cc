// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/template/parser.h"

#include <algorithm>
#include <array>
#include <utility>

#include "eadem/io/template/expression_parser.h"

namespace eadem::io::chat {
namespace {

// Tags that Jinja has and this interpreter has not.
constexpr auto kMissingTags = std::to_array<std::string_view>(
    {"autoescape", "block", "debug", "do", "extends", "from", "import", "include", "pluralize", "print", "trans"});

class Parser : ExpressionParser {
 public:
  Parser(std::string_view source, const std::string& name) : ExpressionParser(source, name) {}

  Body run() {
    Body body = parse_body({}, "");
    return body;
  }

 private:
  // Statements up to one of the tags `ends`, whose name is left as the current token.
  Body parse_body(Names ends, std::string_view opened, int opened_line = 0) {
    const Level level(*this);
    Body body;
    for (;;) {
      const Token& token = current();
      switch (token.kind) {
        case TokenKind::data:
          body.push_back(statement(StmtKind::text, token.line));
          body.back().text = next().text;
          break;
        case TokenKind::print_begin:
          next();
          body.push_back(statement(StmtKind::print, token.line));
          body.back().exprs.push_back(parse_tuple(true, {}));
          expect(TokenKind::print_end, "}}");
          break;
        case TokenKind::block_begin:
          next();
          if (current().kind == TokenKind::name && std::find(ends.begin(), ends.end(), current().text) != ends.end()) {
            return body;
          }
          parse_tag(body);
          expect(TokenKind::block_end, "%}");
          break;
        default:
          if (ends.size() != 0) fail(fmt::format("{{% {} %}} of line {} does not end", opened, opened_line));
          return body;
      }
    }
  }

  static Stmt statement(StmtKind kind, int line) {
    Stmt stmt;
    stmt.kind = kind;
    stmt.line = line;
    return stmt;
  }

  void end_tag() { expect(TokenKind::block_end, "%}"); }

  // A body that ends with the tag `end`, whose name is consumed.
  Body parse_until(std::string_view end, std::string_view opened, int line) {
    end_tag();
    Body body = parse_body({end}, opened, line);
    next();
    return body;
  }

  void parse_tag(Body& body) {
    const int line = current().line;
    const std::string tag = expect_name();
    if (tag == "if") {
      body.push_back(parse_if(line));
    } else if (tag == "for") {
      body.push_back(parse_for(line));
    } else if (tag == "set") {
      body.push_back(parse_set(line));
    } else if (tag == "macro") {
      body.push_back(parse_macro(line));
    } else if (tag == "call") {
      body.push_back(parse_call_block(line));
    } else if (tag == "filter") {
      Stmt stmt = statement(StmtKind::filter_block, line);
      stmt.exprs.push_back(parse_filters(nullptr, true));
      stmt.bodies.push_back(parse_until("endfilter", tag, line));
      body.push_back(std::move(stmt));
    } else if (tag == "with") {
      body.push_back(parse_with(line));
    } else if (tag == "generation") {
      Stmt stmt = statement(StmtKind::generation, line);
      stmt.bodies.push_back(outside_loops([&] { return parse_until("endgeneration", tag, line); }));
      body.push_back(std::move(stmt));
    } else if (tag == "break" || tag == "continue") {
      if (loops_ == 0) fail(fmt::format("{{% {} %}} stands outside of a loop", tag), line);
      body.push_back(statement(tag == "break" ? StmtKind::break_ : StmtKind::continue_, line));
    } else if (contains(kMissingTags, tag)) {
      unsupported("tag", tag, line);
    } else {
      throw Unsupported("{}:{}: unknown tag {}", name_, line, quote(tag));
    }
  }

  template <typename Parse>
  Body outside_loops(Parse parse) {
    const int loops = std::exchange(loops_, 0);
    Body result = parse();
    loops_ = loops;
    return result;
  }

  Stmt parse_if(int line) {
    Stmt stmt = statement(StmtKind::branch, line);
    for (;;) {
      stmt.exprs.push_back(parse_tuple(false, {}));
      end_tag();
      stmt.bodies.push_back(parse_body({"elif", "else", "endif"}, "if", line));
      const std::string tag = next().text;
      if (tag == "elif") continue;
      if (tag == "else") stmt.bodies.push_back(parse_until("endif", "if", line));
      return stmt;
    }
  }

  Stmt parse_for(int line) {
    Stmt stmt = statement(StmtKind::loop, line);
    stmt.target = parse_target(false);
    if (stmt.target.name == "loop") fail("the name 'loop' cannot be assigned in a loop", line);
    if (!skip_name("in")) fail(fmt::format("expected 'in', got {}", describe()));
    stmt.exprs.push_back(parse_tuple(false, {"recursive"}));
    stmt.exprs.push_back(skip_name("if") ? parse_expression() : nullptr);
    stmt.recursive = skip_name("recursive");
    end_tag();
    ++loops_;
    stmt.bodies.push_back(parse_body({"endfor", "else"}, "for", line));
    --loops_;
    if (next().text == "else") stmt.bodies.push_back(parse_until("endfor", "for", line));
    return stmt;
  }

  Stmt parse_set(int line) {
    Stmt stmt = statement(StmtKind::set, line);
    stmt.target = parse_target(true);
    if (skip_op("=")) {
      stmt.exprs.push_back(parse_tuple(true, {}));
      return stmt;
    }
    stmt.kind = StmtKind::set_block;
    if (!stmt.target.many.empty()) fail("a set block has one target", line);
    stmt.exprs.push_back(parse_filters(nullptr, false));
    stmt.bodies.push_back(parse_until("endset", "set", line));
    return stmt;
  }

  void parse_signature(std::vector<Param>& params) {
    expect_op("(");
    while (!is_op(")")) {
      if (!params.empty()) expect_op(",");
      Param param;
      param.name = assignable(expect_name());
      if (skip_op("=")) {
        param.value = parse_expression();
      } else if (!params.empty() && params.back().value) {
        fail("a parameter without a default follows one with a default");
      }
      params.push_back(std::move(param));
    }
    next();
  }

  Stmt parse_macro(int line) {
    Stmt stmt = statement(StmtKind::macro, line);
    stmt.text = assignable(expect_name());
    parse_macro_body(stmt, "endmacro", "macro");
    return stmt;
  }

  // The parameters of a macro and its body, and which of the implicit names they mention.
  void parse_macro_body(Stmt& stmt, std::string_view end, std::string_view tag) {
    const auto outer = std::exchange(mentioned_, {});
    if (tag == "macro") parse_signature(stmt.params);
    stmt.bodies.push_back(outside_loops([&] { return parse_until(end, tag, stmt.line); }));
    stmt.uses_caller = mentioned_.caller;
    stmt.uses_varargs = mentioned_.varargs;
    stmt.uses_kwargs = mentioned_.kwargs;
    mentioned_ = outer;
  }

  Stmt parse_call_block(int line) {
    Stmt stmt = statement(StmtKind::call_block, line);
    if (is_op("(")) parse_signature(stmt.params);
    stmt.exprs.push_back(parse_expression());
    if (stmt.exprs[0]->kind != ExprKind::call) fail("a call block needs a call", line);
    parse_macro_body(stmt, "endcall", "call");
    return stmt;
  }

  Stmt parse_with(int line) {
    Stmt stmt = statement(StmtKind::with, line);
    while (current().kind != TokenKind::block_end) {
      if (!stmt.params.empty()) expect_op(",");
      Param param;
      param.name = assignable(expect_name());
      expect_op("=");
      param.value = parse_expression();
      stmt.params.push_back(std::move(param));
    }
    stmt.bodies.push_back(parse_until("endwith", "with", line));
    return stmt;
  }

  std::string assignable(const std::string& name) const {
    if (contains(std::array<std::string_view, 6>{"true", "false", "none", "True", "False", "None"}, name)) {
      fail(fmt::format("{} cannot be assigned", quote(name)));
    }
    return name;
  }

  Target parse_target(bool with_namespace) {
    const Level level(*this);
    std::vector<Target> targets;
    bool many = false;
    for (;;) {
      if (is_op("(")) {
        next();
        targets.push_back(parse_target(with_namespace));
        expect_op(")");
      } else {
        Target target;
        target.name = assignable(expect_name());
        if (with_namespace && skip_op(".")) target.attribute = expect_name();
        targets.push_back(std::move(target));
      }
      if (!skip_op(",")) break;
      many = true;
      if (is_op("=") || is_op(")") || is_name("in") || current().kind == TokenKind::block_end) break;
    }
    if (!many) return std::move(targets[0]);
    Target target;
    target.many = std::move(targets);
    return target;
  }

  int loops_ = 0;
};

}  // namespace

Body parse_template(std::string_view source, const std::string& name) { return Parser(source, name).run(); }

}  // namespace eadem::io::chat
