// SPDX-License-Identifier: Apache-2.0
//
// cuBLASLt, which is opened at run time when the first CUDA device is, so that a program with this backend starts and
// serves on CPUs where the library is missing. It comes with a CUDA toolkit and not with a driver.
#pragma once

#include <cublasLt.h>

#include <string>

namespace eadem {

// The functions that the backend calls, under their names without "cublasLt".
struct CublasLt {
#define EADEM_CUBLAS_LT_FUNCTIONS(function)                                                                         \
  function(Create) function(Destroy) function(GetVersion) function(GetStatusName) function(GetStatusString)         \
      function(Matmul) function(MatmulDescCreate) function(MatmulDescDestroy) function(MatmulDescSetAttribute)      \
          function(MatrixLayoutCreate) function(MatrixLayoutDestroy) function(MatrixLayoutSetAttribute)             \
              function(MatmulPreferenceCreate) function(MatmulPreferenceDestroy)                                    \
                  function(MatmulPreferenceSetAttribute) function(MatmulAlgoGetHeuristic) function(MatmulAlgoCheck) \
                      function(MatmulAlgoConfigGetAttribute)
#define EADEM_DECLARE(name) decltype(&cublasLt##name) name = nullptr;
  EADEM_CUBLAS_LT_FUNCTIONS(EADEM_DECLARE)
#undef EADEM_DECLARE
};

// Opens the library `name` ("libcublasLt.so.13": where the dynamic linker looks), then `directory`/`name` if there is
// no such. Throws DeviceError with what the linker said of both, or naming a function that is missing.
CublasLt open_cublas_lt(const std::string& name, const std::string& directory);

// The library of the major version that this was built with, opened at the first call; else of the toolkit that it was
// built with. Thread-safe. Throws DeviceError, at each call anew.
const CublasLt& cublas_lt();

}  // namespace eadem
