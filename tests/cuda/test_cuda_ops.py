"""masked_softmax, split_heads, merge_heads and dropout_mask on CUDA, streams, graphs and refusals; see on_cuda.py."""

from __future__ import annotations

import os
import subprocess
import sys

import cases
import oracle
import pytest
import test_softmax
import torch
from on_cuda import modifiers, moved, prepared, to_cuda

import mha_ext
from mha_ext import _ops, masks

pytestmark = pytest.mark.cuda

SOFTMAX_TABLE = [c for c in cases.SWEEP if c.B * c.H * c.Sq * c.Sk < 60_000]


def softmax_truth(scores, bias, dout, seen, keep, scale, p):
    """Truths of out, scores' and bias' gradient."""
    leaves = [t for t in (scores, bias) if t is not None]

    def other(dtype):
        inner = [t.detach().to(dtype).requires_grad_() for t in leaves]
        result = test_softmax.eager(inner[0], seen, inner[1] if bias is not None else None, scale, keep, p, dtype)
        return result.detach(), torch.autograd.grad(result, inner, dout.to(dtype))

    (exact, exact_grads), (rival, rival_grads) = other(torch.float64), other(scores.dtype)
    row = 1 + abs(scale) * scores.detach().double().abs().amax(-1, keepdim=True)
    row = row + (bias.detach().double().abs().max() if bias is not None else 0)
    terms = exact.abs() * dout.double().abs() * row
    dscores = terms + exact.abs() * terms.sum(-1, keepdim=True)
    truths = {
        "out": oracle.Truth(exact, rival, exact * row, scores.dtype),
        "scores": oracle.Truth(exact_grads[0], rival_grads[0], dscores * abs(scale), scores.dtype),
    }
    if bias is not None:
        truths["bias"] = oracle.Truth(exact_grads[1], rival_grads[1], dscores.sum_to_size(bias.shape), scores.dtype)
    return truths


def softmax_case(scores, bias, dout, seen, given, keep=None, p=0.0):
    """given: the op's other arguments, on the CPU."""
    leaf, there = to_cuda(scores), moved({**given, "bias": bias})
    op = torch.ops.mha_ext.masked_softmax_fwd.default
    out = _ops.masked_softmax_fwd(*cases.op_arguments(op, scores=leaf, **there))[0]
    leaves = {"scores": leaf, **({"bias": there["bias"]} if bias is not None else {})}
    grads = torch.autograd.grad(out, list(leaves.values()), to_cuda(dout))
    got = {"out": out.cpu(), **{name: g.cpu() for name, g in zip(leaves, grads)}}
    oracle.check(got, softmax_truth(scores, bias, dout, seen, keep, given["scale"], p))


@pytest.mark.parametrize("c", SOFTMAX_TABLE, ids=lambda c: c.id)
def test_softmax_over_the_table(c):
    c, x = prepared(c)
    given = modifiers(c, x)
    del given["softcap"], given["bias"], given["sinks"]
    bias = None if c.bias in cases.RELATIVE else x.bias
    gen = cases.generator(c.id)
    order = [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)][len(c.id) % 3]
    scores = cases.surrounded(cases.randn(gen, c.B, c.H, c.Sq, c.Sk, dtype=c.dtype), order, 1 + len(c.id) % 2)
    dout = cases.surrounded(cases.randn(gen, *scores.shape, dtype=c.dtype), (2, 0, 1, 3))
    keep = mha_ext.dropout_mask(x.rng_state, c.dropout_p, *scores.shape) if c.dropout_p else None
    softmax_case(scores.requires_grad_(), bias, dout, x.seen, given, keep, c.dropout_p)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 17, 1025, 4097, 40001])
def test_softmax_row_lengths(length, dtype):
    gen = cases.generator(length)
    scores, dout = (cases.randn(gen, 1, 1, 2, length, dtype=dtype).mul(4) for _ in range(2))
    softmax_case(scores.requires_grad_(), None, dout, None, {"scale": 0.7})


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_hidden_scores_have_no_influence(dtype):
    gen = cases.generator(3)
    scores, dout = (cases.randn(gen, 2, 2, 5, 40, dtype=dtype) for _ in range(2))
    seen = torch.rand(2, 2, 5, 40, generator=gen) < 0.5
    seen[0, 0, 2] = False
    results = []
    for fill in (0.0, torch.nan):
        leaf = scores.masked_fill(~seen, fill).cuda().requires_grad_()
        out = mha_ext.masked_softmax(leaf, seen.cuda())
        (grad,) = torch.autograd.grad(out, leaf, dout.masked_fill(~seen, fill).cuda())
        results.append((out.cpu(), grad.cpu()))
    for a, b in zip(*results):
        assert torch.equal(a, b) and not a[~seen].any()
    assert not results[0][0][0, 0, 2].any()


HEAD_SIZES = [(2, 5, 3, 8), (1, 1, 1, 1), (3, 33, 4, 17), (2, 64, 2, 64), (2, 7, 1, 257), (66_000, 1, 1, 2)]  # B,S,H,D


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("B,S,H,D", HEAD_SIZES)
def test_split_and_merge(B, S, H, D, dtype):
    """Bit by bit what reshape and transpose give, in any layout; a bias is added with one rounding."""
    gen = cases.generator(1)
    x, bias = cases.randn(gen, B, S, H * D, dtype=dtype), cases.randn(gen, H * D, dtype=dtype)
    split = x.view(B, S, H, D).transpose(1, 2)
    views = [x, cases.surrounded(x), cases.surrounded(x, (2, 1, 0)), cases.surrounded(x, last_step=2)]
    for view in views if B < 1000 else views[:1]:
        leaf = to_cuda(view.detach().requires_grad_())
        out = mha_ext.split_heads(leaf, H)
        assert out.is_contiguous() and torch.equal(out.cpu(), split)
        (grad,) = torch.autograd.grad(out, leaf, to_cuda(cases.surrounded(split, (0, 2, 1, 3))))
        assert torch.equal(grad.cpu(), x)
        by_head = to_cuda(view).unflatten(-1, (H, D)).transpose(1, 2).detach().requires_grad_()
        merged = mha_ext.merge_heads(by_head)
        assert merged.is_contiguous() and torch.equal(merged.cpu(), x)
        (grad,) = torch.autograd.grad(merged, by_head, x.cuda())
        assert torch.equal(grad.cpu(), split)
    out = mha_ext.split_heads(x.cuda(), H, bias.cuda()).cpu()
    assert torch.equal(out, (x + bias).view(B, S, H, D).transpose(1, 2))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("B,S,H,D", HEAD_SIZES[:5])
def test_merge_with_head_mix(B, S, H, D, dtype):
    gen = cases.generator(4)
    x = cases.surrounded(cases.randn(gen, B, H, S, D, dtype=dtype), (0, 2, 1, 3))
    mix = cases.randn(gen, H, H, dtype=dtype)
    out = mha_ext.merge_heads(to_cuda(x), mix.cuda()).cpu()

    def mixed(x, mix):
        return torch.einsum("bhsd,hg->bsgd", x, mix).reshape(B, S, H * D)

    oracle.compare(
        "out",
        out,
        mixed(x.double(), mix.double()),
        mixed(x, mix),
        magnitude=mixed(x.double().abs(), mix.double().abs()),
    )


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], ids=str)
def test_zero_sizes(sizes):
    scores = torch.empty(sizes).cuda()
    assert mha_ext.masked_softmax(scores).shape == sizes
    assert mha_ext.dropout_mask(torch.tensor([1, 2]).cuda(), 0.5, *sizes).shape == sizes
    if sizes[1]:
        B, H, S, D = sizes
        assert mha_ext.merge_heads(scores).shape == (B, S, H * D)
        assert mha_ext.split_heads(torch.empty(B, S, H * D).cuda(), H).shape == sizes


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("sizes", [(2, 3, 33, 70), (1, 1, 1, 1), (1, 2, 5, 4)], ids=str)
def test_dropout_mask_has_the_bits_of_the_cpu(sizes, p):
    state = torch.tensor([-5, 2**40 + 3])
    mask = mha_ext.dropout_mask(state.cuda(), p, *sizes)
    assert mask.is_cuda and torch.equal(mask.cpu(), mha_ext.dropout_mask(state, p, *sizes))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_weights_drop_what_they_drop_on_the_cpu(dtype):
    q, k, v = (cases.randn(cases.generator(n), 2, 2, 33, 32, dtype=dtype) for n in range(3))
    more = {"dropout_p": 0.4, "return_weights": True}
    state = torch.tensor([7, 9])
    weights = mha_ext.attention(q.cuda(), k.cuda(), v.cuda(), rng_state=state.cuda(), **more)[1].cpu()
    assert torch.equal(weights == 0, mha_ext.attention(q, k, v, rng_state=state, **more)[1] == 0)


def test_another_stream_than_the_default():
    q = cases.randn(cases.generator(1), 1, 2, 33, 32, dtype=torch.bfloat16)
    expected = mha_ext.attention(*[q.cuda()] * 3).cpu()
    stream = torch.cuda.Stream()
    there = q.cuda()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = mha_ext.attention(there, there, there)
        done = stream.record_event()
    done.synchronize()
    assert torch.equal(out.cpu(), expected)


GRAPH = """
import torch, mha_ext
q, k, v = (torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3))
state = torch.tensor([1, 2])
arguments = dict(mask=mha_ext.masks.Causal(), dropout_p=0.3)
expected = mha_ext.attention(q.cuda(), k.cuda(), v.cuda(), rng_state=state.cuda(), **arguments).cpu()
there = [torch.zeros_like(t).cuda() for t in (q, k, v)] + [torch.zeros_like(state).cuda()]
def run():
    leaves = [t.detach().requires_grad_() for t in there[:3]]
    out = mha_ext.attention(*leaves, rng_state=there[3], **arguments)
    return out, *torch.autograd.grad(out, leaves, there[0])
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    run()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    results = run()
for a, b in zip(there, (q, k, v, state)):
    a.copy_(b)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(results[0].detach().cpu(), expected)
assert all(t.detach().cpu().isfinite().all() and t.detach().cpu().any() for t in results)
print("replayed")
"""


def in_a_process_of_its_own(code: str, **environment: str) -> str:
    environment = {**os.environ, **environment}
    if environment.get("PTXSIM_TORCH_CACHING") == "1":
        environment.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
    done = subprocess.run([sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_graph_capture_and_replay_with_new_values():
    assert "replayed" in in_a_process_of_its_own(GRAPH, PTXSIM_TORCH_CACHING="1")


OLD = """
import torch, mha_ext
q = torch.zeros(1, 1, 4, 8).cuda()
try:
    mha_ext.attention(q, q, q)
except RuntimeError as error:
    print(error)
"""


def test_a_gpu_without_the_instructions_is_refused():
    if not torch.cuda.get_device_name().startswith("ptxsim"):
        pytest.skip("only the simulation can be an older GPU")
    said = in_a_process_of_its_own(OLD, PTXSIM_DEVICE="sm_75")
    assert "compute capability 7.x; mha_ext's CUDA kernels need 8.0 or later: move the tensors to the CPU" in said


def test_tensors_on_two_devices_are_refused():
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="cuda:0, cpu, cpu; accepted: one device"):
        mha_ext.attention(q.cuda(), q, q)
    with pytest.raises(ValueError, match="mask has a tensor on cpu but the queries are on cuda:0"):
        mha_ext.attention(*[q.cuda()] * 3, mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="k and q are on different devices"):
        op = torch.ops.mha_ext.attention_fwd.default
        op(*cases.op_arguments(op, q=q.cuda(), k=q, v=q))


def test_what_the_cpu_refuses_is_refused_with_the_same_sentence():
    q, k = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 7, 8)
    for call in (
        lambda q, k: mha_ext.attention(q, k, k[:, :, :6]),
        lambda q, k: mha_ext.attention(q[:, :3], k, k),
        lambda q, k: mha_ext.attention(q, k, k, dropout_p=1.5),
        lambda q, k: mha_ext.attention(q, k, k, mask=masks.Padding(q.new_empty([3], dtype=torch.int64))),
        lambda q, k: mha_ext.split_heads(q[0], 3),
        lambda q, k: mha_ext.merge_heads(q, q[0, :2, :2, 0]),
        lambda q, k: torch.ops.mha_ext.merge_heads(q[0]),
    ):
        said = []
        for move in (torch.Tensor.cpu, torch.Tensor.cuda):
            with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
                call(move(q), move(k))
            said.append(str(error.value))
        assert said[0] == said[1]


@pytest.mark.parametrize(
    "columns,dtype,given,forward,backward,why",
    [
        (64, torch.bfloat16, {}, "sm90_bf16_64_plain", "sm90_bf16_64_plain", None),
        (64, torch.float16, {"softcap": 2.0}, "sm90_f16_64_general", "sm90_f16_64_general", None),
        (60, torch.bfloat16, {}, "sm80_bf16_64_general", "sm80_bf16_64_general", "TMA cannot read"),
        (300, torch.bfloat16, {}, "simple", "simple", "head sizes up to 256"),
        (64, torch.float32, {"dropout_p": 0.5}, "simple", "simple", "float16 and bfloat16"),
    ],
)
def test_explain_names_the_kernels_and_says_why_there_is_none_for_9_0(columns, dtype, given, forward, backward, why):
    q, k, v = (torch.zeros(1, 2, 70, columns, dtype=dtype).cuda() for _ in range(3))
    plan = mha_ext.explain(q, k, v, **given)
    if torch.cuda.get_device_capability()[0] != 9:
        forward, backward, why = forward.replace("sm90", "sm80"), backward.replace("sm90", "sm80"), "compute capability"
    if torch.cuda.get_device_properties().shared_memory_per_multiprocessor <= 100 * 1024:
        forward = forward.replace("sm80", "sm86")  # of which two blocks fit
        backward = backward.replace("sm80_bf16_64_plain", "sm86_bf16_64_plain")  # one, of twice as many warps
    assert plan.kernel == f"attention_fwd_{forward} and attention_bwd_{backward}"
    assert set(plan.refusals) == ({"*_sm90 forward", "*_sm90 backward"} if why else set())
    assert all(why in reason for reason in plan.refusals.values()) and plan.kernel in str(plan)
    mha_ext.attention(q, k, v, **given)  # nothing is left of what explain did


@pytest.mark.parametrize("which", range(3))
def test_explain_names_the_tensor_that_the_kernels_for_9_0_cannot_read(which):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("another compute capability is the reason that explain gives")
    heads = [torch.zeros(1, 2, 70, 64, dtype=torch.bfloat16).cuda() for _ in range(3)]
    heads[which] = torch.zeros(1, 2, 70, 68, dtype=torch.bfloat16).cuda()[..., :64]  # rows of 136 bytes
    refusals = mha_ext.explain(*heads).refusals
    assert set(refusals) == {"*_sm90 forward", "*_sm90 backward"}
    assert all(f"TMA cannot read {'qkv'[which]}: it must start" in reason for reason in refusals.values())
