// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/lookups.h"

#include <atomic>

namespace eadem {

#ifdef EADEM_COUNT_LOOKUPS
namespace {
std::atomic<int64_t> lookup_counter{0};
}  // namespace
void count_lookup() { lookup_counter.fetch_add(1, std::memory_order_relaxed); }
int64_t num_lookups() { return lookup_counter.load(std::memory_order_relaxed); }
#else
void count_lookup() {}
int64_t num_lookups() { return 0; }
#endif

}  // namespace eadem
