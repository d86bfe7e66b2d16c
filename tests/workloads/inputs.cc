// SPDX-License-Identifier: Apache-2.0
#include "tests/workloads/inputs.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/kernels/attention/attention.h"
#include "eadem/kernels/attention/compressed_attention.h"
#include "eadem/kernels/attention/kv_append.h"
#include "eadem/kernels/attention/latent_attention.h"
#include "eadem/kernels/attention/pooled_attention.h"
#include "eadem/kernels/attention/selected_attention.h"
#include "eadem/kernels/experts.h"
#include "eadem/kernels/recurrent/gated_delta_rule.h"
#include "eadem/kernels/sample.h"

namespace eadem::workloads {

namespace {

// SplitMix64. Source: Steele, Lea & Flood 2014.
class Random {
 public:
  explicit Random(uint64_t seed, StepKind kind = StepKind::varied) : state_(seed), kind_(kind) {}
  // Whether steps are to vary.
  bool varies() const { return kind_ == StepKind::varied; }
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // [0, 1)
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  // [low, high)
  double between(double low, double high) { return low + (high - low) * unit(); }
  // [0, bound)
  int64_t below(int64_t bound) { return static_cast<int64_t>(next() % static_cast<uint64_t>(bound)); }

 private:
  uint64_t state_;
  StepKind kind_;
};

void store(const TensorView& view, int64_t index, double value) {
  switch (view.dtype) {
    case DType::f32: view.as<float>()[index] = static_cast<float>(value); break;
    case DType::bf16: view.as<bf16_t>()[index] = bf16_t::from_float(static_cast<float>(value)); break;
    case DType::f16: view.as<f16_t>()[index] = f16_t::from_float(static_cast<float>(value)); break;
    case DType::f64: view.as<double>()[index] = value; break;
    case DType::i32: view.as<int32_t>()[index] = static_cast<int32_t>(value); break;
    case DType::i64: view.as<int64_t>()[index] = static_cast<int64_t>(value); break;
    case DType::u8: view.as<uint8_t>()[index] = static_cast<uint8_t>(value); break;
  }
}

template <typename ValueAt>
Tensor filled(DType dtype, const Shape& shape, ValueAt&& value_at) {
  Tensor tensor = Tensor::on_host(dtype, shape);
  for (int64_t i = 0; i < shape.num_elements(); ++i) store(tensor.view, i, value_at(i));
  return tensor;
}

Tensor uniform(DType dtype, const Shape& shape, Random& random, double low = -1, double high = 1) {
  return filled(dtype, shape, [&](int64_t) { return random.between(low, high); });
}

// The first `count` of a random order of [0, size). `size` must be at least `count`.
std::vector<int64_t> distinct(int64_t count, int64_t size, Random& random) {
  EADEM_CHECK(count <= size, "{} distinct numbers of {}", count, size);
  std::vector<int64_t> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), int64_t{0});
  for (int64_t i = 0; i < count; ++i)
    std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(i + random.below(size - i))]);
  all.resize(static_cast<size_t>(count));
  return all;
}

// Of each row distinct numbers of [0, experts).
Tensor chosen_experts(DType dtype, const Shape& shape, int64_t experts, Random& random) {
  std::vector<int64_t> row;
  return filled(dtype, shape, [&](int64_t i) {
    if (i % shape[1] == 0) row = distinct(shape[1], experts, random);
    return static_cast<double>(row[static_cast<size_t>(i % shape[1])]);
  });
}

// `tokens` divided over `sequences`, unevenly, each at least one as long as they last.
std::vector<int64_t> query_lengths(int64_t tokens, int64_t sequences, Random& random) {
  std::vector<int64_t> lengths(static_cast<size_t>(sequences), 0);
  for (int64_t s = 0; s < sequences && tokens > 0; ++s, --tokens) ++lengths[static_cast<size_t>(s)];
  for (; tokens > 0 && sequences > 0; --tokens) ++lengths[static_cast<size_t>(random.below(sequences))];
  return lengths;
}

// i32 [lengths + 1]: where each sequence, or the rows of each expert, begin, and the end.
Tensor starts_of(const std::vector<int64_t>& lengths) {
  int64_t start = 0;
  return filled(DType::i32, Shape{std::ssize(lengths) + 1}, [&](int64_t i) {
    const int64_t here = start;
    if (i < std::ssize(lengths)) start += lengths[static_cast<size_t>(i)];
    return static_cast<double>(here);
  });
}

// The positions of sequence `s`, `own` of them of this step: the first sequence fills its blocks; the others do, or
// fill any part.
int64_t length_in_cache(int64_t s, int64_t own, int64_t capacity, Random& random) {
  return s == 0 || !random.varies() ? capacity : own + random.below(capacity - own + 1);
}

// Where steps vary, every fifth token or sequence has no slot.
bool is_without_slot(int64_t index, const Random& random) { return index % 5 == 4 && random.varies(); }

// The loss ignores every fifth row, if steps vary.
bool is_ignored(int64_t row, const Random& random) { return row % 5 == 3 && random.varies(); }

// The ports that attention and select_keys begin with: three of numbers, and the sequences. A key has `stride`
// positions.
std::vector<Tensor> attention_inputs(kernels::KvSource source, std::span<const Shape> shapes,
                                     std::span<const TensorType> types, Random& random, int64_t stride = 1) {
  const bool cached = source == kernels::KvSource::cached;
  std::vector<Tensor> inputs;
  // Wide enough that scores differ: the softmax is neither flat nor a single spike.
  for (size_t port = 0; port < 3; ++port) inputs.push_back(uniform(types[port].dtype, shapes[port], random, -2, 2));
  const int64_t sequences = shapes[4][0];
  const std::vector<int64_t> queries = query_lengths(shapes[0][0], sequences, random);
  inputs.push_back(starts_of(queries));
  const int64_t capacity = cached ? shapes[5][1] * shapes[1][2] * stride : 0;
  inputs.push_back(filled(DType::i32, shapes[4], [&](int64_t s) {
    const int64_t own = queries[static_cast<size_t>(s)];
    if (!cached) return static_cast<double>(own);
    EADEM_CHECK(own <= capacity, "{} tokens in a cache of {} positions", own, capacity);
    return static_cast<double>(length_in_cache(s, own, capacity, random));
  }));
  if (cached) {
    const std::vector<int64_t> blocks = distinct(shapes[5].num_elements(), shapes[1][0], random);
    inputs.push_back(
        filled(DType::i32, shapes[5], [&](int64_t i) { return static_cast<double>(blocks[static_cast<size_t>(i)]); }));
  } else {
    inputs.emplace_back();
  }
  return inputs;
}

// Attention's, with a selection behind the values: of each token and head of keys as many entries as there are or fit,
// its first one among them, every other time fewer if steps vary.
std::vector<Tensor> selected_attention_inputs(const ops::Op& op, std::span<const Shape> shapes,
                                              std::span<const TensorType> types, Random& random) {
  const auto attrs = op.attrs().get<kernels::SelectedAttentionAttrs>();
  std::vector<Shape> others(shapes.begin(), shapes.end());
  std::vector<TensorType> other_types(types.begin(), types.end());
  others.erase(others.begin() + 3);
  other_types.erase(other_types.begin() + 3);
  std::vector<Tensor> inputs = attention_inputs(attrs.source, others, other_types, random);
  const auto *starts = inputs[3].view.as<int32_t>(), *lengths = inputs[4].view.as<int32_t>();
  Tensor selection = Tensor::on_host(DType::i32, shapes[3]);
  auto* entry = selection.view.as<int32_t>();
  for (int64_t s = 0; s < shapes[5][0]; ++s)
    for (int64_t t = starts[s]; t < starts[s + 1]; ++t)
      for (int64_t g = 0; g < attrs.kv_heads; ++g, entry += shapes[3][2]) {
        const int64_t seen = (lengths[s] - starts[s + 1] + t) / attrs.span + 1;
        const int64_t most = std::min(seen, shapes[3][2]),
                      count = t % 2 == 0 || !random.varies() ? most : 1 + random.below(most);
        std::vector<int64_t> chosen = distinct(count, seen, random);
        std::sort(chosen.begin(), chosen.end());
        std::fill(std::copy(chosen.begin(), chosen.end(), entry), entry + shapes[3][2], -1);
      }
  inputs.insert(inputs.begin() + 3, std::move(selection));
  return inputs;
}

// Ports `inputs` of a step whose sequences are described by those from `first` on: query_start, kv_length and
// block_table. A block of a cache has room for `block_size` positions; `fresh` is the number of tokens of the step.
void fill_sequences(std::vector<Tensor>& inputs, size_t first, std::span<const Shape> shapes, bool cached,
                    int64_t fresh, int64_t block_size, int64_t num_blocks, Random& random) {
  const int64_t sequences = shapes[first + 1][0];
  const std::vector<int64_t> queries = query_lengths(fresh, sequences, random);
  inputs[first] = starts_of(queries);
  const int64_t capacity = cached ? shapes[first + 2][1] * block_size : 0;
  inputs[first + 1] = filled(DType::i32, shapes[first + 1], [&](int64_t s) {
    const int64_t own = queries[static_cast<size_t>(s)];
    if (!cached) return static_cast<double>(own);
    EADEM_CHECK(own <= capacity, "{} tokens in a cache of {} positions", own, capacity);
    return static_cast<double>(length_in_cache(s, own, capacity, random));
  });
  if (!cached) return;
  const std::vector<int64_t> blocks = distinct(shapes[first + 2].num_elements(), num_blocks, random);
  inputs[first + 2] = filled(DType::i32, shapes[first + 2],
                             [&](int64_t i) { return static_cast<double>(blocks[static_cast<size_t>(i)]); });
}

// compressed_attention and select_blocks: queries and rows, then the sequences.
std::vector<Tensor> compressed_inputs(kernels::KvSource source, int64_t stride, size_t numbers,
                                      std::span<const Shape> shapes, std::span<const TensorType> types,
                                      Random& random) {
  const bool cached = source == kernels::KvSource::cached;
  std::vector<Tensor> inputs(numbers + 3);
  for (size_t port = 0; port < numbers; ++port) inputs[port] = uniform(types[port].dtype, shapes[port], random, -2, 2);
  fill_sequences(inputs, numbers, shapes, cached, shapes[0][0], cached ? shapes[1][2] * stride : 0,
                 cached ? shapes[1][0] : 0, random);
  return inputs;
}

// Keys are about as large as queries. Of a sequence's tokens some are of its prompt, or all, or none; if steps do not
// vary, none where each sequence has one, else all.
std::vector<Tensor> latent_attention_inputs(const ops::Op& op, std::span<const Shape> shapes,
                                            std::span<const TensorType> types, Random& random) {
  const auto attrs = op.attrs().get<kernels::LatentAttentionAttrs>();
  const double spread = 2 / std::sqrt(static_cast<double>(attrs.latent_dim));
  std::vector<Tensor> inputs(types.size());
  for (const size_t port : {size_t{0}, size_t{1}})
    inputs[port] = uniform(types[port].dtype, shapes[port], random, -2, 2);
  for (const size_t port : {size_t{2}, size_t{3}})
    inputs[port] = uniform(types[port].dtype, shapes[port], random, -spread, spread);
  fill_sequences(inputs, 4, shapes, true, shapes[0][0], shapes[1][2], shapes[1][0], random);
  const auto *starts = inputs[4].view.as<int32_t>(), *lengths = inputs[5].view.as<int32_t>();
  inputs[7] = filled(DType::i32, shapes[7], [&](int64_t s) {
    const int64_t own = starts[s + 1] - starts[s];
    if (!random.varies()) return static_cast<double>(shapes[0][0] > shapes[7][0] ? lengths[s] : lengths[s] - own);
    const int64_t kind = random.below(4);
    if (kind == 0) return 0.0;
    if (kind == 1) return static_cast<double>(lengths[s] + random.below(3));
    return static_cast<double>(lengths[s] - own + random.below(own + 1));
  });
  return inputs;
}

// The slots of a step, i64 [tokens]: those of its tokens in a cache of such blocks; those without one are written
// nowhere. `inputs` from `first` on describe the sequences.
Tensor slots_of(std::span<const Tensor> inputs, size_t first, const Shape& shape, int64_t block_size,
                const Random& random) {
  Tensor slots = Tensor::on_host(DType::i64, shape);
  const auto *starts = inputs[first].view.as<int32_t>(), *lengths = inputs[first + 1].view.as<int32_t>(),
             *table = inputs[first + 2].view.as<int32_t>();
  const int64_t blocks = inputs[first + 2].shape()[1];
  for (int64_t s = 0; s < inputs[first + 1].shape()[0]; ++s)
    for (int64_t t = starts[s]; t < starts[s + 1]; ++t) {
      const int64_t position = lengths[s] - starts[s + 1] + t, block = table[s * blocks + position / block_size];
      store(slots.view, t,
            is_without_slot(t, random) ? -1.0 : static_cast<double>(block * block_size + position % block_size));
    }
  return slots;
}

std::vector<Tensor> compress_keys_inputs(const ops::Op& op, std::span<const Shape> shapes,
                                         std::span<const TensorType> types, Random& random) {
  const bool cached = op.attrs().get<kernels::CompressKeysAttrs>().source == kernels::KvSource::cached;
  std::vector<Tensor> inputs(types.size());
  for (const size_t port : {size_t{0}, size_t{1}, size_t{2}})
    if (!kernels::is_unconnected(types[port])) inputs[port] = uniform(types[port].dtype, shapes[port], random);
  const int64_t block_size = cached ? shapes[0][2] : 0, fresh = cached ? shapes[6][0] : shapes[0][0];
  fill_sequences(inputs, 3, shapes, cached, fresh, block_size, cached ? shapes[0][0] : 0, random);
  if (!cached) return inputs;
  inputs[6] = slots_of(inputs, 3, shapes[6], block_size, random);
  inputs[7] = uniform(types[7].dtype, shapes[7], random);
  return inputs;
}

// Gates are wide enough that the softmax is neither flat nor a single spike.
std::vector<Tensor> pool_keys_inputs(const ops::Op& op, std::span<const Shape> shapes,
                                     std::span<const TensorType> types, Random& random) {
  const bool cached = op.attrs().get<kernels::PoolKeysAttrs>().source == kernels::KvSource::cached;
  std::vector<Tensor> inputs(types.size());
  for (const size_t port : {size_t{0}, size_t{1}, size_t{2}})
    inputs[port] = uniform(types[port].dtype, shapes[port], random, -2, 2);
  const int64_t block_size = cached ? shapes[0][2] : 0, fresh = cached ? shapes[6][0] : shapes[0][0];
  fill_sequences(inputs, 3, shapes, cached, fresh, block_size, cached ? shapes[0][0] : 0, random);
  if (cached) inputs[6] = slots_of(inputs, 3, shapes[6], block_size, random);
  return inputs;
}

// The rows have a table of their own. A selection has as many rows as there are or fit; every other time fewer, or
// none, if steps vary.
std::vector<Tensor> pooled_attention_inputs(const ops::Op& op, std::span<const Shape> shapes,
                                            std::span<const TensorType> types, Random& random) {
  const auto attrs = op.attrs().get<kernels::PooledAttentionAttrs>();
  const bool cached = attrs.source == kernels::KvSource::cached;
  std::vector<Tensor> inputs(types.size());
  for (size_t port = 0; port < 4; ++port) inputs[port] = uniform(types[port].dtype, shapes[port], random, -2, 2);
  fill_sequences(inputs, 4, shapes, cached, shapes[0][0], cached ? shapes[1][2] : 0, cached ? shapes[1][0] : 0, random);
  if (cached) {
    const std::vector<int64_t> blocks = distinct(shapes[7].num_elements(), shapes[2][0], random);
    inputs[7] =
        filled(DType::i32, shapes[7], [&](int64_t i) { return static_cast<double>(blocks[static_cast<size_t>(i)]); });
  }
  if (attrs.selected == 0) return inputs;
  const auto *starts = inputs[4].view.as<int32_t>(), *lengths = inputs[5].view.as<int32_t>();
  inputs.back() = Tensor::on_host(DType::i32, shapes.back());
  auto* entry = inputs.back().view.as<int32_t>();
  for (int64_t s = 0; s < shapes[5][0]; ++s)
    for (int64_t t = starts[s]; t < starts[s + 1]; ++t, entry += attrs.selected) {
      const int64_t seen = attrs.rows_seen(lengths[s] - starts[s + 1] + t), most = std::min(seen, attrs.selected);
      std::vector<int64_t> chosen =
          distinct(t % 2 == 0 || !random.varies() ? most : random.below(most + 1), seen, random);
      std::sort(chosen.begin(), chosen.end());
      std::fill(std::copy(chosen.begin(), chosen.end(), entry), entry + attrs.selected, -1);
    }
  return inputs;
}

std::vector<Tensor> sample_inputs(std::span<const Shape> shapes, Random& random) {
  const int64_t rows = shapes[0][0], vocab = shapes[0][1];
  std::vector<Tensor> inputs;
  inputs.push_back(uniform(DType::f32, shapes[0], random, -6, 6));
  // Every third row greedy; filters on and off in all combinations. The pairs of penalties are dealt out in turn, one
  // to each row, as far as the vocabulary goes.
  inputs.push_back(Tensor::on_host(DType::i32, shapes[1]));
  inputs.push_back(Tensor::on_host(DType::i32, shapes[2]));
  auto* row = static_cast<kernels::SampleRow*>(inputs[1].view.data);
  auto* pair = inputs[2].view.as<int32_t>();
  const int64_t pairs = shapes[2][0];
  int64_t begin = 0;
  for (int64_t r = 0; r < rows; ++r, ++row) {
    const auto real = [&](double low, double high) { return static_cast<float>(random.between(low, high)); };
    const int64_t own = std::min({vocab, pairs - begin, (pairs + rows - 1) / rows});
    *row = {.settings = {.temperature = r % 3 == 2 ? 0.0f : real(0.5, 1.5),
                         .top_k = r % 2 == 0 ? 0 : static_cast<int32_t>(1 + random.below(vocab)),
                         .top_p = r / 2 % 2 == 0 ? 1.0f : real(0.3, 0.99),
                         .min_p = r / 4 % 2 == 0 ? 0.0f : real(0.01, 0.3),
                         .seed = random.below(int64_t{1} << 40),
                         .repetition_penalty = r % 4 == 3 ? 1.0f : real(0.5, 2),
                         .presence_penalty = r % 5 == 4 ? 0.0f : real(-2, 2),
                         .frequency_penalty = r % 7 == 6 ? 0.0f : real(-0.5, 0.5)},
            .position = random.below(100000),
            .penalties_begin = static_cast<int32_t>(begin),
            .penalties_end = static_cast<int32_t>(begin + own)};
    const std::vector<int64_t> tokens = distinct(own, vocab, random);
    for (int64_t i = 0; i < own; ++i) {
      pair[2 * (begin + i)] = static_cast<int32_t>(tokens[static_cast<size_t>(i)]);
      pair[2 * (begin + i) + 1] = static_cast<int32_t>(random.below(4));
    }
    begin += own;
  }
  std::fill(pair + 2 * begin, pair + 2 * pairs, 0);  // of no row
  return inputs;
}

// Rows of cosines, then the sines of the same angles.
Tensor rotations(DType dtype, const Shape& shape, Random& random) {
  const int64_t half = shape[1] / 2;
  std::vector<double> angles(static_cast<size_t>(shape[0] * half));
  for (double& angle : angles) angle = random.between(-3.2, 3.2);
  return filled(dtype, shape, [&](int64_t i) {
    const int64_t row = i / shape[1], column = i % shape[1];
    const double angle = angles[static_cast<size_t>(row * half + column % half)];
    return column < half ? std::cos(angle) : std::sin(angle);
  });
}

// rope_append_attention, decoder_layer and decoder_layers: sequences and slots that belong together, weights of
// products with a row's norm of 1, so that values keep their size from layer to layer, and numbers for the others.
std::vector<Tensor> appending_inputs(const ops::Op& op, std::span<const Shape> shapes,
                                     std::span<const TensorType> types, Random& random) {
  const std::vector<ops::Port> ports = op.inputs();
  const auto index_of = [&](std::string_view name) {
    const auto found = std::find_if(ports.begin(), ports.end(), [&](const ops::Port& p) { return p.name == name; });
    return static_cast<size_t>(found - ports.begin());
  };
  const size_t sequences = index_of("query_start"), table = index_of("table"), slots = index_of("slots");
  const auto cache = std::find_if(ports.begin(), ports.end(),
                                  [](const ops::Port& port) { return port.role == ops::Port::Role::state; });
  const Shape& blocks = shapes[static_cast<size_t>(cache - ports.begin())];
  std::vector<Tensor> inputs(ports.size());
  fill_sequences(inputs, sequences, shapes, true, shapes[0][0], blocks[2], blocks[0], random);
  inputs[slots] = slots_of(inputs, sequences, shapes[slots], blocks[2], random);
  inputs[table] = rotations(types[table].dtype, shapes[table], random);
  for (size_t i = 0; i < ports.size(); ++i) {
    if (inputs[i].defined()) continue;
    const bool is_parameter = ports[i].role == ops::Port::Role::parameter;
    const double width = static_cast<double>(shapes[i].back());
    const double most = is_parameter && shapes[i].rank() == 2 ? std::sqrt(3 / width) : 2;
    inputs[i] = uniform(types[i].dtype, shapes[i], random, -most, most);
  }
  return inputs;
}

// The value of AdamW's hyper at `index`, of the tenth step of a usual recipe.
double hyper_value(int64_t index) {
  const double beta1 = 0.9, beta2 = 0.95, steps = 10;
  const double values[] = {3e-3, beta1, beta2, 1e-8, 0.1, 1 - std::pow(beta1, steps), 1 - std::pow(beta2, steps), 1.0};
  return values[index];
}

Tensor make_input(std::string_view op, std::string_view port, std::span<const Shape> shapes, const TensorType& type,
                  const Shape& shape, const ops::Op& object, int64_t tokens, Random& random) {
  const DType dtype = type.dtype;
  if (op == "embedding" && port == "ids")
    return filled(dtype, shape, [&](int64_t) { return static_cast<double>(random.below(shapes[0][0])); });
  if (port == "positions")  // of tables of rotations, and of scales
    return filled(dtype, shape, [&](int64_t i) { return static_cast<double>(i % 2 ? random.below(131072) : i); });
  if (op == "rope_table" && port == "inv_freq")
    return filled(dtype, shape, [&](int64_t i) {
      return std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(shape[0]));
    });
  if (op == "rope" && port == "table") return rotations(dtype, shape, random);
  if (op == "cross_entropy" && port == "logits") return uniform(dtype, shape, random, -6, 6);
  if (op == "cross_entropy" && port == "labels")
    return filled(dtype, shape, [&](int64_t i) {
      return is_ignored(i, random) ? -1.0 : static_cast<double>(random.below(shapes[0][1]));
    });
  if ((op == "softmax_state" || op == "parallel_cross_entropy") && port == "logits")
    return uniform(dtype, shape, random, -6, 6);
  if ((op == "softmax_state" || op == "parallel_cross_entropy") && port == "labels")  // of this part or another
    return filled(dtype, shape, [&](int64_t i) {
      return is_ignored(i, random) ? -1.0 : static_cast<double>(random.below(shapes[0][1] + 10));
    });
  if (op == "parallel_cross_entropy" && port == "states")  // largest logit, sum of exponentials, logit of the label
    return filled(dtype, shape, [&](int64_t i) { return i % 3 == 1 ? random.between(1, 100) : random.between(-6, 6); });
  if (op == "softmax") return uniform(dtype, shape, random, -8, 8);
  if (op == "activation" || (op == "gated_activation" && port == "gate")) {
    return uniform(dtype, shape, random, -8, 8);
  }
  if (port == "slots") {
    const Shape& cache = shapes.back();
    int64_t positions = cache[2];
    if (op == "latent_append")
      if (const auto attrs = object.attrs().get<kernels::LatentAppendAttrs>(); attrs.stride > 1)
        positions = attrs.block_size;
    const std::vector<int64_t> slots = distinct(shape[0], cache[0] * positions, random);
    return filled(dtype, shape, [&](int64_t i) {
      return is_without_slot(i, random) ? -1.0 : static_cast<double>(slots[static_cast<size_t>(i)]);
    });
  }
  if (port == "query_start") return starts_of(query_lengths(shapes[0][0], shape[0] - 1, random));
  if (port == "state_slots") {
    const std::vector<int64_t> slots = distinct(shape[0], shapes.back()[0], random);
    return filled(dtype, shape, [&](int64_t i) {
      return is_without_slot(i, random) ? -1.0 : static_cast<double>(slots[static_cast<size_t>(i)]);
    });
  }
  // States that fade within a few tokens, and hardly.
  if (op == "gated_delta_rule" && (port == "a" || port == "b")) return uniform(dtype, shape, random, -3, 3);
  if (op == "gated_delta_rule" && port == "dt_bias") return uniform(dtype, shape, random, -4, 0);
  if (op == "gated_delta_rule" && port == "state") {  // each head has as many tokens of a group as its number says
    const auto attrs = object.attrs().get<kernels::GatedDeltaRuleAttrs>();
    return filled(dtype, shape, [&](int64_t i) {
      const int64_t head = i / attrs.state_floats(), at = i % attrs.state_floats();
      if (at == attrs.count_at()) return static_cast<double>(head % attrs.kGroup);
      return random.between(at < attrs.keys_at() ? 0 : -1, 1);
    });
  }
  if (op == "feed_tokens" && port == "ids")  // every third one is that of a row of the step before
    return filled(dtype, shape, [&](int64_t i) {
      return i % 3 == 1 ? -1.0 - static_cast<double>(random.below(shapes[1][0]))
                        : static_cast<double>(random.below(1000));
    });
  if (op == "feed_tokens" && port == "sampled")
    return filled(dtype, shape, [&](int64_t) { return static_cast<double>(random.below(1000)); });
  if (op == "select_rows" && port == "rows") {
    const std::vector<int64_t> rows = distinct(shape[0], shapes[0][0], random);
    return filled(dtype, shape, [&](int64_t i) { return static_cast<double>(rows[static_cast<size_t>(i)]); });
  }
  if (op == "clamped_swiglu") return uniform(dtype, shape, random, -9, 9);  // on both sides of the limit
  if (op == "gate_rows" && port == "gate") return uniform(dtype, shape, random, -8, 8);
  // Experts may repeat in a row, and some numbers are none.
  if (op == "route" && port == "table")
    return filled(dtype, shape, [&](int64_t) { return static_cast<double>(random.below(shapes[0][1] + 2) - 1); });
  if (op == "route" && port == "token_ids")
    return filled(dtype, shape, [&](int64_t) { return static_cast<double>(random.below(shapes[2][0])); });
  if (op == "route" || op == "load_balancing_loss") return uniform(dtype, shape, random, -4, 4);
  if (op == "expert_order") {
    const auto attrs = object.attrs().get<kernels::ExpertOrderAttrs>();
    return chosen_experts(dtype, shape, attrs.experts + attrs.identities, random);
  }
  if (op == "identity_experts" && port == "experts") {  // about every third one has no weights
    const int64_t first = object.attrs().get<kernels::IdentityExpertsAttrs>().first;
    return chosen_experts(dtype, shape, first + first / 2 + shape[1], random);
  }
  if (op == "scale_by" && port == "index")
    return filled(dtype, shape, [&](int64_t) { return static_cast<double>(random.below(shapes[1][0])); });
  if ((op == "permute" || op == "unpermute") && port == "rows") {
    const std::vector<int64_t> rows = distinct(shape.num_elements(), shape.num_elements(), random);
    return filled(dtype, shape, [&](int64_t i) { return static_cast<double>(rows[static_cast<size_t>(i)]); });
  }
  // Rows of experts that are chosen alike, so that counts are the differences of offsets.
  if (op == "expert_dispatch" || op == "expert_combine") {
    const int64_t rows = shapes[0][0], experts = shapes[1][0] - 1;
    const auto begin_of = [&](int64_t e) { return static_cast<double>(e * rows / experts); };
    if (port == "offsets") return filled(dtype, shape, begin_of);
    if (port == "counts") return filled(dtype, shape, [&](int64_t e) { return begin_of(e + 1) - begin_of(e); });
  }
  if (op == "grouped_linear" && port == "offsets") {
    const int64_t rows = shapes[0][0], experts = shape[0] - 1;
    std::vector<int64_t> counts(static_cast<size_t>(experts), 0);
    const auto add = [&](int64_t expert) { ++counts[static_cast<size_t>(expert)]; };
    if (random.varies())  // the first expert is popular, some have nothing to do
      for (int64_t r = 0; r < rows; ++r) add(r % 3 == 0 ? 0 : random.below(experts));
    else
      for (int64_t r = 0; r < rows; r += rows / tokens)
        for (const int64_t expert : distinct(rows / tokens, experts, random)) add(expert);
    return starts_of(counts);
  }
  if (op == "state_space_scan" && port == "dt") return uniform(dtype, shape, random, -4, 4);
  if (op == "adamw" && port == "norm") return filled(dtype, shape, [&](int64_t) { return random.between(0.5, 4); });
  if (op == "adamw" && port == "hyper") return filled(dtype, shape, hyper_value);
  if (op == "adamw" && port == "m") return uniform(dtype, shape, random, -0.1, 0.1);
  if (op == "adamw" && port == "v") return uniform(dtype, shape, random, 1e-6, 0.1);
  EADEM_CHECK(is_floating(dtype), "no generator for port '{}' of {}", port, object.name());
  return uniform(dtype, shape, random);
}

}  // namespace

Tensor random_tensor(DType dtype, const Shape& shape, uint64_t seed) {
  Random random(seed);
  return uniform(dtype, shape, random);
}

namespace {

// A host copy of `plain` in an encoding.
Tensor encoded(const Tensor& plain, const Encoding& encoding) {
  Tensor result = Tensor::on_host(DType::f32, plain.shape(), encoding);
  if (const BlockEncoding* blocks = BlockEncoding::of(&encoding); blocks != nullptr && !blocks->is_writable()) {
    blocks->fill_random(static_cast<uint8_t*>(result.view.data), 0,
                        plain.shape().num_elements() / blocks->format().block_size, 0.5, 1);
    return result;
  }
  encoding.encode(result.view, plain.view);
  return result;
}

std::vector<Tensor> plain_inputs(const ops::Op& op, std::span<const TensorType> types, const SymbolValues& symbols,
                                 uint64_t seed, StepKind kind) {
  Random random(seed, kind);
  std::vector<Shape> shapes;
  for (const TensorType& type : types) shapes.push_back(type.bind(symbols));
  if (op.name() == "attention") {
    const auto attrs = op.attrs().get<kernels::AttentionAttrs>();
    std::vector<Tensor> inputs = attention_inputs(attrs.source, shapes, types, random);
    if (attrs.sinks) inputs.push_back(uniform(DType::f32, shapes[6], random, -2, 4));
    return inputs;
  }
  if (op.name() == "select_keys") {
    const auto attrs = op.attrs().get<kernels::SelectKeysAttrs>();
    return attention_inputs(attrs.source, shapes, types, random, attrs.stride);
  }
  if (op.name() == "latent_attention") return latent_attention_inputs(op, shapes, types, random);
  if (op.name() == "selected_attention") return selected_attention_inputs(op, shapes, types, random);
  if (op.name() == "compress_keys") return compress_keys_inputs(op, shapes, types, random);
  if (op.name() == "compressed_attention") {
    const auto attrs = op.attrs().get<kernels::CompressedAttentionAttrs>();
    return compressed_inputs(attrs.source, attrs.grid.stride, 3, shapes, types, random);
  }
  if (op.name() == "select_blocks") {
    const auto attrs = op.attrs().get<kernels::SelectBlocksAttrs>();
    return compressed_inputs(attrs.source, attrs.grid.stride, 2, shapes, types, random);
  }
  if (op.name() == "pool_keys") return pool_keys_inputs(op, shapes, types, random);
  if (op.name() == "pooled_attention") return pooled_attention_inputs(op, shapes, types, random);
  if (op.name() == "sample") return sample_inputs(shapes, random);
  if (op.name() == "rope_append_attention" || op.name() == "decoder_layer" || op.name() == "decoder_layers")
    return appending_inputs(op, shapes, types, random);
  const std::vector<ops::Port> ports = op.inputs();
  EADEM_CHECK(ports.size() == types.size(), "{}: {} types for {} ports", op.name(), types.size(), ports.size());
  std::vector<Tensor> inputs;
  for (size_t i = 0; i < ports.size(); ++i) {
    if (kernels::is_unconnected(types[i]))
      inputs.emplace_back();
    else
      inputs.push_back(
          make_input(op.name(), ports[i].name, shapes, types[i], shapes[i], op, symbols[Symbol::tokens], random));
  }
  return inputs;
}

}  // namespace

std::vector<Tensor> make_inputs(const ops::Op& op, std::span<const TensorType> types, const SymbolValues& symbols,
                                uint64_t seed, StepKind kind) {
  std::vector<Tensor> inputs = plain_inputs(op, types, symbols, seed, kind);
  for (size_t i = 0; i < types.size(); ++i)
    if (types[i].encoding != nullptr) inputs[i] = encoded(inputs[i], *types[i].encoding);
  return inputs;
}

}  // namespace eadem::workloads
