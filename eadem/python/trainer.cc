// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/trainer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "eadem/core/error.h"
#include "eadem/python/bindings.h"
#include "eadem/python/engine_arguments.h"

namespace eadem::python {

using namespace nb::literals;
using train::Batch;
using train::StepResult;
using train::Trainer;

namespace {

struct PyTrainer {
  Exclusive exclusive;
  std::unique_ptr<Trainer> trainer;
  int64_t batch_tokens;
  std::vector<std::string> missing;  // parameters that nobody has set
};

// Documents with a label for each token, distributed in order over passes of at most `batch_tokens`.
std::vector<Batch> batches_of(nb::handle ids_object, nb::handle labels_object, nb::handle lengths_object,
                              int64_t batch_tokens) {
  const Integers ids = integers_of(ids_object, "input_ids", 0, INT32_MAX),
                 labels = integers_of(labels_object, "labels", INT32_MIN, INT32_MAX);
  if (ids.shape != labels.shape || ids.shape.empty() || ids.shape.size() > 2)
    throw InvalidArgument("input_ids has {} axes and {} elements, labels has {} and {}; expected both [batch, tokens] "
                          "or, packed, [tokens]",
                          ids.shape.size(), ids.values.size(), labels.shape.size(), labels.values.size());
  const bool rows = ids.shape.size() == 2;
  const auto total = static_cast<int64_t>(ids.values.size());
  std::vector<int64_t> lengths = rows ? std::vector<int64_t>(static_cast<size_t>(ids.shape[0]), ids.shape[1])
                                      : std::vector<int64_t>{total};
  if (!lengths_object.is_none()) lengths = integers_of(lengths_object, "input_lengths", 1, INT32_MAX).values;
  if (rows && static_cast<int64_t>(lengths.size()) != ids.shape[0])
    throw InvalidArgument("input_lengths has {} entries; input_ids has {} rows", lengths.size(), ids.shape[0]);

  std::vector<Batch> batches;
  int64_t start = 0;
  for (size_t s = 0; s < lengths.size(); ++s) {
    const int64_t length = lengths[s], room = rows ? ids.shape[1] : total - start;
    if (rows) start = static_cast<int64_t>(s) * ids.shape[1];
    if (length < 1 || length > room)
      throw InvalidArgument("document {} has {} tokens; there is room for 1 to {}", s, length, room);
    if (length > batch_tokens)
      throw InvalidArgument("document {} has {} tokens; a pass takes {} (batch_tokens)", s, length, batch_tokens);
    if (batches.empty() || static_cast<int64_t>(batches.back().token_ids.size()) + length > batch_tokens) {
      batches.emplace_back();
      batches.back().query_start.push_back(0);
    }
    Batch& batch = batches.back();
    for (int64_t t = 0; t < length; ++t) {
      const auto at = static_cast<size_t>(start + t);
      batch.token_ids.push_back(static_cast<int32_t>(ids.values[at]));
      batch.positions.push_back(static_cast<int32_t>(t));
      batch.labels.push_back(labels.values[at] < 0 ? -1 : static_cast<int32_t>(labels.values[at]));
      batch.num_labels += labels.values[at] >= 0;
    }
    batch.lengths.push_back(static_cast<int32_t>(length));
    batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
    start += length;
  }
  if (!rows && start != total)
    throw InvalidArgument("input_lengths add up to {}; there are {} input_ids", start, total);
  return batches;
}

void require_loaded(const PyTrainer& self) {
  if (self.missing.empty()) return;
  throw NotFound("{} parameters were never set, first '{}'; use load_pretrained, load_random or load_param",
                 self.missing.size(), self.missing.front());
}

}  // namespace

void bind_trainer(nb::module_& m) {
  nb::class_<StepResult>(m, "StepResult", "Of one optimizer step; unpacks as (loss, grad_norm).")
      .def_ro("loss", &StepResult::loss, "mean cross entropy over the labelled tokens, nats")
      .def_ro("grad_norm", &StepResult::grad_norm, "L2 norm of all gradients before clipping")
      .def(
          "__iter__",
          [](const StepResult& self) { return nb::iter(nb::make_tuple(self.loss, self.grad_norm)); },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[float]"))
      .def("__repr__", [](const StepResult& self) {
        return fmt::format("StepResult(loss={}, grad_norm={})", self.loss, self.grad_norm);
      });

  nb::class_<PyTrainer>(m, "Trainer",
                        "A model, its gradients and AdamW on one device. The forward pass is that of serving: the same "
                        "kernels and bits.\n\n"
                        "Calls from several threads take turns. The GIL is released while it computes.")
      .def(
          "__init__",
          [](PyTrainer* self, const PyLlamaConfig& config, std::string device, int threads, std::string isa,
             const std::string& weights, int64_t batch_tokens, double beta1, double beta2, double eps,
             double weight_decay, double max_grad_norm, std::vector<std::string> disabled_fusions) {
            const auto require = [](bool ok, const char* name, double value, const char* range) {
              if (!ok) throw InvalidArgument("{} is {}; expected {}", name, value, range);
            };
            require(batch_tokens >= 1 && batch_tokens <= int64_t{1} << 24, "batch_tokens",
                    static_cast<double>(batch_tokens), "1 to 2^24");
            require(beta1 >= 0 && beta1 < 1, "beta1", beta1, "0 to less than 1");
            require(beta2 >= 0 && beta2 < 1, "beta2", beta2, "0 to less than 1");
            require(eps > 0 && eps < 1, "eps", eps, "more than 0, less than 1");
            require(weight_decay >= 0 && weight_decay < 1e6, "weight_decay", weight_decay, "0 to 1e6");
            require(max_grad_norm >= 0 && max_grad_norm < 1e30, "max_grad_norm", max_grad_norm, "0 (off) to 1e30");
            const train::TrainerOptions options{.weights = dtype_of_name(weights, "weights"),
                                                .batch_tokens = batch_tokens,
                                                .beta1 = beta1,
                                                .beta2 = beta2,
                                                .eps = eps,
                                                .weight_decay = weight_decay,
                                                .max_grad_norm = max_grad_norm,
                                                .disabled_fusions = std::move(disabled_fusions)};
            std::unique_ptr<Trainer> made;
            {
              const nb::gil_scoped_release released;
              made = std::make_unique<Trainer>(model_of(config), open_device_of(device, threads, isa), options);
            }
            new (self) PyTrainer();
            self->trainer = std::move(made);
            self->batch_tokens = batch_tokens;
            self->missing = self->trainer->parameter_names();
          },
          "config"_a, "device"_a = "cpu", nb::kw_only(), "threads"_a = 0, "isa"_a = "", "weights"_a = "f32",
          "batch_tokens"_a = 4096, "beta1"_a = 0.9, "beta2"_a = 0.95, "eps"_a = 1e-8, "weight_decay"_a = 0.1,
          "max_grad_norm"_a = 1.0, "disabled_fusions"_a = std::vector<std::string>(),
          "weights        \"f32\", or \"bf16\" with f32 master copies\n"
          "batch_tokens   most tokens of one pass\n"
          "weight_decay   decoupled, on parameters of two or more dimensions\n"
          "max_grad_norm  0: no clipping\n"
          "Set the parameters before the first step.")
      .def(
          "load_pretrained",
          [](PyTrainer& self, nb::handle path) {
            const Exclusive::Use use(self.exclusive, "load_pretrained");
            const std::string name = resolve_model(path);
            {
              const nb::gil_scoped_release released;
              self.trainer->load(models::open_checkpoint(name));
            }
            self.missing.clear();
          },
          "path"_a.none(), nb::sig("def load_pretrained(self, path: str | os.PathLike[str] | None) -> None"),
          "Takes the weights of a model, which must have the trainer's configuration.")
      .def(
          "load_random",
          [](PyTrainer& self, uint64_t seed, double stddev) {
            const Exclusive::Use use(self.exclusive, "load_random");
            if (!(stddev >= 0 && stddev < 1e6)) throw InvalidArgument("stddev is {}; expected 0 to 1e6", stddev);
            {
              const nb::gil_scoped_release released;
              self.trainer->load_random(seed, stddev);
            }
            self.missing.clear();
          },
          "seed"_a, "stddev"_a = 0.02, "Fills every parameter: matrices normal, norms one, biases zero.")
      .def(
          "load_param",
          [](PyTrainer& self, const std::string& name, nb::handle param) {
            const Exclusive::Use use(self.exclusive, "load_param");
            const HostArray array(param, name);
            {
              const nb::gil_scoped_release released;
              self.trainer->load_param(name, array.view());
            }
            std::erase(self.missing, name);
          },
          "name"_a, "param"_a, nb::sig("def load_param(self, name: str, param: numpy.typing.ArrayLike) -> None"),
          "Takes one parameter, of any floating dtype (uint16: the bits of bf16), rounded to the trainer's. Raises "
          "NotFound, or InvalidArgument naming both shapes.")
      .def(
          "state_dict",
          [](PyTrainer& self) {
            const Exclusive::Use use(self.exclusive, "state_dict");
            require_loaded(self);
            std::vector<std::pair<std::string, Tensor>> parameters;
            {
              const nb::gil_scoped_release released;
              parameters = self.trainer->state_dict();
            }
            return to_dict(std::move(parameters));
          },
          nb::sig("def state_dict(self) -> dict[str, numpy.typing.NDArray[typing.Any]]"),
          "The weights that the passes read, as new arrays (bf16 as uint16).")
      .def(
          "step",
          [](PyTrainer& self, nb::handle input_ids, nb::handle labels, double learning_rate, nb::handle lengths) {
            const Exclusive::Use use(self.exclusive, "step");
            require_loaded(self);
            if (!(learning_rate >= 0 && learning_rate < 1e6))
              throw InvalidArgument("learning_rate is {}; expected 0 to 1e6", learning_rate);
            const std::vector<Batch> batches = batches_of(input_ids, labels, lengths, self.batch_tokens);
            const nb::gil_scoped_release released;
            return self.trainer->step(batches, learning_rate);
          },
          "input_ids"_a, "labels"_a, "learning_rate"_a, "input_lengths"_a.none() = nb::none(),
          nb::sig("def step(self, input_ids: numpy.typing.ArrayLike, labels: numpy.typing.ArrayLike, learning_rate: "
                  "float, input_lengths: numpy.typing.ArrayLike | None = None) -> StepResult"),
          "One optimizer step. input_ids and labels: [batch, tokens], every row a document, or packed [tokens] with "
          "input_lengths [documents]; input_lengths shortens rows. labels[i] is the token that should follow "
          "input_ids[i]; negative: not counted. Documents that do not fit one pass of batch_tokens take several, whose "
          "gradients add up; the loss is the mean over all labels of the step. Raises DataCorrupted when loss or "
          "gradient is not finite; the parameters are unchanged then.")
      .def(
          "evaluate",
          [](PyTrainer& self, nb::handle input_ids, nb::handle labels, nb::handle lengths) {
            const Exclusive::Use use(self.exclusive, "evaluate");
            require_loaded(self);
            const std::vector<Batch> batches = batches_of(input_ids, labels, lengths, self.batch_tokens);
            double sum = 0;
            int64_t count = 0;
            {
              const nb::gil_scoped_release released;
              for (const Batch& batch : batches) {
                const auto [loss, num_labels] = self.trainer->evaluate(batch);
                sum += loss * static_cast<double>(num_labels);
                count += num_labels;
              }
            }
            if (count == 0) throw InvalidArgument("no token has a label");
            return sum / static_cast<double>(count);
          },
          "input_ids"_a, "labels"_a, "input_lengths"_a.none() = nb::none(),
          nb::sig("def evaluate(self, input_ids: numpy.typing.ArrayLike, labels: numpy.typing.ArrayLike, "
                  "input_lengths: numpy.typing.ArrayLike | None = None) -> float"),
          "Mean loss over the labels by the serving pass; changes nothing. Arguments as for `step`.")
      .def(
          "gradient",
          [](PyTrainer& self, const std::string& name) {
            const Exclusive::Use use(self.exclusive, "gradient");
            return to_numpy(self.trainer->gradient(name));
          },
          "name"_a, nb::sig("def gradient(self, name: str) -> numpy.typing.NDArray[numpy.float32]"),
          "Gradient of a parameter in the last step, before clipping, as a new array.")
      .def_prop_ro(
          "parameter_names", [](PyTrainer& self) { return self.trainer->parameter_names(); }, "names of all parameters")
      .def_prop_ro(
          "num_parameters", [](PyTrainer& self) { return self.trainer->num_parameters(); }, "elements of all parameters")
      .def_prop_ro(
          "num_steps", [](PyTrainer& self) { return self.trainer->num_steps(); }, "optimizer steps that were done");
}

}  // namespace eadem::python
