// The ops' schemas: the one place that names their arguments. The groups have structs in arguments.h, and Call in
// mha_ext/_ops/arguments.py has the arguments of attention_mixed_fwd.
#include <torch/csrc/stable/library.h>

#include <string>

STABLE_TORCH_LIBRARY(mha_ext, m) {
  const std::string mask =
      "Tensor? bias, Tensor? mask, Tensor? begin, Tensor? end, Tensor? query_ids, Tensor? key_ids, Tensor? blocks, "
      "SymInt? left, SymInt? right, bool top_left, SymInt block_size, ";
  const std::string sequences = "Tensor? q_starts, Tensor? k_starts, SymInt max_q, SymInt max_k, ";
  const std::string scores = "Tensor? sinks, float scale, float softcap";
  const std::string dropout = "float dropout_p, Tensor? rng_state";
  const std::string attention = mask + sequences + scores + ", " + dropout;
  auto def = [&](const std::string& schema) { m.def(schema.c_str()); };
  def("attention_fwd(Tensor q, Tensor k, Tensor v, " + attention +
      ", bool return_weights, bool deterministic) -> (Tensor out, Tensor lse, Tensor lse_rest, Tensor weights)");
  // Of q, k, v that are slices of one tensor [B,S,H+2*Hk,D].
  def("attention_packed_fwd(Tensor qkv, SymInt num_heads, " + attention +
      ", bool deterministic) -> (Tensor out, Tensor lse, Tensor lse_rest)");
  def("attention_cached(Tensor q, Tensor k, Tensor v, Tensor? block_table, Tensor? k_scale, Tensor? v_scale, "
      "SymInt page_size, " +
      mask + scores + ") -> (Tensor out, Tensor lse)");
  const std::string backward =
      "(Tensor dout, Tensor? dlse, Tensor? dweights, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor "
      "lse_rest, " +
      attention + ", bool need_dbias, bool deterministic) -> ";
  def("attention_bwd" + backward + "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)");
  def("attention_packed_bwd" + backward + "(Tensor dqkv, Tensor dbias, Tensor dsinks)");
  def("attention_mixed_fwd(Tensor q, Tensor k, Tensor v, Tensor? pre_mix, Tensor? post_mix, " + attention +
      ", bool return_weights, bool deterministic) -> (Tensor out, Tensor lse, Tensor lse_rest, Tensor weights)");
  def("attention_mixed_bwd(Tensor dout, Tensor? dlse, Tensor? dweights, Tensor q, Tensor k, Tensor v, Tensor lse, "
      "Tensor lse_rest, Tensor? pre_mix, Tensor? post_mix, " +
      attention +
      ", bool need_dbias, bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks, "
      "Tensor dpre_mix, Tensor dpost_mix)");
  def("masked_softmax_fwd(Tensor scores, " + mask + "float scale, " + dropout + ") -> (Tensor out, Tensor lse)");
  def("masked_softmax_bwd(Tensor dout, Tensor scores, Tensor lse, " + mask + "float scale, " + dropout +
      ", bool need_dbias) -> (Tensor dscores, Tensor dbias)");
  def("split_heads(Tensor x, SymInt num_heads, Tensor? bias=None) -> Tensor");
  def("merge_heads(Tensor x, Tensor? mix=None) -> Tensor");
  def("dropout_mask(Tensor rng_state, float p, SymInt B, SymInt H, SymInt Sq, SymInt Sk) -> Tensor");
}
