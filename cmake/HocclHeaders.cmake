# Finds cuda.h and nccl.h (headers only: libcuda and NCCL are loaded at run time) and offers them as
# the interface target hoccl_headers. Order: the cache variables, what scripts/fetch-headers has unpacked
# into build/headers (only where the others do not do), CUDA_HOME, /usr/local/cuda, the system.
set(_hints ${CMAKE_SOURCE_DIR}/build/headers/include)
if(DEFINED ENV{CUDA_HOME})
  list(APPEND _hints $ENV{CUDA_HOME}/include)
endif()
list(APPEND _hints /usr/local/cuda/include)

find_path(HOCCL_CUDA_INCLUDE_FOUND cuda.h HINTS ${HOCCL_CUDA_INCLUDE} ${_hints} NO_CACHE)
find_path(HOCCL_NCCL_INCLUDE_FOUND nccl.h HINTS ${HOCCL_NCCL_INCLUDE} ${_hints} NO_CACHE)
if(NOT HOCCL_CUDA_INCLUDE_FOUND OR NOT HOCCL_NCCL_INCLUDE_FOUND)
  message(FATAL_ERROR "cuda.h or nccl.h not found: set CUDA_HOME, pass -DHOCCL_CUDA_INCLUDE=… and "
                      "-DHOCCL_NCCL_INCLUDE=…, or run scripts/fetch-headers first")
endif()
# What the stand-in NCCL declares; the libraries themselves run with older NCCLs.
set(_nccl_least 22809)
file(STRINGS ${HOCCL_NCCL_INCLUDE_FOUND}/nccl.h _nccl_code REGEX "^#define NCCL_VERSION_CODE [0-9]+")
string(REGEX MATCH "[0-9]+" _nccl_code "${_nccl_code}")
if(NOT _nccl_code OR _nccl_code LESS _nccl_least)
  message(FATAL_ERROR "${HOCCL_NCCL_INCLUDE_FOUND}/nccl.h has NCCL_VERSION_CODE '${_nccl_code}', building "
                      "needs ${_nccl_least} (2.28.9) or newer: pass -DHOCCL_NCCL_INCLUDE=…, or run "
                      "scripts/fetch-headers first")
endif()
add_library(hoccl_headers INTERFACE)
target_include_directories(hoccl_headers SYSTEM INTERFACE ${HOCCL_CUDA_INCLUDE_FOUND}
                                                          ${HOCCL_NCCL_INCLUDE_FOUND})
