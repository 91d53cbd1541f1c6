#include "common/gpu/frees_seen.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>
#include <unistd.h>

#include <cstring>
#include <string_view>

namespace hoccl {
namespace {

/// In every CUDA run time since the first: the text of cudaErrorInsufficientDriver. In two parts,
/// so that it does not stand in this program.
const char* const kRunTimeText[] = {"CUDA driver version is insufficient ",
                                    "for CUDA runtime version"};

/// What one walk over the loaded objects finds.
struct Objects {
  std::string runTimeText;
  bool first = true;
  bool programHasRunTime = false;
  bool programNeedsDriver = false;
  std::string sharedRunTime;
};

/// Not by memmem: AddressSanitizer would find its own red zones between the variables of a segment.
#if defined(__SANITIZE_ADDRESS__)
__attribute__((no_sanitize("address")))
#endif
bool containsText(const char* begin, std::size_t bytes, const std::string& text) {
  const char* const wanted = text.data();
  const std::size_t length = text.size();
  for (std::size_t at = 0; at + length <= bytes; ++at) {
    std::size_t same = 0;
    while (same < length && begin[at + same] == wanted[same]) ++same;
    if (same == length) return true;
  }
  return false;
}

bool contains(const dl_phdr_info& object, const std::string& text) {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = object.dlpi_phdr[i];
    if (header.p_type != PT_LOAD || !(header.p_flags & PF_R) || (header.p_flags & PF_W)) continue;
    const auto* begin = reinterpret_cast<const char*>(object.dlpi_addr + header.p_vaddr);
    if (containsText(begin, header.p_filesz, text)) return true;
  }
  return false;
}

/// The object names that library among those it is linked with.
bool needs(const dl_phdr_info& object, std::string_view library) {
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    if (object.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    dynamic = reinterpret_cast<const ElfW(Dyn)*>(object.dlpi_addr + object.dlpi_phdr[i].p_vaddr);
  }
  if (!dynamic) return false;
  const char* strings = nullptr;
  for (const ElfW(Dyn)* entry = dynamic; entry->d_tag != DT_NULL; ++entry) {
    // glibc has relocated this pointer.
    if (entry->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(entry->d_un.d_ptr);
  }
  for (const ElfW(Dyn)* entry = dynamic; strings && entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_NEEDED && library == strings + entry->d_un.d_val) return true;
  }
  return false;
}

int visit(dl_phdr_info* object, std::size_t, void* data) {
  auto& objects = *static_cast<Objects*>(data);
  if (objects.first) {  // the program itself comes first
    objects.first = false;
    objects.programHasRunTime = contains(*object, objects.runTimeText);
    objects.programNeedsDriver = needs(*object, "libcuda.so.1");
    return 0;
  }
  const std::string_view path = object->dlpi_name ? object->dlpi_name : "";
  const std::string_view name = path.substr(path.rfind('/') + 1);
  if (name.substr(0, 12) == "libcudart.so") objects.sharedRunTime = path;
  return 0;
}

std::string program() {
  char path[4096];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path);
  return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : "the program";
}

/// The object that the loader gives for a function, or null.
const void* objectOf(const char* function, std::string* path) {
  void* found = ::dlsym(RTLD_DEFAULT, function);
  Dl_info info{};
  if (!found || !::dladdr(found, &info)) return nullptr;
  *path = info.dli_fname ? info.dli_fname : "";
  return info.dli_fbase;
}

}  // namespace

FreesSeen lookForFrees() {
  std::string path;
  const void* shim = objectOf("hocclShimVersion", &path);
  if (!shim) {
    return {false, "libnccl-tuner-hoccl.so is not preloaded: name it in LD_PRELOAD"};
  }
  for (const char* function : {"cudaFree", "cuMemFree_v2"}) {
    if (objectOf(function, &path) == shim) continue;
    return {false, fmt::format("{} comes from {}, before the preloaded library: name "
                               "libnccl-tuner-hoccl.so first in LD_PRELOAD",
                               function, path)};
  }
  Objects objects;
  objects.runTimeText = std::string(kRunTimeText[0]) + kRunTimeText[1];
  ::dl_iterate_phdr(&visit, &objects);
  if (objects.programHasRunTime) {
    return {false, fmt::format("the CUDA run time is linked statically into {}: link it with "
                               "-cudart shared",
                               program())};
  }
  if (!objects.sharedRunTime.empty()) {
    return {true, fmt::format("the program uses {}", objects.sharedRunTime)};
  }
  if (objects.programNeedsDriver) {
    return {true, fmt::format("{} is linked with libcuda.so.1", program())};
  }
  return {false,
          fmt::format("no shared CUDA run time is loaded and {} is not linked with libcuda.so.1: "
                      "its frees go where they cannot be seen",
                      program())};
}

}  // namespace hoccl
