#include "test/e2e/rank/nccl_api.h"

#include <dlfcn.h>

#include "test/e2e/rank/check.h"

namespace e2e {

const NcclApi& nccl() {
  static const NcclApi api = [] {
    REQUIRE(::dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL), "{}", ::dlerror());
    NcclApi made;
#define X(name)                                                                    \
  made.name = reinterpret_cast<decltype(made.name)>(::dlsym(RTLD_DEFAULT, #name)); \
  REQUIRE(made.name, "{} is not to be found", #name);
    E2E_NCCL_FUNCTIONS(X)
#undef X
    made.hocclStatsJson =
        reinterpret_cast<decltype(made.hocclStatsJson)>(::dlsym(RTLD_DEFAULT, "hocclStatsJson"));
    return made;
  }();
  return api;
}

}  // namespace e2e
