#pragma once

#include <memory>

#include "test/conformance/net_driver.h"

namespace conformance {

/// The same, but memory that a test sends from or receives into without a handle is registered with
/// the connection for as long as the request lasts, as NCCL would have done before. For transports
/// whose data goes another way, or not at all, without (verbs).
std::unique_ptr<Net> registering(std::unique_ptr<Net> net);

}  // namespace conformance
