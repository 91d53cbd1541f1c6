# hoccl_lab_test(NAME name COMMAND program args… [NODES 1|2] [RAILS n] [TIMEOUT seconds] [OPTIONS …]):
# a test whose command runs in soft-RoCE guests (docs/rdma-lab.md), by itself, since guests under
# emulation take all processors. Skipped where no guest can be had. TIMEOUT (60) is the command's,
# from when the guests are ready. OPTIONS are more options of test/rdma-lab/guest.
function(hoccl_lab_test)
  cmake_parse_arguments(ARG "" "NAME;NODES;RAILS;TIMEOUT" "COMMAND;OPTIONS" ${ARGN})
  foreach(pair "NODES 1" "RAILS 1" "TIMEOUT 60")
    separate_arguments(pair)
    list(GET pair 0 option)
    list(GET pair 1 value)
    if(NOT DEFINED ARG_${option})
      set(ARG_${option} ${value})
    endif()
  endforeach()
  if(HOCCL_SANITIZE)
    list(APPEND ARG_OPTIONS --memory 2048) # the last one counts
  endif()
  add_test(NAME ${ARG_NAME}
           COMMAND ${CMAKE_SOURCE_DIR}/test/rdma-lab/guest --offline --nodes ${ARG_NODES} --rails ${ARG_RAILS}
                   --timeout ${ARG_TIMEOUT} ${ARG_OPTIONS} -- ${ARG_COMMAND})
  hoccl_lab_properties(${ARG_NAME} ${ARG_TIMEOUT})
endfunction()

# hoccl_lab_properties(test seconds): what all tests with guests have in common.
function(hoccl_lab_properties test seconds)
  # Guests have 150 s to become ready.
  math(EXPR limit "${seconds} + 170")
  set_tests_properties(${test} PROPERTIES LABELS rdma SKIP_RETURN_CODE 77 RUN_SERIAL ON
                       TIMEOUT ${limit} FIXTURES_REQUIRED rdma_lab_image)
endfunction()
