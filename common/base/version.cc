#include "common/base/version.h"

namespace hoccl {

const char* versionText() { return HOCCL_VERSION; }

}  // namespace hoccl
