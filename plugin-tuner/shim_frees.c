/* The functions that free device memory, before which the movers have to let go of it, and those
 * that allocate it, which get a second try once they have. As the rest of the shim: C, libc only,
 * no constructor. Until the process has made a communicator each one is two atomic loads and the
 * real call.
 *
 * Who reaches them: whoever calls the CUDA run time in a shared libcudart (PyTorch), who calls
 * libcuda.so.1 through the dynamic linker, and who asks one of the interposed entry-point look-ups
 * for the driver's function (PyTorch's expandable segments). Not a CUDA run time linked statically,
 * nor one that asks dlsym for a handle's function: common/gpu/frees_seen.h tells.
 *
 * cuMemRelease needs no wrapper: an exported mapping keeps its memory until cuMemUnmap, which has
 * one. */

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "plugin-tuner/shim.h"

/* cudaError_t and CUresult: both are ints, and these values mean the same in both. */
typedef int Result;
enum { kSuccess = 0, kOutOfMemory = 2, kNotInitialised = 3 };

typedef unsigned long long Address;    /* CUdeviceptr */
typedef unsigned long long EntryFlags; /* of the look-ups */
enum { kPerThreadStream = 2 };         /* the bit in them, the same for run time and driver */

/* The prototypes of cuda.h and cuda_runtime.h stay out of the way: each wrapper has a name of its
 * own, and the real one's as its symbol. */
#define WRAPPER(name) __asm__(#name)
typedef void* Stream;
EXPORT Result wrapCudaFree(void* pointer) WRAPPER(cudaFree);
EXPORT Result wrapCudaFreeAsync(void* pointer, Stream stream) WRAPPER(cudaFreeAsync);
EXPORT Result wrapCudaFreeAsyncPtsz(void* pointer, Stream stream) WRAPPER(cudaFreeAsync_ptsz);
EXPORT Result wrapCudaMalloc(void** pointer, size_t bytes) WRAPPER(cudaMalloc);
EXPORT Result wrapEntry(const char* symbol, void** out, EntryFlags flags, int* status)
    WRAPPER(cudaGetDriverEntryPoint);
EXPORT Result wrapEntryPtsz(const char* symbol, void** out, EntryFlags flags, int* status)
    WRAPPER(cudaGetDriverEntryPoint_ptsz);
EXPORT Result wrapEntryByVersion(const char* symbol, void** out, unsigned version, EntryFlags flags,
                                 int* status) WRAPPER(cudaGetDriverEntryPointByVersion);
EXPORT Result wrapEntryByVersionPtsz(const char* symbol, void** out, unsigned version,
                                     EntryFlags flags, int* status)
    WRAPPER(cudaGetDriverEntryPointByVersion_ptsz);
EXPORT Result wrapMemFree(Address pointer) WRAPPER(cuMemFree_v2);
EXPORT Result wrapMemFreeAsync(Address pointer, Stream stream) WRAPPER(cuMemFreeAsync);
EXPORT Result wrapMemFreeAsyncPtsz(Address pointer, Stream stream) WRAPPER(cuMemFreeAsync_ptsz);
EXPORT Result wrapMemUnmap(Address pointer, size_t bytes) WRAPPER(cuMemUnmap);
EXPORT Result wrapMemAlloc(Address* pointer, size_t bytes) WRAPPER(cuMemAlloc_v2);
EXPORT Result wrapMemCreate(Address* handle, size_t bytes, const void* properties, Address flags)
    WRAPPER(cuMemCreate);
EXPORT Result wrapProcAddress(const char* symbol, void** out, int version, EntryFlags flags)
    WRAPPER(cuGetProcAddress);
EXPORT Result wrapProcAddress2(const char* symbol, void** out, int version, EntryFlags flags,
                               int* status) WRAPPER(cuGetProcAddress_v2);

/* --- The real functions --------------------------------------------------------------------- */

struct Real {
  const char* name;
  const char* const* libraries; /* where it is when the loader's order does not lead to it */
  void* wrapper;
  _Atomic(void*) function;
};

/* PyTorch's CUDA libraries are loaded RTLD_LOCAL, where RTLD_NEXT finds nothing. */
static const char* const kRunTime[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0",
                                       NULL};
static const char* const kDriver[] = {"libcuda.so.1", NULL};

#define REAL(variable, symbol, where, wrap) \
  static struct Real variable = {#symbol, where, (void*)(wrap), NULL}
REAL(realCudaFree, cudaFree, kRunTime, wrapCudaFree);
REAL(realCudaFreeAsync, cudaFreeAsync, kRunTime, wrapCudaFreeAsync);
REAL(realCudaFreeAsyncPtsz, cudaFreeAsync_ptsz, kRunTime, wrapCudaFreeAsyncPtsz);
REAL(realCudaMalloc, cudaMalloc, kRunTime, wrapCudaMalloc);
REAL(realCudaLastError, cudaGetLastError, kRunTime, NULL);
REAL(realCudaVersion, cudaRuntimeGetVersion, kRunTime, NULL);
REAL(realEntry, cudaGetDriverEntryPoint, kRunTime, wrapEntry);
REAL(realEntryPtsz, cudaGetDriverEntryPoint_ptsz, kRunTime, wrapEntryPtsz);
REAL(realEntryByVersion, cudaGetDriverEntryPointByVersion, kRunTime, wrapEntryByVersion);
REAL(realEntryByVersionPtsz, cudaGetDriverEntryPointByVersion_ptsz, kRunTime,
     wrapEntryByVersionPtsz);
REAL(realMemFree, cuMemFree_v2, kDriver, wrapMemFree);
REAL(realMemFreeAsync, cuMemFreeAsync, kDriver, wrapMemFreeAsync);
REAL(realMemFreeAsyncPtsz, cuMemFreeAsync_ptsz, kDriver, wrapMemFreeAsyncPtsz);
REAL(realMemUnmap, cuMemUnmap, kDriver, wrapMemUnmap);
REAL(realMemAlloc, cuMemAlloc_v2, kDriver, wrapMemAlloc);
REAL(realMemCreate, cuMemCreate, kDriver, wrapMemCreate);
REAL(realProcAddress, cuGetProcAddress, kDriver, wrapProcAddress);
REAL(realProcAddress2, cuGetProcAddress_v2, kDriver, wrapProcAddress2);

static void* symbolIn(const char* library, const struct Real* real) {
  void* handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
  void* found = handle ? dlsym(handle, real->name) : NULL;
  return found == real->wrapper ? NULL : found;
}

static void* lookUp(struct Real* real, const void* caller) {
  const int before = errno;
  void* found = dlsym(RTLD_NEXT, real->name);
  for (const char* const* library = real->libraries; !found && *library; ++library) {
    found = symbolIn(*library, real);
  }
  /* A library of another name: whatever the caller itself is linked with. */
  Dl_info info;
  if (!found && dladdr(caller, &info) && info.dli_fname) found = symbolIn(info.dli_fname, real);
  if (found) {
    /* Held, so that the address stays good. */
    if (dladdr(found, &info) && info.dli_fname)
      (void)dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    atomic_store_explicit(&real->function, found, memory_order_release);
  }
  errno = before;
  return found;
}

static void* realOf(struct Real* real, const void* caller) {
  void* known = atomic_load_explicit(&real->function, memory_order_acquire);
  return known ? known : lookUp(real, caller);
}

/* A typed real function as a local variable of the wrapper; the wrapper returns if there is none.
 */
#define REAL_FUNCTION(variable, real, ...)                           \
  Result (*variable)(__VA_ARGS__);                                   \
  *(void**)&variable = realOf(&(real), __builtin_return_address(0)); \
  if (!variable) return kNotInitialised

/* --- What the core has to know -------------------------------------------------------------- */

/* One free may reach another one's wrapper: only the outermost counts. */
static __thread int inside;

static void freeing(Address address, size_t bytes) {
  const struct HocclCoreApi* core = atomic_load_explicit(&hocclLoadedCore, memory_order_acquire);
  if (!core || !core->freeing || !address || inside) return;
  inside = 1;
  core->freeing(address, bytes);
  inside = 0;
}

/* The allocation that gave `result` is worth another try. */
static int worthAnotherTry(Result result) {
  if (result != kOutOfMemory || inside) return 0;
  const struct HocclCoreApi* core = atomic_load_explicit(&hocclLoadedCore, memory_order_acquire);
  if (!core || !core->allocationFailed) return 0;
  inside = 1;
  const int again = core->allocationFailed();
  inside = 0;
  return again;
}

/* --- Frees ---------------------------------------------------------------------------------- */

Result wrapCudaFree(void* pointer) {
  freeing((uintptr_t)pointer, 0);
  REAL_FUNCTION(free, realCudaFree, void*);
  return free(pointer);
}

/* Memory of a pool is never exported, but memory of cudaMalloc may be freed here, too. */
Result wrapCudaFreeAsync(void* pointer, Stream stream) {
  freeing((uintptr_t)pointer, 0);
  REAL_FUNCTION(free, realCudaFreeAsync, void*, Stream);
  return free(pointer, stream);
}

Result wrapCudaFreeAsyncPtsz(void* pointer, Stream stream) {
  freeing((uintptr_t)pointer, 0);
  REAL_FUNCTION(free, realCudaFreeAsyncPtsz, void*, Stream);
  return free(pointer, stream);
}

Result wrapMemFree(Address pointer) {
  freeing(pointer, 0);
  REAL_FUNCTION(free, realMemFree, Address);
  return free(pointer);
}

Result wrapMemFreeAsync(Address pointer, Stream stream) {
  freeing(pointer, 0);
  REAL_FUNCTION(free, realMemFreeAsync, Address, Stream);
  return free(pointer, stream);
}

Result wrapMemFreeAsyncPtsz(Address pointer, Stream stream) {
  freeing(pointer, 0);
  REAL_FUNCTION(free, realMemFreeAsyncPtsz, Address, Stream);
  return free(pointer, stream);
}

Result wrapMemUnmap(Address pointer, size_t bytes) {
  if (bytes) freeing(pointer, bytes);
  REAL_FUNCTION(unmap, realMemUnmap, Address, size_t);
  return unmap(pointer, bytes);
}

/* --- Allocations ---------------------------------------------------------------------------- */

Result wrapCudaMalloc(void** pointer, size_t bytes) {
  REAL_FUNCTION(allocate, realCudaMalloc, void**, size_t);
  Result result = allocate(pointer, bytes);
  if (!worthAnotherTry(result)) return result;
  result = allocate(pointer, bytes);
  if (result == kSuccess) {
    /* The first try's error would show up at the application's next look. */
    Result (*takeError)(void);
    *(void**)&takeError = realOf(&realCudaLastError, __builtin_return_address(0));
    if (takeError) (void)takeError();
  }
  return result;
}

Result wrapMemAlloc(Address* pointer, size_t bytes) {
  REAL_FUNCTION(allocate, realMemAlloc, Address*, size_t);
  const Result result = allocate(pointer, bytes);
  return worthAnotherTry(result) ? allocate(pointer, bytes) : result;
}

Result wrapMemCreate(Address* handle, size_t bytes, const void* properties, Address flags) {
  REAL_FUNCTION(create, realMemCreate, Address*, size_t, const void*, Address);
  const Result result = create(handle, bytes, properties, flags);
  return worthAnotherTry(result) ? create(handle, bytes, properties, flags) : result;
}

/* --- Entry-point look-ups ------------------------------------------------------------------- */

/* A function by the name it is looked up by, from the version on that has the wrapper's arguments.
 */
struct Entry {
  const char* symbol;
  int from, to; /* 1000 * major + 10 * minor, both included */
  struct Real* plain;
  struct Real* perThread; /* with the per-thread default stream */
};
static const int kAnyVersion = 0x7fffffff;
static const struct Entry kEntries[] = {
    {"cuMemFree", 3020, kAnyVersion, &realMemFree, &realMemFree},
    {"cuMemFreeAsync", 11020, kAnyVersion, &realMemFreeAsync, &realMemFreeAsyncPtsz},
    {"cuMemUnmap", 10020, kAnyVersion, &realMemUnmap, &realMemUnmap},
    {"cuMemAlloc", 3020, kAnyVersion, &realMemAlloc, &realMemAlloc},
    {"cuMemCreate", 10020, kAnyVersion, &realMemCreate, &realMemCreate},
    {"cuGetProcAddress", 11030, 11999, &realProcAddress, &realProcAddress},
    {"cuGetProcAddress", 12000, kAnyVersion, &realProcAddress2, &realProcAddress2},
};

/* A look-up has succeeded: puts the wrapper in the place of what it found. */
static Result substitute(Result result, const char* symbol, void** out, int version,
                         int perThread) {
  if (result != kSuccess || !symbol || !out || !*out) return result;
  for (size_t i = 0; i < sizeof kEntries / sizeof kEntries[0]; ++i) {
    const struct Entry* entry = &kEntries[i];
    if (strcmp(symbol, entry->symbol) != 0 || version < entry->from || version > entry->to)
      continue;
    struct Real* real = perThread ? entry->perThread : entry->plain;
    if (*out == real->wrapper) return result;
    void* none = NULL;
    atomic_compare_exchange_strong(&real->function, &none, *out);
    *out = real->wrapper;
    return result;
  }
  return result;
}

/* The version that a look-up without one means: the run time's own. */
static int runTimeVersion(const void* caller) {
  Result (*ask)(int*);
  *(void**)&ask = realOf(&realCudaVersion, caller);
  int version = 0;
  return ask && ask(&version) == kSuccess ? version : 0;
}

Result wrapEntry(const char* symbol, void** out, EntryFlags flags, int* status) {
  REAL_FUNCTION(find, realEntry, const char*, void**, EntryFlags, int*);
  return substitute(find(symbol, out, flags, status), symbol, out,
                    runTimeVersion(__builtin_return_address(0)), (flags & kPerThreadStream) != 0);
}

Result wrapEntryPtsz(const char* symbol, void** out, EntryFlags flags, int* status) {
  REAL_FUNCTION(find, realEntryPtsz, const char*, void**, EntryFlags, int*);
  return substitute(find(symbol, out, flags, status), symbol, out,
                    runTimeVersion(__builtin_return_address(0)),
                    flags == 0 || (flags & kPerThreadStream) != 0);
}

Result wrapEntryByVersion(const char* symbol, void** out, unsigned version, EntryFlags flags,
                          int* status) {
  REAL_FUNCTION(find, realEntryByVersion, const char*, void**, unsigned, EntryFlags, int*);
  return substitute(find(symbol, out, version, flags, status), symbol, out, (int)version,
                    (flags & kPerThreadStream) != 0);
}

Result wrapEntryByVersionPtsz(const char* symbol, void** out, unsigned version, EntryFlags flags,
                              int* status) {
  REAL_FUNCTION(find, realEntryByVersionPtsz, const char*, void**, unsigned, EntryFlags, int*);
  return substitute(find(symbol, out, version, flags, status), symbol, out, (int)version,
                    flags == 0 || (flags & kPerThreadStream) != 0);
}

Result wrapProcAddress(const char* symbol, void** out, int version, EntryFlags flags) {
  REAL_FUNCTION(find, realProcAddress, const char*, void**, int, EntryFlags);
  return substitute(find(symbol, out, version, flags), symbol, out, version,
                    (flags & kPerThreadStream) != 0);
}

Result wrapProcAddress2(const char* symbol, void** out, int version, EntryFlags flags,
                        int* status) {
  REAL_FUNCTION(find, realProcAddress2, const char*, void**, int, EntryFlags, int*);
  return substitute(find(symbol, out, version, flags, status), symbol, out, version,
                    (flags & kPerThreadStream) != 0);
}
