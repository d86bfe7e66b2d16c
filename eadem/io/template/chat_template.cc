// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/template/chat_template.h"

#include <optional>
#include <utility>

#include "eadem/core/error.h"
#include "eadem/io/template/parser.h"
#include "eadem/io/template/renderer.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/tokenizer.h"

namespace eadem::io {

namespace {

class Literals {
 public:
  std::vector<std::string_view> texts;

  void visit(const chat::Body& body) {
    for (const chat::Stmt& stmt : body) {
      if (stmt.kind == chat::StmtKind::text) texts.push_back(stmt.text);
      for (const chat::ExprPtr& expr : stmt.exprs) visit(expr.get());
      for (const chat::Param& param : stmt.params) visit(param.value.get());
      for (const chat::Body& inner : stmt.bodies) visit(inner);
    }
  }

 private:
  void visit(const chat::Expr* expr) {
    if (expr == nullptr) return;
    if (expr->kind == chat::ExprKind::string) texts.push_back(expr->text);
    for (const chat::ExprPtr& child : expr->children) visit(child.get());
    for (const chat::ExprPtr& arg : expr->args.positional) visit(arg.get());
    for (const auto& [name, arg] : expr->args.named) visit(arg.get());
  }
};

}  // namespace

struct ChatTemplate::Impl {
  std::string name;
  chat::Body body;
};

ChatTemplate::ChatTemplate(std::string_view source, std::string name) {
  if (!is_valid_utf8(source)) throw DataCorrupted("{}: the chat template is not UTF-8", name);
  chat::Body body = chat::parse_template(source, name);
  impl_ = std::make_unique<const Impl>(Impl{std::move(name), std::move(body)});
}
ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

std::vector<TextSegment> ChatTemplate::render(const TemplateInput& input, const TemplateLimits& limits) const {
  const chat::Text text = chat::render_template(impl_->body, impl_->name, input, limits);
  std::vector<TextSegment> segments;
  text.for_each_run(0, text.size(), [&](std::string_view bytes, bool trusted) {
    segments.push_back({std::string(bytes), trusted});
  });
  return segments;
}

std::vector<std::string_view> ChatTemplate::literals() const {
  Literals literals;
  literals.visit(impl_->body);
  return std::move(literals.texts);
}

TemplateInput template_input(const Tokenizer& tokenizer) {
  TemplateInput input;
  const std::pair<const char*, std::optional<int32_t>> roles[] = {{"bos_token", tokenizer.bos()},
                                                                  {"eos_token", tokenizer.eos()},
                                                                  {"unk_token", tokenizer.unk()},
                                                                  {"pad_token", tokenizer.pad()}};
  for (const auto& [name, id] : roles) {
    if (id) input.trusted.set(name, tokenizer.token_text(*id));
  }
  const std::time_t now = std::time(nullptr);
  localtime_r(&now, &input.now);
  return input;
}

std::string join_segments(std::span<const TextSegment> segments) {
  std::string text;
  for (const TextSegment& segment : segments) text += segment.text;
  return text;
}

}  // namespace eadem::io
