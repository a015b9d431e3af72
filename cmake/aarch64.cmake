# For the C++ tests on an x86 machine: Debian's g++-aarch64-linux-gnu, and qemu-user to run what it compiles.
#   cmake -B build/aarch64 -DMHA_EXT_TORCH=OFF -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max)
