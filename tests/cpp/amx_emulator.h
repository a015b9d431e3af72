// AMX in plain C++, after the definition of its instructions in Intel's manual, for processors without it. The compiled
// kernels themselves run: each AMX instruction raises SIGILL there, whose handler does the instruction's work.
#pragma once
#include <cstdint>

namespace amx_emulator {

// The tiles of one thread. What the processor answers with an exception ends the program here, with a message.
class Tiles {
 public:
  void configure(const void* shapes);  // LDTILECFG
  void release();                      // TILERELEASE
  void zero(int tile);                 // TILEZERO
  void load(int tile, const void* rows, int64_t stride);
  void store(int tile, void* rows, int64_t stride);
  void dot(int c, int a, int b);  // TDPBF16PS c, a, b
  bool configured() const { return palette_ != 0; }

 private:
  void need(int tile) const;

  int palette_ = 0;
  int rows_[8] = {}, row_bytes_[8] = {};
  alignas(64) unsigned char data_[8][16][64] = {};
};

// From now on, AMX instructions of this process are emulated. Returns false, and does nothing, where the kernels for
// AMX cannot run even so, or need no emulation.
bool install();

// The emulated tiles of this thread.
Tiles& tiles();

}  // namespace amx_emulator
