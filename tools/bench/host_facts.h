#pragma once

#include <string>

namespace hoccl::bench {

/// "Linux 6.1.0": the running kernel.
std::string kernelText();
/// "580.159.04": the NVIDIA kernel driver's version; empty where there is none.
std::string nvidiaDriverVersion();
/// UTC, "2026-11-29T15:00:00Z".
std::string timestampText();
/// The commit the program was built from; empty when unknown.
std::string commitText();

}  // namespace hoccl::bench
