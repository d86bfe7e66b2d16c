// SPDX-License-Identifier: Apache-2.0
//
// The device backends of this build. Each backend is a folder kernels/<backend>/ with a namespace of that name
// that defines, for every op, `KernelList <op>_kernels()`: its kernels, or an empty list when it has none. The list
// of an op's kernels stands in the op's source as EADEM_KERNELS_OF(op).
#pragma once

#include "eadem/kernels/kernel.h"

#ifdef EADEM_CUDA
#define EADEM_FOR_EACH_BACKEND(X, op) X(cpu, op) X(cuda, op)
#else
#define EADEM_FOR_EACH_BACKEND(X, op) X(cpu, op)
#endif

// Every op and fusion that backends provide kernels for.
#define EADEM_FOR_EACH_KERNEL_OP(X) \
  X(embedding)                      \
  X(linear)                         \
  X(rms_norm)                       \
  X(add)                            \
  X(mul)                            \
  X(rope_table)                     \
  X(rope)                           \
  X(attention)                      \
  X(activation)                     \
  X(gated_activation)               \
  X(softmax)                        \
  X(cross_entropy)                  \
  X(cast)                           \
  X(kv_append)                      \
  X(select_rows)                    \
  X(sample)                         \
  X(add_bias)                       \
  X(select_heads)                   \
  X(softmax_state)                  \
  X(parallel_cross_entropy)         \
  X(all_reduce)                     \
  X(all_gather)                     \
  X(reduce_scatter)                 \
  X(all_to_all)                     \
  X(broadcast)                      \
  X(send)                           \
  X(recv)                           \
  X(grad_norm)                      \
  X(adamw)                          \
  X(add_rms_norm)                   \
  X(linear_gated_activation)        \
  X(linear_add)                     \
  X(rope_kv_append)                 \
  X(linear_cross_entropy)

#define EADEM_DECLARE_KERNELS(backend, op) \
  namespace backend {                      \
  KernelList op##_kernels();               \
  }
#define EADEM_DECLARE_KERNELS_OF(op) EADEM_FOR_EACH_BACKEND(EADEM_DECLARE_KERNELS, op)
namespace eadem::kernels {
EADEM_FOR_EACH_KERNEL_OP(EADEM_DECLARE_KERNELS_OF)
}
#undef EADEM_DECLARE_KERNELS_OF
#undef EADEM_DECLARE_KERNELS

#define EADEM_APPEND_KERNELS(backend, op) \
  for (const ::eadem::kernels::Kernel* kernel : ::eadem::kernels::backend::op##_kernels()) list.push_back(kernel);
// The kernels of `op` of every backend in this build.
#define EADEM_KERNELS_OF(op)                         \
  [] {                                               \
    ::eadem::kernels::KernelList list;               \
    EADEM_FOR_EACH_BACKEND(EADEM_APPEND_KERNELS, op) \
    return list;                                     \
  }()
