// SPDX-License-Identifier: Apache-2.0
//
// What the sources of the extension module share. Every function here is called with the GIL held.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/core/hardware_config.h"
#include "eadem/models/llama_config.h"
#include "eadem/models/model.h"

namespace eadem::python {

namespace nb = nanobind;

// --- Each source adds its classes to the module.
void bind_errors(nb::module_& m);
void bind_configs(nb::module_& m);
void bind_tokenizer(nb::module_& m);
void bind_infer_engine(nb::module_& m);
void bind_llm(nb::module_& m);
void bind_trainer(nb::module_& m);
void bind_sequential(nb::module_& m);

// --- Arrays.

// A host tensor over the memory of a NumPy array or of anything that speaks DLPack or the buffer protocol, else over a
// copy (not contiguous, not aligned, a list). `view` is valid while this lives. uint16 holds the bits of bf16, which
// NumPy has no type for; ml_dtypes' bfloat16 is understood as well.
class HostArray {
 public:
  // Throws InvalidArgument naming `name`: on another device, of a dtype that is none of ours, more than kMaxRank axes.
  HostArray(nb::handle array, std::string_view name);
  const TensorView& view() const { return view_; }

 private:
  nb::object owner_;  // keeps a converted object alive
  nb::ndarray<nb::ro> source_;
  Tensor copy_;
  TensorView view_;
};

// Integers of a list or array of any integer dtype and shape, in C order. Throws InvalidArgument naming `name`: not
// integers, or outside [min, max].
struct Integers {
  std::vector<int64_t> values;
  std::vector<int64_t> shape;
};
Integers integers_of(nb::handle array, std::string_view name, int64_t min, int64_t max);
std::vector<int32_t> narrowed(const std::vector<int64_t>& values);

// An array that owns the tensor's bytes: no copy. bf16 arrives as uint16.
nb::object to_numpy(Tensor tensor);
// A copy of a host view.
nb::object copy_to_numpy(const TensorView& view);
template <typename T>
nb::object to_numpy(const std::vector<T>& values, std::initializer_list<size_t> shape) {
  Tensor tensor = Tensor::on_host(dtype_of<T>, Shape{static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), tensor.view.as<T>());
  std::vector<int64_t> dims(shape.begin(), shape.end());
  tensor.view = tensor.view.reshaped(Shape(std::span<const int64_t>(dims)));
  return to_numpy(std::move(tensor));
}

// {name: array} of parameters.
nb::dict to_dict(std::vector<std::pair<std::string, Tensor>> parameters);

// --- Names and paths.
DType dtype_of_name(const std::string& name, std::string_view argument);
std::optional<DType> optional_dtype(const std::optional<std::string>& name, std::string_view argument);
// A path as it is, the name of a bundled model, or None for the default one. Throws NotFound.
std::string resolve_model(nb::handle model);
// Takes str and os.PathLike.
std::string path_of(nb::handle path);

// --- The configuration of the Llama family, fixed once made.
struct PyLlamaConfig {
  models::LlamaConfig config;
};
std::shared_ptr<const models::Model> model_of(const PyLlamaConfig& config);

// --- Threads and signals.

// Lets one Python thread at a time into an object; the others wait without the GIL. A callback of a call must not call
// the same object again: that would wait for itself, and is refused.
class Exclusive {
 public:
  class Use {
   public:
    Use(Exclusive& exclusive, const char* what);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Exclusive& exclusive_;
  };

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> user_{};
};

// Ctrl-C during a long call without the GIL. `poll` is cheap: it takes the GIL to ask at most every 50 ms, because
// waiting for it behind another Python thread takes milliseconds.
class SignalPoll {
 public:
  // Throws what the signal handler raised (KeyboardInterrupt).
  void poll();

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// Called while a model loads: polls for Ctrl-C, then calls progress(done, total) if there is one.
std::function<void(int64_t, int64_t)> load_progress(const std::optional<nb::object>& progress);

}  // namespace eadem::python
