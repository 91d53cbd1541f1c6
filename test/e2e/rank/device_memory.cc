// The kinds of device memory of a Buffer.

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "test/e2e/rank/check.h"
#include "test/e2e/rank/device.h"

namespace e2e {
namespace {

constexpr std::size_t kPiece = 2 << 20;

const std::string& kind() {
  static const std::string kind = [] {
    const char* text = std::getenv("E2E_MEMORY");
    return std::string(text && *text ? text : "device");
  }();
  return kind;
}

}  // namespace

CUmemAllocationHandleType shareableAs(std::size_t n) {
  const char* fabric = std::getenv("E2E_FABRIC");
  const bool is = fabric && (std::string(fabric) == "all" || n % 2 == 1);
  return is ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

DeviceMemory::DeviceMemory(std::size_t bytes) {
  if (kind() == "managed") {
    REQUIRE_CU(cuda().memAllocManaged(&address_, bytes, CU_MEM_ATTACH_GLOBAL));
  } else if (kind() == "pool") {
    CUstream stream = newStream();
    REQUIRE_CU(cuda().memAllocAsync(&address_, bytes, stream));
    awaitStream(stream, "an allocation");
  } else if (kind() == "mapped" || kind() == "unexportable") {
    mapped_ = (bytes + kPiece - 1) / kPiece * kPiece;
    REQUIRE_CU(cuda().memAddressReserve(&address_, mapped_, 0, 0, 0));
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
    for (std::size_t at = 0; at < mapped_; at += kPiece) {
      if (kind() == "mapped") properties.requestedHandleTypes = shareableAs(at / kPiece);
      REQUIRE_CU(cuda().memCreate(&pieces_.emplace_back(), kPiece, &properties, 0));
      REQUIRE_CU(cuda().memMap(address_ + at, kPiece, 0, pieces_.back(), 0));
    }
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    REQUIRE_CU(cuda().memSetAccess(address_, mapped_, &access, 1));
  } else {
    REQUIRE(kind() == "device", "E2E_MEMORY={}: no such kind", kind());
    REQUIRE_CU(cuda().memAlloc(&address_, bytes));
  }
}

DeviceMemory::~DeviceMemory() {
  if (mapped_ == 0) {
    cuda().memFree(address_);
    return;
  }
  // As the program's linker finds it: the preloaded library has to hear of it.
  void* const linked = ::dlsym(RTLD_DEFAULT, "cuMemUnmap");
  auto* const unmap = linked ? reinterpret_cast<decltype(&::cuMemUnmap)>(linked) : cuda().memUnmap;
  unmap(address_, mapped_);
  for (CUmemGenericAllocationHandle piece : pieces_) cuda().memRelease(piece);
  cuda().memAddressFree(address_, mapped_);
}

}  // namespace e2e
