# CMake toolchain: 64-bit ARM from another machine, with Debian's cross compiler (g++-aarch64-linux-gnu) and the :arm64
# packages of libraries. What is built runs, and is tested, under user-mode QEMU (qemu-user).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64)
