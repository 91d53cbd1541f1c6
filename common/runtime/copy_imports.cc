#include "common/runtime/copy_imports.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstring>

#include "common/base/log.h"

namespace hoccl {
namespace {
constexpr useconds_t kNapUs = 20;
}

CopyImports::CopyImports(const Driver* driver, CopySegment segment)
    : driver_(driver), segment_(segment) {}

void CopyImports::handle(const CopyMessage& message, std::vector<UniqueFd> fds) {
  if (message.kind == CopyMessageKind::Drop) {
    drop(message.import);
  } else {
    map(message, fds);
  }
}

void CopyImports::map(const CopyMessage& message, const std::vector<UniqueFd>& fds) {
  Import& import = at(message.import);
  import.state.store(Mapping, std::memory_order_seq_cst);
  import.bytes = message.bytes;
  import.segment = message.kind == CopyMessageKind::ImportSegment;
  import.id.store(message.import, std::memory_order_release);  // behind Mapping: never found closed
  newest_.store(message.import, std::memory_order_release);
  Status status;
  if (!import.segment) {
    CUipcMemHandle handle;
    std::memcpy(&handle, message.ipcHandle, sizeof handle);
    status = HOCCL_CU(
        driver_, cuIpcOpenMemHandle(&import.address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  } else {
    status = fds.size() == 1 ? mapSegment(fds[0].get(), &import)
                             : Status::error(Code::InvalidArgument, "a segment without descriptor");
  }
  CopyImport& shown = segment_.import(message.import);
  if (status) {
    segment_.header().imports.fetch_add(1, std::memory_order_relaxed);
    import.state.store(Mapped, std::memory_order_seq_cst);
    shown.ready.store(message.import, std::memory_order_release);
    return;
  }
  setText(shown.text, fmt::format("it cannot map the application's memory at {:#x} ({} bytes): {}",
                                  message.base, message.bytes, status.message()));
  shown.failed.store(message.import, std::memory_order_release);
  import.state.store(Closed, std::memory_order_seq_cst);
}

Status CopyImports::mapSegment(int fd, Import* import) {
  CUmemGenericAllocationHandle handle = 0;
  // The descriptor goes as the pointer itself, as the driver has it.
  void* const descriptor = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  HOCCL_RETURN_IF_ERROR(
      HOCCL_CU(driver_, cuMemImportFromShareableHandle(&handle, descriptor,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)));
  CUdeviceptr address = 0;
  Status status = HOCCL_CU(driver_, cuMemAddressReserve(&address, import->bytes, 0, 0, 0));
  if (status) {
    status = HOCCL_CU(driver_, cuMemMap(address, import->bytes, 0, handle, 0));
    if (status) {
      CUmemAccessDesc access{};
      access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      CUdevice device = 0;
      status = HOCCL_CU(driver_, cuCtxGetDevice(&device));
      access.location.id = device;
      if (status) status = HOCCL_CU(driver_, cuMemSetAccess(address, import->bytes, &access, 1));
      if (!status) (void)driver_->cuMemUnmap(address, import->bytes);
    }
    if (!status) (void)driver_->cuMemAddressFree(address, import->bytes);
  }
  (void)driver_->cuMemRelease(handle);  // the mapping keeps the memory
  import->address = address;
  return status;
}

Status CopyImports::unmap(const Import& import) {
  if (!import.segment) return HOCCL_CU(driver_, cuIpcCloseMemHandle(import.address));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuMemUnmap(import.address, import.bytes)));
  return HOCCL_CU(driver_, cuMemAddressFree(import.address, import.bytes));
}

void CopyImports::drop(std::uint64_t id) {
  Import& import = at(id);
  if (import.id.load(std::memory_order_relaxed) == id &&
      import.state.load(std::memory_order_relaxed) == Mapped) {
    import.state.store(Closed, std::memory_order_seq_cst);
    // Copies end by themselves: nothing they wait for is anybody else's.
    while (import.copies.load(std::memory_order_seq_cst) != 0) ::usleep(kNapUs);
    if (const Status status = unmap(import); !status) {
      logWarn("memory of the application stays mapped: {}", status.message());
    }
    segment_.header().unmaps.fetch_add(1, std::memory_order_relaxed);
  }
  segment_.import(id).gone.store(id, std::memory_order_release);
}

CopyImports::Use CopyImports::use(const CopyPiece& piece, CUdeviceptr* address) {
  Import& import = at(piece.import);
  // Before its id: an import that is no newer than this has had its place.
  const std::uint64_t newest = newest_.load(std::memory_order_acquire);
  if (import.id.load(std::memory_order_acquire) != piece.import) {
    return piece.import > newest ? Use::Pending : Use::Refused;
  }
  if (import.state.load(std::memory_order_acquire) == Mapping) return Use::Pending;
  import.copies.fetch_add(1, std::memory_order_seq_cst);
  if (import.state.load(std::memory_order_seq_cst) == Mapped &&
      import.id.load(std::memory_order_relaxed) == piece.import && piece.offset <= import.bytes &&
      piece.bytes <= import.bytes - piece.offset) {
    *address = import.address + piece.offset;
    return Use::Ready;
  }
  import.copies.fetch_sub(1, std::memory_order_release);
  return Use::Refused;
}

void CopyImports::release(const CopyPiece& piece) {
  at(piece.import).copies.fetch_sub(1, std::memory_order_release);
}

}  // namespace hoccl
