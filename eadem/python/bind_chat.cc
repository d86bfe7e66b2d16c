// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "eadem/engine/text/chat_prompt.h"
#include "eadem/python/binding.h"

namespace eadem::python {

using namespace nb::literals;

namespace {

// A value that Python wrote as JSON; `name` is that of the argument.
io::JsonValue json_argument(const std::string& text, const std::string& name) {
  try {
    return io::parse_json(text, name);
  } catch (const DataCorrupted& error) {  // nested too deep, or two keys that are one as text
    throw InvalidArgument("{}", error.what());
  }
}

}  // namespace

void bind_chat(nb::module_& m) {
  using engine::ChatOptions;
  using engine::ChatPrompt;
  nb::class_<ChatOptions>(m, "ChatOptions", "What ChatPrompt takes besides messages; structures are JSON.")
      .def(
          "__init__",
          [](ChatOptions* self, const std::string& tools, const std::string& documents, const std::string& variables,
             std::string chat_template, bool add_generation_prompt, bool continue_final_message, bool openai) {
            new (self) ChatOptions{.tools = json_argument(tools, "tools"),
                                   .documents = json_argument(documents, "documents"),
                                   .add_generation_prompt = add_generation_prompt,
                                   .continue_final_message = continue_final_message,
                                   .chat_template = std::move(chat_template),
                                   .variables = json_argument(variables, "the template's variables"),
                                   .openai = openai,
                                   .now = {}};
          },
          nb::kw_only(), "tools"_a, "documents"_a, "variables"_a, "chat_template"_a, "add_generation_prompt"_a,
          "continue_final_message"_a, "openai"_a);

  nb::class_<ChatPrompt>(m, "ChatPrompt", "What eadem.Tokenizer writes conversations with. Threads may share it.")
      .def(nb::init<const io::Tokenizer&>(), "tokenizer"_a, nb::keep_alive<1, 2>(),
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "render",
          [](const ChatPrompt& self, const std::string& messages, const ChatOptions& options) {
            const GilRelease release;
            return io::join_segments(self.render(json_argument(messages, "messages"), options));
          },
          "messages"_a, "options"_a)
      .def(
          "encode",
          [](const ChatPrompt& self, const std::string& messages, const ChatOptions& options) {
            const GilRelease release;
            return self.encode(json_argument(messages, "messages"), options);
          },
          "messages"_a, "options"_a);
}

}  // namespace eadem::python
