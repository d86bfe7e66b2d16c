// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/linear/cublas_lt.h"

#include <dlfcn.h>

#include "eadem/core/error.h"

namespace eadem {

CublasLt open_cublas_lt(const std::string& name, const std::string& directory) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const std::string first = dlerror();
    library = dlopen((directory + "/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
      throw DeviceError(
          "CUDA devices need cuBLASLt, which comes with a CUDA toolkit, and it cannot be opened: {}; {} (set "
          "LD_LIBRARY_PATH to its directory)",
          first, dlerror());
  }
  // It stays open: handles and kernels live in it.
  CublasLt functions;
#define EADEM_FIND(function)                                                                                 \
  functions.function = reinterpret_cast<decltype(functions.function)>(dlsym(library, "cublasLt" #function)); \
  if (functions.function == nullptr) throw DeviceError("{} has no cublasLt" #function, name);
  EADEM_CUBLAS_LT_FUNCTIONS(EADEM_FIND)
#undef EADEM_FIND
  return functions;
}

const CublasLt& cublas_lt() {
  static const CublasLt library =
      open_cublas_lt(fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR), EADEM_CUDA_LIBRARIES);
  return library;
}

}  // namespace eadem
