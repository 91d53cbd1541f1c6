#pragma once

#include <cstddef>
#include <cstdint>

#include "outcome.h"

namespace standin {

/// Pinned host memory, kept by the process and used again.
struct Block {
  char* data = nullptr;
  std::size_t bytes = 0;
};

/// Where a stream and a worker tell each other where they are, in pinned host memory. The values
/// only grow, from one use of the gate to the next, so that nothing is ever reset.
struct Gate {
  std::uint64_t started = 0;  ///< by the stream: all before the operation is done, the input staged
  std::uint64_t finished = 0;  ///< by the worker: the output is staged
  std::uint64_t drained = 0;   ///< by the stream: it needs neither gate nor staged data any more
  std::uint64_t sequence = 0;  ///< of the use under way
};

std::uint64_t load(const std::uint64_t& word);
void store(std::uint64_t& word, std::uint64_t value);

/// Both need a Driver::Scope. A block has at least `bytes` bytes.
Outcome takeBlock(std::size_t bytes, Block* out);
Outcome takeGate(Gate** out);
/// For later use, whatever the context.
void give(const Block& block);
void give(Gate* gate);
/// Gives the operating system back what the process keeps beyond a bound. Needs a Driver::Scope.
void trimBlocks();

}  // namespace standin
