// SPDX-License-Identifier: Apache-2.0
//
// eadem tokenizer train|encode|decode.
#include "eadem/io/tokenizer/tokenizer.h"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <iostream>

#include "eadem/cli/commands.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/options/model_options.h"
#include "eadem/cli/terminal.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/gguf.h"
#include "eadem/io/json.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/models/bpe_trainer.h"

namespace eadem::cli {

namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxCorpusBytes = int64_t{1} << 31;
constexpr int64_t kMaxStdinBytes = int64_t{1} << 28;  // the size of standard input is not known in advance

// Reads standard input in pieces, each passed to `use`. At most kMaxStdinBytes.
template <typename Use>
void read_stdin(std::string_view what, const Use& use) {
  std::string piece(size_t{1} << 16, '\0');
  int64_t bytes = 0;
  while (std::cin.read(piece.data(), static_cast<std::streamsize>(piece.size())) || std::cin.gcount() > 0) {
    bytes += std::cin.gcount();
    if (bytes > kMaxStdinBytes)
      throw InvalidArgument("standard input: more than {} bytes of {}; -f reads a file of up to {}", kMaxStdinBytes,
                            what, kMaxCorpusBytes);
    use(std::string_view(piece).substr(0, static_cast<size_t>(std::cin.gcount())));
    stop_if_interrupted();
  }
  stop_if_interrupted();
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// The text of `given`, of a file, or of standard input.
std::string text_of(const std::optional<std::string>& given, const std::optional<std::string>& file) {
  if (given && file) throw UsageError("TEXT and -f both give the text; give one");
  // A path is hardly ever the text that was meant, and its ids would not show the mistake.
  if (given && exists(*given))
    throw UsageError(fmt::format(
        "TEXT is {0}, which is a file or directory: `-m {0}` takes it for the model, `-f {0}` for the text; to encode "
        "the path itself, write it to standard input",
        io::quote(*given)));
  if (given) return *given;
  if (file && *file != "-") return io::read_file(*file, kMaxCorpusBytes);
  std::string text;
  read_stdin("text", [&](std::string_view piece) { text += piece; });
  return text;
}

// Token ids between spaces, line breaks, commas and brackets, from text that comes in pieces.
class IdReader {
 public:
  void add(std::string_view piece) {
    for (const char c : piece) {
      const bool separates = c == ' ' || c == '\n' || c == '\t' || c == ',' || c == '[' || c == ']' || c == '\r';
      if (!separates) {
        word_ += c;
        if (word_.size() > kMaxWord) finish_word();  // no id is so long; refused before it fills the memory
      } else {
        finish_word();
      }
    }
  }
  std::vector<int32_t> finish() {
    finish_word();
    return std::move(ids_);
  }

 private:
  static constexpr size_t kMaxWord = 64;

  void finish_word() {
    if (word_.empty()) return;
    int32_t id = 0;
    const auto [rest, error] = std::from_chars(word_.data(), word_.data() + word_.size(), id);
    if (error != std::errc() || rest != word_.data() + word_.size())
      throw InvalidArgument("{} is no token id{}", io::quote(word_),
                            exists(word_) ? "; -m gives the model and -f a file of ids" : "");
    ids_.push_back(id);
    word_.clear();
  }

  std::string word_;
  std::vector<int32_t> ids_;
};

int train_tokenizer(CommandLine command_line) {
  std::vector<std::string> files, specials;
  int64_t vocab_size = 0, min_frequency = 2;
  std::string pattern = "gpt2", output;
  std::optional<std::string> bos, eos, pad;
  bool add_bos = false, force = false;
  Arguments arguments(
      "tokenizer train",
      "Trains a byte-level BPE tokenizer on texts and writes tokenizer.json and tokenizer_config.json.");
  arguments.rest("FILE", files, "UTF-8 texts");
  arguments.option("--vocab-size", "N", vocab_size, "tokens, with the 256 bytes and the special ones");
  arguments.choice("--pattern", {"gpt2", "llama3", "qwen2"}, pattern, "how texts are cut into pieces (default: gpt2)");
  arguments.list("--special", "TEXT", specials, "a special token, cut out of the texts; may be repeated");
  arguments.option("--bos", "TEXT", bos, "the special token that begins a text");
  arguments.option("--eos", "TEXT", eos, "the special token that ends a text");
  arguments.option("--pad", "TEXT", pad, "the special token for padding");
  arguments.flag("--add-bos", add_bos, "put the BOS token before every text");
  arguments.option("--min-frequency", "N", min_frequency, "a pair that occurs less often is not merged (default: 2)");
  arguments.option("-o,--output", "DIR", output, "where to write; made if it is not there");
  arguments.flag("--force", force, "overwrite a tokenizer that is there");
  arguments.example(
      "eadem tokenizer train *.txt --vocab-size 4k --special \"<|endoftext|>\" --bos \"<|endoftext|>\" --eos "
      "\"<|endoftext|>\" -o tokenizer",
      "4096 tokens, one of them special, which begins and ends texts");
  if (!arguments.parse(command_line)) return kOk;
  if (vocab_size == 0) throw UsageError("--vocab-size is missing");
  if (output.empty()) throw UsageError("-o DIR is missing");
  if (vocab_size < 1 || vocab_size > io::kMaxVocab)
    throw UsageError(fmt::format("--vocab-size is {}; expected at most {}", vocab_size, io::kMaxVocab));
  if (min_frequency < 1) throw UsageError(fmt::format("--min-frequency is {}; expected at least 1", min_frequency));
  listen_for_interrupt();
  if (!force && fs::exists(fs::path(output) / "tokenizer.json"))
    throw InvalidArgument("{} exists; --force overwrites it", (fs::path(output) / "tokenizer.json").string());

  io::BpeTrainer trainer({.vocab_size = static_cast<int32_t>(vocab_size),
                          .special_tokens = specials,
                          .pattern = *io::known_pattern_by_name(pattern),
                          .min_frequency = static_cast<uint64_t>(min_frequency),
                          .bos_token = bos,
                          .eos_token = eos,
                          .pad_token = pad,
                          .add_bos = add_bos});
  int64_t bytes = 0;
  {
    ProgressBar bar("reading");
    for (size_t i = 0; i < files.size(); ++i) {
      stop_if_interrupted();
      const std::string text = io::read_file(files[i], kMaxCorpusBytes);
      if (text.empty()) note("warning: {} is empty", files[i]);
      try {
        trainer.add_text(text, &interrupt_flag());
      } catch (const InvalidArgument& error) {
        throw InvalidArgument("{}: {}", files[i], error.what());
      }
      bytes += static_cast<int64_t>(text.size());
      bar.update(static_cast<double>(i + 1), static_cast<double>(files.size()));
    }
  }
  if (bytes == 0) throw InvalidArgument("the files hold no text to learn from");
  const io::TokenizerSpec spec = trainer.train(&interrupt_flag());
  std::error_code error;
  fs::create_directories(output, error);
  if (error) throw IoError("{}: cannot make the directory: {}", output, error.message());
  io::save_tokenizer(spec, output);
  const io::Tokenizer tokenizer(spec);
  if (tokenizer.vocab_size() < vocab_size)
    note("warning: {} tokens instead of {}: no other pair occurs {} times", tokenizer.vocab_size(), vocab_size,
         min_frequency);
  note("{} of text, {} tokens, written to {}", bytes_text(static_cast<double>(bytes)), tokenizer.vocab_size(), output);
  return kOk;
}

// `-m` of encode and decode: a model, or a tokenizer file.
struct CoderOptions {
  std::optional<std::string> model, file;
  bool json = false;

  void add(Arguments& arguments, const char* what) {
    arguments.option("-m,--model", "MODEL", model,
                     "a model, a tokenizer.json, or a directory with one (default: the bundled model)");
    arguments.option("-f,--file", "FILE", file, std::string("read the ") + what + " from a file; - is standard input");
    arguments.flag("--json", json, "machine-readable");
  }
  io::Tokenizer open() const { return io::Tokenizer::from_file(resolve_model(model), &interrupt_flag()); }
};

int encode(CommandLine command_line) {
  CoderOptions options;
  std::optional<std::string> text;
  bool no_special = false, plain = false;
  Arguments arguments("tokenizer encode", "Prints the token ids of a text.");
  arguments.operand("TEXT", text, "the text; without it or -f, standard input");
  options.add(arguments, "text");
  arguments.flag("--no-special", no_special, "without the tokens that the tokenizer puts around a text");
  arguments.flag("--plain", plain, "take special tokens that stand in the text for ordinary text");
  arguments.example("eadem tokenizer encode \"Once upon a time\"", "ids of the bundled tokenizer");
  arguments.example("eadem tokenizer encode -m model.gguf -f book.txt --json", "ids and texts of tokens");
  if (!arguments.parse(command_line)) return kOk;
  listen_for_interrupt();
  const std::string input = text_of(text, options.file);
  const io::Tokenizer tokenizer = options.open();
  const std::vector<int32_t> ids = tokenizer.encode(
      input, {.add_special_tokens = !no_special, .parse_special = !plain, .cancel = &interrupt_flag()});
  if (!options.json) {
    print(fmt::format("{}\n", fmt::join(ids, " ")));
    return kOk;
  }
  io::JsonValue list = io::JsonValue::array(), texts = io::JsonValue::array();
  for (int32_t id : ids) {
    list.push_back(id);
    texts.push_back(std::string(tokenizer.token_text(id)));
  }
  print(io::to_json(io::JsonValue::object().set("ids", std::move(list)).set("tokens", std::move(texts))) + "\n");
  return kOk;
}

int decode(CommandLine command_line) {
  CoderOptions options;
  std::vector<std::string> words;
  bool special = false;
  Arguments arguments("tokenizer decode", "Prints the text of token ids.");
  arguments.rest("ID", words, "ids; without them or -f, standard input", false);
  options.add(arguments, "ids");
  arguments.flag("--special", special, "show special tokens too");
  arguments.example("eadem tokenizer decode 403 407 261", "the text of three tokens of the bundled tokenizer");
  arguments.example("eadem tokenizer encode -f a.txt | eadem tokenizer decode > b.txt", "there and back");
  if (!arguments.parse(command_line)) return kOk;
  listen_for_interrupt();
  if (!words.empty() && options.file) throw UsageError("ID and -f both give the ids; give one");
  IdReader reader;
  for (const std::string& word : words) reader.add(word + " ");
  if (words.empty() && options.file && *options.file != "-") {
    reader.add(io::read_file(*options.file, kMaxCorpusBytes));
  } else if (words.empty()) {
    read_stdin("ids", [&](std::string_view piece) { reader.add(piece); });
  }
  const std::vector<int32_t> ids = reader.finish();
  const io::Tokenizer tokenizer = options.open();
  const std::string text = tokenizer.decode(ids, !special);
  print(options.json ? io::to_json(io::JsonValue::object().set("text", text)) + "\n" : text + "\n");
  return kOk;
}

}  // namespace

int tokenizer(CommandLine arguments) {
  constexpr const char* kHelp =
      "Usage: eadem tokenizer train|encode|decode [OPTIONS] …\n\n"
      "  train                       trains a byte-level BPE tokenizer on texts\n"
      "  encode                      prints the token ids of a text\n"
      "  decode                      prints the text of token ids\n\n"
      "`eadem tokenizer train --help` and so on show options.\n\n"
      "Examples:\n"
      "  eadem tokenizer train a.txt b.txt --vocab-size 4k -o tokenizer\n"
      "  eadem tokenizer encode \"Once upon a time\"\n"
      "  eadem tokenizer decode -m model.gguf 1 403 407\n";
  if (arguments.empty()) throw UsageError("tokenizer needs one of train, encode, decode");
  const std::string& action = arguments[0];
  if (action == "--help" || action == "-h") {
    print(kHelp);
    return kOk;
  }
  if (action == "train") return train_tokenizer(arguments.subspan(1));
  if (action == "encode") return encode(arguments.subspan(1));
  if (action == "decode") return decode(arguments.subspan(1));
  const std::vector<std::string> known = {"train", "encode", "decode"};
  const std::optional<std::string> meant = did_you_mean(action, known);
  throw UsageError(fmt::format("unknown action '{}' of tokenizer{}", action,
                               meant ? fmt::format("; did you mean '{}'?", *meant) : ""));
}

}  // namespace eadem::cli
