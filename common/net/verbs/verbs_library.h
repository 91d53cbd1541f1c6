#pragma once

// The verbs library as one table of function pointers, loaded at run time: one build runs with and
// without libibverbs. Tests put a table of their own in its place. What verbs.h defines inline
// (ibv_post_send, ibv_post_recv, ibv_poll_cq) goes through the operations of the device's context
// and needs no symbol.

#include <infiniband/verbs.h>

#include "common/base/status.h"

// verbs.h wraps some functions in macros of the same name; the table is filled with the functions.
#undef ibv_reg_mr
#undef ibv_query_port

namespace hoccl {

struct VerbsLibrary {
  ibv_device** (*getDeviceList)(int* count) = nullptr;
  void (*freeDeviceList)(ibv_device** list) = nullptr;
  const char* (*getDeviceName)(ibv_device* device) = nullptr;
  ibv_context* (*openDevice)(ibv_device* device) = nullptr;
  int (*closeDevice)(ibv_context* context) = nullptr;
  int (*queryDevice)(ibv_context* context, ibv_device_attr* attributes) = nullptr;
  /// Of `attributes` only what the first version of the library knows is filled in, the rest is 0.
  int (*queryPort)(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes) = nullptr;
  /// An entry of the GID table with its type; ENODATA where the index is not in use, another errno
  /// value where it is out of range.
  int (*queryGid)(ibv_context* context, std::uint8_t port, std::uint32_t index,
                  ibv_gid_entry* entry) = nullptr;
  ibv_pd* (*allocPd)(ibv_context* context) = nullptr;
  int (*deallocPd)(ibv_pd* pd) = nullptr;
  /// `access` may hold optional flags (relaxed ordering); those the library does not know are left
  /// out.
  ibv_mr* (*regMr)(ibv_pd* pd, void* address, std::size_t bytes, unsigned access) = nullptr;
  /// Memory behind a DMA-BUF descriptor, at `offset` in it, for the peer at `iova`. Null where the
  /// library is older than that.
  ibv_mr* (*regDmaBufMr)(ibv_pd* pd, std::uint64_t offset, std::size_t bytes, std::uint64_t iova,
                         int fd, int access) = nullptr;
  int (*deregMr)(ibv_mr* mr) = nullptr;
  ibv_cq* (*createCq)(ibv_context* context, int entries) = nullptr;
  int (*destroyCq)(ibv_cq* cq) = nullptr;
  ibv_qp* (*createQp)(ibv_pd* pd, ibv_qp_init_attr* attributes) = nullptr;
  int (*destroyQp)(ibv_qp* qp) = nullptr;
  int (*modifyQp)(ibv_qp* qp, ibv_qp_attr* attributes, int mask) = nullptr;
  int (*queryQp)(ibv_qp* qp, ibv_qp_attr* attributes, int mask, ibv_qp_init_attr* init) = nullptr;
  const char* (*statusText)(ibv_wc_status status) = nullptr;

  /// The table of libibverbs.so.1, filled once a process. Without the library, or with one that
  /// lacks a function: an error that says so.
  static Status load(const VerbsLibrary** out);
};

}  // namespace hoccl
