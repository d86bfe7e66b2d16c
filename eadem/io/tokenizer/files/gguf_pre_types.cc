// SPDX-License-Identifier: Apache-2.0
//
// The names and flags are llama.cpp's (src/llama-vocab.cpp), which defines them. The patterns are those of the models'
// own tokenizer.json or tiktoken files; llama.cpp's differ where its pattern engine has no Unicode subcategories. So
// does that kimi-k2 takes a piece that is a token whole, as tiktoken does.
//
// Left out are the names of encoder models, which nothing here runs: jina-v1-en, jina-v2-code and roberta-bpe (they put
// a separator behind the text) and whitespace.
#include "eadem/io/tokenizer/files/gguf_pre_types.h"

#include <algorithm>
#include <iterator>

namespace eadem::io {
namespace {

using Text = std::string_view;

// Pieces of patterns that several models share; macros, since only literals join at compile time.
#define EADEM_CONTRACTION "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define EADEM_SPACES R"(\s*[\r\n]+|\s+(?!\S)|\s+)"
#define EADEM_UPPER R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
#define EADEM_LOWER R"([\p{Ll}\p{Lm}\p{Lo}\p{M}])"
#define EADEM_CASED_WORDS(suffix)                                                                                     \
  R"([^\r\n\p{L}\p{N}]?)" EADEM_UPPER "*" EADEM_LOWER "+" suffix R"(|[^\r\n\p{L}\p{N}]?)" EADEM_UPPER "+" EADEM_LOWER \
  "*" suffix "|"
#define EADEM_PUNCTUATED_WORDS(not_before_word) \
  R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+)" not_before_word
#define EADEM_CJK R"([\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+)"

constexpr Text kGpt2[] = {R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"};
constexpr Text kLlama3[] = {EADEM_CONTRACTION
                            R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)" EADEM_SPACES};
constexpr Text kQwen2[] = {EADEM_CONTRACTION
                           R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)" EADEM_SPACES};
constexpr Text kQwen35[] = {EADEM_CONTRACTION
                            R"(|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|)" EADEM_SPACES};
constexpr Text kUfakzeka[] = {R"([^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)" EADEM_SPACES};
constexpr Text kJais2[] = {EADEM_CONTRACTION
                           R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+)"
                           R"(|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S))"
                           R"(|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1})"};
constexpr Text kMinicpm5[] = {
    R"(\p{N}{1,3})", EADEM_CONTRACTION R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|)" EADEM_SPACES};
constexpr Text kLaguna[] = {R"([^\n]+|[\n]+)", kQwen2[0]};
constexpr Text kSeedCoder[] = {EADEM_CONTRACTION
                               R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|)" EADEM_SPACES};
constexpr Text kBailingmoe[] = {
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)"};
constexpr Text kExaoneMoe[] = {
    EADEM_CONTRACTION R"(|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?)"
                      R"(|\s*[\r\n]|\s+(?!\S)|\s+)"};

constexpr Text kTekken[] = {EADEM_CASED_WORDS("") R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|)" EADEM_SPACES};
constexpr Text kGpt4o[] = {
    EADEM_CASED_WORDS(EADEM_CONTRACTION "?") R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|)" EADEM_SPACES};
constexpr Text kTinyAya[] = {R"(\d{1,3}(?=(?:\d{3})*\b))", kGpt4o[0]};
constexpr Text kYoutu[] = {
    R"([\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+)"
    R"(|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+)"
    R"(|[\x{3105}-\x{312F}]+|)" EADEM_CJK,
    EADEM_CASED_WORDS(EADEM_CONTRACTION "?") R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|)" EADEM_SPACES};
// The published pattern subtracts \p{Han} from both classes of letters; so do the lookaheads.
#define EADEM_UPPER_NOT_HAN R"((?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]))"
#define EADEM_LOWER_NOT_HAN R"((?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}]))"
constexpr Text kKimiK2[] = {R"([\p{Han}]+|[^\r\n\p{L}\p{N}]?)" EADEM_UPPER_NOT_HAN "*" EADEM_LOWER_NOT_HAN
                            "+" EADEM_CONTRACTION R"(?|[^\r\n\p{L}\p{N}]?)" EADEM_UPPER_NOT_HAN "+" EADEM_LOWER_NOT_HAN
                            "*" EADEM_CONTRACTION R"(?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)" EADEM_SPACES};

// Letters that have a case, as of Unicode 11.
#define EADEM_CASED_LETTERS                                                                                             \
  R"(A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373})" \
  R"(\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481})"   \
  R"(\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA})"               \
  R"(\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D})"           \
  R"(\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4})"    \
  R"(\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC})"   \
  R"(\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126})"     \
  R"(\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184})"     \
  R"(\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B})"            \
  R"(\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17})"           \
  R"(\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2})"   \
  R"(\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943})"
#define EADEM_CJK_AND_HANGUL R"([\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+)"
// In the published pattern the fourth is \s+$, which takes quadratic time on spaces before other characters. Line
// breaks are pieces of their own by then, so a run that reaches the end of its piece is the same match.
constexpr Text kDeepseekLlm[] = {R"([\r\n])",
                                 R"(\s?[)" EADEM_CASED_LETTERS "]+",
                                 R"(\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+)",
                                 R"((?<!\s)\s++$)",
                                 EADEM_CJK_AND_HANGUL,
                                 R"(\p{N}+)"};
constexpr Text kDeepseekCoder[] = {R"([\r\n])", R"(\s?\p{L}+)", R"(\s?\p{P}+)", EADEM_CJK_AND_HANGUL, R"(\p{N})"};
constexpr Text kDeepseekV3[] = {R"(\p{N}{1,3})", EADEM_CJK, EADEM_PUNCTUATED_WORDS(R"([\r\n]*|)" EADEM_SPACES)};
constexpr Text kSpark[] = {R"(\p{N}{1,3})", EADEM_CJK, EADEM_PUNCTUATED_WORDS(R"(|[\r\n]|\s+(?!\S)|\s+)"), R"(\p{N})"};
// Numbers are cut into groups of three from their end.
constexpr Text kAfmoe[] = {
    R"(\p{N}+)", R"(^\p{N}{1,2}(?=(?:\p{N}{3})*+$)|\p{N}{3})",
    R"([\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+)",
    kDeepseekV3[2]};
constexpr Text kSuperbpe[] = {R"(\p{N}+)", R"((?=(\d{3})+(?!\d)))"};

constexpr Text kFalcon[] = {R"([\p{P}\$\+<=>\^~\|`]+)", kGpt2[0], "[0-9][0-9][0-9]"};
constexpr Text kStarcoder[] = {R"(\p{N})", kGpt2[0]};
constexpr Text kBloom[] = {R"( ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+)"};
constexpr Text kViking[] = {kBloom[0], R"(\p{N})"};
constexpr Text kChameleon[] = {"<sentinel:[0-9]+>",       "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                               R"(([\t\n]|    |  ))",     R"(\p{N})",
                               R"([\p{P}!-/:-@\[-`{-~])", kGpt2[0]};
constexpr Text kDefault[] = {R"([\p{P}\$\+<=>\^~\|]+)", kGpt2[0], R"(\p{N}+)", "[0-9][0-9][0-9]"};
constexpr Text kLines[] = {R"([^\n]+|[\n]+)"};

constexpr GgufPreType kPreTypes[] = {
    {"default", kDefault},
    {"gpt-2", kGpt2},
    {"phi-2", kGpt2},
    {"jina-es", kGpt2},
    {"jina-de", kGpt2},
    {"jina-v2-es", kGpt2},
    {"jina-v2-de", kGpt2},
    {"gigachat", kGpt2},
    {"a.x-4.0", kGpt2},
    {"mellum", kGpt2},
    {"modern-bert", kGpt2},
    {"exaone4", kGpt2},
    {"mpt", kGpt2},
    {"olmo", kGpt2},
    {"jais", kGpt2},
    {"trillion", kGpt2},
    {"granite-docling", kGpt2},
    {"llama-bpe", kLlama3, true, true},
    {"llama3", kLlama3, true, true},
    {"llama-v3", kLlama3, true, true},
    {"falcon3", kLlama3, true, true},
    {"falcon-h1", kLlama3, true, true},
    {"pixtral", kLlama3, true, true},
    {"midm-2.0", kLlama3, true, true},
    {"lfm2", kLlama3, true, true},
    {"jina-v5-nano", kLlama3, true, true},
    {"dbrx", kLlama3},
    {"smaug-bpe", kLlama3},
    {"glm4", kLlama3},
    {"chatglm-bpe", kLlama3},
    {"jais-2", kJais2},
    {"minicpm5", kMinicpm5, true},
    {"qwen2", kQwen2},
    {"deepseek-r1-qwen", kQwen2},
    {"kormo", kQwen2},
    {"f2llmv2", kQwen2},
    {"megrez", kQwen2},
    {"stablelm2", kQwen2},
    {"hunyuan", kQwen2},
    {"solar-open", kQwen2},
    {"grok-2", kQwen2},
    {"qwen35", kQwen35},
    {"ufakzeka", kUfakzeka},
    {"laguna", kLaguna},
    {"seed-coder", kSeedCoder},
    {"bailingmoe", kBailingmoe},
    {"bailingmoe2", kBailingmoe},
    {"llada-moe", kBailingmoe},
    {"exaone-moe", kExaoneMoe},
    {"tekken", kTekken, true, true},
    {"gpt-4o", kGpt4o},
    {"llama4", kGpt4o},
    {"kanana2", kGpt4o},
    {"talkie", kGpt4o},
    {"minimax-m2", kGpt4o},
    {"granite-embed-multi-97m", kGpt4o, true},
    {"tiny_aya", kTinyAya},
    {"cohere2moe", kTinyAya},
    {"youtu", kYoutu, true},
    {"kimi-k2", kKimiK2, true},
    {"deepseek-llm", kDeepseekLlm},
    {"deepseek-coder", kDeepseekCoder},
    {"deepseek-v3", kDeepseekV3},
    {"hunyuan-dense", kDeepseekV3},
    {"joyai-llm", kDeepseekV3},
    {"hy_v4", kDeepseekV3},
    {"spark2_5", kSpark},
    {"afmoe", kAfmoe},
    {"superbpe", kSuperbpe},
    {"falcon", kFalcon},
    {"starcoder", kStarcoder},
    {"refact", kStarcoder},
    {"command-r", kStarcoder},
    {"smollm", kStarcoder},
    {"codeshell", kStarcoder},
    {"exaone", kStarcoder},
    {"minerva-7b", kStarcoder},
    {"mellum2", kStarcoder},
    {"bloom", kBloom},
    {"gpt3-finnish", kBloom},
    {"poro-chat", kBloom},
    {"viking", kViking},
    {"chameleon", kChameleon, false, true},
    {"gemma4", kLines, false, false, false},
    {"granite-embed-multi-311m", kLines, false, false, false},
    {"sarvam-moe", kLines, false, false, false},
};

}  // namespace

std::span<const GgufPreType> gguf_pre_types() { return kPreTypes; }

std::vector<PreTokenizerStep> steps_of(const GgufPreType& type) {
  std::vector<PreTokenizerStep> steps;
  for (const std::string_view pattern : type.patterns) {
    PreTokenizerStep split{};
    split.kind = PreTokenizerStep::Kind::kSplit;
    split.pattern = {Pattern::Kind::kRegex, std::string(pattern)};
    steps.push_back(std::move(split));
  }
  if (!type.byte_level) return steps;
  // ByteLevel's own pattern is GPT-2's: it takes the place of a last step that has it.
  const bool gpt2 = known_pattern(type.patterns.back()) == KnownPattern::kGpt2;
  if (gpt2) steps.pop_back();
  PreTokenizerStep bytes{};
  bytes.kind = PreTokenizerStep::Kind::kByteLevel;
  bytes.use_regex = gpt2;
  steps.push_back(std::move(bytes));
  return steps;
}

const GgufPreType* find_gguf_pre_type(std::string_view name) {
  const auto found = std::find_if(std::begin(kPreTypes), std::end(kPreTypes),
                                  [&](const GgufPreType& type) { return type.name == name; });
  return found == std::end(kPreTypes) ? nullptr : found;
}

std::string gguf_pre_type_names() {
  std::string names;
  for (const GgufPreType& type : kPreTypes) {
    if (!names.empty()) names += ", ";
    names += type.name;
  }
  return names;
}

}  // namespace eadem::io
