#pragma once

#include <cstddef>

namespace hoccl {

/// Counters by communicator and path as JSON; returns the length the text needs without its end.
std::size_t statsJson(char* out, std::size_t capacity);
/// The same as a table on standard error, with HOCCL_STATS=1 when the process ends.
void printStats();

}  // namespace hoccl
