#pragma once

#include <cstdint>

#include "link.h"
#include "outcome.h"

namespace standin {

/// What a rank tells the root of its id.
struct Join {
  std::uint64_t magic;
  std::uint32_t rank, nranks, port;
  std::uint32_t release;  ///< nobody is going to join: the root may go
};
/// Followed by `count` ports, or, where `failed` is set, by `count` bytes of text.
struct Answer {
  std::uint32_t failed, count;
};

/// Starts the thread that waits at the listener for all ranks of an id and tells each where the
/// others listen.
Outcome startRoot(UniqueFd listener, std::uint64_t magic);

}  // namespace standin
