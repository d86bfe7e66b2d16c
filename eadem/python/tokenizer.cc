// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/tokenizer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "eadem/core/error.h"
#include "eadem/python/bindings.h"

namespace eadem::python {

using namespace nb::literals;
using io::Tokenizer;

void bind_tokenizer(nb::module_& m) {
  nb::class_<Tokenizer>(m, "Tokenizer",
                        "Text to token ids and back. Immutable: any number of threads may use one at once.")
      .def_static(
          "from_file",
          [](nb::handle path) {
            const std::string name = path_of(path);
            const nb::gil_scoped_release released;
            return Tokenizer::from_file(name);
          },
          "path"_a, nb::sig("def from_file(path: str | os.PathLike[str]) -> Tokenizer"),
          "A tokenizer.json, a tiktoken tokenizer.model, a .gguf, or the directory of a model. Raises NotFound, "
          "DataCorrupted, or Unsupported naming what the file asks for.")
      .def(
          "encode",
          [](const Tokenizer& self, const std::string& text, bool add_special_tokens, bool parse_special) {
            const nb::gil_scoped_release released;
            return self.encode(text, {add_special_tokens, parse_special});
          },
          "text"_a, "add_special_tokens"_a = true, "parse_special"_a = true,
          "Token ids of `text`. add_special_tokens puts what the model wants around it (BOS, EOS); parse_special reads "
          "special tokens such as <|im_end|> from the text: off for text that a user controls.")
      .def(
          "decode",
          [](const Tokenizer& self, nb::handle ids, bool skip_special) {
            const std::vector<int32_t> list = narrowed(integers_of(ids, "ids", INT32_MIN, INT32_MAX).values);
            const nb::gil_scoped_release released;
            return self.decode(list, skip_special);
          },
          "ids"_a, "skip_special"_a = true,
          nb::sig("def decode(self, ids: collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.integer[typing.Any]]"
                  ", skip_special: bool = True) -> str"),
          "The text of `ids`; ill-formed UTF-8 becomes U+FFFD. Raises InvalidArgument for an id that is no token.")
      .def("token_to_id", &Tokenizer::token_to_id, "token"_a, "The id of a token as the vocabulary spells it, or None.")
      .def(
          "id_to_token",
          [](const Tokenizer& self, int64_t id) {
            if (!self.is_token(id)) throw InvalidArgument("{}: {} is no token", self.source(), id);
            const std::string_view text = self.token_text(static_cast<int32_t>(id));
            return std::string(text);
          },
          "id"_a, "A token as the vocabulary spells it.")
      .def_prop_ro("vocab_size", &Tokenizer::vocab_size, "one more than the largest id")
      .def_prop_ro("bos_token_id", &Tokenizer::bos, "id of the beginning of a text, or None")
      .def_prop_ro("eos_token_id", &Tokenizer::eos, "id of the end of a text, or None")
      .def_prop_ro("unk_token_id", &Tokenizer::unk, "id of what the vocabulary cannot express, or None")
      .def_prop_ro("pad_token_id", &Tokenizer::pad, "id of padding, or None")
      .def_prop_ro("chat_template", &Tokenizer::chat_template, "Jinja source of the chat template; empty: none")
      .def("__len__", &Tokenizer::vocab_size);
}

}  // namespace eadem::python
