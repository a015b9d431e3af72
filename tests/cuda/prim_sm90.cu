// The wrappers of compute capability 9.0's instructions, each in a small kernel. Built and run by hand, or by CI on the
// simulated device: nvcc -std=c++20 -gencode arch=compute_90a,code=compute_90a -cudart shared tests/cuda/prim_sm90.cu
#include "../../csrc/cuda/prim/cluster.cuh"
#include "../../csrc/cuda/prim/convert.cuh"
#include "../../csrc/cuda/prim/ldmatrix.cuh"
#include "../../csrc/cuda/prim/math.cuh"
#include "../../csrc/cuda/prim/mbarrier.cuh"
#include "../../csrc/cuda/prim/red.cuh"
#include "../../csrc/cuda/prim/stmatrix.cuh"
#include "../../csrc/cuda/prim/tma.cuh"
#include "../../csrc/cuda/prim/warpgroup.cuh"
#include "../../csrc/cuda/prim/wgmma.cuh"
#include "../../csrc/cuda/sm90/tensor_map.h"
#include "tools.h"

using namespace mha::cuda;
using bf16 = __nv_bfloat16;

namespace {

constexpr int kSize = 64, kTileBytes = kSize * kSize * 2;  // of a; b has 8 * kNt rows or columns instead of 64

enum class Product { rows, held_rows, columns, both_columns };
template <Product kProduct>
constexpr bool kRowsOfB = kProduct == Product::rows || kProduct == Product::held_rows;

// One 64 x (8 * kNt) x 64 product of a warpgroup: c = a b^T, c = a b, or c = a^T b.
template <Product kProduct, int kNt>
__global__ void __launch_bounds__(128) multiply(const __grid_constant__ CUtensorMap map_a,
                                                const __grid_constant__ CUtensorMap map_b, const bf16* a, float* c) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ uint64_t barrier_word;
  const uint32_t a_tile = (shared_address(shared) + 1023) & ~1023u, b_tile = a_tile + kTileBytes;
  const uint32_t barrier = shared_address(&barrier_word);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(barrier, kTileBytes + kNt * 1024);
    tma_load_4d(a_tile, &map_a, barrier, 0, 0, 0, 0);
    tma_load_4d(b_tile, &map_b, barrier, 0, 0, 0, 0);
    if (!kRowsOfB<kProduct> && kNt == 16) tma_load_4d(b_tile + kTileBytes, &map_b, barrier, kSize, 0, 0, 0);
  }
  float sum[kNt][4] = {};
  uint32_t held[4][4];
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < 4; ++i)
      held[k][i] =
          *reinterpret_cast<const uint32_t*>(a + (16 * warp + g + i % 2 * 8) * kSize + 16 * k + 2 * t + i / 2 * 8);
  mbarrier_wait(barrier, 0);
  hold(sum);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (kProduct == Product::rows)
      wgmma_rows<bf16, kNt>(sum, describe_rows(a_tile + 32 * k), describe_rows(b_tile + 32 * k), k > 0);
    else if constexpr (kProduct == Product::held_rows)
      wgmma_rows<bf16, kNt>(sum, held[k], describe_rows(b_tile + 32 * k), k > 0);
    else if constexpr (kProduct == Product::columns)
      wgmma_columns<bf16, kNt>(sum, held[k], describe_columns(b_tile + 2048 * k, kTileBytes));
    else
      wgmma_columns<bf16, kNt>(sum, describe_columns(a_tile + 2048 * k, 0),
                               describe_columns(b_tile + 2048 * k, kTileBytes), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(sum);
  for (int n = 0; n < kNt; ++n)
    for (int i = 0; i < 4; ++i) c[(16 * warp + g + i / 2 * 8) * (8 * kNt) + 8 * n + 2 * t + i % 2] = sum[n][i];
}

// A 16 x 16 tile through registers; whether any of 64 threads said so, at a barrier; and a bulk copy.
__global__ void __launch_bounds__(64) move(const uint32_t* in, uint32_t* out, int* any, int who) {
  __shared__ __align__(128) uint32_t tile[2][128], copied[128];
  __shared__ uint64_t barrier_word;
  const uint32_t barrier = shared_address(&barrier_word);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 2);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(barrier, sizeof(copied));
    bulk_load(shared_address(copied), in, sizeof(copied), barrier);
  }
  if (threadIdx.x == 33) mbarrier_arrive(barrier);
  const uint32_t* from = in + warp * 128;
  const int g = lane / 4, t = lane % 4;
  stmatrix_x4(shared_address(tile[warp]) + lane % 16 * 32 + lane / 16 * 16, from[g * 8 + t], from[(g + 8) * 8 + t],
              from[g * 8 + 4 + t], from[(g + 8) * 8 + 4 + t]);
  if (named_barrier_or<64>(1, int(threadIdx.x) == who) && lane == 0) any[warp] = 1;
  named_barrier<64>(2);
  mbarrier_wait(barrier, 0);
  for (int i = lane; i < 128; i += 32) out[warp * 128 + i] = tile[warp][i] + (warp == 0 ? copied[i] - in[i] : 0);
}

// Blocks add, in the order in which they start, what rounding makes depend on that order.
__global__ void __launch_bounds__(32) add_in_turns(const float* values, float* sums, unsigned* ticket, unsigned* done) {
  unsigned place = threadIdx.x == 0 ? atomicAdd(ticket, 1u) : 0;
  place = __shfl_sync(~0u, place, 0);
  if (threadIdx.x == 0)
    while (load_acquire(done) != place) continue;
  __syncwarp();
  const float four[4] = {values[place], 1, 2, 3};
  add_global_4<16>(sums + 4 * threadIdx.x, four);
  __threadfence();
  __syncwarp();
  if (threadIdx.x == 0) increment_release(done);
}

// What the block of another rank has at an address that address_in gave.
__device__ int load_from_cluster(uint32_t there) {
  int x;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(x) : "r"(there) : "memory");
  return x;
}

// Two blocks load half of a tile each, for both; then each one writes out the whole and what the other one says.
__global__ void __cluster_dims__(2) __launch_bounds__(128)
    share(const __grid_constant__ CUtensorMap half_of_a, uint32_t* out, int* said) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ uint64_t barrier_words[2];
  __shared__ int word;
  const uint32_t tile = (shared_address(shared) + 1023) & ~1023u, full = shared_address(barrier_words),
                 heard = full + 8, rank = cluster_rank();
  if (threadIdx.x == 0) {
    word = 100 + int(rank);
    mbarrier_init(full, 1), mbarrier_init(heard, 2);
    fence_mbarrier_init();
  }
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(full, kTileBytes);
    tma_load_4d_multicast(tile + rank * kTileBytes / 2, &half_of_a, full, 3, 0, int(rank) * kSize / 2, 0, 0);
    said[rank] = load_from_cluster(address_in(shared_address(&word), rank ^ 1));
    mbarrier_arrive_there(address_in(heard, 0)), mbarrier_arrive_there(address_in(heard, 1));
  }
  mbarrier_wait(full, 0);
  mbarrier_wait(heard, 0);
  for (int i = threadIdx.x; i < kTileBytes / 16; i += 128) {
    const uint32_t row = i / 8, chunk = i % 8;
    reinterpret_cast<uint4*>(out)[rank * kTileBytes / 16 + i] =
        load_shared_16(tile + row * 128 + (chunk ^ row % 8) * 16);
  }
  cluster_arrive();
  cluster_wait();
}

// A tile is written by threads, twice: the second time, when the first store has read it. To two heads or, where they
// lie side by side, to more rows of both.
__global__ void __launch_bounds__(32)
    store_twice(const __grid_constant__ CUtensorMap map, const uint32_t* in, int row, bool side_by_side) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t tile = (shared_address(shared) + 1023) & ~1023u;
  for (int turn = 0; turn < 2; ++turn, in += kTileBytes / 4) {
    if (threadIdx.x == 0) bulk_wait_read();
    __syncwarp();
    for (int i = threadIdx.x; i < kTileBytes / 16; i += 32)
      store_shared_16(tile + i / 8 * 128 + (i % 8 ^ i / 8 % 8) * 16, reinterpret_cast<const uint4*>(in)[i]);
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x == 0) {
      tma_store_5d(&map, tile, 0, 0, side_by_side ? row + turn * kSize / 2 : row, side_by_side ? 0 : turn, 0);
      bulk_commit();
    }
  }
  if (threadIdx.x == 0) bulk_wait_read();
}

int failures = 0;
void expect(bool right, const char* what) {
  std::printf("%s %s\n", right ? "ok  " : "FAIL", what);
  failures += !right;
}

template <Product kProduct, int kNt>
void test_product(const char* name) {
  constexpr int kRows = kRowsOfB<kProduct> ? 8 * kNt : kSize, kColumns = kRowsOfB<kProduct> ? kSize : 8 * kNt;
  mha::Tensor4 a = tools::tensor(mha::DType::bf16, 1, 1, kSize, kSize, false, 0, 1);
  mha::Tensor4 b = tools::tensor(mha::DType::bf16, 1, 1, kRows, kColumns, false, 0, 1);
  auto* c = static_cast<float*>(tools::allocate(kSize * 8 * kNt * 4));
  multiply<kProduct, kNt><<<1, 128, kTileBytes + kNt * 1024 + 1024>>>(
      tensor_map<bf16>(a, {1, 1, kSize, kSize}, kSize), tensor_map<bf16>(b, {1, 1, kRows, kColumns}, kRows),
      static_cast<const bf16*>(a.data), c);
  check(cudaDeviceSynchronize(), name);
  auto at = [](const mha::Tensor4& t, int i, int j) {
    return naive::load(t.data, mha::DType::bf16, i * t.stride[2] + j);
  };
  bool right = true;
  for (int i = 0; i < kSize; ++i)
    for (int j = 0; j < 8 * kNt; ++j) {
      double want = 0;
      for (int k = 0; k < kSize; ++k)
        want += (kProduct == Product::both_columns ? at(a, k, i) : at(a, i, k)) *
                (kRowsOfB<kProduct> ? at(b, j, k) : at(b, k, j));
      right &= std::fabs(want - c[i * 8 * kNt + j]) < 1e-4;  // NaN is not
    }
  expect(right, name);
}

void test_turns() {
  constexpr int kBlocks = 6;
  const float given[kBlocks] = {1, 1e8f, -1e8f, 0.5f, 3e7f, 0.25f};
  auto *values = static_cast<float*>(tools::allocate(64)), *sums = static_cast<float*>(tools::allocate(33 * 16));
  auto* counters = static_cast<unsigned*>(tools::allocate(8));
  std::memcpy(values, given, sizeof(given));
  std::memset(sums, 0, 33 * 16);
  counters[0] = counters[1] = 0;
  add_in_turns<<<kBlocks, 32>>>(values, sums, counters, counters + 1);
  check(cudaDeviceSynchronize(), "add_in_turns");
  float want = 0;
  for (float x : given) want += x;
  bool right = counters[1] == kBlocks;
  for (int i = 4; i < 33 * 4; ++i) right &= sums[i] == (i % 4 ? float(kBlocks * (i % 4)) : want);
  expect(right, "four sums at once, blocks in turns");
}

void test_move() {
  auto *in = static_cast<uint32_t*>(tools::allocate(1024)), *out = static_cast<uint32_t*>(tools::allocate(1024));
  auto* any = static_cast<int*>(tools::allocate(8));
  for (int i = 0; i < 256; ++i) in[i] = 7 * i + 1;
  for (int who : {-1, 40}) {
    any[0] = any[1] = 0;
    std::memset(out, 0xFF, 1024);
    move<<<1, 64>>>(in, out, any, who);
    check(cudaDeviceSynchronize(), "move");
    expect(std::memcmp(in, out, 1024) == 0, "stmatrix, bulk copy, mbarrier with two arrivals");
    expect(any[0] == (who >= 0) && any[1] == (who >= 0), "named barrier that asks");
  }
}

// Two heads of 100 rows of 40 columns, in rows of 48; what is beside them stays. From row 64 on, 36 are left.
void test_store(bool side_by_side) {
  constexpr int kRows = 100, kColumns = 40, kStride = 48;
  auto *in = static_cast<uint16_t*>(tools::allocate(2 * kTileBytes)),
       *out = static_cast<uint16_t*>(tools::allocate(2 * kRows * kStride * 2));
  for (int i = 0; i < kTileBytes; ++i) in[i] = uint16_t(i);
  for (int row : {0, kSize}) {
    std::memset(out, 0xFF, 2 * kRows * kStride * 2);
    const mha::Tensor4 t = {out, {2 * kRows * kStride, kRows * kStride, kStride, 1}};
    const CUtensorMap map = grouped_tensor_map<bf16>(t, {1, 2, kRows, kColumns}, side_by_side ? 2 : 1, kSize);
    store_twice<<<1, 32, kTileBytes + 1024>>>(map, reinterpret_cast<uint32_t*>(in), row, side_by_side);
    check(cudaDeviceSynchronize(), "store_twice");
    bool right = true;
    for (int h = 0; h < 2; ++h)
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < kStride; ++j) {
          const bool inside = i >= row && i < row + kSize && j < kColumns;
          const int from = side_by_side ? 2 * (i - row) + h : h * kSize + i - row;
          right &= out[(h * kRows + i) * kStride + j] == (inside ? in[from * kSize + j] : uint16_t(0xFFFF));
        }
    expect(right, side_by_side ? "TMA from shared memory to two heads at once" : "TMA from shared memory, clipped");
  }
}

void test_share() {
  const mha::Tensor4 a = tools::tensor(mha::DType::bf16, 1, 1, kSize, kSize, false, 0, 1);
  auto* out = static_cast<uint32_t*>(tools::allocate(2 * kTileBytes));
  auto* said = static_cast<int*>(tools::allocate(8));
  share<<<2, 128, kTileBytes + 1024>>>(tensor_map<bf16>(a, {1, 1, kSize, kSize}, kSize / 2), out, said);
  check(cudaDeviceSynchronize(), "share");
  for (int rank = 0; rank < 2; ++rank) {
    expect(std::memcmp(out + rank * kTileBytes / 4, a.data, kTileBytes) == 0, "TMA to both blocks of a cluster");
    expect(said[rank] == 100 + 1 - rank, "shared memory of the other block");
  }
}

}  // namespace

int main() {
  test_product<Product::rows, 4>("wgmma, 32 rows along K");
  test_product<Product::rows, 8>("wgmma, 64 rows along K");
  test_product<Product::held_rows, 8>("wgmma, A in registers, rows of B along K");
  test_product<Product::columns, 8>("wgmma, A in registers, columns of B");
  test_product<Product::both_columns, 8>("wgmma, columns of both");
  test_product<Product::both_columns, 16>("wgmma, columns of both, 128 of B");
  test_turns();
  test_move();
  test_store(false);
  test_store(true);
  test_share();
  return failures != 0;
}
