// The choice of the instruction set. CTest also runs this program with MHA_EXT_CPU_ISA set.
#ifdef __linux__
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <stdexcept>

#include "../../csrc/cpu/isa/features.h"
#include "harness.h"

using namespace harness;

namespace {

std::string refusal(const char* isa) {
  try {
    mha::cpu::kernels_for(isa);
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

// Every table names itself and has every kernel.
void tables() {
  for (const std::string& name : mha::cpu::available_isas()) {
    const Kernels& k = mha::cpu::kernels_for(name);
    check(k.isa == name, name + " names itself");
    check(k.attention_fwd && k.attention_fwd_workspace && k.attention_bwd && k.attention_bwd_workspace &&
              k.masked_softmax_fwd && k.masked_softmax_bwd && k.split_heads && k.merge_heads && k.dropout_mask,
          name + " has every kernel");
  }
}

void refusals() {
  for (const char* name : {"", "AVX2", "neon9"})
    check(refusal(name).find("is unknown; choose one of scalar") != std::string::npos,
          std::string("'") + name + "' is refused as unknown");
#ifdef __x86_64__
  const mha::cpu::CpuFeatures f = mha::cpu::detect_cpu_features();
  const std::pair<const char*, bool> isas[] = {{"avx2", f.avx2},
                                               {"avx512", f.avx512},
                                               {"avx512_bf16", f.avx512_bf16},
                                               {"amx", f.amx && mha::cpu::request_tiles()}};
  for (const auto& [name, usable] : isas)
    check(usable ? refusal(name).empty() : refusal(name).find("is absent from this machine") != std::string::npos,
          std::string(name) + " is taken if and only if this machine has it");
  check(__builtin_cpu_supports("avx2") == 0 || f.avx2, "AVX2 is found when the compiler's runtime finds it");
  check((__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) == f.avx512,
        "AVX-512 is found if and only if the compiler's runtime finds it");
#elif defined(__aarch64__)
  check(refusal("neon").empty(), "every ARM64 processor has NEON");
  check(refusal("neon_bf16").empty() == mha::cpu::detect_cpu_features().neon_bf16,
        "neon_bf16 is taken if and only if this machine has it");
#endif
}

#if defined(__x86_64__) && defined(__linux__)
// Linux refuses tiles where a signal stack has no room for them, which costs nothing but them. For a process that has
// not asked yet; returns its exit status.
int refused_tiles() {
  static char stack[4096];
  const stack_t small{stack, 0, sizeof(stack)};
  check(sigaltstack(&small, nullptr) == 0, "a small signal stack");
  check(mha::cpu::available_isas().back() == "avx512_bf16", "without tiles, the next best is the best");
  check(refusal("amx").find("is refused by the operating system; choose one of scalar, avx2") != std::string::npos,
        "and amx by name an error");
  check(refusal("avx512_bf16").empty(), "others are not refused");
  return finish();
}
#endif

}  // namespace

int main() {
#if defined(__x86_64__) && defined(__linux__)
  if (mha::cpu::detect_cpu_features().amx) {
    const pid_t child = fork();
    if (child == 0) _exit(refused_tiles());
    int status = -1;
    waitpid(child, &status, 0);
    check(status == 0, "tiles that the system refuses");
  }
#endif
  try {
    std::printf("in use: %s\n", mha::cpu::kernels().isa);
  } catch (const std::runtime_error& e) {
    std::printf("%s\n", e.what());
    return 2;
  }
  const std::vector<std::string> available = mha::cpu::available_isas();
  check(std::getenv("MHA_EXT_CPU_ISA") || mha::cpu::kernels().isa == available.back(),
        "the best is used unless another is named");
  tables();
  refusals();
  return finish();
}
