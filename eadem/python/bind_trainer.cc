// SPDX-License-Identifier: Apache-2.0
//
// Trainers from the arguments of Python, on one rank and on a mesh. Ranks 1, 2, … are processes that run
// python/eadem/_rank.py, get the same arguments, and do what this process tells them (train/led_trainer.h).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "eadem/core/machine/rank_processors.h"
#include "eadem/distributed/spawned_mesh.h"
#include "eadem/io/json.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/huggingface.h"
#include "eadem/python/binding.h"
#include "eadem/train/led_trainer.h"

namespace eadem::python {

using namespace nb::literals;

namespace {

struct TrainerArguments {
  // The model: a checkpoint, or a configuration.
  std::string path;                           // empty: a configuration
  std::optional<models::ModelConfig> config;  // else of the text
  std::string config_text;                    // of a config.json

  std::string device, isa;
  int64_t threads = 0;
  DistConfig dist;
  train::TrainerOptions options;
};

// All but `config`, from the keywords that eadem._trainer makes.
TrainerArguments trainer_arguments(const nb::kwargs& keywords) {
  TrainerArguments arguments;
  std::string weights, products, head_products, recompute;
  const auto take = [&](const char* name, auto& value) {
    value = nb::cast<std::decay_t<decltype(value)>>(keywords[name]);
  };
  train::TrainerOptions& options = arguments.options;
  take("path", arguments.path), take("config", arguments.config_text), take("device", arguments.device);
  take("threads", arguments.threads), take("isa", arguments.isa), take("weights", weights), take("products", products);
  take("head_products", head_products), take("amax_history", options.amax_history);
  take("recompute", recompute), take("batch_tokens", options.batch_tokens), take("beta1", options.beta1),
      take("beta2", options.beta2);
  take("eps", options.eps), take("weight_decay", options.weight_decay), take("max_grad_norm", options.max_grad_norm);
  take("disabled_fusions", options.disabled_fusions), take("frozen", options.frozen);
  take("router_aux_loss_coef", options.router_aux_loss_coef);
  options.weights = *dtype_argument("weights", weights);
  options.products = train::products_from_name(products);
  options.head_products = train::head_products_from_name(head_products);
  if (recompute != "none" && recompute != "layers")
    throw InvalidArgument("recompute is '{}'; expected one of none, layers", recompute);
  options.recompute_layers = recompute == "layers";
  arguments.dist = dist_argument(keywords);
  if (arguments.dist.deterministic_across_tp)
    throw Unsupported("deterministic_across_tp is for engines; a Trainer has none");
  return arguments;
}

// The checkpoint that a trainer begins with, or a model without weights.
models::Checkpoint source_of(const TrainerArguments& arguments) {
  if (!arguments.path.empty()) return models::huggingface_form(models::open_checkpoint(arguments.path));
  const std::string name = "the configuration";
  const models::ModelConfig config =
      arguments.config ? *arguments.config
                       : models::ModelConfig::from_json(io::JsonReader::parse(arguments.config_text, name));
  config.validate(name);
  models::Checkpoint source;
  source.model = std::make_shared<models::Decoder>(models::with_huggingface_order(config));
  return source;
}

// Opens the device of a rank, which has its share of the threads and of the processors. The calling thread is bound to
// these.
std::shared_ptr<Device> open_rank(const TrainerArguments& arguments, int rank) {
  const int ranks = arguments.dist.shape().num_ranks();
  if (ranks == 1) return open(arguments.device, arguments.threads, arguments.isa);
  const RankThreads own =
      rank_threads(Topology::of_this_process(), static_cast<int>(arguments.threads), 0, ranks, rank);
  bind_to_processors(own.processors);
  return open(arguments.device, own.decode, arguments.isa, own.prefill);
}

std::unique_ptr<train::Trainer> make_trainer(const TrainerArguments& arguments, const models::Checkpoint& source,
                                             const std::shared_ptr<Device>& device, const Mesh& mesh) {
  auto trainer = std::make_unique<train::Trainer>(source.model, device, arguments.options, mesh);
  if (source.weights != nullptr) trainer->load(source);
  return trainer;
}

// A trainer behind its lock, with the processes of the other ranks of its mesh.
class Trainer {
 public:
  Trainer(const TrainerArguments& arguments, const std::vector<std::string>& program) {
    check_ranks(arguments.dist, arguments.device, arguments.threads);
    source_ = source_of(arguments);
    if (const MeshShape shape = arguments.dist.shape(); shape.num_ranks() > 1)
      processes_ = std::make_unique<distributed::SpawnedMesh>(shape, program);
    const KeepsProcessors as_they_were;
    trainer_ = std::make_unique<train::LedTrainer>(
        make_trainer(arguments, source_, open_rank(arguments, 0), processes_ == nullptr ? Mesh() : processes_->mesh()),
        processes_ == nullptr ? nullptr : processes_->all());
    source_.weights = nullptr;  // the weights have been read
  }
  ~Trainer() {
    if (processes_ == nullptr) return;
    const GilRelease release;  // other ranks take a moment to end
    trainer_.reset();
    processes_.reset();
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  template <typename F>
  auto run(F&& call) {
    return exclusive_.run([&] { return call(*trainer_); });
  }
  // The tokenizer's files at `tokenizer`, or what came with the checkpoint; none if a configuration was given.
  train::Companions companions(const std::optional<std::string>& tokenizer = std::nullopt) const {
    if (tokenizer) return io::tokenizer_files(*tokenizer);
    return source_.config_path.empty() ? train::Companions() : models::companions_of(source_);
  }
  std::vector<pid_t> rank_processes() const {
    return processes_ == nullptr ? std::vector<pid_t>() : processes_->processes();
  }

 private:
  Exclusive exclusive_;
  models::Checkpoint source_;
  std::unique_ptr<distributed::SpawnedMesh> processes_;  // null: one rank
  std::unique_ptr<train::LedTrainer> trainer_;
};

// Token ids, labels and lengths of a pass: rows one after another, each a document of its own.
using Pass = std::tuple<HostList<int32_t>, HostList<int32_t>, HostList<int32_t>>;

train::Batch batch_of(const Pass& pass) {
  const auto& [ids, labels, lengths] = pass;
  if (labels.size() != ids.size())
    throw InvalidArgument("there are {} labels for {} tokens", labels.size(), ids.size());
  train::Batch batch;
  train::clear(batch);
  batch.token_ids = to_vector(ids);
  batch.labels = to_vector(labels);
  batch.lengths = to_vector(lengths);
  batch.query_start = {0};
  int64_t start = 0;
  for (int32_t length : batch.lengths) {
    if (length < 1 || start + length > static_cast<int64_t>(ids.size()))
      throw InvalidArgument("a sequence of {} tokens at {} of {}", length, start, ids.size());
    for (int32_t position = 0; position < length; ++position) batch.positions.push_back(position);
    start += length;
    batch.query_start.push_back(static_cast<int32_t>(start));
  }
  for (int32_t label : batch.labels) batch.num_labels += label >= 0 ? 1 : 0;
  return batch;
}

// What a rank of another process does.
void follow(const TrainerArguments& arguments, const Mesh& mesh, const std::shared_ptr<Communicator>& all) {
  const std::unique_ptr<train::Trainer> trainer =
      make_trainer(arguments, source_of(arguments), open_rank(arguments, all->rank()), mesh);
  train::follow_trainer(*trainer, *all);
}

}  // namespace

void bind_trainer(nb::module_& m) {
  nb::class_<Trainer>(m, "NativeTrainer", "What eadem.Trainer calls.")
      .def(
          "__init__",
          [](Trainer* self, const models::ModelConfig* config, const std::vector<std::string>& rank_program,
             const nb::kwargs& keywords) {
            TrainerArguments arguments = trainer_arguments(keywords);
            if (config != nullptr) arguments.config = *config;
            const GilRelease release;
            new (self) Trainer(arguments, rank_program);
          },
          "model_config"_a.none(), "rank_program"_a, "arguments"_a)
      .def("rank_processes", &Trainer::rank_processes, "The processes of ranks 1, 2, …")
      .def(
          "load_param",
          [](Trainer& self, const std::string& name, const HostArray& array) {
            const TensorView view = view_of(array, name);
            self.run([&](train::LedTrainer& led) {
              led.load_param(name, models::from_huggingface_order(led.trainer().model(), name, {view, nullptr}).view);
            });
          },
          "name"_a, "array"_a)
      .def(
          "save",
          [](Trainer& self, const std::string& path, const std::optional<std::string>& tokenizer) {
            self.run([&](train::LedTrainer& led) { led.write_model(self.companions(tokenizer), path); });
          },
          "path"_a, "tokenizer"_a.none())
      .def(
          "save_checkpoint",
          [](Trainer& self, const std::string& path) {
            self.run([&](train::LedTrainer& led) { led.write_checkpoint(self.companions(), path); });
          },
          "path"_a)
      .def(
          "load_checkpoint",
          [](Trainer& self, const std::string& path) {
            self.run([&](train::LedTrainer& led) { led.load_checkpoint(path); });
          },
          "path"_a)
      .def(
          "load_random",
          [](Trainer& self, uint64_t seed, double stddev) {
            self.run([&](train::LedTrainer& led) { led.load_random(seed, stddev); });
          },
          "seed"_a, "stddev"_a)
      .def("state_dict",
           [](Trainer& self) {
             return to_numpy_dict(self.run([](train::LedTrainer& led) {
               auto state = led.whole_state_dict();
               for (auto& [name, tensor] : state)
                 tensor = models::to_huggingface_order(led.trainer().model(), name, tensor);
               return state;
             }));
           })
      .def("parameter_names",
           [](Trainer& self) {
             return self.run([](train::LedTrainer& led) { return led.trainer().whole_parameter_names(); });
           })
      .def(
          "step",
          [](Trainer& self, const std::vector<Pass>& passes, double learning_rate) {
            std::vector<train::Batch> batches;
            for (const Pass& pass : passes) batches.push_back(batch_of(pass));
            const train::StepResult result =
                self.run([&](train::LedTrainer& led) { return led.step(batches, learning_rate); });
            return std::pair(result.loss, result.grad_norm);
          },
          "passes"_a, "learning_rate"_a)
      .def(
          "evaluate",
          [](Trainer& self, const Pass& pass) {
            const train::Batch batch = batch_of(pass);
            return self.run([&](train::LedTrainer& led) { return led.evaluate(batch); });
          },
          "batch"_a)
      .def(
          "gradient",
          [](Trainer& self, const std::string& name) {
            return to_numpy(self.run([&](train::LedTrainer& led) { return led.whole_gradient(name); }));
          },
          "name"_a, nb::sig("def gradient(self, name: str) -> numpy.typing.NDArray[numpy.float32]"))
      .def_prop_ro("num_steps", [](Trainer& self) {
        return self.run([](train::LedTrainer& led) { return led.trainer().num_steps(); });
      });
  m.def(
      "follow_trainer",
      [](const std::string& descriptor, const std::string& rank, const std::string& parent,
         const nb::kwargs& keywords) {
        const TrainerArguments arguments = trainer_arguments(keywords);
        const GilRelease release;
        distributed::live_on_spawned_mesh(
            arguments.dist.shape(), descriptor, rank, parent,
            [&](const Mesh& mesh, const std::shared_ptr<Communicator>& all) { follow(arguments, mesh, all); });
      },
      "descriptor"_a, "rank"_a, "parent"_a, "arguments"_a,
      "The life of a rank of a trainer in a process of its own, which eadem/_rank.py is.");
}

}  // namespace eadem::python
