#pragma once

namespace hoccl {

/// "0.1.0": the project's version.
const char* versionText();

}  // namespace hoccl
