// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/llm.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "eadem/core/error.h"
#include "eadem/python/bindings.h"
#include "eadem/python/engine_arguments.h"

namespace eadem::python {

using namespace nb::literals;
using engine::Completion;
using engine::FinishReason;
using engine::GenerationStats;
using engine::LLM;
using engine::SamplingParams;

namespace {

// What the caller set; the rest is the model's recommendation.
struct PySamplingParams {
  std::optional<double> temperature, top_p, min_p;
  std::optional<int64_t> top_k, max_tokens, seed;
  std::vector<std::string> stop;
  std::vector<int64_t> stop_token_ids;
  bool ignore_eos = false;

  SamplingParams over(SamplingParams params) const {
    params.temperature = temperature.value_or(params.temperature);
    params.top_k = top_k.value_or(params.top_k);
    params.top_p = top_p.value_or(params.top_p);
    params.min_p = min_p.value_or(params.min_p);
    params.max_tokens = max_tokens.value_or(params.max_tokens);
    params.seed = seed;
    params.stop.insert(params.stop.end(), stop.begin(), stop.end());
    params.stop_token_ids.insert(params.stop_token_ids.end(), stop_token_ids.begin(), stop_token_ids.end());
    params.ignore_eos = ignore_eos;
    params.validate();
    return params;
  }
};

struct PyLlm {
  Exclusive exclusive;
  std::unique_ptr<LLM> llm;
  std::atomic<bool> cancel = false;
};

// Of one sequence, when the caller names no length: a long context costs memory that few texts need.
constexpr int64_t kDefaultCacheLength = 4096;

std::vector<std::string> strings_of(nb::handle value, const char* name) {
  std::vector<std::string> result;
  if (value.is_none()) return result;
  if (nb::isinstance<nb::str>(value)) return {nb::cast<std::string>(value)};
  if (!nb::try_cast(value, result))
    throw nb::type_error((std::string(name) + " is neither a string nor a sequence of strings").c_str());
  return result;
}

std::string text_of(nb::handle value) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
  if (utf8 == nullptr) {  // lone surrogates
    PyErr_Clear();
    throw InvalidArgument("a prompt is a str that UTF-8 cannot express: {}", nb::cast<std::string>(nb::repr(value)));
  }
  return {utf8, static_cast<size_t>(size)};
}

// Texts, or token ids; one of them or a list.
struct Prompts {
  std::vector<std::string> texts;
  std::vector<std::vector<int32_t>> ids;
  bool are_ids = false;
};

Prompts prompts_of(nb::handle value) {
  Prompts prompts;
  if (nb::isinstance<nb::str>(value)) {
    prompts.texts.push_back(text_of(value));
    return prompts;
  }
  if (!nb::isinstance<nb::sequence>(value) || nb::isinstance<nb::bytes>(value))
    throw nb::type_error("prompts is neither a string nor a sequence of strings or of token ids");
  for (nb::handle item : nb::borrow<nb::sequence>(value)) {
    if (nb::isinstance<nb::str>(item)) {
      prompts.texts.push_back(text_of(item));
    } else if (PyLong_Check(item.ptr())) {
      throw nb::type_error("prompts is a sequence of ints; token ids of one prompt are given as [ids]");
    } else {
      prompts.ids.push_back(narrowed(integers_of(item, "prompts", INT32_MIN, INT32_MAX).values));
    }
  }
  if (!prompts.texts.empty() && !prompts.ids.empty())
    throw InvalidArgument("prompts mixes {} texts and {} lists of token ids; give one kind", prompts.texts.size(),
                          prompts.ids.size());
  prompts.are_ids = !prompts.ids.empty();
  return prompts;
}

std::vector<Completion> generate(PyLlm& self, nb::handle prompts_object, const PySamplingParams* sampling,
                                 const std::optional<nb::callable>& on_text) {
  const Exclusive::Use use(self.exclusive, "generate");
  const Prompts prompts = prompts_of(prompts_object);
  const SamplingParams params =
      (sampling != nullptr ? *sampling : PySamplingParams{}).over(self.llm->default_params());
  self.cancel = false;
  // What a callback or a signal handler raised: the requests are cancelled and it is raised when they have ended.
  std::exception_ptr failure;
  const auto guarded = [&](const auto& call) {
    if (failure) return;
    try {
      call();
    } catch (...) {
      failure = std::current_exception();
      self.cancel = true;
    }
  };
  LLM::OnText show;
  if (on_text)
    show = [&](size_t request, std::string_view piece) {
      const nb::gil_scoped_acquire acquired;
      guarded([&] { (*on_text)(request, nb::str(piece.data(), piece.size())); });
    };
  SignalPoll signals;
  const auto poll = [&] { guarded([&] { signals.poll(); }); };

  std::vector<Completion> completions;
  {
    const nb::gil_scoped_release released;
    completions = prompts.are_ids ? self.llm->generate_ids(prompts.ids, params, show, &self.cancel, poll)
                                  : self.llm->generate(prompts.texts, params, show, &self.cancel, poll);
  }
  if (failure) std::rethrow_exception(failure);
  return completions;
}

// Warnings of the engine go where those of a Python program go.
Logger python_logger() {
  return Logger(LogLevel::warning, [](LogLevel level, std::string_view message) {
    const nb::gil_scoped_acquire acquired;
    nb::module_::import_("logging").attr("getLogger")("eadem").attr(level >= LogLevel::error ? "error" : "warning")(
        "%s", nb::str(message.data(), message.size()));
  });
}

void construct(PyLlm* self, nb::handle model, std::string device, int threads, std::string isa, std::string mode,
               std::optional<std::string> weights, std::optional<std::string> activations,
               std::optional<std::string> kv_dtype, std::optional<int64_t> max_batch_size,
               std::optional<int64_t> max_cache_len, const PyCacheConfig* kv_cache, int64_t max_step_tokens,
               std::vector<std::string> disabled_fusions, bool op_by_op, std::optional<nb::object> progress) {
  const EngineArguments arguments{device,   threads,         isa,              mode,    weights, activations,
                                  kv_dtype, max_step_tokens, disabled_fusions, op_by_op};
  engine::EngineOptions options = arguments.options();
  if (kv_cache != nullptr && (max_batch_size || max_cache_len))
    throw InvalidArgument("kv_cache states the cache; max_batch_size and max_cache_len are for calls without it");
  if (max_batch_size && *max_batch_size < 1)
    throw InvalidArgument("max_batch_size is {}; expected at least 1", *max_batch_size);
  if (max_cache_len && *max_cache_len < 1)
    throw InvalidArgument("max_cache_len is {}; expected at least 1", *max_cache_len);
  const std::string path = resolve_model(model);
  const std::function<void(int64_t, int64_t)> on_progress = load_progress(progress);
  std::unique_ptr<LLM> made;
  {
    const nb::gil_scoped_release released;
    if (kv_cache != nullptr) {
      options.cache = kv_cache->config;
    } else {
      const int64_t context = models::open_checkpoint(path).model->info().max_positions;
      options.cache = engine::StaticKVCacheConfig{
          max_batch_size.value_or(8), max_cache_len.value_or(std::min(context, kDefaultCacheLength))};
    }
    made = std::make_unique<LLM>(path, arguments.open(), options, python_logger(), on_progress);
  }
  new (self) PyLlm();
  self->llm = std::move(made);
}

template <typename T>
std::string optional_text(const std::optional<T>& value) {
  return value ? fmt::to_string(*value) : "None";
}

void bind_sampling_params(nb::module_& m) {
  nb::class_<PySamplingParams>(
      m, "SamplingParams",
      "How one request's text is drawn. None: what the model's authors recommend (generation_config.json), else the "
      "default.\n\n"
      "temperature     0 (greedy) to 1e6; default 1\n"
      "top_k           the likeliest so many tokens; 0, the default, is off\n"
      "top_p           the likeliest tokens of this total probability; more than 0, at most 1, the default: off\n"
      "min_p           drops tokens below this share of the likeliest one's probability; 0 to 1, default 0: off\n"
      "max_tokens      tokens to draw at most; default 256\n"
      "seed            the same seed gives the same text; None: a fresh one, stated in the result\n"
      "stop            strings that end the text, across token borders; not part of it\n"
      "stop_token_ids  token ids that end the text\n"
      "ignore_eos      goes on after the end-of-text token")
      .def(
          "__init__",
          [](PySamplingParams* self, std::optional<double> temperature, std::optional<int64_t> top_k,
             std::optional<double> top_p, std::optional<double> min_p, std::optional<int64_t> max_tokens,
             std::optional<int64_t> seed, nb::object stop, std::vector<int64_t> stop_token_ids, bool ignore_eos) {
            PySamplingParams params;
            params.temperature = temperature;
            params.top_k = top_k;
            params.top_p = top_p;
            params.min_p = min_p;
            params.max_tokens = max_tokens;
            params.seed = seed;
            params.stop = strings_of(stop, "stop");
            params.stop_token_ids = std::move(stop_token_ids);
            params.ignore_eos = ignore_eos;
            params.over({});  // refuses values out of range
            new (self) PySamplingParams(std::move(params));
          },
          nb::kw_only(), "temperature"_a = nb::none(), "top_k"_a = nb::none(), "top_p"_a = nb::none(),
          "min_p"_a = nb::none(), "max_tokens"_a = nb::none(), "seed"_a = nb::none(), "stop"_a = nb::none(),
          "stop_token_ids"_a = std::vector<int64_t>(), "ignore_eos"_a = false,
          nb::sig("def __init__(self, *, temperature: float | None = None, top_k: int | None = None, top_p: float | "
                  "None = None, min_p: float | None = None, max_tokens: int | None = None, seed: int | None = None, "
                  "stop: str | collections.abc.Sequence[str] | None = None, "
                  "stop_token_ids: collections.abc.Sequence[int] = [], ignore_eos: bool = False) -> None"),
          "Raises InvalidArgument naming the field, its value and its range.")
      .def_ro("temperature", &PySamplingParams::temperature)
      .def_ro("top_k", &PySamplingParams::top_k)
      .def_ro("top_p", &PySamplingParams::top_p)
      .def_ro("min_p", &PySamplingParams::min_p)
      .def_ro("max_tokens", &PySamplingParams::max_tokens)
      .def_ro("seed", &PySamplingParams::seed)
      .def_ro("stop", &PySamplingParams::stop)
      .def_ro("stop_token_ids", &PySamplingParams::stop_token_ids)
      .def_ro("ignore_eos", &PySamplingParams::ignore_eos)
      .def("__repr__", [](const PySamplingParams& self) {
        return fmt::format("SamplingParams(temperature={}, top_k={}, top_p={}, min_p={}, max_tokens={}, seed={})",
                           optional_text(self.temperature), optional_text(self.top_k), optional_text(self.top_p),
                           optional_text(self.min_p), optional_text(self.max_tokens), optional_text(self.seed));
      });
}

void bind_results(nb::module_& m) {
  nb::class_<Completion>(m, "RequestOutput", "What became of one prompt.")
      .def_ro("text", &Completion::text, "the drawn text, without the prompt and without what ended it")
      .def_ro("token_ids", &Completion::token_ids, "drawn, without the token that ended the text")
      .def_ro("logprobs", &Completion::logprobs, "natural logarithms of the probabilities of token_ids")
      .def_prop_ro(
          "finish_reason",
          [](const Completion& self) { return std::string(finish_reason_name(self.finish_reason)); },
          nb::sig("def finish_reason(self) -> typing.Literal['length', 'stop', 'cancelled', 'error']"),
          "length: max_tokens, or the context is full; stop: end of text, a stop token or string; cancelled; error")
      .def_prop_ro(
          "error",
          [](const Completion& self) -> std::optional<std::string> {
            if (self.error.empty()) return std::nullopt;
            return self.error;
          },
          "why this request, and it alone, was refused or failed; None: it did not")
      .def_ro("prompt_tokens", &Completion::prompt_tokens, "tokens of the prompt")
      .def_ro("seed", &Completion::seed, "that was used")
      .def("__repr__", [](const Completion& self) {
        const nb::object text = nb::repr(nb::str(self.text.data(), self.text.size()));
        return fmt::format("RequestOutput(text={}, finish_reason='{}')", nb::cast<std::string>(text),
                           finish_reason_name(self.finish_reason));
      });
  nb::class_<GenerationStats>(m, "GenerationStats", "Wall times of one `generate`, seconds, and its tokens.")
      .def_ro("tokenize_seconds", &GenerationStats::tokenize_seconds)
      .def_ro("first_token_seconds", &GenerationStats::first_token_seconds,
              "from the start to the first drawn token of any request")
      .def_ro("prompt_seconds", &GenerationStats::prompt_seconds, "steps that held prompt tokens")
      .def_ro("decode_seconds", &GenerationStats::decode_seconds, "steps that held none")
      .def_ro("prompt_tokens", &GenerationStats::prompt_tokens)
      .def_ro("decode_tokens", &GenerationStats::decode_tokens, "drawn in decode steps");
}

}  // namespace

void bind_llm(nb::module_& m) {
  bind_sampling_params(m);
  bind_results(m);
  nb::class_<PyLlm>(m, "LLM",
                    "Text in, text out: a model with its tokenizer, an engine and a scheduler.\n\n"
                    "Calls from several threads take turns. The GIL is released while the engine computes.")
      .def("__init__", construct, "model"_a.none() = nb::none(), "device"_a = "cpu", nb::kw_only(), "threads"_a = 0,
           "isa"_a = "", "mode"_a = "performance", "weights"_a = nb::none(), "activations"_a = nb::none(),
           "kv_dtype"_a = nb::none(), "max_batch_size"_a = nb::none(), "max_cache_len"_a = nb::none(),
           "kv_cache"_a = nb::none(), "max_step_tokens"_a = 512, "disabled_fusions"_a = std::vector<std::string>(),
           "op_by_op"_a = false, "progress"_a = nb::none(),
           nb::sig("def __init__(self, model: str | os.PathLike[str] | None = None, device: str = 'cpu', *, "
                   "threads: int = 0, isa: str = '', mode: str = 'performance', weights: str | None = None, "
                   "activations: str | None = None, kv_dtype: str | None = None, max_batch_size: int | None = None, "
                   "max_cache_len: int | None = None, kv_cache: CacheConfig | None = None, max_step_tokens: int = 512, "
                   "disabled_fusions: collections.abc.Sequence[str] = [], op_by_op: bool = False, "
                   "progress: collections.abc.Callable[[int, int], object] | None = None) -> None"),
           "model           a directory in Hugging Face layout, a .safetensors with its config.json beside it, a .gguf, "
           "or the name of a bundled model; None: the default one\n"
           "max_batch_size  requests that run at once; others wait. None: 8\n"
           "max_cache_len   tokens of one request, prompt and answer. None: the model's context, at most 4096\n"
           "kv_cache        instead of both: StaticKVCacheConfig or PagedKVCacheConfig\n"
           "progress        progress(done, total) in bytes while the weights load\n"
           "The rest as for InferEngine. Raises NotFound, DataCorrupted, Unsupported or OutOfMemory, naming the file "
           "and both values.")
      .def("generate", generate, "prompts"_a, "sampling_params"_a.none() = nb::none(), "on_text"_a = nb::none(),
           nb::sig("def generate(self, prompts: str | collections.abc.Sequence[str] | "
                   "collections.abc.Sequence[collections.abc.Sequence[int]], sampling_params: SamplingParams | None = "
                   "None, on_text: collections.abc.Callable[[int, str], object] | None = None) -> list[RequestOutput]"),
           "One result per prompt (a text, or a list of token ids), in order; one prompt gives a list of one. "
           "on_text(request, piece) is called with each piece of text as it is drawn. A prompt that is refused gives a "
           "result with `error`; the others are not affected.\n\n"
           "Ctrl-C, and any exception of on_text, end every request at the next step and are raised then.")
      .def(
          "cancel", [](PyLlm& self) { self.cancel = true; },
          "Ends the requests of a running `generate` at its next step, from any thread or callback; they finish as "
          "\"cancelled\". Without one it does nothing.")
      .def_prop_ro(
          "tokenizer", [](PyLlm& self) -> const io::Tokenizer& { return self.llm->tokenizer(); },
          nb::rv_policy::reference_internal, "the model's tokenizer")
      .def_prop_ro(
          "default_params",
          [](PyLlm& self) {
            const SamplingParams& params = self.llm->default_params();
            PySamplingParams result;
            result.temperature = params.temperature;
            result.top_k = params.top_k;
            result.top_p = params.top_p;
            result.min_p = params.min_p;
            result.max_tokens = params.max_tokens;
            return result;
          },
          "what holds for a request that states nothing")
      .def_prop_ro(
          "last_stats",
          [](PyLlm& self) {
            const Exclusive::Use use(self.exclusive, "last_stats");
            return self.llm->last_stats();
          },
          "times and tokens of the last `generate`")
      .def_prop_ro(
          "model_path", [](PyLlm& self) { return self.llm->checkpoint().path; }, "where the model came from")
      .def_prop_ro(
          "eos_token_ids", [](PyLlm& self) { return self.llm->eos_token_ids(); }, "ids that end a text")
      .def_prop_ro(
          "device", [](PyLlm& self) { return self.llm->engine().device()->description(); }, "the device, for people")
      .def_prop_ro(
          "max_sequence_length", [](PyLlm& self) { return self.llm->engine().max_sequence_length(); },
          "tokens of one request, prompt and answer");
}

}  // namespace eadem::python
