#include "plugin-tuner/call_support.h"

namespace hoccl {

std::size_t typeBytes(ncclDataType_t type) {
  switch (static_cast<int>(type)) {
    case ncclInt8:
    case ncclUint8:
    case 10:  // ncclFloat8e4m3
    case 11:  // ncclFloat8e5m2
      return 1;
    case ncclFloat16:
    case 9:  // ncclBfloat16
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

Status abortedStatus() {
  return Status::error(Code::Aborted, "the communicator was aborted during the call");
}

ncclResult_t refuse(SteeredComm& comm, const Status& status) {
  comm.noteLastError("hoccl: " + status.message());
  return toNccl(status.code());
}

}  // namespace hoccl
