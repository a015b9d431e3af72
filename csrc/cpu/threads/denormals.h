// Denormal numbers, which are 0 while a kernel runs.
#pragma once

MHA_ISA_BEGIN

// While a thread has one of these, its vector instructions take denormal numbers for 0 and make 0 of results that would
// be denormal (DAZ and FTZ), as tiles and products of bf16 do whatever the settings: each term is off by less than
// 2^-126, and no instruction takes hundreds of cycles over one. Afterwards the thread has its own settings again; flags
// that arithmetic has raised stay up. Machines other than x86 keep denormal numbers.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  explicit FlushDenormals(bool flush) : before_(_mm_getcsr()), flush_(flush) {
    if (flush_) _mm_setcsr(before_ | kFlushResults | kOperandsAreZero);
  }
  ~FlushDenormals() {
    if (flush_) _mm_setcsr(before_ | (_mm_getcsr() & kFlags));
  }

 private:
  static constexpr unsigned kFlushResults = 0x8000, kOperandsAreZero = 0x40, kFlags = 0x3F;
  const unsigned before_;
  const bool flush_;
#else
  explicit FlushDenormals(bool) {}
  ~FlushDenormals() {}
#endif

 public:
  FlushDenormals(const FlushDenormals&) = delete;
};

// A kernel as its table has it: those of double keep denormal numbers. Threads that help flush in for_each_task.
template <auto kKernel, class Problem, class... Workspace>
void flushing(const Problem& p, const Threads& given, Workspace... workspace) {
  Threads threads = given;
  threads.flush_denormals &= p.dtype != DType::f64;
  const FlushDenormals flush(threads.flush_denormals);
  kKernel(p, threads, workspace...);
}

MHA_ISA_END
