// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/weight_writer.h"

#include "eadem/io/weights_internal.h"

namespace eadem::io {

WeightWriter::WeightWriter(const std::string& path, std::string_view header, std::vector<TensorHeader> tensors,
                           int64_t alignment)
    : file_(path), path_(path), tensors_(std::move(tensors)), alignment_(alignment) {
  file_.write(header);
  skip_complete();
}

void WeightWriter::write(const TensorView& values) {
  if (values.num_elements() == 0) return;
  EADEM_CHECK(next_ < tensors_.size(), "{}: values after the last tensor", path_);
  const TensorHeader& tensor = tensors_[next_];
  EADEM_CHECK(tensor.type == WeightType(values.dtype, values.encoding), "{}: {} for tensor {}, which is {}", path_,
              to_string(values), tensor.name, tensor.type.name());
  const std::span<const std::byte> bytes = bytes_of(values);
  written_bytes_ += std::ssize(bytes);
  EADEM_CHECK(written_bytes_ <= stored_bytes(tensor.type, tensor.shape), "{}: {} bytes for tensor {} {}", path_,
              written_bytes_, tensor.name, to_string(tensor.shape));
  file_.write(bytes);
  skip_complete();
}

// Moves on to the first incomplete tensor, and writes the padding behind each complete one.
void WeightWriter::skip_complete() {
  while (next_ < tensors_.size()) {
    const int64_t size_bytes = stored_bytes(tensors_[next_].type, tensors_[next_].shape);
    if (written_bytes_ < size_bytes) return;
    file_.write(std::string(static_cast<size_t>(padding_of(size_bytes, alignment_)), '\0'));
    ++next_, written_bytes_ = 0;
  }
}

void WeightWriter::commit() {
  EADEM_CHECK(next_ == tensors_.size(), "{}: tensor {} was not written whole", path_, tensors_[next_].name);
  file_.commit();
}

}  // namespace eadem::io
