// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/python/binding.h"

namespace eadem::python {

namespace {

using Code = nb::dlpack::dtype_code;

std::optional<DType> dtype_of_array(const nb::dlpack::dtype& dtype) {
  const auto code = static_cast<Code>(dtype.code);
  if (dtype.lanes != 1) return std::nullopt;
  if (code == Code::Float && dtype.bits == 64) return DType::f64;
  if (code == Code::Float && dtype.bits == 32) return DType::f32;
  if (code == Code::Float && dtype.bits == 16) return DType::f16;
  if ((code == Code::Bfloat || code == Code::UInt) && dtype.bits == 16) return DType::bf16;
  return std::nullopt;
}

nb::dlpack::dtype array_dtype(DType dtype) {
  const auto make = [&](Code code) {
    return nb::dlpack::dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(8 * dtype_size(dtype)), 1};
  };
  switch (dtype) {
    case DType::f64:
    case DType::f32:
    case DType::f16: return make(Code::Float);
    case DType::i64:
    case DType::i32: return make(Code::Int);
    case DType::bf16:  // its bits
    case DType::u8: return make(Code::UInt);
  }
  return {};
}

}  // namespace

TensorView view_of(const HostArray& array, const std::string& name) {
  const std::optional<DType> dtype = dtype_of_array(array.dtype());
  if (!dtype)
    throw InvalidArgument(
        "'{}' has elements of {} bits of another kind; expected float64, float32, float16, bfloat16 "
        "(or uint16, its bits)",
        name, array.dtype().bits);
  if (array.ndim() > static_cast<size_t>(kMaxRank))
    throw InvalidArgument("'{}' has {} dimensions; expected at most {}", name, array.ndim(), kMaxRank);
  std::vector<int64_t> dims;
  for (size_t axis = 0; axis < array.ndim(); ++axis) dims.push_back(static_cast<int64_t>(array.shape(axis)));
  return TensorView(const_cast<void*>(array.data()), *dtype, Shape(std::span<const int64_t>(dims)));
}

nb::object to_numpy(const Tensor& tensor) {
  std::vector<size_t> dims;
  for (int64_t extent : tensor.shape().dims()) dims.push_back(static_cast<size_t>(extent));
  auto* keep = new std::shared_ptr<const void>(tensor.storage);
  const nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<const void>*>(p); });
  const nb::object array = nb::cast(
      nb::ndarray<nb::numpy>(tensor.view.data, dims.size(), dims.data(), owner, nullptr, array_dtype(tensor.dtype())));
  if (tensor.dtype() != DType::bf16) return array;
  nb::object bfloat16;
  try {
    bfloat16 = nb::module_::import_("ml_dtypes").attr("bfloat16");
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_ImportError)) throw;
    return array;
  }
  return array.attr("view")(bfloat16);
}

nb::dict to_numpy_dict(const std::vector<std::pair<std::string, Tensor>>& tensors) {
  nb::dict result;
  for (const auto& [name, tensor] : tensors) result[name.c_str()] = to_numpy(tensor);
  return result;
}

std::shared_ptr<Device> open(const std::string& device, int64_t threads, const std::string& isa,
                             int64_t prefill_threads, bool pin) {
  const auto in_range = [](const char* name, int64_t value) {
    if (value < 0 || value > 4096) throw InvalidArgument("{} is {}; expected 0 to 4096", name, value);
    return static_cast<int>(value);
  };
  const DeviceOptions options{.num_threads = in_range("threads", threads),
                              .prefill_threads = in_range("prefill_threads", prefill_threads),
                              .pin = pin,
                              .isa = isa,
                              .log = python_logger()};
  if (!device.starts_with("cpu") && (threads != 0 || prefill_threads != 0 || !pin || !isa.empty()))
    throw InvalidArgument("threads, prefill_threads, pin and isa are for the CPU; device is '{}'", device);
  return open_device(device, options);
}

std::optional<DType> dtype_argument(const char* name, const std::optional<std::string>& value) {
  if (!value) return std::nullopt;
  const std::optional<DType> dtype = dtype_from_name(*value);
  const bool holds_f16 = std::string_view(name) == "weights";  // nothing computes activations in f16
  if (!dtype || (*dtype != DType::f32 && *dtype != DType::bf16 && (*dtype != DType::f16 || !holds_f16)))
    throw InvalidArgument("{} is '{}'; expected f32{}", name, *value, holds_f16 ? ", bf16 or f16" : " or bf16");
  return dtype;
}

namespace {

std::optional<WeightType> kv_argument(const std::optional<std::string>& value) {
  if (!value) return std::nullopt;
  const std::optional<WeightType> type = kv_cache_type(*value);
  if (!type) throw InvalidArgument("kv_dtype is '{}'; expected f32, bf16, f16, int8 or fp8_e4m3", *value);
  return type;
}

}  // namespace

engine::EngineOptions engine_options(const EngineArguments& arguments) {
  engine::EngineOptions options;
  if (arguments.cache) options.cache = *arguments.cache;
  options.mode = hardware_mode_from_name(arguments.mode);
  options.hardware.weights = dtype_argument("weights", arguments.weights);
  options.hardware.activations = dtype_argument("activations", arguments.activations);
  if (arguments.matmul_input) options.hardware.matmul_input = matmul_input_from_name(*arguments.matmul_input);
  options.hardware.kv_cache = kv_argument(arguments.kv_dtype);
  options.max_num_batched_tokens = arguments.max_num_batched_tokens;
  options.max_logit_rows = arguments.max_logit_rows;
  options.disabled_fusions = arguments.disabled_fusions;
  options.pack_cache = arguments.pack_cache.value_or("");
  options.deterministic_across_tp = arguments.dist.deterministic_across_tp;
  options.divide = arguments.dist.ep_size > 1 ? MeshAxis::ep : MeshAxis::tp;
  return options;
}

Logger python_logger() {
  return Logger(LogLevel::info, [](LogLevel level, std::string_view message) {
    const GilAcquire acquire;
    const nb::object logger = nb::module_::import_("logging").attr("getLogger")("eadem");
    const char* method = level >= LogLevel::error ? "error" : level == LogLevel::warning ? "warning" : "info";
    logger.attr(method)("%s", std::string(message));
  });
}

}  // namespace eadem::python
