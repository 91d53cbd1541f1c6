#pragma once

#include <cstdint>

struct ncclComm;

namespace standin {

/// What a line of the log says beside the function's name. -1 and null where there is nothing to
/// say.
struct Call {
  const ncclComm* comm = nullptr;
  int peer = -1;  ///< peer, root, or the new communicator's color
  std::uint64_t bytes = 0;
  int dtype = -1;
  const void* stream = nullptr;
};

/// Appends a line to the log in memory and, with NCCLSTANDIN_LOG set, to that file.
void record(const char* function, const Call& call = {});

}  // namespace standin
