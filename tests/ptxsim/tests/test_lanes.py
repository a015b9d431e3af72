"""Lanes of one warp that meet in shared memory need a __syncwarp (or a barrier, a fence) between."""
import numpy as np
import pytest

from ptxsim_py import Buffer, SimError, build

SOURCE = r"""
__device__ unsigned smem(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }
__device__ void order(int how) {
  if (how == 1) __syncwarp();
  if (how == 2) __syncthreads();
  if (how == 3) __shfl_sync(~0u, 0, 0);          // brings the lanes together, and orders nothing
}

// A lane reads what its neighbour wrote.
extern "C" __global__ void neighbour(int* out, int how) {
  __shared__ int s[32];
  s[threadIdx.x] = threadIdx.x;
  order(how);
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}

// The same, with parts of words; apart: each lane reads its own.
extern "C" __global__ void bytes(int* out, int apart) {
  __shared__ volatile unsigned char s[32];
  s[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = s[threadIdx.x ^ !apart];
}

// All lanes keep one number in shared memory: read, then written anew.
extern "C" __global__ void counter(int* out, int how) {
  __shared__ volatile int s;
  s = 3;
  __syncwarp();
  int x = s;
  order(how);
  s = x + 1;
  out[threadIdx.x] = s;
}

extern "C" __global__ void twice(int* out, int how) {
  __shared__ int s[32];
  s[threadIdx.x] = 1;
  order(how);
  s[threadIdx.x ^ 1] = 2;
  order(1);
  out[threadIdx.x] = s[threadIdx.x];
}

// Own words in pieces of other sizes, and several at once.
extern "C" __global__ void own(int* out, int) {
  __shared__ __align__(16) int s[128];
  reinterpret_cast<int4*>(s)[threadIdx.x] = make_int4(1, 2, 3, threadIdx.x);
  s[4 * threadIdx.x + 1] = 7;
  reinterpret_cast<short*>(s)[8 * threadIdx.x] = 5;
  int4 v = reinterpret_cast<int4*>(s)[threadIdx.x];
  out[threadIdx.x] = v.x + v.y + v.z + v.w;
}

extern "C" __global__ void copied(int* out, int how) {
  __shared__ int s[32];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\ncp.async.wait_all;" :: "r"(smem(&s[threadIdx.x])), "l"(out + threadIdx.x) : "memory");
  order(how);
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}

extern "C" __global__ void matrix(int* out, int how) {
  __shared__ __align__(16) int s[32];
  unsigned x;
  s[threadIdx.x] = threadIdx.x;
  order(how);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x) : "r"(smem(s + threadIdx.x % 8 * 4)) : "memory");
  s[threadIdx.x] = 0;                            // after all lanes have read
  out[threadIdx.x] = x;
}

// Half of the lanes write what the other half reads, on their own ways.
extern "C" __global__ void diverged(int* out, int how) {
  __shared__ int s[32];
  if (threadIdx.x < 16) s[threadIdx.x] = threadIdx.x;
  order(how);
  if (threadIdx.x >= 16) out[threadIdx.x] = s[threadIdx.x - 16];
}
"""


@pytest.fixture(scope="module")
def module():
    return build(SOURCE, "sm_80")


def launch(module, kernel, how):
    out = Buffer(np.zeros(32, np.int32))
    module.launch(kernel, 1, 32, out, how)


@pytest.mark.parametrize("how, ordered", [(0, False), (1, True), (2, True), (3, False)])
@pytest.mark.parametrize("kernel", ["neighbour", "counter", "twice", "copied", "matrix", "diverged"])
def test_what_orders_lanes(module, kernel, how, ordered):
    if ordered:
        launch(module, kernel, how)
    else:
        with pytest.raises(SimError, match="other lanes of the warp .* without a __syncwarp between"):
            launch(module, kernel, how)


def test_parts_of_a_word_belong_to_lanes(module):
    launch(module, "bytes", 1)
    launch(module, "own", 0)
    with pytest.raises(SimError, match="read by .* of what other lanes of the warp wrote"):
        launch(module, "bytes", 0)
