// SPDX-License-Identifier: Apache-2.0
//
// Chat templates against Hugging Face transformers; tests/data/templates/make_goldens.py makes the goldens.
#include "eadem/io/template/chat_template.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "eadem/core/error.h"
#include "eadem/io/files/sha256.h"

namespace eadem::io {
namespace {

namespace fs = std::filesystem;

const std::string kFolder = std::string(EADEM_SOURCE_DIR) + "/tests/data/templates/";

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
JsonValue read_json(const std::string& name) { return parse_json(read(kFolder + name), name); }

// 2026-03-09 14:05:06, as in make_goldens.py.
std::tm golden_time() {
  std::tm time = {};
  time.tm_year = 126, time.tm_mon = 2, time.tm_mday = 9, time.tm_hour = 14, time.tm_min = 5, time.tm_sec = 6;
  time.tm_wday = 1, time.tm_yday = 67;
  return time;
}

TemplateInput input(JsonValue variables) {
  TemplateInput input;
  input.variables = std::move(variables);
  input.trusted.set("bos_token", "<|bos|>").set("eos_token", "<|eos|>");
  input.trusted.set("unk_token", "<unk>").set("pad_token", "<pad>");
  input.now = golden_time();
  return input;
}

// The text, or the message of the error in `error`.
std::optional<std::string> render(const std::string& source, const TemplateInput& input, std::string& error) {
  try {
    return join_segments(ChatTemplate(source, "t").render(input));
  } catch (const Error& e) {
    error = e.what();
    return std::nullopt;
  }
}

std::string text_of(std::string_view source, JsonValue variables = JsonValue::object()) {
  return join_segments(ChatTemplate(source, "t").render(input(std::move(variables))));
}

std::string message_of(std::string_view source, const TemplateLimits& limits = {}) {
  try {
    (void)ChatTemplate(source, "t").render(input(JsonValue::object()), limits);
  } catch (const Error& e) {
    return std::string(e.kind()) + ": " + e.what();
  }
  return "no error";
}

TEST(ChatTemplate, RendersEveryConstructAsTransformers) {
  const JsonValue file = read_json("constructs.json");
  const JsonValue variables = read_json("construct_variables.json");
  for (const JsonValue& entry : file.as_array()) {
    const std::string& source = entry.as_array()[0].as_string();
    const JsonValue& expected = entry.as_array()[1];
    SCOPED_TRACE(source);
    std::string error;
    const auto text = render(source, input(variables), error);
    if (expected.is_null()) {
      EXPECT_FALSE(text.has_value()) << "transformers raises; this gives " << *text;
    } else if (!text) {
      ADD_FAILURE() << error << "\nexpected " << expected.as_string();
    } else {
      EXPECT_EQ(*text, expected.as_string());
    }
  }
}

TEST(ChatTemplate, RendersRealTemplatesAsTransformers) {
  const fs::path shared = fs::path(EADEM_SHARED_DATA) / "templates";
  if (!fs::is_directory(shared)) GTEST_SKIP() << shared << " is not there";
  const JsonValue conversations = read_json("conversations.json");
  std::vector<TemplateInput> inputs;
  for (const JsonValue& entry : conversations.as_array()) inputs.push_back(input(*entry.find("variables")));
  const JsonValue rows = read_json("matrix.json");
  EXPECT_EQ(rows.as_array().size(), 63u);
  for (const JsonValue& row : rows.as_array()) {
    const std::string& name = row.as_array()[0].as_string();
    const std::string source = read(shared / name);
    const auto& digests = row.as_array()[1].as_array();
    ASSERT_EQ(digests.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::string error;
      const auto text = render(source, inputs[i], error);
      const std::string digest = text ? sha256_hex(*text).substr(0, 12) : "error";
      EXPECT_EQ(digest, digests[i].as_string())
          << name << ": " << conversations.as_array()[i].find("name")->as_string() << "\n"
          << (text ? *text : error);
    }
  }
}

TEST(ChatTemplate, RefusesUnknownConstructsWhenCompiled) {
  // None of these places is reached when the template renders.
  const auto refusal = [](std::string_view construct) {
    const std::string source = "a\n{% if false %}\n" + std::string(construct) + "{% endif %}";
    try {
      (void)ChatTemplate(source, "file.jinja");
    } catch (const Unsupported& e) {
      return std::string(e.what());
    }
    return std::string("compiled");
  };
  EXPECT_EQ(refusal("{{ x | wordwrap }}"), "file.jinja:3: filter 'wordwrap' is not supported in chat templates");
  EXPECT_EQ(refusal("{{ x is prime }}"), "file.jinja:3: test 'prime' is not supported in chat templates");
  EXPECT_EQ(refusal("{% include 'x' %}"), "file.jinja:3: tag 'include' is not supported in chat templates");
  EXPECT_EQ(refusal("{% do x %}"), "file.jinja:3: tag 'do' is not supported in chat templates");
  EXPECT_EQ(refusal("{{ '{}'.format(1) }}"), "file.jinja:3: method 'format' is not supported in chat templates");
  EXPECT_EQ(refusal("{{ cycler(1) }}"), "file.jinja:3: function 'cycler' is not supported in chat templates");
  EXPECT_EQ(refusal("{{ f(*x) }}"), "file.jinja:3: argument '*' is not supported in chat templates");
  EXPECT_EQ(refusal("{{ x | map('wordwrap') }}"), "file.jinja:3: filter 'wordwrap' is not supported in chat templates");
  EXPECT_EQ(refusal("{{ x | select('prime') }}"), "file.jinja:3: test 'prime' is not supported in chat templates");
  EXPECT_EQ(refusal("{% frobnicate %}"), "file.jinja:3: unknown tag 'frobnicate'");
}

// The words in the code spans of the rows of docs/chat.md that begin with `| name |`.
std::vector<std::string> documented(const std::string& name) {
  const std::string text = read(std::string(EADEM_SOURCE_DIR) + "/docs/chat.md");
  const std::string begin = "\n| " + name + " | ";
  std::vector<std::string> words;
  for (size_t at = 0; (at = text.find(begin, at)) != std::string::npos;) {
    const size_t end = text.find('\n', ++at);
    for (size_t open = text.find('`', at); open < end;) {
      const size_t close = text.find('`', open + 1);
      words.push_back(text.substr(open + 1, close - open - 1));
      open = text.find('`', close + 1);
    }
  }
  return words;
}

bool is_refused(const std::string& source) {
  try {
    (void)ChatTemplate(source, "t");
    return false;
  } catch (const Unsupported&) {
    return true;
  }
}

// The names are those of Jinja 3.1.6 and of Python 3.11's str, dict, int and float.
TEST(ChatTemplate, TheDocumentNamesEverythingThatIsRefused) {
  struct Row {
    const char* name;
    const char* before;
    const char* after;
    std::vector<std::string> of_jinja;
    bool all_are_documented;  // those that are understood, too
  };
  const Row rows[] = {
      {"filters",
       "{{ x | ",
       " }}",
       {"abs",    "attr",       "batch",       "capitalize", "center",   "count",
        "d",      "default",    "dictsort",    "e",          "escape",   "filesizeformat",
        "first",  "float",      "forceescape", "format",     "groupby",  "indent",
        "int",    "items",      "join",        "last",       "length",   "list",
        "lower",  "map",        "max",         "min",        "pprint",   "random",
        "reject", "rejectattr", "replace",     "reverse",    "round",    "safe",
        "select", "selectattr", "slice",       "sort",       "string",   "striptags",
        "sum",    "title",      "tojson",      "trim",       "truncate", "unique",
        "upper",  "urlencode",  "urlize",      "wordcount",  "wordwrap", "xmlattr"},
       true},
      {"functions", "{{ ", "(1) }}", {"cycler", "joiner", "lipsum", "namespace", "dict", "range"}, true},
      {"tags",
       "{% ",
       " x %}",
       {"autoescape", "block", "debug", "do", "extends", "from", "import", "include", "pluralize", "print", "trans"},
       true},
      {"methods",
       "{{ x.",
       "(1) }}",
       {"as_integer_ratio",
        "bit_count",
        "bit_length",
        "capitalize",
        "casefold",
        "center",
        "conjugate",
        "copy",
        "count",
        "encode",
        "endswith",
        "expandtabs",
        "find",
        "format",
        "format_map",
        "from_bytes",
        "fromhex",
        "fromkeys",
        "get",
        "hex",
        "index",
        "is_integer",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "items",
        "join",
        "keys",
        "ljust",
        "lower",
        "lstrip",
        "maketrans",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rjust",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "to_bytes",
        "translate",
        "upper",
        "values",
        "zfill"},
       false}};
  for (const Row& row : rows) {
    const std::vector<std::string> words = documented(row.name);
    for (const std::string& name : row.of_jinja) {
      const bool named = std::find(words.begin(), words.end(), name) != words.end();
      EXPECT_EQ(named, row.all_are_documented || is_refused(row.before + name + row.after)) << row.name << ": " << name;
    }
  }
  // Methods that no value has are found when the template renders; those of the document when it is compiled.
  for (const std::string& name : documented("methods")) {
    EXPECT_TRUE(name == "str" || name == "list" || name == "dict" || is_refused("{{ x." + name + "(1) }}")) << name;
  }
}

TEST(ChatTemplate, ErrorsNameTheLine) {
  EXPECT_EQ(message_of("\n\n{{ raise_exception('only user turns') }}"), "InvalidArgument: t:3: only user turns");
  EXPECT_EQ(message_of("\n{{ a.b }}"), "InvalidArgument: t:2: 'a' is undefined, so it has no 'b'");
  EXPECT_EQ(message_of("\n{% for x in [1] %}\n{% endif %}"), "Unsupported: t:3: unknown tag 'endif'");
  EXPECT_EQ(message_of("\n{{ 1 + }}"), "DataCorrupted: t:2: expected an expression, got end of print statement");
}

TEST(ChatTemplate, LimitsBoundHostileTemplates) {
  const std::string steps = "InvalidArgument: t:1: the template takes more than 1000000 steps";
  const TemplateLimits few{.max_work = 1'000'000};
  EXPECT_EQ(message_of("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", few), steps);
  EXPECT_EQ(message_of("{{ 'x' * 9999999999 }}", few), steps);
  EXPECT_EQ(message_of("{{ [0] * 9223372036854775807 }}", few), steps);
  EXPECT_EQ(
      message_of("{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", few),
      steps);
  EXPECT_EQ(
      message_of(
          "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}", few),
      steps);
  EXPECT_EQ(message_of("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
            "InvalidArgument: t:1: the template nests calls and blocks more than 400 deep");
  EXPECT_EQ(message_of("{% set n = namespace() %}{% set n.n = n %}{{ n }}"),
            "InvalidArgument: t:1: values are nested more than 200 deep");
  EXPECT_EQ(message_of("{{ 'x' * 1001 }}", {.max_output = 1000}),
            "InvalidArgument: t:1: the text has more than 1000 bytes");
  EXPECT_EQ(message_of("{{ " + std::string(100000, '(') + "1" + std::string(100000, ')') + " }}"),
            "DataCorrupted: t:1: nested more than 200 deep");
  EXPECT_EQ(message_of("{{ " + std::string(100000, '-') + "1 }}"), "DataCorrupted: t:1: nested more than 200 deep");
  std::string nested;
  for (int i = 0; i < 1000; ++i) nested += "{% if true %}";
  EXPECT_EQ(message_of(nested), "DataCorrupted: t:1: nested more than 200 deep");
  std::string attributes = "{{ a";
  for (int i = 0; i < 1000; ++i) attributes += ".b";
  EXPECT_EQ(message_of(attributes + " }}"), "DataCorrupted: t:1: nested more than 200 deep");
}

TEST(ChatTemplate, LongTemplatesAndConversationsTakeLinearWork) {
  // 4 MiB of each; quadratic work would take hours, or run into the limit.
  std::string source = "{% for m in messages %}";
  for (int i = 0; i < 100000; ++i) source += "{% if no %}{{ x }} text {% endif %}{# c #}";
  source = "{{ s | trim | upper | replace('A', 'b') | length }}" + source + "{% endfor %}";
  JsonValue variables = JsonValue::object();
  variables.set("s", std::string(4 << 20, 'a')).set("messages", JsonValue::array());
  EXPECT_EQ(text_of(source, variables), std::to_string(4 << 20));
  JsonValue messages = JsonValue::array();
  for (int i = 0; i < 50000; ++i)
    messages.push_back(JsonValue::object().set("role", "user").set("content", "some text"));
  EXPECT_EQ(text_of("{% for m in messages %}{{ m.role ~ m['content'] | trim }}{% endfor %}",
                    JsonValue::object().set("messages", std::move(messages)))
                .size(),
            50000u * 13);
}

TEST(ChatTemplate, KeepsTextOfTheConversationApart) {
  JsonValue message = JsonValue::object().set("role", "user").set("content", " <|im_end|> ");
  message.set("name", "<|x|>");
  JsonValue variables = JsonValue::object();
  variables.set("messages",
                JsonValue::array().push_back(message).push_back(JsonValue::object().set("role", "<|im_end|>")));
  const auto segments = [&](std::string_view source) { return ChatTemplate(source, "t").render(input(variables)); };
  using Segments = std::vector<TextSegment>;
  EXPECT_EQ(segments("<|im_start|>{{ messages[0].role }}\n{{ messages[0].content | trim }}<|im_end|>"),
            (Segments{{"<|im_start|>user\n", true}, {"<|im_end|>", false}, {"<|im_end|>", true}}));
  EXPECT_EQ(segments("<|{{ messages[1].role }}|>"), (Segments{{"<|", true}, {"<|im_end|>", false}, {"|>", true}}));
  EXPECT_EQ(segments("{% set t = 'a' + messages[0].content.replace('|', '!') ~ 'b' %}{{ t[1:-1] | upper }}"),
            (Segments{{" <!IM_END!> ", false}}));
  // What is put in the place of a message's text is the message's, and what is put elsewhere is not.
  EXPECT_EQ(
      segments("{{ messages[0].content | replace('im', '<s>') }}{{ ('<s>' ~ messages[0].name) | replace('s', 't') }}"
               "{{ messages[0].name | replace('', '.') }}{{ 'ab' | replace('', '.') }}"),
      (Segments{{" <|<s>_end|> ", false}, {"<t>", true}, {"<|x|>.<.|.x.|.>.", false}, {".a.b.", true}}));
  EXPECT_EQ(segments("{{ {'k': messages[0].name} | tojson }}{{ [messages[0].name] }}"),
            (Segments{{"{\"k\": \"", true}, {"<|x|>", false}, {"\"}['", true}, {"<|x|>", false}, {"']", true}}));
  EXPECT_EQ(segments("{{ [messages[0].name, 'x'] | join('<|') }}{{ '%s!' % messages[0].name }}{{ bos_token }}"),
            (Segments{{"<|x|>", false}, {"<|x", true}, {"<|x|>", false}, {"!<|bos|>", true}}));
  EXPECT_EQ(
      segments("{% macro m(x) %}{{ x }}{% endmacro %}{% set b %}{{ m(messages[0].name) }}{% endset %}{{ b | indent }}"),
      (Segments{{"<|x|>", false}}));
  EXPECT_EQ(segments("{% for c in messages[0].name %}{{ c }}{% endfor %}{% for k in messages[0] %}{{ k }}{% endfor %}"),
            (Segments{{"<|x|>rolecontentname", false}}));
  EXPECT_EQ(segments("{{ raise_exception is defined }}{{ 'a|b' | replace('|', messages[0].name) }}"),
            (Segments{{"Truea", true}, {"<|x|>", false}, {"b", true}}));
}

}  // namespace
}  // namespace eadem::io
