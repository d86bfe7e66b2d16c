// SPDX-License-Identifier: Apache-2.0
//
// The keyword arguments that LLM and InferEngine share, and the cache and rank configurations.
#pragma once

#include "eadem/engine/infer_engine.h"
#include "eadem/python/bindings.h"

namespace eadem::python {

// The root of the cache configurations, as the classes of Python derive from one.
struct PyCacheConfig {
  engine::CacheConfig config;
};
struct PyStaticKVCacheConfig : PyCacheConfig {};
struct PyPagedKVCacheConfig : PyCacheConfig {};

struct EngineArguments {
  std::string device = "cpu";
  int threads = 0;
  std::string isa, mode;
  std::optional<std::string> weights, activations, kv_dtype;
  int64_t max_step_tokens = 512;
  std::vector<std::string> disabled_fusions;
  bool op_by_op = false;

  std::shared_ptr<Device> open() const;
  // Everything but cache, ranks and logit rows.
  engine::EngineOptions options() const;
};

// Checked here, because the device interface states it for its callers.
std::shared_ptr<Device> open_device_of(const std::string& device, int threads, const std::string& isa);

}  // namespace eadem::python
