// SPDX-License-Identifier: Apache-2.0
//
// Writing a file of weights tensor by tensor: the header needs names, types and shapes only, so no two tensors' values
// have to be in memory together.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "eadem/io/files/atomic_file.h"
#include "eadem/io/weights.h"

namespace eadem::io {

// A tensor that will be written.
struct TensorHeader {
  std::string name;
  WeightType type;
  Shape shape;
  // The name in a safetensors header of an 8-bit type that is no dtype here, I8 or F8_E4M3; `type` is then u8.
  std::string stored_type = {};
};

// The data of a file whose header is settled (begin_gguf, begin_safetensors). The file appears with commit(), whole;
// without it nothing appears (atomic_file.h). One thread at a time.
class WeightWriter {
 public:
  // `header` is everything before the data; tensors' data begin at multiples of `alignment`.
  WeightWriter(const std::string& path, std::string_view header, std::vector<TensorHeader> tensors, int64_t alignment);

  // The next values, in the order of the tensors: a tensor, or the next rows of one, of its type. Throws IoError.
  void write(const TensorView& values);
  // After the last tensor.
  void commit();

 private:
  void skip_complete();

  AtomicFile file_;
  std::string path_;
  std::vector<TensorHeader> tensors_;
  int64_t alignment_;
  size_t next_ = 0;            // the tensor that is being written
  int64_t written_bytes_ = 0;  // bytes of that tensor written so far
};

}  // namespace eadem::io
