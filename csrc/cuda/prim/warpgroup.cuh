// What warps of a specialised kernel need (compute capability 9.0): named barriers and registers handed over.
#pragma once

namespace mha::cuda {

template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barrier `id` (1 to 15; 0 is __syncthreads) of so many threads.
template <int kThreads>
__device__ inline void named_barrier(int id) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Counts there, without waiting for the others.
template <int kThreads>
__device__ inline void named_barrier_arrive(int id) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

template <int kThreads>
__device__ inline bool named_barrier_or(int id, bool x) {
  int any;
  asm volatile(
      "{\n.reg .pred in, out;\n"
      "setp.ne.s32 in, %1, 0;\n"
      "barrier.red.or.pred.aligned out, %2, %3, in;\n"
      "selp.s32 %0, 1, 0, out;\n}"
      : "=r"(any)
      : "r"(int(x)), "r"(id), "n"(kThreads)
      : "memory");
  return any;
}

}  // namespace mha::cuda
