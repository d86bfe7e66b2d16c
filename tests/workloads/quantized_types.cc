// SPDX-License-Identifier: Apache-2.0
#include "tests/workloads/quantized_types.h"

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"

namespace eadem::workloads {

std::vector<QuantizedType> quantized_types() {
  std::vector<QuantizedType> result;
  for (const BlockEncoding* encoding : BlockEncoding::writable())
    result.push_back({encoding, encoding->format().block_size, false});
  // Of those that are only read, one for each layout that products know.
  for (const char* name : {"iq1_m", "iq2_xxs", "iq3_xxs", "tq1_0"})
    result.push_back({BlockEncoding::find(name), kMaxBlockSize, false});
  for (const char* name : {"int4_g32_f16", "int4_g64_f16_zeros", "int4_g128_bf16_zeros", "int4_row_f32",
                           "int4_g128_f16_zeros_order", "int8_g32_f32_zeros", "int8_g128_f16", "int8_row_bf16"}) {
    const GroupEncoding* encoding = GroupEncoding::find(name);
    EADEM_CHECK(encoding != nullptr, "no encoding {}", name);
    const GroupFormat& format = encoding->format();
    result.push_back({encoding, format.group_size == 0 ? 32 : format.group_size, format.has_order});
  }
  for (const char* name : {"fp8_e4m3_tensor", "fp8_e4m3_channel", "fp8_e4m3_block128", "fp8_e5m2_channel"}) {
    const Fp8Encoding* encoding = Fp8Encoding::find(name);
    EADEM_CHECK(encoding != nullptr, "no encoding {}", name);
    result.push_back({encoding, 50, false});
  }
  return result;
}

}  // namespace eadem::workloads
