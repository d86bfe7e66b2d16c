// SPDX-License-Identifier: Apache-2.0
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <system_error>
#include <utility>

#include "eadem/engine/llm.h"
#include "eadem/engine/text/chat_prompt.h"
#include "eadem/python/binding.h"

namespace eadem::python {

using namespace nb::literals;

namespace {

using engine::Completion;
using engine::SamplingParams;

using Prompts = std::variant<std::vector<std::string>, std::vector<std::vector<int32_t>>>;

// Formats a value as eadem._arguments.given does.
std::string shown(const nb::object& object) {
  return nb::cast<std::string>(nb::module_::import_("eadem._arguments").attr("given")(object));
}

// (token, log-probability) pairs, in falling order.
using Listed = std::vector<std::vector<std::pair<int32_t, float>>>;
Listed listed(const std::vector<std::vector<engine::TokenLogprob>>& places) {
  Listed result;
  for (const auto& place : places) {
    auto& pairs = result.emplace_back();
    for (const engine::TokenLogprob& each : place) pairs.emplace_back(each.token, each.logprob);
  }
  return result;
}

class Llm {
 public:
  Llm(std::unique_ptr<RanksOfRank0> ranks, std::unique_ptr<engine::LLM> llm)
      : ranks_(std::move(ranks)), llm_(std::move(llm)) {}
  ~Llm() {
    if (ranks_->processes().empty()) return;
    const GilRelease release;  // other ranks take a moment to end
    llm_.reset();
    ranks_.reset();
  }
  Llm(const Llm&) = delete;
  Llm& operator=(const Llm&) = delete;

  std::vector<pid_t> rank_processes() const { return ranks_->processes(); }

  const engine::LLM& llm() const { return *llm_; }

  // Generates on another thread, so that this one can deliver text and notice Ctrl-C between steps. Threads may call it
  // at once; their requests share steps.
  std::vector<Completion> generate(const Prompts& prompts, const SamplingParams& given, const nb::object& on_text,
                                   bool parse_special, const std::vector<nb::object>& logits_processors,
                                   const nb::object& token_mask) {
    SamplingParams params = given;
    for (const nb::object& each : logits_processors) params.logits_processors.push_back(processor(each));
    if (!token_mask.is_none()) params.token_mask = mask(token_mask);
    const GilRelease release;
    const NotInCallback guard(this);
    Shared shared;
    std::vector<Completion> completions;
    std::exception_ptr failed;
    const auto run = [&](const engine::LLM::OnText& deliver) {
      completions = std::visit(
          [&](const auto& list) {
            if constexpr (std::is_same_v<std::decay_t<decltype(list)>, std::vector<std::string>>)
              return llm_->generate(list, params, deliver, &shared.cancel, parse_special);
            else
              return llm_->generate_ids(list, params, deliver, &shared.cancel);
          },
          prompts);
    };
    const auto run_beside = [&] {
      engine::LLM::OnText deliver;
      if (!on_text.is_none())
        deliver = [&](size_t request, std::string_view piece) {
          const std::lock_guard lock(shared.mutex);
          shared.pieces.emplace_back(request, piece);
          shared.changed.notify_one();
        };
      try {
        run(deliver);
      } catch (...) {
        failed = std::current_exception();
      }
      const std::lock_guard lock(shared.mutex);
      shared.done = true;
      shared.changed.notify_one();
    };
    std::thread worker;
    try {
      worker = std::thread(run_beside);
    } catch (const std::system_error& error) {
      python_logger().log(LogLevel::warning, "no thread to generate on ({}): Ctrl-C waits for the next piece of text",
                          error.what());
      run([&](size_t request, std::string_view piece) { deliver_here(on_text, request, piece); });
      return completions;
    }
    std::exception_ptr interrupted;
    try {
      attend(shared, on_text);
    } catch (...) {  // Ctrl-C, or the callback raised
      interrupted = std::current_exception();
      shared.cancel = true;
    }
    worker.join();
    if (interrupted) std::rethrow_exception(interrupted);
    if (failed) std::rethrow_exception(failed);
    return completions;
  }

 private:
  // While one exists, this thread is inside a callback of an object, or in a call that makes callbacks.
  class InCallback {
   public:
    explicit InCallback(const Llm* llm) { calls().push_back(llm); }
    ~InCallback() { calls().pop_back(); }
    InCallback(const InCallback&) = delete;
    InCallback& operator=(const InCallback&) = delete;

   protected:
    static std::vector<const Llm*>& calls() {  // of this thread, the innermost last
      thread_local std::vector<const Llm*> list;
      return list;
    }
  };

  // Refuses a call from inside a callback of this object, which might call itself without end.
  class NotInCallback : private InCallback {
   public:
    explicit NotInCallback(const Llm* llm) : InCallback(checked(llm)) {}

   private:
    static const Llm* checked(const Llm* llm) {
      if (std::find(calls().begin(), calls().end(), llm) != calls().end())
        throw InvalidArgument("an object was called from inside one of its own callbacks");
      return llm;
    }
  };

  // Both are called on the thread that drives the steps. They hold what the caller of generate() holds for them, and
  // may call this object no more than on_text may.
  engine::LogitsProcessor processor(nb::handle function) const {
    return [this, function](std::span<const int32_t> tokens, std::span<float> logits) {
      const InCallback guard(this);
      const GilAcquire acquire;
      const nb::object scores = nb::cast(Floats(logits.data(), {logits.size()}), nb::rv_policy::copy);
      const nb::object result = called([&] { return function(ids(tokens), scores); });
      const FloatsOnHost changed = array<FloatsOnHost>(result.is_none() ? scores : result, "float32", logits.size());
      std::copy_n(changed.data(), logits.size(), logits.data());
    };
  }

  engine::TokenMask mask(nb::handle function) const {
    return [this, function](std::span<const int32_t> tokens, std::span<int32_t> allowed) {
      const InCallback guard(this);
      const GilAcquire acquire;
      const nb::object result = called([&] { return function(ids(tokens)); });
      if (result.is_none()) return;
      const IntsOnHost words = array<IntsOnHost>(result, "int32", allowed.size());
      for (size_t i = 0; i < allowed.size(); ++i) allowed[i] &= words.data()[i];
    };
  }

  using Floats = nb::ndarray<nb::numpy, float, nb::ndim<1>>;
  using FloatsOnHost = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using IntsOnHost = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  static nb::object ids(std::span<const int32_t> tokens) {
    return nb::cast(nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>>(tokens.data(), {tokens.size()}),
                    nb::rv_policy::copy);
  }

  // Calls a callback, whose exception becomes an error that says its type and text.
  template <typename Call>
  static nb::object called(const Call& call) {
    try {
      return call();
    } catch (const nb::python_error& error) {
      throw InvalidArgument("{}: {}", nb::cast<std::string>(error.type().attr("__name__")),
                            nb::cast<std::string>(nb::str(error.value())));
    }
  }

  // What a callback returned, as an array of `size`.
  template <typename Array>
  static Array array(const nb::object& object, const char* dtype, size_t size) {
    Array result;
    if (!nb::try_cast(object, result, false) || result.size() != size)
      throw InvalidArgument("it returned {}; expected None or a contiguous array [{}] of {}", shown(object), size,
                            dtype);
    return result;
  }

  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::pair<size_t, std::string>> pieces;  // guarded by mutex, like done
    bool done = false;
    std::atomic<bool> cancel = false;
  };

  // Hands text to `on_text` and lets Python's signal handlers run until the worker is done.
  static void attend(Shared& shared, const nb::object& on_text) {
    constexpr auto kSignalInterval = std::chrono::milliseconds(20);
    for (bool done = false; !done;) {
      std::vector<std::pair<size_t, std::string>> pieces;
      {
        std::unique_lock lock(shared.mutex);
        shared.changed.wait_for(lock, kSignalInterval, [&] { return shared.done || !shared.pieces.empty(); });
        pieces.swap(shared.pieces);
        done = shared.done;
      }
      const std::atomic<bool>* cancel = call_cancel();
      if (cancel != nullptr && cancel->load()) shared.cancel = true;
      const GilAcquire acquire;
      for (const auto& [request, piece] : pieces) on_text(request, piece);
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }

  static void deliver_here(const nb::object& on_text, size_t request, std::string_view piece) {
    const GilAcquire acquire;
    if (!on_text.is_none()) on_text(request, piece);
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }

  std::unique_ptr<RanksOfRank0> ranks_;
  std::unique_ptr<engine::LLM> llm_;
};

std::string text_argument(const nb::object& object) {
  if (!nb::isinstance<nb::str>(object)) throw InvalidArgument("text is {}; expected a str", shown(object));
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (utf8 == nullptr) {
    PyErr_Clear();
    throw InvalidArgument("text has no UTF-8: it holds a lone surrogate");
  }
  return {utf8, static_cast<size_t>(size)};
}

std::vector<int32_t> ids_argument(const nb::object& object) {
  std::vector<int32_t> ids;
  if (nb::isinstance<nb::str>(object) || !nb::try_cast(object, ids))
    throw InvalidArgument("ids is {}; expected a sequence of int below 2^31", shown(object));
  return ids;
}

}  // namespace

void bind_llm(nb::module_& m) {
  nb::class_<SamplingParams>(m, "NativeSamplingParams", "What eadem.SamplingParams checks itself with.")
      .def("__init__",
           [](SamplingParams* self, const nb::kwargs& values) {
             SamplingParams params;
             SamplingParams::for_each(params, [&](const char* name, auto& field) {
               field = nb::cast<std::decay_t<decltype(field)>>(values[name]);
             });
             const auto early = nb::cast<std::string>(values["early_stopping"]);
             params.early_stopping = early == "never"  ? engine::EarlyStopping::never
                                     : early == "True" ? engine::EarlyStopping::yes
                                                       : engine::EarlyStopping::no;
             params.validate();
             new (self) SamplingParams(params);
           })
      .def("__getattr__", [](const SamplingParams& self, const std::string& name) {
        nb::object value;
        if (name == "early_stopping")
          return self.early_stopping == engine::EarlyStopping::never
                     ? nb::cast("never")
                     : nb::cast(self.early_stopping == engine::EarlyStopping::yes);
        SamplingParams::for_each(self, [&](const char* each, const auto& field) {
          if (name == each) value = nb::cast(field);
        });
        if (!value.is_valid()) throw nb::attribute_error(name.c_str());
        return value;
      });

  nb::class_<Completion>(m, "Completion", "The answer to one prompt.")
      .def_ro("text", &Completion::text, "The text drawn, without the stop string that ended it.")
      .def_ro("token_ids", &Completion::token_ids, "The tokens drawn, without the one that ended the text.")
      .def_ro("logprobs", &Completion::logprobs, "Natural logarithm of the probability of each of token_ids.")
      .def_prop_ro(
          "top_logprobs", [](const Completion& c) { return listed(c.top_logprobs); },
          "For each of token_ids the params.logprobs likeliest tokens there, as (token id, log-probability), in "
          "falling "
          "order; empty unless asked for.")
      .def_prop_ro(
          "prompt_logprobs",
          [](const Completion& c) {
            nb::list result;
            for (size_t i = 0; i < c.prompt_logprobs.size(); ++i)
              result.append(i == 0 ? nb::none() : nb::cast(c.prompt_logprobs[i]));
            return result;
          },
          nb::sig("def prompt_logprobs(self) -> list[float | None]"),
          "Natural logarithm of the probability of each token of the prompt, None for the first one, which nothing "
          "predicts; empty unless params.prompt_logprobs asks.")
      .def_prop_ro(
          "prompt_top_logprobs", [](const Completion& c) { return listed(c.prompt_top_logprobs); },
          "For each token of the prompt the params.prompt_logprobs likeliest ones there, as in top_logprobs; none for "
          "the "
          "first.")
      .def_prop_ro(
          "finish_reason", [](const Completion& c) { return engine::finish_reason_name(c.finish_reason); },
          "\"stop\" (end of sequence, stop token or string), \"length\", \"cancelled\" or \"error\".")
      .def_ro("error", &Completion::error, "Why the request failed; empty when it did not.")
      .def_ro("prompt_tokens", &Completion::prompt_tokens, "Tokens of the prompt.")
      .def_ro("cached_tokens", &Completion::cached_tokens, "Tokens of the prompt that were in the cache.")
      .def_ro("proposed_tokens", &Completion::proposed_tokens,
              "Proposed tokens that steps computed beside those of the text (speculation).")
      .def_ro("accepted_tokens", &Completion::accepted_tokens, "Those of them that became part of it.")
      .def_ro("seed", &Completion::seed, "The seed that was used.")
      .def_ro("score", &Completion::score,
              "Of a beam search: the log-probability of the text, with its end, / tokens ** length_penalty.")
      .def("__repr__", [](const Completion& c) {
        if (!c.error.empty())
          return nb::str("Completion(error={!r}, text={!r}, finish_reason={!r}, tokens={})")
              .format(c.error, c.text, engine::finish_reason_name(c.finish_reason), c.token_ids.size());
        return nb::str("Completion(text={!r}, finish_reason={!r}, tokens={})")
            .format(c.text, engine::finish_reason_name(c.finish_reason), c.token_ids.size());
      });

  nb::class_<io::Tokenizer>(m, "NativeTokenizer", "What eadem.Tokenizer calls. Any thread may use it at any time.")
      .def_static(
          "from_file",
          [](const std::string& path) {
            const GilRelease release;
            return new io::Tokenizer(io::Tokenizer::from_file(path));
          },
          nb::rv_policy::take_ownership, "path"_a,
          "Reads a tokenizer.json, a tokenizer.model, a tiktoken.model, a .gguf, or the directory around one.")
      .def(
          "encode",
          [](const io::Tokenizer& self, const nb::object& object, bool add_special_tokens, bool parse_special) {
            const std::string text = text_argument(object);
            const GilRelease release;
            return self.encode(text, {.add_special_tokens = add_special_tokens, .parse_special = parse_special});
          },
          "text"_a, nb::kw_only(), "add_special_tokens"_a = true, "parse_special"_a = true,
          nb::sig("def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> "
                  "list[int]"),
          "Token ids of `text`. `parse_special` reads special tokens such as <|im_end|> from the text: switch it off "
          "for text that a user controls.")
      .def(
          "decode",
          [](const io::Tokenizer& self, const nb::object& object, bool skip_special) {
            const std::vector<int32_t> ids = ids_argument(object);
            const GilRelease release;
            return self.decode(ids, skip_special);
          },
          "ids"_a, nb::kw_only(), "skip_special"_a = true,
          nb::sig("def decode(self, ids: collections.abc.Sequence[int], *, skip_special: bool = True) -> str"),
          "Text of the ids; ill-formed UTF-8 becomes U+FFFD. Raises InvalidArgument on an id that is not a token.")
      .def_prop_ro("vocab_size", &io::Tokenizer::vocab_size, "One more than the largest id.")
      .def_prop_ro("bos_token_id", &io::Tokenizer::bos)
      .def_prop_ro("eos_token_id", &io::Tokenizer::eos)
      .def_prop_ro("pad_token_id", &io::Tokenizer::pad)
      .def_prop_ro("unk_token_id", &io::Tokenizer::unk)
      .def("token_to_id", &io::Tokenizer::token_to_id, "text"_a)
      .def("token_text", &io::Tokenizer::token_text, "id"_a, "The token as the vocabulary spells it.")
      .def_prop_ro("chat_templates", [](const io::Tokenizer& self) {
        std::map<std::string, std::string> sources;
        for (const io::NamedTemplate& named : self.chat_templates()) sources[named.name] = named.source;
        return sources;
      });

  bind_chat(m);

  nb::class_<Llm>(m, "Llm", "What eadem.LLM calls.")
      .def(
          "__init__",
          [](Llm* self, std::optional<engine::CacheConfig> cache, const std::vector<std::string>& rank_program,
             const std::string& speculate, int64_t draft_tokens, const nb::kwargs& keywords) {
            EngineArguments arguments = engine_arguments(keywords);
            // Prompts run together, so engine::fit_cache chooses the memory.
            arguments.cache = cache ? *cache : engine::PagedKVCacheConfig{};
            const GilRelease release;
            const engine::SpeculationOptions speculation = engine::SpeculationOptions::of(speculate, draft_tokens);
            models::Checkpoint checkpoint = models::open_checkpoint(arguments.path);
            auto ranks = std::make_unique<RanksOfRank0>(arguments, checkpoint.model->info(), rank_program);
            auto llm = std::make_unique<engine::LLM>(
                std::move(checkpoint), ranks->device(), ranks->options(arguments), python_logger(),
                [](int64_t, int64_t) { stop_if_abandoned(); }, speculation);
            new (self) Llm(std::move(ranks), std::move(llm));
          },
          "kv_cache"_a.none(), "rank_program"_a, "speculate"_a, "draft_tokens"_a, "arguments"_a)
      .def("rank_processes", &Llm::rank_processes, "The processes of ranks 1, 2, …")
      .def("generate", &Llm::generate, "prompts"_a, "params"_a, "on_text"_a.none(), "parse_special"_a,
           "logits_processors"_a, "token_mask"_a.none())
      .def_prop_ro("cache_counters",
                   [](const Llm& self) {
                     const GilRelease release;
                     const engine::CacheCounters counters = self.llm().cache_counters();
                     return std::map<std::string, int64_t>{{"hits", counters.hits},
                                                           {"misses", counters.misses},
                                                           {"evictions", counters.evictions},
                                                           {"preemptions", counters.preemptions}};
                   })
      .def_prop_ro("default_params", [](const Llm& self) { return self.llm().default_params(); })
      .def_prop_ro(
          "tokenizer", [](const Llm& self) -> const io::Tokenizer& { return self.llm().tokenizer(); },
          nb::rv_policy::reference_internal)
      .def_prop_ro("eos_token_ids", [](const Llm& self) { return self.llm().eos_token_ids(); })
      .def(
          "chat_stop_token_ids",
          [](const Llm& self, const engine::ChatPrompt& chat) {
            const models::Checkpoint& checkpoint = self.llm().checkpoint();
            return engine::ids_of_model(engine::chat_stop_tokens(checkpoint, self.llm().tokenizer(), chat),
                                        checkpoint.model->info());
          },
          "chat"_a);
}

}  // namespace eadem::python
