#include "common/net/verbs/verbs_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>

namespace hoccl {
namespace {

// Functions whose calls need a few words around them. All others go into the table as they are.
int (*queryPortFunction)(ibv_context*, std::uint8_t, _compat_ibv_port_attr*) = nullptr;
ibv_mr* (*regMrFunction)(ibv_pd*, void*, std::size_t, int) = nullptr;
ibv_mr* (*regMrIova2Function)(ibv_pd*, void*, std::size_t, std::uint64_t, unsigned) = nullptr;
ibv_cq* (*createCqFunction)(ibv_context*, int, void*, ibv_comp_channel*, int) = nullptr;
int (*queryGidFunction)(ibv_context*, std::uint8_t, int, ibv_gid*) = nullptr;
int (*queryGidExFunction)(ibv_context*, std::uint32_t, std::uint32_t, ibv_gid_entry*, std::uint32_t,
                          std::size_t) = nullptr;

int queryPort(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes) {
  // The exported function fills the structure of the library's first version, the beginning of
  // today's.
  std::memset(attributes, 0, sizeof *attributes);
  return queryPortFunction(context, port, reinterpret_cast<_compat_ibv_port_attr*>(attributes));
}

ibv_mr* regMr(ibv_pd* pd, void* address, std::size_t bytes, unsigned access) {
  // As verbs.h does it: only the newer function may be given optional flags.
  const unsigned optional = access & IBV_ACCESS_OPTIONAL_RANGE;
  if (optional != 0 && regMrIova2Function) {
    return regMrIova2Function(pd, address, bytes, reinterpret_cast<std::uint64_t>(address), access);
  }
  return regMrFunction(pd, address, bytes, static_cast<int>(access & ~optional));
}

ibv_cq* createCq(ibv_context* context, int entries) {
  return createCqFunction(context, entries, nullptr, nullptr, 0);
}

/// The type of a GID as the kernel writes it into sysfs ("RoCE v2", "IB/RoCE v1").
int gidTypeFromSysfs(const ibv_context* context, std::uint8_t port, std::uint32_t index,
                     std::uint32_t* type) {
  std::ifstream file(fmt::format("{}/ports/{}/gid_attrs/types/{}", context->device->ibdev_path,
                                 unsigned{port}, index));
  std::string text;
  if (!std::getline(file, text)) return ENODATA;
  *type = text == "RoCE v2" ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
  return 0;
}

int queryGid(ibv_context* context, std::uint8_t port, std::uint32_t index, ibv_gid_entry* entry) {
  std::memset(entry, 0, sizeof *entry);
  if (queryGidExFunction) {
    return queryGidExFunction(context, port, index, entry, 0, sizeof *entry);
  }
  if (queryGidFunction(context, port, static_cast<int>(index), &entry->gid) != 0) {
    return errno != 0 ? errno : EINVAL;
  }
  entry->gid_index = index;
  entry->port_num = port;
  return gidTypeFromSysfs(context, port, index, &entry->gid_type);
}

template <typename Function>
bool find(void* library, const char* symbol, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(library, symbol));
  return *out != nullptr;
}

Status loadTable(VerbsLibrary* table) {
  // Never dlclosed: its providers may have threads and handlers of their own.
  void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    return Status::error(
        Code::Unsupported,
        fmt::format("no verbs library (Debian: libibverbs1, ibverbs-providers): {}",
                    why ? why : "libibverbs.so.1 not found"));
  }
  const char* missing = nullptr;
  const auto need = [&](const char* symbol, auto* out) {
    if (!find(library, symbol, out)) missing = symbol;
  };
  need("ibv_get_device_list", &table->getDeviceList);
  need("ibv_free_device_list", &table->freeDeviceList);
  need("ibv_get_device_name", &table->getDeviceName);
  need("ibv_open_device", &table->openDevice);
  need("ibv_close_device", &table->closeDevice);
  need("ibv_query_device", &table->queryDevice);
  need("ibv_query_port", &queryPortFunction);
  need("ibv_query_gid", &queryGidFunction);
  need("ibv_alloc_pd", &table->allocPd);
  need("ibv_dealloc_pd", &table->deallocPd);
  need("ibv_reg_mr", &regMrFunction);
  need("ibv_dereg_mr", &table->deregMr);
  need("ibv_create_cq", &createCqFunction);
  need("ibv_destroy_cq", &table->destroyCq);
  need("ibv_create_qp", &table->createQp);
  need("ibv_destroy_qp", &table->destroyQp);
  need("ibv_modify_qp", &table->modifyQp);
  need("ibv_query_qp", &table->queryQp);
  need("ibv_wc_status_str", &table->statusText);
  if (missing) {
    return Status::error(Code::Unsupported,
                         fmt::format("libibverbs.so.1 lacks {}: it is too old", missing));
  }
  find(library, "ibv_reg_mr_iova2", &regMrIova2Function);
  find(library, "ibv_reg_dmabuf_mr", &table->regDmaBufMr);
  find(library, "_ibv_query_gid_ex", &queryGidExFunction);
  table->queryPort = queryPort;
  table->queryGid = queryGid;
  table->regMr = regMr;
  table->createCq = createCq;
  return {};
}

}  // namespace

Status VerbsLibrary::load(const VerbsLibrary** out) {
  static VerbsLibrary table;
  static Status status;
  static std::once_flag once;
  std::call_once(once, [] { status = loadTable(&table); });
  if (status) *out = &table;
  return status;
}

}  // namespace hoccl
