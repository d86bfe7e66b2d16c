// SPDX-License-Identifier: Apache-2.0
//
// The tree of a chat template.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace eadem::io::chat {

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

enum class ExprKind : uint8_t {
  undefined,  // the missing else of an inline if
  none,
  boolean,      // integer
  integer,      // integer
  number,       // number
  string,       // text
  name,         // text
  list,         // children
  tuple,        // children
  dict,         // children: key, value, key, value ...
  attribute,    // children[0] . text
  item,         // children[0] [ children[1] ]
  slice,        // children: base, begin, end, step; null where absent
  call,         // children[0] ( args )
  filter,       // children[0] | text ( args ); no children[0] in a filter block
  test,         // children[0] is text ( args )
  chain,        // children joined from left to right by ops
  concat,       // children joined by ~
  compare,      // children compared by ops, as in a < b < c
  logical_and,  // children
  logical_or,   // children
  logical_not,  // children[0]
  negate,       // - children[0]
  plus,         // + children[0]
  conditional,  // children: condition, then, else
};

enum class Op : uint8_t {
  add,
  subtract,
  multiply,
  divide,
  floor_divide,
  modulo,
  power,
  equal,
  not_equal,
  less,
  less_equal,
  greater,
  greater_equal,
  in,
  not_in,
};

struct Arguments {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> named;
};

struct Expr {
  ExprKind kind = ExprKind::undefined;
  int line = 0;
  int depth = 1;  // of the tree below, bounded by the parser
  int64_t integer = 0;
  double number = 0;
  std::string text;
  std::vector<ExprPtr> children;
  std::vector<Op> ops;
  Arguments args;
};

// The target of an assignment: a name, an attribute of a namespace, or several of these.
struct Target {
  std::string name;
  std::string attribute;     // not empty: name.attribute
  std::vector<Target> many;  // not empty: unpacked
};

enum class StmtKind : uint8_t {
  text,          // text
  print,         // exprs
  branch,        // bodies[i] if exprs[i]; one more body is the else
  loop,          // target, exprs[0] the values, exprs[1] the filter or null; bodies: body, else; recursive
  set,           // target = exprs[0]
  set_block,     // target = bodies[0] through filters exprs[0], or null
  macro,         // text(params) = bodies[0]
  call_block,    // exprs[0], a call, with caller(params) = bodies[0]
  filter_block,  // bodies[0] through exprs[0]
  with,          // params with values, then bodies[0]
  generation,    // bodies[0]
  break_,
  continue_,
};

struct Stmt;
using Body = std::vector<Stmt>;

struct Param {
  std::string name;
  ExprPtr value;  // the default, or null
};

struct Stmt {
  StmtKind kind = StmtKind::text;
  int line = 0;
  bool recursive = false;
  // Of a macro or call block: whether its body mentions these names, which are then bound for it.
  bool uses_caller = false, uses_varargs = false, uses_kwargs = false;
  std::string text;
  Target target;
  std::vector<ExprPtr> exprs;
  std::vector<Param> params;
  std::vector<Body> bodies;
};

}  // namespace eadem::io::chat
