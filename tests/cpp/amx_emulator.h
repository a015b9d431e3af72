// AMX in plain C++, after the definition of its instructions in Intel's manual, for processors without it. The compiled
// kernels themselves run: each AMX instruction raises SIGILL there, whose handler does the instruction's work.
#pragma once
#include <cstdint>

namespace amx_emulator {

// The tiles of one thread. What the processor answers with an exception ends the program here, with a message.
class Tiles {
 public:
  void configure(const void* shapes);            // LDTILECFG
  void release();                                // TILERELEASE
  void store_configuration(void* shapes) const;  // STTILECFG
  void zero(int tile);                           // TILEZERO
  void load(int tile, const void* rows, int64_t stride);
  void store(int tile, void* rows, int64_t stride);
  void dot(int c, int a, int b);        // TDPBF16PS c, a, b
  void dot_bytes(int c, int a, int b);  // TDPBSSD c, a, b
  bool configured() const { return palette_ != 0; }

 private:
  void need(int tile) const;
  void need_product(int c, int a, int b) const;

  int palette_ = 0;
  int rows_[8] = {}, row_bytes_[8] = {};
  alignas(64) unsigned char data_[8][16][64] = {};
};

// How many instructions this thread has had done. On a processor with AMX nobody counts.
struct Counts {
  int64_t loads = 0, stores = 0, products = 0;
};
Counts& counts();

// Whether AMX instructions of this process are emulated, from the first call on: not where the processor has them, nor
// where it lacks others that the kernels for AMX use. A program with this file in it finds AMX in either case, and gets
// tiles as it does from Linux: unless a signal stack (here: this thread's) has no room for them.
bool emulated();

// The emulated tiles of this thread.
Tiles& tiles();

}  // namespace amx_emulator
