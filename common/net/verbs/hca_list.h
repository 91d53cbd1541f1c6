#pragma once

#include <cstdint>
#include <string_view>

namespace hoccl {

/// Whether a list in the syntax of NCCL_IB_HCA allows a port of a device: entries separated by
/// commas, each a prefix of a device's name, with `:port` only that port; `=` in front: exact
/// names;
/// `^`: all but these; `^=` both. An empty list allows everything.
[[nodiscard]] bool hcaAllowed(std::string_view list, std::string_view device, unsigned port);

}  // namespace hoccl
