// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/sequential.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "eadem/core/error.h"
#include "eadem/ops/elementwise.h"
#include "eadem/ops/linear.h"
#include "eadem/ops/rms_norm.h"
#include "eadem/ops/softmax.h"
#include "eadem/python/bindings.h"
#include "eadem/python/engine_arguments.h"

namespace eadem::python {

using namespace nb::literals;
using pipeline::Sequential;

namespace {

struct PyOp {
  ops::OpPtr op;
};

struct PyModule {
  std::shared_ptr<const pipeline::Module> module;
};

struct PySequential {
  Exclusive exclusive;
  std::unique_ptr<Sequential> sequential;
  bool loaded = false;
  bool went_forward = false;  // the activations that backward needs are there
};

kernels::ActivationKind activation_kind(const std::string& name) {
  using Kind = kernels::ActivationKind;
  std::string known;
  for (Kind kind : {Kind::silu, Kind::gelu, Kind::gelu_tanh, Kind::relu, Kind::relu2}) {
    if (ops::activation_name(kind) == name) return kind;
    known += (known.empty() ? "" : ", ") + std::string(ops::activation_name(kind));
  }
  throw InvalidArgument("activation \"{}\"; known are {}", name, known);
}

ops::RefTensor ref_of(const TensorView& view) {
  ops::RefTensor result{view.shape, std::vector<double>(static_cast<size_t>(view.num_elements()))};
  const TensorView wide(result.data.data(), DType::f64, view.shape);
  convert_on_host(wide, view);
  return result;
}

// The inference pass of the double-precision reference.
nb::object reference(const PyOp& self, const nb::args& arrays) {
  std::vector<TensorType> types;
  std::vector<ops::RefTensor> inputs;
  for (nb::handle array : arrays) {
    const HostArray host(array, fmt::format("input {}", inputs.size()));
    if (!is_floating(host.view().dtype))
      throw InvalidArgument("input {} is {}; expected floating numbers", inputs.size(), to_string(host.view()));
    std::vector<Dim> dims(host.view().shape.dims().begin(), host.view().shape.dims().end());
    types.emplace_back(DType::f32, std::span<const Dim>(dims));
    inputs.push_back(ref_of(host.view()));
  }
  if (types.size() != self.op->inputs().size())
    throw InvalidArgument("{} takes {} inputs; {} were given", self.op->name(), self.op->inputs().size(), types.size());
  std::vector<ops::RefTensor> outputs;
  for (const TensorType& type : self.op->infer_types(types)) {
    const Shape shape = type.bind({});
    outputs.push_back({shape, std::vector<double>(static_cast<size_t>(shape.num_elements()))});
  }
  self.op->reference(ops::Pass::inference, inputs, outputs);
  Tensor result = Tensor::on_host(DType::f64, outputs.at(0).shape);
  std::copy(outputs[0].data.begin(), outputs[0].data.end(), result.view.as<double>());
  return to_numpy(std::move(result));
}

void require_loaded(PySequential& self) {
  if (self.loaded) return;
  self.sequential->parameters().require_all_loaded("Sequential");
  self.loaded = true;
}

nb::object run(PySequential& self, nb::handle array, const char* name, Tensor (Sequential::*pass)(const TensorView&)) {
  require_loaded(self);
  const HostArray x(array, name);
  Tensor result;
  {
    const nb::gil_scoped_release released;
    result = (self.sequential.get()->*pass)(x.view());
  }
  return to_numpy(std::move(result));
}

void bind_op(nb::module_& m) {
  nb::class_<PyOp>(m, "Op", "What is computed: an operator with its attributes. Immutable.")
      .def_static(
          "linear",
          [](bool bias) { return PyOp{std::make_shared<ops::Linear>(kernels::LinearAttrs{.has_bias = bias})}; },
          "bias"_a = false, "y = x @ weight.T + bias; inputs x [tokens, in], weight [out, in], bias [out] if there is one.")
      .def_static(
          "rms_norm",
          [](float eps) { return PyOp{std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{.eps = eps})}; },
          "eps"_a = 1e-5f, "y = x / sqrt(mean(x^2) + eps) * weight; inputs x [..., hidden], weight [hidden].")
      .def_static(
          "activation",
          [](const std::string& kind) {
            return PyOp{std::make_shared<ops::Activation>(kernels::ActivationAttrs{.kind = activation_kind(kind)})};
          },
          "kind"_a = "silu", "y = f(x): silu, gelu, gelu_tanh, relu or relu2.")
      .def_static(
          "softmax", [] { return PyOp{std::make_shared<ops::Softmax>()}; }, "Probabilities over the last axis.")
      .def("reference", reference,
           nb::sig("def reference(self, *inputs: numpy.typing.ArrayLike) -> numpy.typing.NDArray[numpy.float64]"),
           "The slow, obvious double-precision computation that every kernel is tested against.")
      .def_prop_ro(
          "name", [](const PyOp& self) { return std::string(self.op->name()); }, "the operator's name")
      .def_prop_ro(
          "input_names",
          [](const PyOp& self) {
            std::vector<std::string> names;
            for (const ops::Port& port : self.op->inputs()) names.emplace_back(port.name);
            return names;
          },
          "names of the inputs, in order")
      .def("__repr__",
           [](const PyOp& self) { return fmt::format("Op({} {})", self.op->name(), self.op->attrs_text()); });
}

}  // namespace

void bind_sequential(nb::module_& m) {
  bind_op(m);
  nb::class_<PyModule>(m, "Module", "An operator whose inputs after the first are parameters with names.")
      .def(
          "__init__",
          [](PyModule* self, std::string name, const PyOp& op,
             const std::vector<std::pair<std::string, std::vector<int64_t>>>& parameters) {
            std::vector<pipeline::OpModule::Parameter> list;
            for (const auto& [parameter, shape] : parameters) {
              std::vector<Dim> dims;
              for (int64_t extent : shape) {
                if (extent < 1 || extent > int64_t{1} << 31)
                  throw InvalidArgument("'{}.{}' has an extent of {}; expected 1 to 2^31", name, parameter, extent);
                dims.emplace_back(extent);
              }
              if (shape.size() > kMaxRank)
                throw InvalidArgument("'{}.{}' has {} axes; at most {} are supported", name, parameter, shape.size(),
                                      kMaxRank);
              list.push_back({parameter, TensorType(DType::f32, std::span<const Dim>(dims))});
            }
            const size_t expected = op.op->inputs().size() - 1;
            if (list.size() != expected)
              throw InvalidArgument("module '{}': {} parameters for {}; expected {}", name, list.size(), op.op->name(),
                                    expected);
            new (self) PyModule{std::make_shared<pipeline::OpModule>(std::move(name), op.op, std::move(list))};
          },
          "name"_a, "op"_a, "parameters"_a,
          "parameters: (name, shape) of each input after the first; `name` comes before theirs: \"norm.weight\".");

  nb::class_<PySequential>(m, "Sequential",
                           "Chains modules over rows that do not know of each other, in float32, and compiles them.\n\n"
                           "Calls from several threads take turns. The GIL is released while it computes.")
      .def(
          "__init__",
          [](PySequential* self, const std::vector<PyModule*>& modules, const std::vector<int64_t>& row_shape,
             int64_t max_rows, const std::string& device, int threads, const std::string& isa) {
            if (modules.empty()) throw InvalidArgument("modules is empty; expected at least one");
            if (max_rows < 1 || max_rows > int64_t{1} << 24)
              throw InvalidArgument("max_rows is {}; expected 1 to 2^24", max_rows);
            if (row_shape.empty() || row_shape.size() >= kMaxRank)
              throw InvalidArgument("row_shape has {} axes; expected 1 to {}", row_shape.size(), kMaxRank - 1);
            for (int64_t extent : row_shape)
              if (extent < 1 || extent > int64_t{1} << 31)
                throw InvalidArgument("row_shape has an extent of {}; expected 1 to 2^31", extent);
            std::vector<std::shared_ptr<const pipeline::Module>> chain;
            for (const PyModule* module : modules) chain.push_back(module->module);
            std::unique_ptr<Sequential> made;
            {
              const nb::gil_scoped_release released;
              made = std::make_unique<Sequential>(std::move(chain), row_shape, max_rows,
                                                  open_device_of(device, threads, isa));
            }
            new (self) PySequential();
            self->sequential = std::move(made);
          },
          "modules"_a, "row_shape"_a, "max_rows"_a, "device"_a = "cpu", nb::kw_only(), "threads"_a = 0, "isa"_a = "",
          "Inputs are [rows, *row_shape] float32 with at most max_rows rows. Raises InvalidArgument naming the "
          "operator and both types where modules do not fit. Set the parameters before the first call.")
      .def(
          "load_param",
          [](PySequential& self, const std::string& name, nb::handle param) {
            const Exclusive::Use use(self.exclusive, "load_param");
            const HostArray array(param, name);
            const nb::gil_scoped_release released;
            self.sequential->parameters().load(name, array.view(), "load_param");
          },
          "name"_a, "param"_a, nb::sig("def load_param(self, name: str, param: numpy.typing.ArrayLike) -> None"),
          "Takes one parameter. Raises NotFound, or InvalidArgument naming both shapes.")
      .def(
          "state_dict",
          [](PySequential& self) {
            const Exclusive::Use use(self.exclusive, "state_dict");
            require_loaded(self);
            std::vector<std::pair<std::string, Tensor>> parameters;
            for (const std::string& name : self.sequential->parameters().names())
              parameters.emplace_back(name, self.sequential->parameters().to_host(name));
            return to_dict(std::move(parameters));
          },
          nb::sig("def state_dict(self) -> dict[str, numpy.typing.NDArray[numpy.float32]]"),
          "The parameters, as new arrays.")
      .def(
          "inference",
          [](PySequential& self, nb::handle x) {
            const Exclusive::Use use(self.exclusive, "inference");
            self.went_forward = false;
            return run(self, x, "x", &Sequential::inference);
          },
          "x"_a, nb::sig("def inference(self, x: numpy.typing.ArrayLike) -> numpy.typing.NDArray[numpy.float32]"),
          "y = f(x), as a new array.")
      .def(
          "forward",
          [](PySequential& self, nb::handle x) {
            const Exclusive::Use use(self.exclusive, "forward");
            nb::object y = run(self, x, "x", &Sequential::forward);
            self.went_forward = true;
            return y;
          },
          "x"_a, nb::sig("def forward(self, x: numpy.typing.ArrayLike) -> numpy.typing.NDArray[numpy.float32]"),
          "The same bits as `inference`; keeps what `backward` needs.")
      .def(
          "backward",
          [](PySequential& self, nb::handle dy) {
            const Exclusive::Use use(self.exclusive, "backward");
            if (!self.went_forward) throw InvalidArgument("backward follows a forward; none is pending");
            nb::object dx = run(self, dy, "dy", &Sequential::backward);
            self.went_forward = false;
            return dx;
          },
          "dy"_a, nb::sig("def backward(self, dy: numpy.typing.ArrayLike) -> numpy.typing.NDArray[numpy.float32]"),
          "Once after `forward`: the gradient of x, as a new array; those of the parameters accumulate.")
      .def(
          "gradient",
          [](PySequential& self, const std::string& name) {
            const Exclusive::Use use(self.exclusive, "gradient");
            return to_numpy(self.sequential->gradient(name));
          },
          "name"_a, nb::sig("def gradient(self, name: str) -> numpy.typing.NDArray[numpy.float32]"),
          "What has accumulated for a parameter, as a new array.")
      .def(
          "zero_gradients",
          [](PySequential& self) {
            const Exclusive::Use use(self.exclusive, "zero_gradients");
            self.sequential->zero_gradients();
          },
          "Sets the gradients of all parameters to zero.")
      .def_prop_ro(
          "parameter_names", [](PySequential& self) { return self.sequential->parameters().names(); },
          "names of all parameters");
}

}  // namespace eadem::python
