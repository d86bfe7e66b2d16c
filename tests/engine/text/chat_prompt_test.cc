// SPDX-License-Identifier: Apache-2.0
//
// Prompts of conversations against Hugging Face transformers (tests/data/chat/make_goldens.py makes the goldens), and
// the tokens that end an answer.
#include "eadem/engine/text/chat_prompt.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "eadem/core/error.h"
#include "eadem/io/files/sha256.h"
#include "eadem/io/gguf.h"
#include "tests/tokenizer/shared_tokenizers.h"

namespace eadem::engine {
namespace {

namespace fs = std::filesystem;
using io::JsonValue;
using io::read_text;
using io::Tokenizer;
using io::write_text;

const fs::path kData = fs::path(EADEM_SOURCE_DIR) / "tests/data";

JsonValue read_json(const fs::path& path) { return io::parse_json(read_text(path), path.string()); }

Tokenizer small() { return Tokenizer::from_file((kData / "chat/small").string()); }

std::vector<int32_t> ids_of(const JsonValue& json) {
  std::vector<int32_t> ids;
  for (const JsonValue& id : json.as_array()) ids.push_back(static_cast<int32_t>(id.as_integer()));
  return ids;
}

// Options as a Python program gives them to apply_chat_template, with its defaults.
ChatOptions options_of(const JsonValue& json) {
  ChatOptions options{.add_generation_prompt = false};
  for (const io::JsonMember& member : json.as_object()) {
    if (member.key == "tools")
      options.tools = member.value;
    else if (member.key == "documents")
      options.documents = member.value;
    else if (member.key == "chat_template")
      options.chat_template = member.value.as_string();
    else if (member.key == "add_generation_prompt")
      options.add_generation_prompt = member.value.as_boolean();
    else if (member.key == "continue_final_message")
      options.continue_final_message = member.value.as_boolean();
    else
      options.variables.set(member.key, member.value);
  }
  return options;
}

JsonValue message(const char* role, JsonValue content) {
  return JsonValue::object().set("role", role).set("content", std::move(content));
}
JsonValue list(JsonValue::Array values) { return values; }

TEST(ChatPrompt, HasTheTextsAndIdsOfTransformers) {
  const Tokenizer tokenizer = small();
  const ChatPrompt chat(tokenizer);
  const JsonValue rows = read_json(kData / "chat/small.json");
  for (const JsonValue& row : rows.as_array()) {
    SCOPED_TRACE(row.find("name")->as_string());
    const ChatOptions options = options_of(*row.find("options"));
    const JsonValue& conversation = *row.find("conversation");
    const JsonValue& text = *row.find("text");
    if (text.is_null()) {
      EXPECT_THROW((void)chat.encode(conversation, options), InvalidArgument);
    } else if (!text.is_array()) {  // several conversations are for Python
      EXPECT_EQ(io::join_segments(chat.render(conversation, options)), text.as_string());
      EXPECT_EQ(chat.encode(conversation, options), ids_of(*row.find("ids")));
    }
  }
}

// 2026-03-09 14:05:06, as in make_goldens.py.
std::tm golden_time() {
  std::tm time = {};
  time.tm_year = 126, time.tm_mon = 2, time.tm_mday = 9, time.tm_hour = 14, time.tm_min = 5, time.tm_sec = 6;
  time.tm_wday = 1, time.tm_yday = 67;
  return time;
}

TEST(ChatPrompt, HasTheIdsOfTransformersForRealTemplates) {
  const fs::path templates = fs::path(EADEM_SHARED_DATA) / "templates";
  if (io::shared_tokenizers().empty() || !fs::is_directory(templates)) GTEST_SKIP() << "no shared data";
  const io::TemporaryDirectory folder;
  for (const char* name : {"vocab.json", "merges.txt"})
    fs::copy_file(io::shared_tokenizers() / "qwen2" / name, folder.path() / name);
  fs::copy_file(io::shared_tokenizers() / "configs/qwen3.tokenizer_config.json",
                folder.path() / "tokenizer_config.json");
  const Tokenizer tokenizer = Tokenizer::from_file(folder.path().string());
  const ChatPrompt chat(tokenizer);
  EXPECT_EQ(chat.end_of_turn(), tokenizer.token_to_id("<|im_end|>"));
  const JsonValue conversations = read_json(kData / "templates/conversations.json");
  int64_t compared = 0;
  const JsonValue rows = read_json(kData / "chat/real.json");
  for (const JsonValue& row : rows.as_array()) {
    const std::string& name = row.as_array()[0].as_string();
    const std::string source = read_text(templates / name);
    for (size_t i = 0; i < conversations.as_array().size(); ++i) {
      const std::string& expected = row.as_array()[1].as_array()[i].as_string();
      if (expected == "planted") continue;
      JsonValue variables = *conversations.as_array()[i].find("variables");
      const JsonValue messages = *variables.find("messages");
      JsonValue::Object rest;
      for (const io::JsonMember& member : variables.as_object()) {
        if (member.key != "messages") rest.push_back(member);
      }
      ChatOptions options = options_of(rest);
      options.chat_template = source;
      options.now = golden_time();
      std::string digest, what;
      try {
        digest = io::sha256_hex(fmt::format("{}", fmt::join(chat.encode(messages, options), ","))).substr(0, 12);
      } catch (const InvalidArgument& error) {
        digest = "error", what = error.what();
      }
      EXPECT_EQ(digest, expected) << name << ": " << conversations.as_array()[i].find("name")->as_string() << " "
                                  << what;
      ++compared;
    }
  }
  EXPECT_GT(compared, 4000);
}

// `text` stands where the conversation has its fields; the template writes all of them.
JsonValue everywhere(const std::string& text) {
  JsonValue call = JsonValue::object().set("id", text).set("type", "function");
  call.set("function", JsonValue::object().set("name", text).set("arguments", JsonValue::object().set(text, text)));
  JsonValue parts = JsonValue::array();
  parts.push_back(JsonValue::object().set("type", "text").set("text", "a" + text + "b"));
  return list({message("system", text), message("user", text), message("user", std::move(parts)),
               message("assistant", " " + text)
                   .set("reasoning_content", text)
                   .set("name", text)
                   .set("tool_calls", JsonValue::array().push_back(std::move(call))),
               message("tool", text).set("name", text).set("tool_call_id", text)});
}

JsonValue tools_of(const std::string& text) {
  JsonValue function = JsonValue::object().set("name", text).set("description", text);
  function.set("parameters", JsonValue::object().set("type", "object").set("properties", JsonValue::object()));
  return list({JsonValue::object().set("type", "function").set("function", std::move(function))});
}

TEST(ChatPrompt, NoFieldOfAConversationPlantsAControlToken) {
  const Tokenizer tokenizer = small();
  const ChatPrompt chat(tokenizer);
  const auto count = [](const std::vector<int32_t>& ids, int32_t id) { return std::count(ids.begin(), ids.end(), id); };
  const ChatOptions plain{.tools = tools_of("x"), .chat_template = "default", .variables = JsonValue::object()};
  for (const char* token : {"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|bos|>", "<think>", "</think>",
                            "<tool_call>", "</tool_call>"}) {
    SCOPED_TRACE(token);
    const int32_t id = tokenizer.token_to_id(token).value();
    ChatOptions options = plain;
    options.tools = tools_of(token);
    options.documents = list({JsonValue::object().set("title", token).set("text", token)});
    EXPECT_EQ(count(chat.encode(everywhere(token), options), id),
              count(chat.encode(everywhere("x"), plain), id) + (std::string_view(token).starts_with("<|im") ? 1 : 0))
        << "the document's own start and end, and nothing else";
    // Read as one trusted text, the prompt holds it once for each field and more.
    EXPECT_GT(count(tokenizer.encode(io::join_segments(chat.render(everywhere(token), options))), id), 10);
  }
  // Added tokens of which the template does not speak are text as it was trained on.
  const int32_t table = tokenizer.token_to_id("<table>").value();
  EXPECT_EQ(count(chat.encode(list({message("user", "a <table>")})), table), 1);
}

TEST(ChatPrompt, ChoosesTemplates) {
  const auto tokenizer = [](const char* config) {
    return Tokenizer::from_json(read_text(kData / "chat/small/tokenizer.json"), config, "model");
  };
  const JsonValue hi = list({message("user", "hi")});
  const auto text = [&](const ChatPrompt& chat, const ChatOptions& options) {
    return io::join_segments(chat.render(hi, options));
  };
  const auto refusal = [&](const ChatPrompt& chat, const ChatOptions& options) {
    try {
      (void)chat.render(hi, options);
    } catch (const Error& error) {
      return std::string(error.kind()) + ": " + error.what();
    }
    return std::string("none");
  };
  const Tokenizer named = tokenizer(
      R"({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"},
          {"name": "rag", "template": "\n{% include 'x' %}"}]})");
  const ChatPrompt chat(named);
  EXPECT_EQ(text(chat, {}), "D");
  EXPECT_EQ(text(chat, {.tools = tools_of("x")}), "T");
  EXPECT_EQ(text(chat, {.chat_template = "tool_use"}), "T");
  EXPECT_EQ(text(chat, {.tools = tools_of("x"), .chat_template = "default"}), "D");
  EXPECT_EQ(text(chat, {.chat_template = "{{ messages[0].content }}"}), "hi");
  EXPECT_EQ(refusal(chat, {.chat_template = "rga"}),
            "NotFound: model: no chat template is named 'rga'; there is 'tool_use', 'default', 'rag'");
  EXPECT_EQ(refusal(chat, {.chat_template = "rag"}),
            "Unsupported: model (tokenizer_config.json): chat_template 'rag':2: tag 'include' is not supported in "
            "chat templates");

  const Tokenizer none = tokenizer("");
  EXPECT_EQ(refusal(ChatPrompt(none), {}),
            "NotFound: model: the model has no chat template, so nothing says how it writes conversations");
  EXPECT_EQ(text(ChatPrompt(none), {.chat_template = "{{ 1 }}"}), "1");
  EXPECT_FALSE(ChatPrompt(none).end_of_turn());
  const Tokenizer other = tokenizer(R"({"chat_template": [{"name": "rag", "template": "R"}]})");
  EXPECT_EQ(refusal(ChatPrompt(other), {}), "NotFound: model: no chat template is named default; choose one of 'rag'");
  EXPECT_THROW(ChatPrompt(tokenizer(R"({"chat_template": "{% include 'x' %}"})")), Unsupported);
  EXPECT_THROW(tokenizer(R"({"chat_template": [{"name": "a", "template": ""}, {"name": "a", "template": ""}]})"),
               DataCorrupted);
}

TEST(ChatPrompt, RefusesOtherShapes) {
  const Tokenizer tokenizer = small();
  const ChatPrompt chat(tokenizer);
  const auto refusal = [&](const JsonValue& messages, const ChatOptions& options) {
    try {
      (void)chat.encode(messages, options);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  const JsonValue hi = list({message("user", "hi")});
  EXPECT_EQ(refusal("hi", {}), "messages must be a list of objects");
  EXPECT_EQ(refusal(list({"hi"}), {}), "messages[0] is not an object");
  EXPECT_EQ(refusal(list({message("user", "a"), JsonValue::object()}), {}),
            "messages[1] has no 'role', which must be a string such as \"user\"");
  EXPECT_EQ(refusal(JsonValue::array(), {}), "messages is empty; a conversation has at least one message");
  EXPECT_EQ(refusal(hi, {.tools = "x"}), "tools must be a list of objects");
  EXPECT_EQ(refusal(hi, {.documents = list({1})}), "documents[0] is not an object");
  EXPECT_EQ(refusal(hi, {.variables = JsonValue::object().set("tools", 1)}),
            "'tools' is an option of its own and cannot be one of the template's variables");
  EXPECT_EQ(refusal(hi, {.add_generation_prompt = false, .continue_final_message = true, .chat_template = "{{ 'x' }}"}),
            "continue_final_message: the chat template does not write the last message's text");
  EXPECT_EQ(
      refusal(list({message("assistant", "a</t>b")}), {.add_generation_prompt = false,
                                                       .continue_final_message = true,
                                                       .chat_template = "{{ messages[0].content.split('</t>')[-1] }}"}),
      "continue_final_message: the chat template changes the last message's text, so that it cannot be continued");
  // White space of every kind that Python strips.
  EXPECT_EQ(io::join_segments(chat.render(list({message("assistant", "a\u3000\u00a0")}),
                                          {.add_generation_prompt = false,
                                           .continue_final_message = true,
                                           .chat_template = "[{{ messages[0].content | trim }}]"})),
            "[a");
}

// --- OpenAI's messages

TEST(ChatPrompt, ReadsOpenAiMessages) {
  const Tokenizer tokenizer = small();
  const ChatPrompt chat(tokenizer);
  const auto text = [&](const JsonValue& messages, const std::string& source, bool openai = true) {
    return io::join_segments(chat.render(messages, {.chat_template = source, .openai = openai}));
  };
  const auto call = [](JsonValue arguments) {
    JsonValue one = JsonValue::object().set("type", "function");
    one.set("function", JsonValue::object().set("name", "f").set("arguments", std::move(arguments)));
    return list({message("user", "x"),
                 message("assistant", nullptr).set("tool_calls", JsonValue::array().push_back(std::move(one)))});
  };
  const std::string arguments = "{{ messages[1].tool_calls[0].function.arguments | tojson }}";
  EXPECT_EQ(text(call(R"({"a": [1, "b"]})"), arguments), R"({"a": [1, "b"]})");
  EXPECT_EQ(text(call(R"({"a": 1})"), arguments, false), R"("{\"a\": 1}")");
  EXPECT_EQ(text(call(JsonValue::object().set("a", 1)), arguments), R"({"a": 1})");
  EXPECT_EQ(text(call("no JSON"), arguments), R"("no JSON")");
  EXPECT_EQ(text(call("[1]"), arguments), R"("[1]")");
  // A template that concatenates arguments gets the text.
  EXPECT_EQ(text(call(R"({"a": 1})"), "{{ '<' + messages[1].tool_calls[0].function.arguments + '>' }}"),
            R"(<{"a": 1}>)");

  const auto part = [](const char* of) { return JsonValue::object().set("type", "text").set("text", of); };
  const JsonValue parts = list({message("user", list({part("one"), part("two")}))});
  EXPECT_EQ(text(parts, "{{ messages[0].content }}!"), "one\ntwo!");
  EXPECT_EQ(text(parts, "{{ 'a' + messages[0].content }}"), "aone\ntwo");
  EXPECT_EQ(text(parts,
                 "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
                 "{% for p in messages[0].content %}{{ p.text }}{% endfor %}{% endif %}"),
            "onetwo");
  // Each role for itself.
  const std::string reads_users =
      "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}{{ m.content[0].text }}"
      "{% else %}{{ m.content }}{% endif %}|{% endfor %}";
  EXPECT_EQ(text(list({message("user", list({part("u")})), message("tool", list({part("one"), part("two")})),
                       message("assistant", list({part("a")}))}),
                 reads_users),
            "u|one\ntwo|a|");
  const JsonValue image = list({message("user", list({JsonValue::object().set("type", "image_url")}))});
  try {
    (void)text(image, "{{ 1 }}");
    ADD_FAILURE() << "no error";
  } catch (const Unsupported& error) {
    EXPECT_STREQ(error.what(), "messages[0] has a part of type 'image_url'; only texts are read");
  }
}

// --- where templates come from

TEST(ChatPrompt, FilesGoBeforeTheConfig) {
  const io::TemporaryDirectory folder;
  fs::copy_file(kData / "chat/small/tokenizer.json", folder.path() / "tokenizer.json");
  write_text(folder.path() / "tokenizer_config.json", R"({"chat_template": [{"name": "old", "template": "O"}]})");
  const auto names = [&] {
    std::string all;
    const Tokenizer tokenizer = Tokenizer::from_file(folder.path().string());
    for (const io::NamedTemplate& named : tokenizer.chat_templates()) all += named.name + "=" + named.source + " ";
    return all;
  };
  EXPECT_EQ(names(), "old=O ");
  fs::create_directory(folder.path() / "additional_chat_templates");
  write_text(folder.path() / "additional_chat_templates/tool_use.jinja", "T");
  write_text(folder.path() / "additional_chat_templates/note.txt", "no template");
  EXPECT_EQ(names(), "tool_use=T ");
  write_text(folder.path() / "chat_template.jinja", "D");
  EXPECT_EQ(names(), "default=D tool_use=T ");
}

io::GgufTokenizerData gguf_data() {
  io::GgufTokenizerData data;
  data.source = "model.gguf";
  data.model = "gpt2";
  data.pre = "gpt-2";
  for (const char* text : {"a", "b", "<eos>", "<eot>", "<eom>", "<more>"}) data.tokens.emplace_back(text);
  data.token_types = {1, 1, 3, 3, 3, 3};
  data.eos = 2;
  return data;
}

TEST(ChatPrompt, GgufNamesEndTokens) {
  io::GgufTokenizerData data = gguf_data();
  data.eot = 3, data.eom = 4, data.eos_ids = {2, 5};
  const Tokenizer tokenizer = Tokenizer::from_gguf(data);
  std::string all;
  for (const io::EndToken& end : tokenizer.end_tokens()) all += fmt::format("{}={} ", end.key, end.id);
  EXPECT_EQ(all,
            "tokenizer.ggml.eot_token_id=3 tokenizer.ggml.eom_token_id=4 tokenizer.ggml.eos_token_ids=2 "
            "tokenizer.ggml.eos_token_ids=5 ");
  data.eot = 6;
  EXPECT_THROW((void)Tokenizer::from_gguf(data), DataCorrupted);
}

// --- the end of a turn

// A tokenizer of single characters and of the added tokens of `config`, which stand at their own ids.
Tokenizer config_tokenizer(const JsonValue& config, const std::string& name) {
  JsonValue vocab = JsonValue::object();
  for (int c = 1; c < 128; ++c) vocab.set(std::string(1, static_cast<char>(c)), int64_t{300'000 + c});
  vocab.set("unknown", int64_t{300'000});
  JsonValue model = JsonValue::object().set("type", "BPE").set("vocab", std::move(vocab));
  model.set("merges", JsonValue::array()).set("unk_token", "unknown");
  JsonValue document = JsonValue::object().set("version", "1.0").set("added_tokens", JsonValue::array());
  document.set("model", std::move(model));
  JsonValue::Object kept;
  for (const io::JsonMember& member : config.as_object()) {
    if (member.key == "added_tokens_decoder" || member.key == "chat_template" || member.key == "eos_token" ||
        member.key == "bos_token")
      kept.push_back(member);
  }
  if (config.find("added_tokens_decoder") == nullptr) {  // then its two named tokens are all that is known
    JsonValue added = JsonValue::object();
    for (const char* role : {"bos_token", "eos_token"}) {
      const JsonValue& token = *config.find(role);
      added.set(
          std::to_string(added.as_object().size()),
          JsonValue::object().set("content", token.is_string() ? token : *token.find("content")).set("special", true));
    }
    kept.push_back({"added_tokens_decoder", std::move(added)});
  }
  return Tokenizer::from_json(io::to_json(document), io::to_json(kept), name);
}

std::string end_of_turn(const Tokenizer& tokenizer) {
  const auto id = ChatPrompt(tokenizer).end_of_turn();
  return id ? std::string(tokenizer.token_text(*id)) : "none";
}

TEST(EndOfTurn, OfRealConfigs) {
  if (io::shared_tokenizers().empty()) GTEST_SKIP() << "no shared data";
  const JsonValue table = read_json(kData / "chat/end_of_turn.json");
  for (const JsonValue& row : table.find("configs")->as_array()) {
    const std::string& name = row.as_array()[0].as_string();
    const JsonValue config = read_json(io::shared_tokenizers() / "configs" / name);
    EXPECT_EQ(end_of_turn(config_tokenizer(config, name)), row.as_array()[1].as_string()) << name;
  }
}

TEST(EndOfTurn, OfRealTemplates) {
  const fs::path templates = fs::path(EADEM_SHARED_DATA) / "templates";
  if (!fs::is_directory(templates)) GTEST_SKIP() << templates << " is not there";
  const JsonValue table = read_json(kData / "chat/end_of_turn.json");
  // One tokenizer that has the special tokens of all templates.
  JsonValue added = JsonValue::object();
  int64_t id = 0;
  for (const JsonValue& token : table.find("special")->as_array())
    added.set(std::to_string(id++), JsonValue::object().set("content", token).set("special", true));
  EXPECT_EQ(table.find("templates")->as_array().size(), 63u);
  for (const JsonValue& row : table.find("templates")->as_array()) {
    const std::string& name = row.as_array()[0].as_string();
    JsonValue config = JsonValue::object().set("added_tokens_decoder", added).set("eos_token", "<|eos|>");
    config.set("bos_token", "<|bos|>").set("chat_template", read_text(templates / name));
    EXPECT_EQ(end_of_turn(config_tokenizer(config, name)), row.as_array()[1].as_string()) << name;
  }
}

// Conversations with `text` in every field that templates write; not every template takes each of them.
std::vector<JsonValue> planted_conversations(const std::string& text) {
  const auto call = [&](const std::string& id) {
    JsonValue function = JsonValue::object().set("name", "f" + text);
    function.set("arguments", JsonValue::object().set("k" + text, text).set("n", list({text, 1})));
    return list({JsonValue::object().set("id", id).set("type", "function").set("function", std::move(function))});
  };
  const JsonValue answer = message("assistant", "A " + text).set("reasoning_content", "R " + text);
  const JsonValue caller = message("assistant", "C " + text).set("reasoning_content", "R " + text);
  std::vector<JsonValue> all = {
      list({message("user", text + " U " + text)}),
      list({message("system", "S " + text), message("user", "U " + text), answer, message("user", text)}),
      list({message("user", list({JsonValue::object().set("type", "text").set("text", text)})), answer})};
  for (const std::string& id : {std::string("call00001"), "i" + text}) {
    const JsonValue result = message("tool", "T " + text).set("name", "f" + text).set("tool_call_id", id);
    all.push_back(list({message("user", "U " + text), JsonValue(caller).set("tool_calls", call(id)), result}));
    all.push_back(list({message("user", "U " + text), message("assistant", "").set("tool_calls", call(id)), result,
                        answer, message("user", "U")}));
  }
  return all;
}

// Every control token of a template, in every field: the prompt has as many of it as with another word in its place.
TEST(EveryTemplate, NoFieldPlantsAControlToken) {
  const fs::path templates = fs::path(EADEM_SHARED_DATA) / "templates";
  if (!fs::is_directory(templates)) GTEST_SKIP() << templates << " is not there";
  const JsonValue table = read_json(kData / "chat/end_of_turn.json");
  const std::vector<std::string> others = {"<think>",     "</think>",        "<tool_call>",     "</tool_call>",
                                           "<arg_value>", "<tool_response>", "</tool_response>"};
  std::vector<std::string> tokens(others);
  JsonValue added = JsonValue::object();
  for (const JsonValue& token : table.find("special")->as_array()) tokens.push_back(token.as_string());
  for (size_t id = 0; id < tokens.size(); ++id)
    added.set(std::to_string(id), JsonValue::object().set("content", tokens[id]).set("special", id >= others.size()));
  JsonValue config = JsonValue::object().set("added_tokens_decoder", added).set("eos_token", "<|eos|>");
  const Tokenizer tokenizer = config_tokenizer(config.set("bos_token", "<|bos|>"), "planted");
  const ChatPrompt chat(tokenizer);
  const auto count = [](const std::vector<int32_t>& ids, int32_t id) { return std::count(ids.begin(), ids.end(), id); };
  const auto encode = [&](const JsonValue& messages, const ChatOptions& options) {
    std::optional<std::vector<int32_t>> ids;
    try {
      ids = chat.encode(messages, options);
    } catch (const InvalidArgument&) {  // the template refuses such a conversation
    }
    return ids;
  };
  int64_t compared = 0;
  for (const JsonValue& row : table.find("templates")->as_array()) {
    const std::string& name = row.as_array()[0].as_string();
    const std::string source = read_text(templates / name);
    int64_t of_template = 0;
    for (size_t id = 0; id < tokens.size(); ++id) {
      const std::string& token = tokens[id];
      if (source.find(token) == std::string::npos && !token.starts_with("<|eos") && !token.starts_with("<|bos"))
        continue;
      for (const bool with_tools : {false, true}) {
        const auto options = [&](const std::string& text) {
          JsonValue variables = JsonValue::object().set("functions", text).set("datetime", text);  // of one template
          return ChatOptions{.tools = with_tools ? tools_of(text) : JsonValue(),
                             .chat_template = source,
                             .variables = std::move(variables)};
        };
        const auto planted = planted_conversations(token), plain = planted_conversations("word");
        for (size_t i = 0; i < plain.size(); ++i) {
          const auto expected = encode(plain[i], options("word")), ids = encode(planted[i], options(token));
          if (!expected || !ids) continue;
          EXPECT_LE(count(*ids, static_cast<int32_t>(id)), count(*expected, static_cast<int32_t>(id)))
              << name << ": " << token << " in conversation " << i << (with_tools ? " with tools" : "");
          ++of_template;
        }
      }
    }
    EXPECT_GT(of_template, 0) << name;
    compared += of_template;
  }
  EXPECT_GT(compared, 5000);
}

TEST(EndOfTurn, OfSmallTemplates) {
  const auto of = [](const std::string& source) {
    JsonValue added = JsonValue::object();
    int64_t id = 0;
    for (const char* token : {"<|eos|>", "<|im_end|>", "<|user|>", "<|return|>"})
      added.set(std::to_string(id++), JsonValue::object().set("content", token).set("special", true));
    added.set("7", JsonValue::object().set("content", "</answer>"));
    JsonValue config = JsonValue::object().set("added_tokens_decoder", added).set("eos_token", "<|eos|>");
    return end_of_turn(config_tokenizer(config.set("chat_template", source), "t"));
  };
  EXPECT_EQ(of("{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>\n{% endfor %}"), "<|im_end|>");
  EXPECT_EQ(of("{% for m in messages %}{{ m.content | trim | upper }} <|im_end|>{% endfor %}"), "none");
  EXPECT_EQ(of("{% for m in messages %}[INST]{{ m.content }} {{ eos_token }}{% endfor %}"), "<|eos|>");
  EXPECT_EQ(of("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"), "<|user|>");
  EXPECT_EQ(of("{% for m in messages %}{{ m.content }}</answer><|im_end|>{% endfor %}"), "<|im_end|>");
  EXPECT_EQ(of("{% for m in messages %}{{ m.content }}{{ '<|return|>' if loop.last else '<|im_end|>' }}{% endfor %}"),
            "<|return|>");
  EXPECT_EQ(of("{% for m in messages %}USER: {{ m.content }}\n{% endfor %}"), "none");
  EXPECT_EQ(of("{{ raise_exception('never') }}"), "none");
}

TEST(ChatStopTokens, AreThoseOfTemplateConfigAndTokenizer) {
  const io::TemporaryDirectory folder;
  for (const auto& entry : fs::directory_iterator(kData / "golden/llama")) {
    if (entry.is_regular_file()) fs::copy_file(entry.path(), folder.path() / entry.path().filename());
  }
  const Tokenizer tokenizer = small();
  const ChatPrompt chat(tokenizer);
  const auto stops = [&] {
    std::map<int32_t, std::string> all;
    for (const StopToken& stop : chat_stop_tokens(models::open_checkpoint(folder.path().string()), tokenizer, chat))
      all[stop.id] = fmt::format("{}", fmt::join(stop.reasons, " + "));
    return all;
  };
  const int32_t end = tokenizer.token_to_id("<|im_end|>").value(), eos = tokenizer.eos().value();
  const std::string generation = (folder.path() / "generation_config.json").string();
  write_text(generation, fmt::format(R"({{"eos_token_id": [{}, 7, 999999]}})", end));
  EXPECT_EQ(stops(), (std::map<int32_t, std::string>{{end, "the chat template's end of turn + generation_config.json"},
                                                     {7, "generation_config.json"},
                                                     {999999, "generation_config.json"},
                                                     {eos, "the tokenizer's EOS"}}));
  write_text(generation, "{}");
  const auto of_config = stops();
  EXPECT_EQ(of_config.at(end), "the chat template's end of turn");
  const models::Checkpoint checkpoint = models::open_checkpoint(folder.path().string());
  for (const int64_t id : checkpoint.model->info().eos_token_ids)
    EXPECT_EQ(of_config.at(static_cast<int32_t>(id)), "config.json");
  write_text(generation, R"({"eos_token_id": "x"})");
  EXPECT_THROW(stops(), DataCorrupted);
}

}  // namespace
}  // namespace eadem::engine
