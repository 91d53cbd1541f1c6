# What every target of the project is compiled with.
add_library(hoccl_options INTERFACE)
target_include_directories(hoccl_options INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(hoccl_options INTERFACE -Wall -Wextra -Wpedantic -Werror=return-type)
target_compile_definitions(hoccl_options INTERFACE
  _GNU_SOURCE HOCCL_SANITIZED=$<BOOL:${HOCCL_SANITIZE}>)
if(HOCCL_SANITIZE)
  target_compile_options(hoccl_options INTERFACE -fsanitize=${HOCCL_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(hoccl_options INTERFACE -fsanitize=${HOCCL_SANITIZE})
endif()

# hoccl_library(name DEPS …): a static library of the folder's own *.cc files.
function(hoccl_library name)
  cmake_parse_arguments(ARG "" "" "DEPS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  add_library(${name} STATIC ${sources})
  target_link_libraries(${name} PUBLIC hoccl_options ${ARG_DEPS})
endfunction()
