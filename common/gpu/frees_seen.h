#pragma once

#include <string>

namespace hoccl {

struct FreesSeen {
  bool seen = false;
  std::string why;  ///< for a person; what decided it, either way
};

/// Whether this process's frees of device memory pass through the preloaded library, so that the
/// movers let go of the memory first (rule 8).
///
/// Seen: a shared libcudart is mapped, whose users are bound to the preloaded cudaFree, or the
/// program is linked with libcuda.so.1. Not seen: the library is not preloaded; another definition
/// comes before it in the loader's order; the program itself contains a CUDA run time (found by one
/// of its error texts, which stripping does not remove); or nothing through which frees could be
/// seen is loaded.
///
/// Not told apart: a library that brings a run time of its own beside the shared one, or asks dlsym
/// for libcuda's functions. NCCL, cuBLAS and their like do, but free only what they have allocated.
FreesSeen lookForFrees();

}  // namespace hoccl
