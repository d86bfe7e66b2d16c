// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/rank_values.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace eadem::train {

namespace {

constexpr std::array kAxes = {MeshAxis::tp, MeshAxis::ep, MeshAxis::pp, MeshAxis::dp};

}  // namespace

bool is_first_rank(const Mesh& mesh) {
  return std::all_of(kAxes.begin(), kAxes.end(), [&](MeshAxis axis) { return mesh.rank(axis) == 0; });
}

std::vector<int64_t> gather_values(Device& device, const Mesh& mesh, MeshAxis axis, std::span<const int64_t> values) {
  const int64_t ranks = mesh.size(axis), count = std::ssize(values);
  if (ranks == 1) return {values.begin(), values.end()};
  std::vector<int64_t> all(static_cast<size_t>(ranks * count));
  const Tensor part = allocate_tensor(device, DType::i64, Shape{count});
  const Tensor parts = allocate_tensor(device, DType::i64, Shape{ranks, count});
  device.copy_from_host(part.view.data, values.data(), part.view.size_bytes());
  mesh.along(axis).all_gather(device, parts.view, part.view);
  device.copy_to_host(all.data(), parts.view.data, parts.view.size_bytes());
  return all;
}

std::vector<std::string> gather_texts(Device& device, const Mesh& mesh, MeshAxis axis, const std::string& text) {
  const int64_t own_size = std::ssize(text);
  const std::vector<int64_t> sizes = gather_values(device, mesh, axis, {&own_size, 1});
  const int64_t most = *std::max_element(sizes.begin(), sizes.end());
  const size_t words = (static_cast<size_t>(most) + sizeof(int64_t) - 1) / sizeof(int64_t);
  std::vector<std::string> texts(sizes.size());
  if (words == 0) return texts;
  std::vector<int64_t> own(words, 0);
  std::memcpy(own.data(), text.data(), text.size());
  const std::vector<int64_t> all = gather_values(device, mesh, axis, own);
  for (size_t rank = 0; rank < sizes.size(); ++rank)
    texts[rank].assign(reinterpret_cast<const char*>(all.data() + rank * words), static_cast<size_t>(sizes[rank]));
  return texts;
}

int64_t value_of_first_rank(Device& device, const Mesh& mesh, int64_t value) {
  // After an axis, the ranks that are first along those to come have the value of the first rank.
  for (MeshAxis axis : kAxes) value = gather_values(device, mesh, axis, {&value, 1})[0];
  return value;
}

bool true_on_all_ranks(Device& device, const Mesh& mesh, bool value) {
  int64_t all = value ? 1 : 0;
  for (MeshAxis axis : kAxes) {
    const std::vector<int64_t> values = gather_values(device, mesh, axis, {&all, 1});
    all = *std::min_element(values.begin(), values.end());
  }
  return all == 1;
}

Tensor join_parts(Device& device, const Mesh& mesh, MeshAxis axis, const Tensor& part, int dim, int64_t whole) {
  const int ranks = mesh.size(axis);
  int64_t outer = 1, inner = static_cast<int64_t>(dtype_size(part.dtype()));
  for (int i = 0; i < dim; ++i) outer *= part.shape()[i];
  for (int i = dim + 1; i < part.shape().rank(); ++i) inner *= part.shape()[i];
  // Ranks gather as many bytes each; the first rank's part is one of the largest.
  const int64_t largest = outer * part_of(whole, ranks, 0).size * inner;
  const Tensor own = allocate_tensor(device, DType::u8, Shape{largest});
  const Tensor all = allocate_tensor(device, DType::u8, Shape{ranks, largest});
  device.fill_zero(own.view.data, largest);
  device.copy_from_host(own.view.data, part.view.data, part.view.size_bytes());
  mesh.along(axis).all_gather(device, all.view, own.view);
  if (mesh.rank(axis) != 0) return {};
  const Tensor parts = copy_to_host(device, all.view);
  Shape shape = part.shape();
  shape[dim] = whole;
  const Tensor joined = Tensor::on_host(part.dtype(), shape);
  auto* to = static_cast<std::byte*>(joined.view.data);
  for (int64_t o = 0; o < outer; ++o)
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t run = part_of(whole, ranks, rank).size * inner;
      std::memcpy(to, static_cast<const std::byte*>(parts.view.data) + rank * largest + o * run,
                  static_cast<size_t>(run));
      to += run;
    }
  return joined;
}

}  // namespace eadem::train
