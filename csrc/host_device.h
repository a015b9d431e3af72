// MHA_HD marks functions that compile for the CPU and, under nvcc, for the GPU too.
#pragma once
#ifdef __CUDACC__
#define MHA_HD __host__ __device__
#else
#define MHA_HD
#endif
