// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/json.h"

#include <cmath>

#include "test_files.h"

namespace eadem::io {
namespace {

JsonReader read(std::string_view text) { return JsonReader::parse(text, "config.json"); }

TEST(JsonParse, Values) {
  EXPECT_TRUE(parse_json("null", "f").is_null());
  EXPECT_EQ(parse_json(" true\n", "f").as_boolean(), true);
  EXPECT_EQ(parse_json("-12", "f").as_integer(), -12);
  EXPECT_EQ(parse_json("9223372036854775807", "f").as_integer(), INT64_MAX);
  EXPECT_EQ(parse_json("-9223372036854775808", "f").as_integer(), INT64_MIN);
  EXPECT_EQ(parse_json("9223372036854775808", "f").kind(), JsonValue::Kind::number);
  EXPECT_EQ(parse_json("1000000000000000019884624838656", "f").as_number(), 1000000000000000019884624838656.0);
  EXPECT_EQ(parse_json("1e-05", "f").as_number(), 1e-05);
  EXPECT_EQ(parse_json("2.0", "f").kind(), JsonValue::Kind::number);
  EXPECT_EQ(parse_json(R"("a\"\\\/\b\f\n\r\t\u0041\u00fc\u20ac\ud83d\ude00ü")", "f").as_string(),
            "a\"\\/\b\f\n\r\tAü€😀ü");
  EXPECT_EQ(parse_json(R"("\u0000")", "f").as_string(), std::string(1, '\0'));
  const JsonValue value = parse_json(R"({"b": [1, {"c": []}], "a": {}})", "f");
  EXPECT_EQ(value.as_object()[0].key, "b");  // the order of the document
  EXPECT_EQ(value.find("b")->as_array()[1].find("c")->as_array().size(), 0u);
  EXPECT_EQ(value.find("x"), nullptr);
}

TEST(JsonParse, ErrorsNameFileAndPlace) {
  const auto refused = [](std::string_view text, std::initializer_list<std::string_view> words) {
    expect_error<DataCorrupted>([&] { parse_json(text, "config.json"); }, {"config.json: byte "});
    expect_error<DataCorrupted>([&] { parse_json(text, "config.json"); }, words);
  };
  refused("", {"byte 0 (line 1, column 1)", "the text ends"});
  refused("{\n \"a\": nul}", {"byte 8 (line 2, column 7)", "expected 'null'"});
  refused("{\"a\" 1}", {"byte 5", "found '1'; expected ':' after a key"});
  refused("{\"a\": 1 \"b\"}", {"byte 8", "expected '}' or ','"});
  refused("{a: 1}", {"byte 1", "'\"' of a key"});
  refused("[1, ]", {"byte 4", "expected a value"});
  refused("[1", {"byte 2", "the text ends; expected ']'"});
  refused("{\"a\": 1, \"b\": 2, \"a\": 3}", {"byte 17", "'a' appears twice", "first at byte 1"});
  refused("{\"a\": 1, \"\\u0061\": 3}", {"'a' appears twice"});
  refused("\"ab", {"byte 0", "does not end"});
  refused("\"a\nb\"", {"byte 2", "control character \\x0a"});
  refused("\"\xff\"", {"byte 1", "\\xff is not valid UTF-8"});
  refused("\"\\x\"", {"byte 1", "unknown escape"});
  refused("\"\\u12\"", {"four hexadecimal digits"});
  refused("\"\\u+123\"", {"four hexadecimal digits"});
  refused("\"\\u-123\"", {"four hexadecimal digits"});
  refused("\"\\ud800\"", {"surrogate"});
  refused("\"\\ude00\"", {"surrogate"});
  refused("\"\\ud800\\u0041\"", {"surrogate"});
  refused("01", {"leading zero"});
  refused("1.", {"after its point"});
  refused("1e", {"exponent"});
  refused("-", {"expected a value"});
  refused("+1", {"found '+'"});
  refused("NaN", {"found 'N'"});
  refused("Infinity", {"found 'I'"});
  refused("1e400", {"'1e400' is outside of the range of a double"});
  refused("{} {}", {"byte 3", "after the end"});
  refused("\xef\xbb\xbf{}", {"byte order mark"});
}

TEST(JsonParse, Limits) {
  JsonLimits limits;
  EXPECT_NO_THROW(parse_json(std::string(64, '[') + std::string(64, ']'), "f", limits));
  expect_error<DataCorrupted>([&] { parse_json(std::string(65, '['), "f", limits); },
                              {"f: byte 64", "deeper than 64 levels"});
  expect_error<DataCorrupted>([&] { parse_json(std::string(1'000'000, '['), "f", limits); }, {"deeper"});
  limits.max_bytes = 3;
  expect_error<DataCorrupted>([&] { parse_json("[ ] ", "f", limits); }, {"f: 4 bytes", "at most 3"});
  limits.max_bytes = 100;
  limits.max_values = 3;
  EXPECT_NO_THROW(parse_json("[1,2]", "f", limits));
  expect_error<DataCorrupted>([&] { parse_json("[1,2,3]", "f", limits); }, {"byte 5", "more than 3 values"});
}

TEST(JsonParse, TruncatedAnywhereIsRefused) {
  const std::string text = R"({"a":[1,-2.5e3,"x\u20ac"],"b":{"c":null,"d":true}})";
  for (size_t size = 0; size < text.size(); ++size) {
    const OwnedBytes cut(std::string_view(text).substr(0, size));
    const std::string_view view(reinterpret_cast<const char*>(cut.block.get()), size);
    EXPECT_THROW(parse_json(view, "f"), DataCorrupted) << view;
  }
}

TEST(JsonWrite, PrettyAndCompact) {
  JsonValue value = JsonValue::object();
  value.set("z", 1).set("a", JsonValue::array().push_back(1).push_back("x")).set("e", JsonValue::object());
  value.set("n", JsonValue::array().push_back(JsonValue::object().set("k", nullptr)));
  value.set("z", 2.0);  // replaced in place
  EXPECT_EQ(to_json(value), R"({
  "z": 2.0,
  "a": [1, "x"],
  "e": {},
  "n": [
    {
      "k": null
    }
  ]
}
)");
  EXPECT_EQ(to_compact_json(value), R"({"z":2.0,"a":[1,"x"],"e":{},"n":[{"k":null}]})");
}

TEST(JsonWrite, RoundTrips) {
  const JsonValue value = parse_json(
      R"({"i":[0,-1,9223372036854775807,-9223372036854775808],"d":[0.1,1e300,5e-324,1.0,-2.5,1e22,123456789012345680000],)"
      R"("s":["\u0000\u001f\"\\\n\r\t","😀"],"b":[true,false,null],"deep":[[[{}]]]})",
      "f");
  EXPECT_EQ(parse_json(to_json(value), "f"), value);
  EXPECT_EQ(parse_json(to_compact_json(value), "f"), value);
  EXPECT_FALSE(JsonValue(1) == JsonValue(1.0));
}

TEST(JsonWrite, RefusesWhatJsonCannotHold) {
  expect_error<InvalidArgument>([] { to_json(NAN); }, {"nan"});
  expect_error<InvalidArgument>([] { to_json(-INFINITY); }, {"-inf"});
  expect_error<InvalidArgument>([] { to_json("\xff"); }, {"UTF-8", "\\xff"});
}

// Python's Infinity is what transformers 5 writes in its place.
TEST(JsonReader, TakesPythonsInfinity) {
  const JsonValue both = JsonReader::parse(R"({"a": [0, Infinity], "b": {"__float__": "Infinity"}})", "f").value();
  EXPECT_EQ(both.find("a")->as_array()[1], *both.find("b"));
  expect_error<DataCorrupted>([] { JsonReader::parse("[Infinite]", "f"); }, {"f: byte 1", "expected 'Infinity'"});
  expect_error<DataCorrupted>([] { JsonReader::parse("[NaN]", "f"); }, {"found 'N'"});
}

TEST(JsonReader, TypedAccess) {
  const JsonReader reader = read(R"({"i": 3, "d": 0.5, "b": false, "s": "x", "n": null, "o": {"k": 1},
                                     "ids": [1, 2], "names": ["a"], "ds": [1, 0.5], "os": [{"k": 1}, {"k": 2}]})");
  EXPECT_EQ(reader.file(), "config.json");
  EXPECT_EQ(reader.integer("i", 3, 3), 3);
  EXPECT_EQ(reader.number("i"), 3.0);
  EXPECT_EQ(reader.number("d", 0.5, 0.5), 0.5);
  EXPECT_EQ(reader.boolean("b"), false);
  EXPECT_EQ(reader.string("s"), "x");
  EXPECT_EQ(reader.object("o").integer("k", 0), 1);
  EXPECT_EQ(reader.integers("ids", 0), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(reader.integers("i", 0), std::vector<int64_t>{3});
  EXPECT_EQ(reader.numbers("ds"), (std::vector<double>{1, 0.5}));
  EXPECT_EQ(reader.strings("names"), std::vector<std::string>{"a"});
  EXPECT_EQ(reader.elements("os")[1].integer("k", 0), 2);
  for (const char* key : {"n", "absent"}) {
    EXPECT_FALSE(reader.has(key));
    EXPECT_EQ(reader.optional_integer(key, 0), std::nullopt);
    EXPECT_EQ(reader.optional_number(key), std::nullopt);
    EXPECT_EQ(reader.optional_boolean(key), std::nullopt);
    EXPECT_EQ(reader.optional_string(key), std::nullopt);
    EXPECT_FALSE(reader.optional_object(key).has_value());
  }
  EXPECT_EQ(reader.optional_integer("i", 0), 3);
  EXPECT_EQ(reader.optional_string("s"), "x");
  EXPECT_TRUE(reader.has("b"));
  EXPECT_EQ(reader.raw("absent"), nullptr);
  EXPECT_EQ(reader.keys().size(), 10u);
}

TEST(JsonReader, ErrorsNameFilePathValueAndRange) {
  const JsonReader reader =
      read(R"({"hidden_size": "abc", "n": null, "big": 3000000000, "neg": -1, "f": 2.0, "o": {"p": {"q": []}},
                                     "os": [{"k": "v"}], "ids": [1, "x"], "many": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,
                                     19,20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35,36,37,38,39,40,41,42]})");
  const auto refused = [&](auto&& action, std::initializer_list<std::string_view> words) {
    expect_error<DataCorrupted>(action, words);
  };
  refused([&] { reader.integer("hidden_size", 1, 100); },
          {"config.json: 'hidden_size' is \"abc\"; expected an integer in [1, 100]"});
  refused([&] { reader.integer("absent", 1); }, {"config.json: 'absent' is missing; expected an integer >= 1"});
  refused([&] { reader.integer("n", 1); }, {"'n' is null"});
  refused([&] { reader.integer("big", 1, INT32_MAX); },
          {"'big' is 3000000000; expected an integer in [1, 2147483647]"});
  refused([&] { reader.optional_integer("neg", 0, 5); }, {"'neg' is -1; expected an integer in [0, 5]"});
  refused([&] { reader.integer("f", 0); }, {"'f' is 2.0; expected an integer >= 0"});
  refused([&] { reader.number("hidden_size"); }, {"expected a number"});
  refused([&] { reader.number("f", 0, 1); }, {"'f' is 2.0; expected a number in [0, 1]"});
  refused([&] { reader.optional_number("neg", 0); }, {"'neg' is -1; expected a number >= 0"});
  refused([&] { reader.boolean("f"); }, {"'f' is 2.0; expected true or false"});
  refused([&] { reader.string("f"); }, {"expected a string"});
  refused([&] { reader.object("f"); }, {"expected an object"});
  refused([&] { reader.object("o").object("p").integer("q", 0); }, {"'o.p.q' is []; expected an integer"});
  refused([&] { reader.elements("os")[0].integer("k", 0); }, {"'os[0].k' is \"v\""});
  refused([&] { reader.elements("f"); }, {"expected an array"});
  refused([&] { reader.integers("ids", 0); }, {"'ids' is [1,\"x\"]; expected an integer >= 0 or an array of such"});
  refused([&] { reader.strings("ids"); }, {"expected an array of strings"});
  refused([&] { reader.strings("many"); }, {"'many' is an array of 42 values"});
  refused([&] { reader.strings("o"); }, {"'o' is an object of 1 members"});
  refused([&] { reader.numbers("ids"); }, {"expected an array in which each is a number"});
  refused([&] { reader.fail("f", "something else"); }, {"config.json: 'f' is 2.0; expected something else"});
  refused([] { read("[1]").integer("a", 0); }, {"config.json: the document is [1]; expected an object"});
}

TEST(JsonReader, KnowsWhatWasNotRead) {
  const JsonReader reader = read(
      R"({"a": 1, "b": {"c": 1, "d": {"e": 2}}, "f": {"g": 1}, "h": [{"i": 1, "j": 2}], "k": {"l": 1}, "m": null})");
  EXPECT_EQ(reader.unread_keys(), (std::vector<std::string>{"a", "b", "f", "h", "k", "m"}));
  reader.integer("a", 0);
  reader.object("b").integer("c", 0);
  reader.elements("h")[0].integer("i", 0);
  reader.ignore("k", "says nothing");
  reader.ignore("k", "twice");
  reader.ignore("absent");
  reader.optional_integer("m", 0);
  EXPECT_EQ(reader.unread_keys(), (std::vector<std::string>{"b.d", "f", "h[0].j"}));
  EXPECT_NE(reader.raw("f"), nullptr);
  reader.object("b").object("d");
  EXPECT_EQ(reader.unread_keys(), (std::vector<std::string>{"b.d.e", "h[0].j"}));
  EXPECT_EQ(reader.object("b").unread_keys(), std::vector<std::string>{"b.d.e"});
  reader.object("f").ignore("g", "of no use");
  reader.object("f").ignore("absent", "is not there");
  reader.ignore("a");
  const JsonReader other = read(R"({"x": 1})");
  other.ignore("x", "other");
  reader.adopt_ignored("m", other);
  std::vector<std::string> ignored;
  for (const JsonReader::Ignored& entry : reader.ignored()) ignored.push_back(entry.path + ": " + entry.reason);
  EXPECT_EQ(ignored, (std::vector<std::string>{"k: says nothing", "f.g: of no use", "m.x: other"}));
}

TEST(JsonReader, ReadsFiles) {
  const ScratchDirectory scratch;
  EXPECT_EQ(JsonReader::read(scratch.write("c.json", R"({"a": 7})")).integer("a", 0), 7);
  expect_error<NotFound>([&] { JsonReader::read(scratch.file("none.json")); }, {"none.json"});
  JsonLimits limits;
  limits.max_bytes = 4;
  expect_error<DataCorrupted>([&] { JsonReader::read(scratch.file("c.json"), limits); }, {"c.json", "8 bytes"});
}

// JSONTestSuite: every y_ file must parse, every n_ file must not, and an i_ file may do either but not crash.
TEST(JsonSuite, Grammar) {
  const std::string archive = std::string(EADEM_SHARED_DATA) + "/json/json_suites.tar.zst";
  if (!std::filesystem::exists(archive)) GTEST_SKIP() << archive << " is absent";
  const ScratchDirectory scratch;
  if (std::system(("tar --zstd -xf '" + archive + "' -C " + scratch.path()).c_str()) != 0)
    GTEST_SKIP() << "cannot unpack " << archive;
  int num_files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(scratch.path())) {
    if (entry.path().parent_path().filename() != "test_parsing") continue;
    ++num_files;
    const std::string name = entry.path().filename().string();
    bool accepted = true;
    try {
      parse_json(content_of(entry.path().string()), name);
    } catch (const DataCorrupted&) {
      accepted = false;
    }
    // Duplicate keys are grammatical, and refused here on purpose.
    const bool is_duplicate_key = name.starts_with("y_object_duplicated_key");
    if (name[0] == 'y') {
      EXPECT_EQ(accepted, !is_duplicate_key) << name;
    }
    if (name[0] == 'n') {
      EXPECT_FALSE(accepted) << name;
    }
  }
  EXPECT_EQ(num_files, 318);
}

}  // namespace
}  // namespace eadem::io
