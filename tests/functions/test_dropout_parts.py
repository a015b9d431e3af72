"""Dropout of a part of a problem is that of the whole: batch, heads, queries, keys; in one process and in several."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import threading

import cases
import oracle
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from test_dtensor import full

import mha_ext
from mha_ext import masks
from mha_ext._ops import draw_rng_state

P, B, H, Hk, S = 0.3, 4, 8, 2, 64
STATE = (0x123456789ABCD, 7 + (3 << 33))


def inputs(dtype=torch.float64, seed=0):
    gen = cases.generator(seed)
    q, dout = (cases.randn(gen, B, H, S, 16, dtype=dtype) for _ in range(2))
    k, v = (cases.randn(gen, B, Hk, S, 16, dtype=dtype) for _ in range(2))
    return q, k, v, dout


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_fewer_heads_have_the_bits_of_the_first_ones():
    state = torch.tensor(STATE)
    assert torch.equal(mha_ext.dropout_mask(state, P, B, H, 7, 9)[:, :4], mha_ext.dropout_mask(state, P, B, 4, 7, 9))


def test_neighbouring_offsets_batches_and_heads_have_nothing_in_common():
    """Two masks that agreed in more places than chance makes them would be correlated."""
    each = [mha_ext.dropout_mask(torch.tensor([5, offset]), 0.5, 2, 2, 64, 64).flatten(0, 1) for offset in (0, 1, 2, 1 << 32)]
    each = torch.cat(each).flatten(1).double()
    agree = (each[:, None] == each).double().mean(-1)
    agree.fill_diagonal_(0.5)
    assert (agree - 0.5).abs().max() < 6 * 0.5 / 64  # standard deviations of 64 * 64 fair coins


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (3, 0, 0, 0), (0, 5, 0, 0), (0, 0, 77, 0), (0, 0, 0, 132), (2, 1, 35, 64)])
def test_a_placed_state_is_a_part_of_the_whole(place):
    whole = oracle.dropout_mask(STATE, P, 4, 6, 100, 200)
    b, h, i, j = place
    expected = whole[b : b + 1, h : h + 1, i : i + 20, j : j + 67]
    state = torch.tensor([*STATE, *place])
    assert torch.equal(mha_ext.dropout_mask(state, P, 1, 1, 20, 67), expected)
    assert torch.equal(mha_ext.reference.dropout_mask(state, P, 1, 1, 20, 67), expected)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_attention_to_a_part_drops_as_the_whole(dtype):
    q, k, v, dout = inputs(dtype)
    part = (slice(1, 3), slice(4, 8), slice(20, 60), slice(32, 64))
    place = [x.start for x in part]
    options = {"dropout_p": P, "return_weights": True}
    _, whole = mha_ext.attention(q, k, v, rng_state=torch.tensor(STATE), **options)
    tensors = [q[part[:3]], k[1:3, 1:, 32:], v[1:3, 1:, 32:]]
    tensors = [x.detach().requires_grad_() for x in tensors]
    out, weights = mha_ext.attention(*tensors, rng_state=torch.tensor([*STATE, *place]), **options)
    assert torch.equal(weights == 0, whole[part] == 0)
    keep = oracle.dropout_mask(STATE, P, B, H, S, S)[part]
    truth = oracle.truths(*(x.detach() for x in tensors), dout=dout[part[:3]], keep=keep, dropout_p=P)
    gradients = torch.autograd.grad(out, tensors, dout[part[:3]])
    oracle.check(dict(zip(("out", "q", "k", "v"), (out.detach(), *gradients))), truth)


def test_softmax_talking_heads_and_packed_sequences_of_a_part():
    q, k, v, _ = inputs()
    scores = q @ q.mT
    state = lambda *place: torch.tensor([*STATE, *place])
    whole = mha_ext.masked_softmax(scores, dropout_p=P, rng_state=torch.tensor(STATE))
    part = mha_ext.masked_softmax(scores[2:, 3:, 5:], dropout_p=P, rng_state=state(2, 3, 5, 0))
    assert torch.equal(part, whole[2:, 3:, 5:])
    mix = torch.eye(H, dtype=q.dtype) + 0.1
    whole = mha_ext.attention(q, k, v, pre_mix=mix, post_mix=mix, dropout_p=P, rng_state=torch.tensor(STATE))
    part = mha_ext.attention(q[3:], k[3:], v[3:], pre_mix=mix, post_mix=mix, dropout_p=P, rng_state=state(3, 0, 0, 0))
    assert torch.equal(part, whole[3:])
    starts = torch.tensor([0, 20, 20, 64])
    heads = [x[0].transpose(0, 1) for x in (q, k, v)]
    whole = mha_ext.attention_varlen(*heads, starts, starts, dropout_p=P, rng_state=torch.tensor(STATE))
    last = torch.tensor([0, 44])
    part = mha_ext.attention_varlen(*(x[20:] for x in heads), last, last, dropout_p=P, rng_state=state(2, 0, 0, 0))
    assert torch.equal(part, whole[20:])


def test_drawn_states_are_placed_by_dropout_part():
    q, k, v, _ = inputs()
    compiled = torch.compile(lambda *x: mha_ext.attention(*x, dropout_p=P), backend="aot_eager", fullgraph=True)
    for call in (lambda *x: mha_ext.attention(*x, dropout_p=P), compiled):
        torch.manual_seed(5)
        whole = call(q, k, v)
        for head in (4, 0, 4):  # compiled once, placed anew
            torch.manual_seed(5)
            with mha_ext.dropout_part(batch=1, head=head):
                assert torch.equal(call(q[1:, head:], k[1:, head // 4 :], v[1:, head // 4 :]), whole[1:, head:])
    torch.manual_seed(5)
    assert torch.equal(mha_ext.attention(q, k, v, dropout_p=P), whole)  # outside, nothing is placed


def test_checkpointing_inside_a_part():
    from torch.utils.checkpoint import checkpoint

    q, k, v, dout = inputs()
    q.requires_grad_()
    found = []
    for wrapped in (False, True):
        torch.manual_seed(1)
        call = lambda q: mha_ext.attention(q, k, v, dropout_p=P)
        with mha_ext.dropout_part(head=8):
            out = checkpoint(call, q, use_reentrant=False) if wrapped else call(q)
            found.append(torch.autograd.grad(out, q, dout)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("sinks", [False, True])
def test_vmap_with_dropout(sinks):
    q, k, v, _ = inputs()
    tensors = [x.detach().unflatten(0, (2, 2)) for x in (q, k, v)]
    more = {"sinks": torch.zeros(H, dtype=q.dtype)} if sinks else {}
    call = lambda q, k, v, **other: mha_ext.attention(q, k, v, dropout_p=P, mask=masks.Causal(), **more, **other)

    def seeded(randomness, f=call):
        torch.manual_seed(3)
        return torch.vmap(f, randomness=randomness)(*tensors)

    torch.manual_seed(3)
    whole = call(q, k, v)
    close(seeded("different").flatten(0, 1), whole)
    same = seeded("same")
    close(same[0], whole[:2])
    torch.manual_seed(3)
    close(call(*(x[1] for x in tensors)), same[1])
    gradient = torch.func.grad(lambda q, k, v: call(q, k, v).square().sum())
    torch.manual_seed(3)
    whole = gradient(q, k, v)
    close(seeded("different", gradient).flatten(0, 1), whole)
    with pytest.raises(ValueError, match='accepted there: randomness="different" or "same"'):
        seeded("error")
    with pytest.raises(ValueError, match='accepted there: randomness="different" or "same"'):  # nothing of q's is mapped
        torch.vmap(lambda bias: mha_ext.attention(q, k, v, bias=bias, dropout_p=P, **more))(torch.zeros(2, S, S).double())
    given = lambda *x: call(*x, rng_state=torch.tensor(STATE))
    close(seeded("error", given), torch.stack([given(*x) for x in zip(*tensors)]))  # a given state is no randomness


def test_refusals():
    q, k, v, _ = inputs()
    for place in ({"key": 2}, {"head": -1}, {"batch": 1.5}, {"query": None}):
        with pytest.raises(ValueError, match="numbers from 0, key a multiple of 4"), mha_ext.dropout_part(**place):
            pass
    with pytest.raises(ValueError, match=r"rng_state is a int64 tensor of shape \[3\].*\[2\].*\[6\]"):
        mha_ext.attention(q, k, v, dropout_p=P, rng_state=torch.tensor([1, 2, 3]))
    with pytest.raises(RuntimeError, match="the first key at 3; the op accepts multiples of 4"):
        mha_ext.attention(q, k, v, dropout_p=P, rng_state=torch.tensor([1, 2, 0, 0, 0, 3]))


# Several processes ----------------------------------------------------------------------------------------------------

distributed = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


def one_process(*tensors, dout, **options):
    tensors = [x.detach().requires_grad_() for x in tensors]
    torch.manual_seed(9)
    out = mha_ext.attention(*tensors, dropout_p=P, **options)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


def dtensors(shape, sharding, given):
    from test_dtensor import mesh_of, placements_of
    from torch.distributed.tensor import distribute_tensor

    q, k, v, dout = inputs()
    state = {"rng_state": torch.tensor([1, 2, 0, 8, 0, 0])} if given else {}
    expected = one_process(q, k, v, dout=dout, mask=masks.Causal(), **state)
    mesh, placements = mesh_of(*shape), placements_of(sharding)
    q, k, v, dout = (distribute_tensor(x, mesh, placements) for x in (q, k, v, dout))
    tensors = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(9 if dist.get_rank() == 0 else 100 + dist.get_rank())  # the first process draws
    out = mha_ext.attention(*tensors, mask=masks.Causal(), dropout_p=P, **state)
    close([full(x) for x in (out.detach(), *torch.autograd.grad(out, tensors, dout))], expected)
    weights = mha_ext.masked_softmax(q @ q.mT, dropout_p=P, rng_state=torch.tensor(STATE))
    whole = full(q)
    close(full(weights), mha_ext.masked_softmax(whole @ whole.mT, dropout_p=P, rng_state=torch.tensor(STATE)))


@distributed
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("shape, sharding", [((2,), "b"), ((2,), "h"), ((2,), "s"), ((2,), "r"), ((2, 2), "bh"), ((4,), "b")], ids=str)
def test_dtensors_drop_as_one_process(processes, shape, sharding):
    n = 2 if shape == (2,) else 4
    for given in (False, True):
        processes[n].run(dtensors, shape, sharding, given)


def data_parallel():
    n, rank = dist.get_world_size(), dist.get_rank()
    q, k, v, dout = inputs()
    expected = one_process(q, k, v, dout=dout)
    rows = slice(rank * B // n, (rank + 1) * B // n)
    with mha_ext.dropout_part(batch=rows.start):
        close(one_process(*(x[rows] for x in (q, k, v)), dout=dout[rows]), [x[rows] for x in expected])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_draw_the_same_again_or_say_so(reentrant):
    x = inputs()[0].requires_grad_()

    def layer(x):
        return mha_ext.attention(x, x, x, dropout_p=P)

    def checkpointed(x):
        torch.manual_seed(11)
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)

    with mha_ext.dropout_part(batch=3):
        torch.manual_seed(11)
        (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
        checkpointed(x).square().sum().backward()
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)
        loss = checkpointed(x).square().sum()
    with pytest.raises(ValueError, match="accepted: both in it: call backward.. inside of the same dropout_part"):
        loss.backward()
    checkpointed(x).square().sum().backward()  # of the whole, from the same seed


def places_in_nested_backwards():
    caller, places = threading.get_ident(), []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if threading.get_ident() != caller:
                places.append(draw_rng_state(grad)[2:].tolist())
            else:  # from some depth on autograd takes another thread
                with torch.enable_grad():
                    Nested.apply(grad.detach().requires_grad_()).sum().backward()
            return grad

    with mha_ext.dropout_part(batch=3, head=2):
        Nested.apply(torch.ones(1, requires_grad=True)).sum().backward()
    return places


def test_threads_of_autograd_are_where_backward_was_called():
    """On a GPU backward runs in threads of autograd's, which know of their caller's part only by what torch hands on."""
    # In a process of its own: one with such threads can't fork any more.
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        assert alone.submit(places_in_nested_backwards).result() == [[3, 2, 0, 0]]


@distributed
@pytest.mark.xdist_group("processes")
def test_data_parallel_drops_as_one_process(processes):
    processes[2].run(data_parallel)


def heads_parallel(n, kv_heads, sinks):
    from test_dtensor import mesh_of
    from torch.distributed.tensor.parallel import parallelize_module

    def module_of():
        torch.manual_seed(3)
        return mha_ext.nn.SelfAttention(24, 8, num_kv_heads=kv_heads, dropout=P, sinks=sinks, rope=True, head_dim=6, causal=True).double()

    alone, shared = module_of(), module_of()
    for module in (alone, shared):
        if sinks:
            with torch.no_grad():
                module.sinks.copy_(torch.linspace(-1, 2, 8))
    alone.unpack()
    shared = parallelize_module(shared, mesh_of(n), mha_ext.distributed.HeadParallel())
    x = cases.randn(cases.generator(1), 2, 12, 24, dtype=torch.float64)
    found = []
    for module in (alone, shared):
        torch.manual_seed(7 if module is alone or dist.get_rank() == 0 else 70)
        given = x.clone().requires_grad_()
        out = module(given)
        out.square().sum().backward()
        found.append((full(out).detach(), full(given.grad), {n: full(p.grad) for n, p in module.named_parameters()}))
    close(found[1], found[0])


@distributed
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("n, kv_heads, sinks", [(2, 4, True), (4, 2, False), (4, 1, True)])
def test_heads_over_processes_drop_as_one(processes, n, kv_heads, sinks):
    """Sinks, and fewer key/value heads than processes, too."""
    processes[n].run(heads_parallel, n, kv_heads, sinks)


def ring(layout):
    from mha_ext.distributed import ring_attention, sequence_positions

    q, k, v, dout = inputs()
    expected = one_process(q, k, v, dout=dout, mask=masks.Causal())
    mine = sequence_positions(S, layout=layout)
    tensors = [x[:, :, mine].requires_grad_() for x in (q, k, v)]
    torch.manual_seed(9 if dist.get_rank() == 0 else 90)
    out = ring_attention(*tensors, mask=masks.Causal(), dropout_p=P, layout=layout)
    close([out.detach(), *torch.autograd.grad(out, tensors, dout[:, :, mine])], [x[:, :, mine] for x in expected])
    tensors = [x[:, :, : 30 + dist.get_rank()] for x in (q, k, v)]
    with pytest.raises(ValueError, match="parts of the keys begin at .*multiples of 4"):
        ring_attention(*tensors, dropout_p=P)


@distributed
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_ring_drops_as_one_process(processes, layout):
    processes[2].run(ring, layout)
    processes[4].run(ring, layout)
