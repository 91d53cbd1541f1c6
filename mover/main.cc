#include <cstdio>
#include <cstring>

#include "common/base/version.h"
#include "common/runtime/copy_process.h"
#include "common/runtime/mover_process.h"
#include "common/runtime/mover_protocol.h"

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--serve") == 0) {
    return hoccl::runMover(hoccl::kMoverSocketFd);
  }
  if (argc == 2 && std::strcmp(argv[1], "--copies") == 0) {
    return hoccl::runCopyMover(hoccl::kMoverSocketFd);
  }
  if (argc == 2 && std::strcmp(argv[1], "--version") == 0) {
    std::printf("hoccl-mover %s\n", hoccl::versionText());
    return 0;
  }
  std::fprintf(stderr,
               "hoccl-mover moves data for one process and GPU. HOCCL's libraries start it; it does "
               "nothing by itself.\nusage: hoccl-mover --version\n");
  return 2;
}
