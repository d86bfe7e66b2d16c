# One directory is one layer is one target: eadem_<name>, alias eadem::<name>.
# A layer links only what architecture.md lets it include; tests/include_graph checks the sources.

add_library(eadem_options INTERFACE)
# Programs that use an installed Eadem get the headers and the language, and keep their own options.
target_include_directories(eadem_options INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(eadem_options INTERFACE cxx_std_20)
set(options -Wall -Wextra -Werror -Wno-missing-field-initializers -fno-math-errno -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # -Wrestrict: a false positive of GCC 12 on `const char* + std::string&&` (GCC bug 105651).
  list(INSERT options 2 -Wshadow=compatible-local)
  list(APPEND options -Wno-restrict)
  # -Wdangling-reference: GCC 13 takes what a temporary AttrsRef refers to for a part of it.
  if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    list(APPEND options -Wno-dangling-reference)
  endif()
endif()
target_compile_options(eadem_options INTERFACE "$<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:${options}>>")
if(EADEM_SANITIZE)
  target_compile_options(eadem_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${EADEM_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all>)
  target_link_options(eadem_options INTERFACE -fsanitize=${EADEM_SANITIZE})
endif()

# Compiles `count` sources of a target as one, because most of a small source's time is its headers. GCC then takes the
# sources for headers, whose classes may not use unnamed namespaces.
function(eadem_join_sources target count)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${count})
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endfunction()

# Leaves a target that computes little unoptimized where there are sanitizers: -O1 takes twice as long to compile.
# libFuzzer needs the speed of what reads files.
function(eadem_sanitize_unoptimized target)
  if(EADEM_SANITIZE AND NOT (EADEM_FUZZ AND target STREQUAL eadem_io))
    target_compile_options(${target} PRIVATE -O0)
  endif()
endfunction()

# Optimizes a target that computes little: -O3 takes a tenth longer to compile it.
function(eadem_optimize_little target)
  target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O2>)
  eadem_sanitize_unoptimized(${target})
endfunction()

# eadem_layer(<name> [JOINED] [LIGHT] [LINK <targets that headers need>] [PRIVATE <targets only sources need>])
# Compiles every .cc below the calling directory; JOINED, with EADEM_JOIN_SOURCES, several as one. LIGHT: it computes
# little.
function(eadem_layer name)
  cmake_parse_arguments(arg "JOINED;LIGHT" "" "LINK;PRIVATE" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  if(sources)
    add_library(eadem_${name} STATIC ${sources})
    if(arg_JOINED AND EADEM_JOIN_SOURCES)
      eadem_join_sources(eadem_${name} 16)
    endif()
    if(arg_LIGHT)
      eadem_optimize_little(eadem_${name})
    endif()
    target_link_libraries(eadem_${name} PUBLIC eadem_options ${arg_LINK} PRIVATE ${arg_PRIVATE})
  else()
    add_library(eadem_${name} INTERFACE)
    target_link_libraries(eadem_${name} INTERFACE eadem_options ${arg_LINK} ${arg_PRIVATE})
  endif()
  add_library(eadem::${name} ALIAS eadem_${name})
  set_target_properties(eadem_${name} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS eadem_${name} EXPORT eadem COMPONENT development)
endfunction()
