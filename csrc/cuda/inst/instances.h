// Written by generate_instances.py: the kernel instances, in the order in which they are tried.
#pragma once
#include "../attention_bwd_launch.h"
#include "../kernels.h"

namespace mha::cuda {

void attention_fwd_sm80_f16_32_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm80_f16_32_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_weights_sm80_f16_32_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_bwd_sm80_f16_32_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_round_f16_32_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_f16_32_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_f16_32_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm80_f16_32_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_round_f16_32_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_f16_32_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_f16_32_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dbias_sm80_f16_32_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_fwd_sm80_f16_64_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm86_f16_64_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm80_f16_64_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm86_f16_64_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_weights_sm80_f16_64_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_bwd_sm80_f16_64_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_round_f16_64_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_f16_64_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_f16_64_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm80_f16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_round_f16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_f16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_f16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_f16_64_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_f16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dbias_sm80_f16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_fwd_sm80_f16_96_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm86_f16_96_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm80_f16_96_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm86_f16_96_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_weights_sm80_f16_96_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_f16_96_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_f16_96_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_f16_96_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_f16_96_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dbias_sm80_f16_96_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_fwd_sm80_f16_128_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm86_f16_128_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm80_f16_128_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_weights_sm80_f16_128_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_bwd_sm80_f16_128_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_round_f16_128_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_f16_128_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_f16_128_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_f16_128_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_f16_128_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_f16_128_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_f16_128_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dbias_sm80_f16_128_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_fwd_sm80_f16_256_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm80_f16_256_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_weights_sm80_f16_256_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_f16_256_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_f16_256_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_f16_256_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_f16_256_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_f16_256_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_f16_256_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dbias_sm80_f16_256_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_fwd_sm90_f16_64_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_f16_64_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_f16_128_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_f16_128_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_f16_192_128_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_f16_192_128_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_f16_256_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_f16_256_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm80_bf16_32_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm80_bf16_32_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_weights_sm80_bf16_32_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_bwd_sm80_bf16_32_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_round_bf16_32_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_bf16_32_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_bf16_32_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm80_bf16_32_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_round_bf16_32_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_bf16_32_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_bf16_32_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dbias_sm80_bf16_32_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_fwd_sm80_bf16_64_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm86_bf16_64_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm80_bf16_64_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm86_bf16_64_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_weights_sm80_bf16_64_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_bwd_sm80_bf16_64_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_round_bf16_64_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_bf16_64_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_bf16_64_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm80_bf16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_round_bf16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_bf16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_bf16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_bf16_64_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_bf16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dbias_sm80_bf16_64_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_fwd_sm80_bf16_96_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm86_bf16_96_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm80_bf16_96_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm86_bf16_96_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_weights_sm80_bf16_96_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_bf16_96_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_bf16_96_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_bf16_96_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_bf16_96_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dbias_sm80_bf16_96_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_fwd_sm80_bf16_128_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm86_bf16_128_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm80_bf16_128_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_weights_sm80_bf16_128_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_bwd_sm80_bf16_128_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_round_bf16_128_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_bf16_128_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_bf16_128_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_bf16_128_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_bf16_128_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_bf16_128_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_bf16_128_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dbias_sm80_bf16_128_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_fwd_sm80_bf16_256_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm80_bf16_256_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_weights_sm80_bf16_256_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_bf16_256_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_bf16_256_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dkv_sm80_bf16_256_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dq_sm80_bf16_256_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_bf16_256_plain(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_sm90_bf16_256_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_bwd_dbias_sm80_bf16_256_general(const AttentionBackwardLaunch&, cudaStream_t);
void attention_fwd_sm90_bf16_64_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_bf16_64_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_bf16_128_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_bf16_128_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_bf16_192_128_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_bf16_192_128_general(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_bf16_256_plain(const AttentionForwardLaunch&, cudaStream_t);
void attention_fwd_sm90_bf16_256_general(const AttentionForwardLaunch&, cudaStream_t);

inline constexpr Instance<AttentionForwardLaunch> k_attention_fwd_sm90[] = {
    {"attention_fwd_sm90_f16_64_plain", DType::f16, 64, 64, false, attention_fwd_sm90_f16_64_plain},
    {"attention_fwd_sm90_f16_64_general", DType::f16, 64, 64, true, attention_fwd_sm90_f16_64_general},
    {"attention_fwd_sm90_f16_128_plain", DType::f16, 128, 128, false, attention_fwd_sm90_f16_128_plain},
    {"attention_fwd_sm90_f16_128_general", DType::f16, 128, 128, true, attention_fwd_sm90_f16_128_general},
    {"attention_fwd_sm90_f16_192_128_plain", DType::f16, 192, 128, false, attention_fwd_sm90_f16_192_128_plain},
    {"attention_fwd_sm90_f16_192_128_general", DType::f16, 192, 128, true, attention_fwd_sm90_f16_192_128_general},
    {"attention_fwd_sm90_f16_256_plain", DType::f16, 256, 256, false, attention_fwd_sm90_f16_256_plain},
    {"attention_fwd_sm90_f16_256_general", DType::f16, 256, 256, true, attention_fwd_sm90_f16_256_general},
    {"attention_fwd_sm90_bf16_64_plain", DType::bf16, 64, 64, false, attention_fwd_sm90_bf16_64_plain},
    {"attention_fwd_sm90_bf16_64_general", DType::bf16, 64, 64, true, attention_fwd_sm90_bf16_64_general},
    {"attention_fwd_sm90_bf16_128_plain", DType::bf16, 128, 128, false, attention_fwd_sm90_bf16_128_plain},
    {"attention_fwd_sm90_bf16_128_general", DType::bf16, 128, 128, true, attention_fwd_sm90_bf16_128_general},
    {"attention_fwd_sm90_bf16_192_128_plain", DType::bf16, 192, 128, false, attention_fwd_sm90_bf16_192_128_plain},
    {"attention_fwd_sm90_bf16_192_128_general", DType::bf16, 192, 128, true, attention_fwd_sm90_bf16_192_128_general},
    {"attention_fwd_sm90_bf16_256_plain", DType::bf16, 256, 256, false, attention_fwd_sm90_bf16_256_plain},
    {"attention_fwd_sm90_bf16_256_general", DType::bf16, 256, 256, true, attention_fwd_sm90_bf16_256_general},
};

inline constexpr Instance<AttentionBackwardLaunch> k_attention_bwd_sm90[] = {
    {"attention_bwd_sm90_f16_64_plain", DType::f16, 64, 64, false, attention_bwd_sm90_f16_64_plain},
    {"attention_bwd_sm90_f16_64_general", DType::f16, 64, 64, true, attention_bwd_sm90_f16_64_general},
    {"attention_bwd_sm90_f16_128_plain", DType::f16, 128, 128, false, attention_bwd_sm90_f16_128_plain},
    {"attention_bwd_sm90_f16_128_general", DType::f16, 128, 128, true, attention_bwd_sm90_f16_128_general},
    {"attention_bwd_sm90_f16_256_plain", DType::f16, 256, 256, false, attention_bwd_sm90_f16_256_plain},
    {"attention_bwd_sm90_f16_256_general", DType::f16, 256, 256, true, attention_bwd_sm90_f16_256_general},
    {"attention_bwd_sm90_bf16_64_plain", DType::bf16, 64, 64, false, attention_bwd_sm90_bf16_64_plain},
    {"attention_bwd_sm90_bf16_64_general", DType::bf16, 64, 64, true, attention_bwd_sm90_bf16_64_general},
    {"attention_bwd_sm90_bf16_128_plain", DType::bf16, 128, 128, false, attention_bwd_sm90_bf16_128_plain},
    {"attention_bwd_sm90_bf16_128_general", DType::bf16, 128, 128, true, attention_bwd_sm90_bf16_128_general},
    {"attention_bwd_sm90_bf16_256_plain", DType::bf16, 256, 256, false, attention_bwd_sm90_bf16_256_plain},
    {"attention_bwd_sm90_bf16_256_general", DType::bf16, 256, 256, true, attention_bwd_sm90_bf16_256_general},
};

inline constexpr Instance<AttentionForwardLaunch> k_attention_fwd_sm80[] = {
    {"attention_fwd_sm80_f16_32_plain", DType::f16, 32, 32, false, attention_fwd_sm80_f16_32_plain},
    {"attention_fwd_sm80_f16_32_general", DType::f16, 32, 32, true, attention_fwd_sm80_f16_32_general},
    {"attention_fwd_sm80_f16_64_plain", DType::f16, 64, 64, false, attention_fwd_sm80_f16_64_plain},
    {"attention_fwd_sm80_f16_64_general", DType::f16, 64, 64, true, attention_fwd_sm80_f16_64_general},
    {"attention_fwd_sm80_f16_96_plain", DType::f16, 96, 96, false, attention_fwd_sm80_f16_96_plain},
    {"attention_fwd_sm80_f16_96_general", DType::f16, 96, 96, true, attention_fwd_sm80_f16_96_general},
    {"attention_fwd_sm80_f16_128_plain", DType::f16, 128, 128, false, attention_fwd_sm80_f16_128_plain},
    {"attention_fwd_sm80_f16_128_general", DType::f16, 128, 128, true, attention_fwd_sm80_f16_128_general},
    {"attention_fwd_sm80_f16_256_plain", DType::f16, 256, 256, false, attention_fwd_sm80_f16_256_plain},
    {"attention_fwd_sm80_f16_256_general", DType::f16, 256, 256, true, attention_fwd_sm80_f16_256_general},
    {"attention_fwd_sm80_bf16_32_plain", DType::bf16, 32, 32, false, attention_fwd_sm80_bf16_32_plain},
    {"attention_fwd_sm80_bf16_32_general", DType::bf16, 32, 32, true, attention_fwd_sm80_bf16_32_general},
    {"attention_fwd_sm80_bf16_64_plain", DType::bf16, 64, 64, false, attention_fwd_sm80_bf16_64_plain},
    {"attention_fwd_sm80_bf16_64_general", DType::bf16, 64, 64, true, attention_fwd_sm80_bf16_64_general},
    {"attention_fwd_sm80_bf16_96_plain", DType::bf16, 96, 96, false, attention_fwd_sm80_bf16_96_plain},
    {"attention_fwd_sm80_bf16_96_general", DType::bf16, 96, 96, true, attention_fwd_sm80_bf16_96_general},
    {"attention_fwd_sm80_bf16_128_plain", DType::bf16, 128, 128, false, attention_fwd_sm80_bf16_128_plain},
    {"attention_fwd_sm80_bf16_128_general", DType::bf16, 128, 128, true, attention_fwd_sm80_bf16_128_general},
    {"attention_fwd_sm80_bf16_256_plain", DType::bf16, 256, 256, false, attention_fwd_sm80_bf16_256_plain},
    {"attention_fwd_sm80_bf16_256_general", DType::bf16, 256, 256, true, attention_fwd_sm80_bf16_256_general},
};

inline constexpr Instance<AttentionForwardLaunch> k_attention_fwd_sm86[] = {
    {"attention_fwd_sm86_f16_64_plain", DType::f16, 64, 64, false, attention_fwd_sm86_f16_64_plain},
    {"attention_fwd_sm86_f16_64_general", DType::f16, 64, 64, true, attention_fwd_sm86_f16_64_general},
    {"attention_fwd_sm86_f16_96_plain", DType::f16, 96, 96, false, attention_fwd_sm86_f16_96_plain},
    {"attention_fwd_sm86_f16_96_general", DType::f16, 96, 96, true, attention_fwd_sm86_f16_96_general},
    {"attention_fwd_sm86_f16_128_plain", DType::f16, 128, 128, false, attention_fwd_sm86_f16_128_plain},
    {"attention_fwd_sm86_bf16_64_plain", DType::bf16, 64, 64, false, attention_fwd_sm86_bf16_64_plain},
    {"attention_fwd_sm86_bf16_64_general", DType::bf16, 64, 64, true, attention_fwd_sm86_bf16_64_general},
    {"attention_fwd_sm86_bf16_96_plain", DType::bf16, 96, 96, false, attention_fwd_sm86_bf16_96_plain},
    {"attention_fwd_sm86_bf16_96_general", DType::bf16, 96, 96, true, attention_fwd_sm86_bf16_96_general},
    {"attention_fwd_sm86_bf16_128_plain", DType::bf16, 128, 128, false, attention_fwd_sm86_bf16_128_plain},
};

inline constexpr Instance<AttentionForwardLaunch> k_attention_weights_sm80[] = {
    {"attention_weights_sm80_f16_32_general", DType::f16, 32, 32, true, attention_weights_sm80_f16_32_general},
    {"attention_weights_sm80_f16_64_general", DType::f16, 64, 64, true, attention_weights_sm80_f16_64_general},
    {"attention_weights_sm80_f16_96_general", DType::f16, 96, 96, true, attention_weights_sm80_f16_96_general},
    {"attention_weights_sm80_f16_128_general", DType::f16, 128, 128, true, attention_weights_sm80_f16_128_general},
    {"attention_weights_sm80_f16_256_general", DType::f16, 256, 256, true, attention_weights_sm80_f16_256_general},
    {"attention_weights_sm80_bf16_32_general", DType::bf16, 32, 32, true, attention_weights_sm80_bf16_32_general},
    {"attention_weights_sm80_bf16_64_general", DType::bf16, 64, 64, true, attention_weights_sm80_bf16_64_general},
    {"attention_weights_sm80_bf16_96_general", DType::bf16, 96, 96, true, attention_weights_sm80_bf16_96_general},
    {"attention_weights_sm80_bf16_128_general", DType::bf16, 128, 128, true, attention_weights_sm80_bf16_128_general},
    {"attention_weights_sm80_bf16_256_general", DType::bf16, 256, 256, true, attention_weights_sm80_bf16_256_general},
};

inline constexpr Instance<AttentionBackwardLaunch> k_attention_bwd_sm80[] = {
    {"attention_bwd_sm80_f16_32_plain", DType::f16, 32, 32, false, attention_bwd_sm80_f16_32_plain},
    {"attention_bwd_sm80_f16_32_general", DType::f16, 32, 32, true, attention_bwd_sm80_f16_32_general},
    {"attention_bwd_sm80_f16_64_plain", DType::f16, 64, 64, false, attention_bwd_sm80_f16_64_plain},
    {"attention_bwd_sm80_f16_64_general", DType::f16, 64, 64, true, attention_bwd_sm80_f16_64_general},
    {"attention_bwd_sm80_f16_128_plain", DType::f16, 128, 128, false, attention_bwd_sm80_f16_128_plain},
    {"attention_bwd_sm80_bf16_32_plain", DType::bf16, 32, 32, false, attention_bwd_sm80_bf16_32_plain},
    {"attention_bwd_sm80_bf16_32_general", DType::bf16, 32, 32, true, attention_bwd_sm80_bf16_32_general},
    {"attention_bwd_sm80_bf16_64_plain", DType::bf16, 64, 64, false, attention_bwd_sm80_bf16_64_plain},
    {"attention_bwd_sm80_bf16_64_general", DType::bf16, 64, 64, true, attention_bwd_sm80_bf16_64_general},
    {"attention_bwd_sm80_bf16_128_plain", DType::bf16, 128, 128, false, attention_bwd_sm80_bf16_128_plain},
};

inline constexpr Instance<AttentionBackwardLaunch> k_attention_bwd_dkv_sm80[] = {
    {"attention_bwd_dkv_sm80_f16_32_plain", DType::f16, 32, 32, false, attention_bwd_dkv_sm80_f16_32_plain},
    {"attention_bwd_dkv_sm80_f16_32_general", DType::f16, 32, 32, true, attention_bwd_dkv_sm80_f16_32_general},
    {"attention_bwd_dkv_sm80_f16_64_plain", DType::f16, 64, 64, false, attention_bwd_dkv_sm80_f16_64_plain},
    {"attention_bwd_dkv_sm80_f16_64_general", DType::f16, 64, 64, true, attention_bwd_dkv_sm80_f16_64_general},
    {"attention_bwd_dkv_sm80_f16_96_plain", DType::f16, 96, 96, false, attention_bwd_dkv_sm80_f16_96_plain},
    {"attention_bwd_dkv_sm80_f16_96_general", DType::f16, 96, 96, true, attention_bwd_dkv_sm80_f16_96_general},
    {"attention_bwd_dkv_sm80_f16_128_plain", DType::f16, 128, 128, false, attention_bwd_dkv_sm80_f16_128_plain},
    {"attention_bwd_dkv_sm80_f16_128_general", DType::f16, 128, 128, true, attention_bwd_dkv_sm80_f16_128_general},
    {"attention_bwd_dkv_sm80_f16_256_plain", DType::f16, 256, 256, false, attention_bwd_dkv_sm80_f16_256_plain},
    {"attention_bwd_dkv_sm80_f16_256_general", DType::f16, 256, 256, true, attention_bwd_dkv_sm80_f16_256_general},
    {"attention_bwd_dkv_sm80_bf16_32_plain", DType::bf16, 32, 32, false, attention_bwd_dkv_sm80_bf16_32_plain},
    {"attention_bwd_dkv_sm80_bf16_32_general", DType::bf16, 32, 32, true, attention_bwd_dkv_sm80_bf16_32_general},
    {"attention_bwd_dkv_sm80_bf16_64_plain", DType::bf16, 64, 64, false, attention_bwd_dkv_sm80_bf16_64_plain},
    {"attention_bwd_dkv_sm80_bf16_64_general", DType::bf16, 64, 64, true, attention_bwd_dkv_sm80_bf16_64_general},
    {"attention_bwd_dkv_sm80_bf16_96_plain", DType::bf16, 96, 96, false, attention_bwd_dkv_sm80_bf16_96_plain},
    {"attention_bwd_dkv_sm80_bf16_96_general", DType::bf16, 96, 96, true, attention_bwd_dkv_sm80_bf16_96_general},
    {"attention_bwd_dkv_sm80_bf16_128_plain", DType::bf16, 128, 128, false, attention_bwd_dkv_sm80_bf16_128_plain},
    {"attention_bwd_dkv_sm80_bf16_128_general", DType::bf16, 128, 128, true, attention_bwd_dkv_sm80_bf16_128_general},
    {"attention_bwd_dkv_sm80_bf16_256_plain", DType::bf16, 256, 256, false, attention_bwd_dkv_sm80_bf16_256_plain},
    {"attention_bwd_dkv_sm80_bf16_256_general", DType::bf16, 256, 256, true, attention_bwd_dkv_sm80_bf16_256_general},
};

inline constexpr Instance<AttentionBackwardLaunch> k_attention_bwd_dq_sm80[] = {
    {"attention_bwd_dq_sm80_f16_32_plain", DType::f16, 32, 32, false, attention_bwd_dq_sm80_f16_32_plain},
    {"attention_bwd_dq_sm80_f16_32_general", DType::f16, 32, 32, true, attention_bwd_dq_sm80_f16_32_general},
    {"attention_bwd_dq_sm80_f16_64_plain", DType::f16, 64, 64, false, attention_bwd_dq_sm80_f16_64_plain},
    {"attention_bwd_dq_sm80_f16_64_general", DType::f16, 64, 64, true, attention_bwd_dq_sm80_f16_64_general},
    {"attention_bwd_dq_sm80_f16_96_plain", DType::f16, 96, 96, false, attention_bwd_dq_sm80_f16_96_plain},
    {"attention_bwd_dq_sm80_f16_96_general", DType::f16, 96, 96, true, attention_bwd_dq_sm80_f16_96_general},
    {"attention_bwd_dq_sm80_f16_128_plain", DType::f16, 128, 128, false, attention_bwd_dq_sm80_f16_128_plain},
    {"attention_bwd_dq_sm80_f16_128_general", DType::f16, 128, 128, true, attention_bwd_dq_sm80_f16_128_general},
    {"attention_bwd_dq_sm80_f16_256_plain", DType::f16, 256, 256, false, attention_bwd_dq_sm80_f16_256_plain},
    {"attention_bwd_dq_sm80_f16_256_general", DType::f16, 256, 256, true, attention_bwd_dq_sm80_f16_256_general},
    {"attention_bwd_dq_sm80_bf16_32_plain", DType::bf16, 32, 32, false, attention_bwd_dq_sm80_bf16_32_plain},
    {"attention_bwd_dq_sm80_bf16_32_general", DType::bf16, 32, 32, true, attention_bwd_dq_sm80_bf16_32_general},
    {"attention_bwd_dq_sm80_bf16_64_plain", DType::bf16, 64, 64, false, attention_bwd_dq_sm80_bf16_64_plain},
    {"attention_bwd_dq_sm80_bf16_64_general", DType::bf16, 64, 64, true, attention_bwd_dq_sm80_bf16_64_general},
    {"attention_bwd_dq_sm80_bf16_96_plain", DType::bf16, 96, 96, false, attention_bwd_dq_sm80_bf16_96_plain},
    {"attention_bwd_dq_sm80_bf16_96_general", DType::bf16, 96, 96, true, attention_bwd_dq_sm80_bf16_96_general},
    {"attention_bwd_dq_sm80_bf16_128_plain", DType::bf16, 128, 128, false, attention_bwd_dq_sm80_bf16_128_plain},
    {"attention_bwd_dq_sm80_bf16_128_general", DType::bf16, 128, 128, true, attention_bwd_dq_sm80_bf16_128_general},
    {"attention_bwd_dq_sm80_bf16_256_plain", DType::bf16, 256, 256, false, attention_bwd_dq_sm80_bf16_256_plain},
    {"attention_bwd_dq_sm80_bf16_256_general", DType::bf16, 256, 256, true, attention_bwd_dq_sm80_bf16_256_general},
};

inline constexpr Instance<AttentionBackwardLaunch> k_attention_bwd_dbias_sm80[] = {
    {"attention_bwd_dbias_sm80_f16_32_general", DType::f16, 32, 32, true, attention_bwd_dbias_sm80_f16_32_general},
    {"attention_bwd_dbias_sm80_f16_64_general", DType::f16, 64, 64, true, attention_bwd_dbias_sm80_f16_64_general},
    {"attention_bwd_dbias_sm80_f16_96_general", DType::f16, 96, 96, true, attention_bwd_dbias_sm80_f16_96_general},
    {"attention_bwd_dbias_sm80_f16_128_general", DType::f16, 128, 128, true, attention_bwd_dbias_sm80_f16_128_general},
    {"attention_bwd_dbias_sm80_f16_256_general", DType::f16, 256, 256, true, attention_bwd_dbias_sm80_f16_256_general},
    {"attention_bwd_dbias_sm80_bf16_32_general", DType::bf16, 32, 32, true, attention_bwd_dbias_sm80_bf16_32_general},
    {"attention_bwd_dbias_sm80_bf16_64_general", DType::bf16, 64, 64, true, attention_bwd_dbias_sm80_bf16_64_general},
    {"attention_bwd_dbias_sm80_bf16_96_general", DType::bf16, 96, 96, true, attention_bwd_dbias_sm80_bf16_96_general},
    {"attention_bwd_dbias_sm80_bf16_128_general", DType::bf16, 128, 128, true, attention_bwd_dbias_sm80_bf16_128_general},
    {"attention_bwd_dbias_sm80_bf16_256_general", DType::bf16, 256, 256, true, attention_bwd_dbias_sm80_bf16_256_general},
};

inline constexpr Instance<AttentionBackwardLaunch> k_attention_bwd_dq_round[] = {
    {"attention_bwd_dq_round_f16_32_plain", DType::f16, 32, 32, false, attention_bwd_dq_round_f16_32_plain},
    {"attention_bwd_dq_round_f16_32_general", DType::f16, 32, 32, true, attention_bwd_dq_round_f16_32_general},
    {"attention_bwd_dq_round_f16_64_plain", DType::f16, 64, 64, false, attention_bwd_dq_round_f16_64_plain},
    {"attention_bwd_dq_round_f16_64_general", DType::f16, 64, 64, true, attention_bwd_dq_round_f16_64_general},
    {"attention_bwd_dq_round_f16_128_plain", DType::f16, 128, 128, false, attention_bwd_dq_round_f16_128_plain},
    {"attention_bwd_dq_round_bf16_32_plain", DType::bf16, 32, 32, false, attention_bwd_dq_round_bf16_32_plain},
    {"attention_bwd_dq_round_bf16_32_general", DType::bf16, 32, 32, true, attention_bwd_dq_round_bf16_32_general},
    {"attention_bwd_dq_round_bf16_64_plain", DType::bf16, 64, 64, false, attention_bwd_dq_round_bf16_64_plain},
    {"attention_bwd_dq_round_bf16_64_general", DType::bf16, 64, 64, true, attention_bwd_dq_round_bf16_64_general},
    {"attention_bwd_dq_round_bf16_128_plain", DType::bf16, 128, 128, false, attention_bwd_dq_round_bf16_128_plain},
};

}  // namespace mha::cuda
