#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/base/status.h"

namespace hoccl {

/// Fills `out` with bytes nobody can predict (getrandom, else /dev/urandom).
Status randomBytes(void* out, std::size_t bytes);
/// 64 such bits, for names and nonces.
Status random64(std::uint64_t* out);
/// 128 such bits, for secrets.
Status random128(std::array<std::uint8_t, 16>* out);

}  // namespace hoccl
