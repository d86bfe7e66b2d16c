// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/linear.h"
#include "eadem/ops/rms_norm.h"
#include "eadem/pipeline/sequential.h"
#include "eadem/python/binding.h"

namespace eadem::python {

using namespace nb::literals;

namespace {

// The modules of a Sequential.
struct Linear {
  int64_t in_features, out_features;
  bool bias;
};
struct RmsNorm {
  int64_t size;
  double eps;
};
struct Activation {
  kernels::ActivationKind kind;
};
using AnyModule = std::variant<Linear, RmsNorm, Activation>;

kernels::ActivationKind activation_kind(const std::string& name) {
  using enum kernels::ActivationKind;
  for (kernels::ActivationKind kind : {silu, gelu, gelu_tanh, relu, relu2})
    if (ops::activation_name(kind) == name) return kind;
  throw InvalidArgument("activation '{}'; known are silu, gelu, gelu_tanh, relu, relu2", name);
}

std::shared_ptr<const pipeline::Module> make_module(const AnyModule& module, const std::string& scope) {
  using pipeline::OpModule;
  if (const auto* linear = std::get_if<Linear>(&module)) {
    std::vector<OpModule::Parameter> parameters = {
        {"weight", TensorType(DType::f32, {linear->out_features, linear->in_features})}};
    if (linear->bias) parameters.push_back({"bias", TensorType(DType::f32, {linear->out_features})});
    return std::make_shared<OpModule>(
        scope, std::make_shared<ops::Linear>(kernels::LinearAttrs{.has_bias = linear->bias}), parameters);
  }
  if (const auto* norm = std::get_if<RmsNorm>(&module))
    return std::make_shared<OpModule>(
        scope, std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{.eps = static_cast<float>(norm->eps)}),
        std::vector<OpModule::Parameter>{{"weight", TensorType(DType::f32, {norm->size})}});
  return std::make_shared<OpModule>(
      scope, std::make_shared<ops::Activation>(kernels::ActivationAttrs{.kind = std::get<Activation>(module).kind}),
      std::vector<OpModule::Parameter>{});
}

void require_positive(const char* name, int64_t value) {
  if (value < 1 || value > (int64_t{1} << 31)) throw InvalidArgument("{} is {}; expected 1 to 2^31", name, value);
}

// Returns the row width after `module`; throws when the module does not take rows of `width`.
int64_t width_after(const AnyModule& module, int64_t width, size_t index) {
  const auto require = [&](int64_t expected) {
    if (width != expected)
      throw InvalidArgument("module {} takes rows of {}; those before it give {}", index, expected, width);
  };
  if (const auto* linear = std::get_if<Linear>(&module)) {
    require(linear->in_features);
    return linear->out_features;
  }
  if (const auto* norm = std::get_if<RmsNorm>(&module)) require(norm->size);
  return width;
}

class Sequential {
 public:
  Sequential(const std::vector<AnyModule>& modules, int64_t row, int64_t max_rows, const std::string& device,
             int64_t threads, const std::string& isa) {
    require_positive("input_size", row);
    require_positive("max_rows", max_rows);
    if (modules.empty()) throw InvalidArgument("a Sequential without modules");
    std::vector<std::shared_ptr<const pipeline::Module>> made;
    int64_t width = row;
    for (size_t i = 0; i < modules.size(); ++i) {
      width = width_after(modules[i], width, i);
      made.push_back(make_module(modules[i], std::to_string(i)));
    }
    sequential_ = std::make_unique<pipeline::Sequential>(std::move(made), std::vector<int64_t>{row}, max_rows,
                                                         open(device, threads, isa));
  }

  template <typename F>
  auto run(F&& call) {
    return exclusive_.run([&] { return call(*sequential_); });
  }
  // Runs a pass over rows; parameters must be loaded.
  template <typename F>
  nb::object pass(const char* name, const HostArray& array, F&& call) {
    const TensorView view = view_of(array, name);
    return to_numpy(run([&](pipeline::Sequential& sequential) {
      sequential.parameters().require_all_loaded("Sequential");
      return call(sequential, view);
    }));
  }
  // Whether the current rows have gone forward, which backward requires.
  bool went_forward = false;

 private:
  Exclusive exclusive_;
  std::unique_ptr<pipeline::Sequential> sequential_;
};

}  // namespace

void bind_sequential(nb::module_& m) {
  nb::class_<Linear>(m, "Linear",
                     "y = x weight^T + bias. Parameters: weight [out_features, in_features], bias [out_features].")
      .def(
          "__init__",
          [](Linear* self, int64_t in_features, int64_t out_features, bool bias) {
            require_positive("in_features", in_features);
            require_positive("out_features", out_features);
            new (self) Linear{in_features, out_features, bias};
          },
          "in_features"_a, "out_features"_a, "bias"_a = true)
      .def_ro("in_features", &Linear::in_features)
      .def_ro("out_features", &Linear::out_features)
      .def_ro("bias", &Linear::bias);
  nb::class_<RmsNorm>(m, "RMSNorm", "y = x / sqrt(mean(x^2) + eps) * weight. Parameter: weight [size].")
      .def(
          "__init__",
          [](RmsNorm* self, int64_t size, double eps) {
            require_positive("size", size);
            new (self) RmsNorm{size, eps};
          },
          "size"_a, "eps"_a = 1e-6)
      .def_ro("size", &RmsNorm::size)
      .def_ro("eps", &RmsNorm::eps);
  nb::class_<Activation>(m, "Activation", "y = f(x); f is silu, gelu, gelu_tanh, relu or relu2.")
      .def(
          "__init__", [](Activation* self, const std::string& name) { new (self) Activation{activation_kind(name)}; },
          "name"_a)
      .def_prop_ro("name", [](const Activation& self) { return std::string(ops::activation_name(self.kind)); });

  nb::class_<Sequential>(
      m, "Sequential",
      "A chain of modules over independent rows [rows, input_size], rows <= max_rows, float32. Parameters are named by "
      "the place in the chain: \"0.weight\". Load each of them before the first pass. One thread at a time runs; "
      "others wait.")
      .def(
          "__init__",
          [](Sequential* self, const std::vector<AnyModule>& modules, int64_t input_size, int64_t max_rows,
             const std::string& device, int64_t threads, const std::string& isa) {
            const GilRelease release;
            new (self) Sequential(modules, input_size, max_rows, device, threads, isa);
          },
          "modules"_a, "input_size"_a, nb::kw_only(), "max_rows"_a = 256, "device"_a = "cpu", "threads"_a = 0,
          "isa"_a = "")
      .def(
          "parameter_names",
          [](Sequential& self) { return self.run([](pipeline::Sequential& s) { return s.parameters().names(); }); },
          "Names of the parameters.")
      .def(
          "load_param",
          [](Sequential& self, const std::string& name, const HostArray& array) {
            const TensorView view = view_of(array, name);
            self.run([&](pipeline::Sequential& s) { s.parameters().load(name, view, "load_param"); });
          },
          "name"_a, "array"_a, "Sets a parameter; raises NotFound, or InvalidArgument naming both shapes.")
      .def(
          "state_dict",
          [](Sequential& self) {
            return to_numpy_dict(self.run([](pipeline::Sequential& s) {
              std::vector<std::pair<std::string, Tensor>> result;
              for (const std::string& name : s.parameters().names())
                result.emplace_back(name, s.parameters().to_host(name));
              return result;
            }));
          },
          nb::sig("def state_dict(self) -> dict[str, numpy.typing.NDArray]"), "Copies of the parameters.")
      .def(
          "inference",
          [](Sequential& self, const HostArray& x) {
            return self.pass("x", x, [](pipeline::Sequential& s, const TensorView& view) { return s.inference(view); });
          },
          "x"_a, nb::sig("def inference(self, x: object) -> numpy.typing.NDArray"),
          "y of x [rows, input_size] float32.")
      .def(
          "forward",
          [](Sequential& self, const HostArray& x) {
            return self.pass("x", x, [&](pipeline::Sequential& s, const TensorView& view) {
              Tensor y = s.forward(view);
              self.went_forward = true;
              return y;
            });
          },
          "x"_a, nb::sig("def forward(self, x: object) -> numpy.typing.NDArray"),
          "The same, and keeps what backward needs.")
      .def(
          "backward",
          [](Sequential& self, const HostArray& dy) {
            return self.pass("dy", dy, [&](pipeline::Sequential& s, const TensorView& view) {
              if (!self.went_forward) throw InvalidArgument("backward before forward: each needs one of its own");
              Tensor dx = s.backward(view);
              self.went_forward = false;
              return dx;
            });
          },
          "dy"_a, nb::sig("def backward(self, dy: object) -> numpy.typing.NDArray"),
          "The gradient of x of the last forward, which it uses up; gradients of the parameters add up.")
      .def(
          "gradient",
          [](Sequential& self, const std::string& name) {
            return to_numpy(self.run([&](pipeline::Sequential& s) { return s.gradient(name); }));
          },
          "name"_a, nb::sig("def gradient(self, name: str) -> numpy.typing.NDArray"), "The gradient of a parameter.")
      .def(
          "zero_gradients", [](Sequential& self) { self.run([](pipeline::Sequential& s) { s.zero_gradients(); }); },
          "Sets all gradients to zero.");
}

}  // namespace eadem::python
