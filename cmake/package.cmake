# What `cmake --install` puts into a prefix for programs that use Eadem: headers, static libraries and the files that
# find_package(eadem) reads. docs/cpp.md shows a program; tests/package builds it.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/eadem)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/eadem DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
  FILES_MATCHING PATTERN "*.h" PATTERN cli EXCLUDE PATTERN python EXCLUDE)
install(TARGETS eadem_options EXPORT eadem COMPONENT development)
install(EXPORT eadem NAMESPACE eadem:: FILE eadem-targets.cmake DESTINATION ${package_dir} COMPONENT development)
configure_package_config_file(cmake/eadem-config.cmake.in ${PROJECT_BINARY_DIR}/eadem-config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/eadem-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/eadem-config.cmake ${PROJECT_BINARY_DIR}/eadem-config-version.cmake
  DESTINATION ${package_dir} COMPONENT development)
