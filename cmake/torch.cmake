# Defines mha_ext_torch: torch's headers and libraries. Looked for in TORCH_INSTALL (the folder with include/ and lib/),
# then around Torch_DIR, then in the torch of the python3 on the path. TorchConfig.cmake is not used: with a CUDA build of
# torch it asks for a CUDA toolkit, which nothing here needs.
set(TORCH_INSTALL "" CACHE PATH "Folder of torch that holds include/ and lib/")
set(torch_root "${TORCH_INSTALL}")
if(NOT torch_root AND Torch_DIR)
  get_filename_component(torch_root "${Torch_DIR}/../../.." ABSOLUTE)
endif()
if(NOT torch_root)
  find_package(Python3 COMPONENTS Interpreter)
  if(Python3_FOUND)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c "import torch; print(torch.utils.cmake_prefix_path)"
      OUTPUT_VARIABLE torch_prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(torch_prefix)
      get_filename_component(torch_root "${torch_prefix}/../.." ABSOLUTE)
    endif()
  endif()
endif()
if(NOT EXISTS "${torch_root}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR "No torch with a stable ABI was found (looked in '${torch_root}'); install torch >= 2.11 for the "
                      "python3 on the path, or pass -DTORCH_INSTALL=<folder with include/ and lib/>, or "
                      "-DMHA_EXT_TORCH=OFF to build the kernels alone.")
endif()

add_library(mha_ext_torch INTERFACE)
target_include_directories(mha_ext_torch SYSTEM INTERFACE
  "${torch_root}/include" "${torch_root}/include/torch/csrc/api/include")
foreach(name torch torch_cpu c10)
  find_library(MHA_EXT_LIB_${name} ${name} PATHS "${torch_root}/lib" NO_DEFAULT_PATH REQUIRED)
  target_link_libraries(mha_ext_torch INTERFACE "${MHA_EXT_LIB_${name}}")
endforeach()
