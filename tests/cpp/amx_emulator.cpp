#include "amx_emulator.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

// This file stands in for isa/features.cpp: what the processor lacks of AMX is found here all the same.
#define detect_cpu_features detect_real_cpu_features
#define request_tiles request_real_tiles
#include "cpu/isa/features.cpp"
#undef detect_cpu_features
#undef request_tiles

namespace amx_emulator {
namespace {

[[noreturn]] void fault(const char* what) {
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

}  // namespace

// ---- the instructions ----------------------------------------------------------------------------------------------

void Tiles::configure(const void* shapes) {
  const unsigned char* bytes = static_cast<const unsigned char*>(shapes);
  *this = Tiles();
  if (bytes[0] == 0) return;
  if (bytes[0] != 1) fault("palettes are 0 and 1");
  if (bytes[1] != 0) fault("no instruction is resumed here");
  for (int i = 2; i < 16; ++i)
    if (bytes[i]) fault("reserved bytes of the configuration are not 0");
  palette_ = 1;
  for (int t = 0; t < 16; ++t) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * t, 2);
    const int rows = bytes[48 + t];
    if (t >= 8 && (rows || row_bytes)) fault("there are 8 tiles");
    if (rows > 16 || row_bytes > 64 || (rows == 0) != (row_bytes == 0)) fault("a tile has up to 16 rows of 64 bytes");
    if (t < 8) rows_[t] = rows, row_bytes_[t] = row_bytes;
  }
}

void Tiles::store_configuration(void* shapes) const {
  unsigned char* bytes = static_cast<unsigned char*>(shapes);
  std::memset(bytes, 0, 64);
  bytes[0] = static_cast<unsigned char>(palette_);
  for (int t = 0; t < 8; ++t) {
    const uint16_t row_bytes = uint16_t(row_bytes_[t]);
    std::memcpy(bytes + 16 + 2 * t, &row_bytes, 2);
    bytes[48 + t] = static_cast<unsigned char>(rows_[t]);
  }
}

void Tiles::release() { *this = Tiles(); }

void Tiles::need(int tile) const {
  if (!palette_) fault("tiles are not configured");
  if (tile < 0 || tile >= 8 || rows_[tile] == 0) fault("this tile is not configured");
}

void Tiles::zero(int tile) {
  need(tile);
  std::memset(data_[tile], 0, sizeof(data_[tile]));
}

void Tiles::load(int tile, const void* rows, int64_t stride) {
  zero(tile);
  ++counts().loads;
  const char* row = static_cast<const char*>(rows);
  for (int r = 0; r < rows_[tile]; ++r) std::memcpy(data_[tile][r], row + r * stride, size_t(row_bytes_[tile]));
}

void Tiles::store(int tile, void* rows, int64_t stride) {
  need(tile);
  ++counts().stores;
  char* row = static_cast<char*>(rows);
  for (int r = 0; r < rows_[tile]; ++r) std::memcpy(row + r * stride, data_[tile][r], size_t(row_bytes_[tile]));
}

namespace {

// Denormals as inputs and as results are zeros of their sign.
inline float flushed(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>(bits & 0x7F800000 ? bits : bits & 0x80000000);
}
inline float low_bf16(uint32_t pair) { return flushed(std::bit_cast<float>(pair << 16)); }
inline float high_bf16(uint32_t pair) { return flushed(std::bit_cast<float>(pair & 0xFFFF0000)); }

}  // namespace

// Two sums along k, of the products of low and of high halves, each step fused and rounded; then their sum; then C's.
#ifdef __x86_64__
__attribute__((target("avx2,fma")))
#endif
void Tiles::dot(int c, int a, int b) {
  need_product(c, a, b);
  constexpr int kColumns = 16;
  uint32_t b_pairs[16][kColumns];
  std::memcpy(b_pairs, data_[b], sizeof(b_pairs));
  float b_low[16][kColumns], b_high[16][kColumns];
  for (int k = 0; k < rows_[b]; ++k) {
    for (int n = 0; n < kColumns; ++n) b_low[k][n] = low_bf16(b_pairs[k][n]), b_high[k][n] = high_bf16(b_pairs[k][n]);
  }
  for (int m = 0; m < rows_[c]; ++m) {
    uint32_t a_pairs[16];
    std::memcpy(a_pairs, data_[a][m], sizeof(a_pairs));
    float low[kColumns] = {}, high[kColumns] = {}, sum[kColumns];
    for (int k = 0; k < rows_[b]; ++k) {
      const float a_low = low_bf16(a_pairs[k]), a_high = high_bf16(a_pairs[k]);
      for (int n = 0; n < kColumns; ++n) {
        low[n] = flushed(std::fma(a_low, b_low[k][n], low[n]));
        high[n] = flushed(std::fma(a_high, b_high[k][n], high[n]));
      }
    }
    std::memcpy(sum, data_[c][m], sizeof(sum));
    for (int n = 0; n < kColumns; ++n) sum[n] = flushed(flushed(sum[n]) + flushed(low[n] + high[n]));
    std::memcpy(data_[c][m], sum, size_t(row_bytes_[c]));
  }
}

void Tiles::need_product(int c, int a, int b) const {
  for (const int tile : {c, a, b}) need(tile);
  ++counts().products;
  if (c == a || c == b || a == b) fault("a product needs three different tiles");
  if (rows_[c] != rows_[a] || row_bytes_[c] != row_bytes_[b] || row_bytes_[a] != 4 * rows_[b] || row_bytes_[c] % 4)
    fault("the shapes of a product's tiles do not match");
}

// Sums of products of four neighbouring bytes with sign; they wrap.
void Tiles::dot_bytes(int c, int a, int b) {
  need_product(c, a, b);
  for (int m = 0; m < rows_[c]; ++m) {
    uint32_t sum[16];
    std::memcpy(sum, data_[c][m], sizeof(sum));
    for (int k = 0; k < rows_[b]; ++k) {
      for (int n = 0; n < row_bytes_[c]; ++n)
        sum[n / 4] += uint32_t(int8_t(data_[a][m][4 * k + n % 4]) * int8_t(data_[b][k][n]));
    }
    std::memcpy(data_[c][m], sum, size_t(row_bytes_[c]));
  }
}

Tiles& tiles() {
  static thread_local Tiles of_thread;
  return of_thread;
}
Counts& counts() {
  static thread_local Counts of_thread;
  return of_thread;
}

}  // namespace amx_emulator

// ---- the trap ------------------------------------------------------------------------------------------------------

#if defined(__x86_64__) && defined(__linux__)
#include <signal.h>
#include <ucontext.h>

namespace amx_emulator {
namespace {

// A memory operand: base + displacement, and the index apart, which AMX takes as a stride.
struct Memory {
  char* address;
  int64_t stride;
  bool sib;
  int length;  // of ModRM, SIB and displacement
};

int64_t general_register(const ucontext_t& context, int number) {
  constexpr int kPlace[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[kPlace[number]];
}

Memory memory_operand(const ucontext_t& context, const unsigned char* modrm, int x, int b) {
  const int mod = modrm[0] >> 6, rm = modrm[0] & 7;
  int length = 1, base = rm;
  Memory to{};
  if (rm == 4) {
    to.sib = true;
    const int sib = modrm[length++], index = (sib >> 3 & 7) + 8 * x;
    if (index != 4) to.stride = general_register(context, index) << (sib >> 6);
    base = sib & 7;
  }
  int64_t address = 0;
  int32_t displacement = 0;
  const bool no_base = mod == 0 && base == 5;
  if (no_base || mod == 2) {
    std::memcpy(&displacement, modrm + length, 4);
    length += 4;
  } else if (mod == 1) {
    displacement = static_cast<signed char>(modrm[length++]);
  }
  if (!no_base)
    address = general_register(context, base + 8 * b);
  else if (rm == 5)
    address = int64_t(modrm + length);  // relative to the next instruction
  to.address = reinterpret_cast<char*>(address + displacement);
  to.length = length;
  return to;
}

// Does the work of the instruction at the context's place and steps over it. False if it is none of AMX.
bool emulate(ucontext_t& context) {
  const auto* at = reinterpret_cast<const unsigned char*>(context.uc_mcontext.gregs[REG_RIP]);
  if (at[0] != 0xC4 || (at[1] & 0x1F) != 2 || (at[2] & 0x84) != 0) return false;  // VEX.128, map 0F38, W0
  const int x = !(at[1] & 0x40), b = !(at[1] & 0x20), vvvv = ~at[2] >> 3 & 15, prefix = at[2] & 3;
  const int opcode = at[3] << 4 | prefix, reg = at[4] >> 3 & 7, rm = at[4] & 7;
  constexpr int k66 = 1, kF3 = 2, kF2 = 3;
  int length = 1;
  if (at[4] >= 0xC0) {  // registers
    if (opcode == 0x490 && at[4] == 0xC0)
      tiles().release();
    else if (opcode == (0x490 | kF2) && rm == 0)
      tiles().zero(reg);
    else if (opcode == (0x5C0 | kF3))
      tiles().dot(reg, rm, vvvv);
    else if (opcode == (0x5E0 | kF2))
      tiles().dot_bytes(reg, rm, vvvv);
    else
      return false;
  } else {
    const Memory memory = memory_operand(context, at + 4, x, b);
    length = memory.length;
    if (opcode == 0x490 && reg == 0)
      tiles().configure(memory.address);
    else if (opcode == (0x490 | k66) && reg == 0)
      tiles().store_configuration(memory.address);
    else if ((opcode == (0x4B0 | kF2) || opcode == (0x4B0 | k66)) && memory.sib)
      tiles().load(reg, memory.address, memory.stride);
    else if (opcode == (0x4B0 | kF3) && memory.sib)
      tiles().store(reg, memory.address, memory.stride);
    else
      return false;
  }
  context.uc_mcontext.gregs[REG_RIP] += 4 + length;
  return true;
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
  if (emulate(*static_cast<ucontext_t*>(context))) return;
  signal(SIGILL, SIG_DFL);  // it happens again, and ends the program
}

bool install() {
  const mha::cpu::CpuFeatures f = mha::cpu::detect_real_cpu_features();
  if (!f.avx512_bf16 || !__builtin_cpu_supports("avx512vbmi") || f.amx) return false;
  struct sigaction action{};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, nullptr) == 0;
}

// A signal's frame takes 11 KB with tiles.
bool signal_stack_has_room() {
  stack_t now{};
  sigaltstack(nullptr, &now);
  return (now.ss_flags & SS_DISABLE) || now.ss_size >= 11 << 10;
}

}  // namespace
}  // namespace amx_emulator
#else
namespace amx_emulator {
namespace {
bool install() { return false; }
bool signal_stack_has_room() { return true; }
}  // namespace
}  // namespace amx_emulator
#endif

namespace amx_emulator {

bool emulated() {
  static const bool done = install();
  return done;
}
}  // namespace amx_emulator

namespace mha::cpu {

CpuFeatures detect_cpu_features() {
  CpuFeatures f = detect_real_cpu_features();
  f.amx |= amx_emulator::emulated();
  return f;
}
bool request_tiles() { return amx_emulator::emulated() ? amx_emulator::signal_stack_has_room() : request_real_tiles(); }

}  // namespace mha::cpu
