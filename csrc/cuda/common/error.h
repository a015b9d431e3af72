// CUDA errors become exceptions that name what failed.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace mha::cuda {

// What is thrown is no longer the runtime's last error: whoever asks for that next would blame another kernel.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(error) + " (" +
                           cudaGetErrorName(error) + ")");
}

// The number of blocks as grid.x takes it (up to 2^31 - 1).
inline unsigned grid_size(int64_t blocks, const char* what) {
  if (blocks > 0x7FFFFFFF)
    throw std::runtime_error(std::string(what) + " needs " + std::to_string(blocks) +
                             " blocks, more than the 2147483647 of one launch: split the batch");
  return unsigned(blocks);
}

}  // namespace mha::cuda
