#pragma once

#include <nccl.h>

namespace hoccl {

/// The intercepted functions that move data; each does what NCCL's of that name does.
ncclResult_t send(const void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream);
ncclResult_t recv(void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream);

// Collectives are the sends and receives they consist of, in one launch. They answer true when the call
// is HOCCL's, with its result in `result`; false leaves it to NCCL.
bool allGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
               cudaStream_t stream, ncclResult_t* result);
bool allToAll(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
              cudaStream_t stream, ncclResult_t* result);
bool broadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
               cudaStream_t stream, ncclResult_t* result);
bool gather(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
            cudaStream_t stream, ncclResult_t* result);
bool scatter(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
             cudaStream_t stream, ncclResult_t* result);

}  // namespace hoccl
