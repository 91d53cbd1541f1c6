# Finds cuda.h and nccl.h (headers only: libcuda and NCCL are loaded at run time) and offers them as
# the interface target hoccl_headers. Order: the cache variables, CUDA_HOME, /usr/local/cuda, the
# system, then the wheels that scripts/fetch-headers unpacks into build/headers.
set(_hints "")
if(DEFINED ENV{CUDA_HOME})
  list(APPEND _hints $ENV{CUDA_HOME}/include)
endif()
list(APPEND _hints /usr/local/cuda/include ${CMAKE_SOURCE_DIR}/build/headers/include)

find_path(HOCCL_CUDA_INCLUDE_FOUND cuda.h HINTS ${HOCCL_CUDA_INCLUDE} ${_hints} NO_CACHE)
find_path(HOCCL_NCCL_INCLUDE_FOUND nccl.h HINTS ${HOCCL_NCCL_INCLUDE} ${_hints} NO_CACHE)
if(NOT HOCCL_CUDA_INCLUDE_FOUND OR NOT HOCCL_NCCL_INCLUDE_FOUND)
  message(FATAL_ERROR "cuda.h or nccl.h not found: set CUDA_HOME, pass -DHOCCL_CUDA_INCLUDE=… and "
                      "-DHOCCL_NCCL_INCLUDE=…, or run scripts/fetch-headers first")
endif()
add_library(hoccl_headers INTERFACE)
target_include_directories(hoccl_headers SYSTEM INTERFACE ${HOCCL_CUDA_INCLUDE_FOUND}
                                                          ${HOCCL_NCCL_INCLUDE_FOUND})
