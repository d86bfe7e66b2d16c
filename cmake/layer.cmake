# One directory is one layer is one target: eadem_<name>, alias eadem::<name>.
# A layer links only what architecture.md lets it include; tests/include_graph checks the sources.

add_library(eadem_options INTERFACE)
target_include_directories(eadem_options INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(eadem_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra $<$<CXX_COMPILER_ID:GNU>:-Wshadow=compatible-local>
  -Werror -Wno-missing-field-initializers -fno-math-errno
  -ffp-contract=off>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # False positive of GCC 12 on `const char* + std::string&&` (GCC bug 105651).
  target_compile_options(eadem_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(EADEM_SANITIZE)
  target_compile_options(eadem_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${EADEM_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all>)
  target_link_options(eadem_options INTERFACE -fsanitize=${EADEM_SANITIZE})
endif()

# eadem_layer(<name> [JOINED] [LINK <targets that headers need>] [PRIVATE <targets only sources need>])
# Compiles every .cc below the calling directory; JOINED, with EADEM_JOIN_SOURCES, several as one.
function(eadem_layer name)
  cmake_parse_arguments(arg "JOINED" "" "LINK;PRIVATE" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  if(sources)
    add_library(eadem_${name} STATIC ${sources})
    if(arg_JOINED AND EADEM_JOIN_SOURCES)
      set_target_properties(eadem_${name} PROPERTIES UNITY_BUILD ON)
    endif()
    target_link_libraries(eadem_${name} PUBLIC eadem_options ${arg_LINK} PRIVATE ${arg_PRIVATE})
  else()
    add_library(eadem_${name} INTERFACE)
    target_link_libraries(eadem_${name} INTERFACE eadem_options ${arg_LINK} ${arg_PRIVATE})
  endif()
  add_library(eadem::${name} ALIAS eadem_${name})
endfunction()
