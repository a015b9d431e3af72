"""KV caches: whatever way the positions arrive, attention is what it is over the whole sequence."""

from __future__ import annotations

import copy

import cases
import oracle
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mha_ext
from mha_ext import biases, masks, nn

B, H, HK, D, DV = 3, 6, 2, 24, 17
LENGTH = 170  # over several tiles of keys


def whole(dtype=torch.float32, length=LENGTH, batch=B, seed=1):
    """q, k, v of whole sequences."""
    gen = cases.generator(seed)
    heads = (H, D), (HK, D), (HK, DV)
    return [cases.randn(gen, batch, h, length, d, dtype=dtype) for h, d in heads]


def seen_of(length: int, window: int | None = None) -> torch.Tensor:
    i, j = torch.arange(length)[:, None], torch.arange(length)
    return (j <= i) if window is None else (j <= i) & (j >= i - window)


def truth(q, k, v, window=None, **options):
    return oracle.truths(q, k, v, dout=torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), seen=seen_of(q.shape[2], window), **options)["out"]  # fmt: skip


def poison(cache):
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    return cache


def make(dtype=torch.float32, capacity=LENGTH, batch=B, **options) -> nn.KVCache:
    return poison(nn.KVCache(batch, capacity, HK, D, value_dim=DV, dtype=dtype, **options))


def in_steps(cache, q, k, v, steps, **options):
    """The outputs of attend(), fed with the steps' numbers of positions; the last step takes the rest."""
    outs, at = [], 0
    for n in [*steps, q.shape[2]]:
        part = slice(at, at + n)
        if at < q.shape[2]:
            outs.append(cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], **options))
        at += n
    return torch.cat(outs, 2)


STEPS = {"decode": [1] * LENGTH, "prefill": [LENGTH - 3, 1, 1], "chunks": [67, 64, 7], "guesses": [100, 4, 4, 4, 5]}


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_any_steps_equal_the_whole(steps, dtype):
    q, k, v = whole(dtype)
    out = in_steps(make(dtype), q, k, v, steps)
    oracle.check({"out": out}, {"out": truth(q, k, v)})


@pytest.mark.parametrize("options", [{"window": 37}, {"window": 0}, {"softcap": 3.0}, {"scale": 0.3}], ids=str)
def test_options(options):
    q, k, v = whole()
    out = in_steps(make(), q, k, v, [67, 64] + [1] * 10, **options)
    oracle.check({"out": out}, {"out": truth(q, k, v, **options)})


@pytest.mark.parametrize("mix", ["pre_mix", "post_mix"])
@pytest.mark.parametrize("kind", [{}, {"page_size": 16}, {"dtype": torch.int8}], ids=str)
def test_one_mix_alone(kind, mix):
    q, k, v = (x.round() if "dtype" in kind else x for x in whole(length=40))  # whole numbers are exact in 8 bits
    scales = {name: torch.ones(HK) for name in ("k_scale", "v_scale") if "dtype" in kind}
    cache = (nn.PagedKVCache if "page_size" in kind else nn.KVCache)(B, 40, HK, D, value_dim=DV, **kind, **scales)
    given = {mix: cases.randn(cases.generator(3), H, H)}
    torch.testing.assert_close(in_steps(cache, q, k, v, [30, 1], **given), mha_ext.attention(q, k, v, mask=masks.Causal(), **given))


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_masks_cover_the_longest_sequence(compiled, fresh_compiler):
    cache, k = nn.KVCache(2, 16, 1, 4), torch.randn(2, 1, 8, 4)
    cache.append(k, k, torch.tensor([6, 2]))
    attend = lambda q, mask: cache.attend(q, q, q, mask=mask)
    if compiled:
        attend = torch.compile(attend, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError if compiled else ValueError, match="mask covers (fewer positions than|7 positions and) the cache has"):
        attend(k[:, :, :2], torch.ones(2, 7, dtype=torch.bool))
    assert cache.lengths.tolist() == [6, 2]
    attend(k[:, :, :2], torch.ones(2, 8, dtype=torch.bool))
    assert cache.lengths.tolist() == [8, 4]


@torch.no_grad()
def test_the_longest_sequence_decides_about_room():
    cache, k = nn.KVCache(2, 8, 1, 4), torch.randn(2, 1, 4, 4)
    for _ in range(2):
        cache.append(k, k, torch.tensor([4, 1]))
    with pytest.raises(ValueError, match="1 positions were appended to sequences of up to 8"):
        cache.append(k[:, :, :1], k[:, :, :1])
    cache.truncate(torch.tensor([4, 2]))
    cache.append(k, k)
    assert cache.lengths.tolist() == [8, 6]


@torch.no_grad()
def test_compiled_appends_stop_at_the_capacity(fresh_compiler):
    cache, k = nn.KVCache(2, 8, 1, 4), torch.randn(2, 1, 4, 4)
    append = torch.compile(lambda k: cache.append(k, k), backend="eager", fullgraph=True)
    cache.append(k, k, torch.tensor([4, 2]))
    append(k)
    assert cache.lengths.tolist() == [8, 6]
    with pytest.raises(RuntimeError, match="positions were appended beyond a cache's capacity, 8"):  # one has room
        append(k[:, :, :1])
    with pytest.raises(ValueError, match="4 positions were appended to sequences of up to 8; accepted: up to the capacity, 8"):
        cache.append(k, k)
    assert cache.lengths.tolist() == [8, 6]


@pytest.mark.parametrize("kind", [nn.KVCache, nn.PagedKVCache])
def test_state_dicts_leave_caches_out(kind):
    assert not kind(B, 8, HK, D, dtype=torch.int8).state_dict()


def test_sinks():
    q, k, v = whole()
    sinks = cases.randn(cases.generator(2), H)
    out = in_steps(make(), q, k, v, [100] + [1] * 30, sinks=sinks)
    torch.testing.assert_close(out, mha_ext.attention(q, k, v, mask=mha_ext.masks.Causal(), sinks=sinks))


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("window,capacity", [(20, 84), (0, 1), (63, 64), (70, 80)])
def test_a_ring_is_a_window_in_bounded_memory(window, capacity, steps):
    q, k, v = whole()
    cache = make(capacity=capacity, window=window)
    assert cache.k.shape[2] == 2 * capacity
    oracle.check({"out": in_steps(cache, q, k, v, steps)}, {"out": truth(q, k, v, window)})
    assert cache.lengths.tolist() == [LENGTH] * B


@pytest.mark.parametrize("window", [None, 20])
def test_ragged_sequences_are_independent(window):
    """Each sequence alone, to the bit; rows beyond counts give 0."""
    q, k, v = whole(torch.bfloat16)
    gen = cases.generator(3)
    cache = make(torch.bfloat16, 110 if window else LENGTH, window=window)
    alone = [make(torch.bfloat16, 110 if window else LENGTH, batch=1, window=window) for _ in range(B)]
    at = torch.zeros(B, dtype=torch.int64)
    for n in (40, 1, 0, 25, 1, 60, 3):
        counts = torch.randint(0, n + 1, (B,), generator=gen)
        parts = [torch.stack([x[b, :, a : a + n] for b, a in enumerate(at)]) for x in (q, k, v)]
        out = cache.attend(*parts, counts=counts)
        for b, count in enumerate(counts.tolist()):
            one = alone[b].attend(*(x[b : b + 1] for x in parts), counts=counts[b : b + 1])
            assert torch.equal(out[b], one[0]) and not out[b, :, count:].any()
        at += counts
    assert torch.equal(cache.lengths, at)


@pytest.mark.parametrize("window", [None, 30])
def test_truncate_takes_guesses_back(window):
    q, k, v = whole()
    cache = make(window=window, capacity=50 if window else LENGTH)
    wrong = [x.flip(2) for x in (q, k, v)]
    outs, at, gen = [], 0, cases.generator(5)
    while at < LENGTH:
        n = min(10, LENGTH - at)
        right = int(torch.randint(1, n + 1, (1,), generator=gen))
        part = [torch.cat([x[:, :, at : at + right], w[:, :, :n - right]], 2) for x, w in zip((q, k, v), wrong)]  # fmt: skip
        outs.append(cache.attend(*part)[:, :, :right])
        at += right
        cache.truncate(torch.full((B,), at))
    oracle.check({"out": torch.cat(outs, 2)}, {"out": truth(q, k, v, window)})


def test_truncate_never_lengthens_and_a_ring_has_limits():
    q, k, v = whole(length=40)
    cache = make(capacity=40)
    in_steps(cache, q, k, v, [])
    cache.truncate(torch.tensor([50, 10, 0]))
    assert cache.lengths.tolist() == [40, 10, 0]
    cache.truncate(5)
    assert cache.lengths.tolist() == [5, 5, 0]
    cache.truncate(0)
    assert cache.lengths.tolist() == [0] * B
    ring = make(capacity=20, window=12)
    in_steps(ring, q, k, v, [])
    ring.truncate(36)
    ring.truncate(32)
    with pytest.raises(ValueError, match="go back too far; a ring of capacity 20 for a window of 12 accepts up to 8"):
        ring.truncate(31)
    ring.reset(0)
    assert ring.lengths.tolist() == [0, 32, 32]
    ring = make(capacity=20, window=12)  # where the 21st position is, the first was
    in_steps(ring, *(x[:, :, :21] for x in (q, k, v)), [])
    with pytest.raises(ValueError, match="go back too far"):
        ring.truncate(3)
    ring.append(k[:, :, :8], v[:, :, :8])  # as many as there is room for
    with pytest.raises(ValueError, match="accepts 8: append less at once"):
        ring.append(k[:, :, :9], v[:, :, :9])
    ring.known_to_itself = [ring]
    twice = copy.deepcopy([ring, ring])
    assert twice[0] is twice[1] and twice[0] is not ring and twice[0].known_to_itself[0] is twice[0]


def test_reorder_for_beam_search():
    q, k, v = whole()
    indices = torch.tensor([2, 2, 0])
    cache = make()
    in_steps(cache, *(x[:, :, :100] for x in (q, k, v)), [])
    cache.k[:, 0, 100:, 0] = torch.arange(3.0)[:, None]
    cache.reorder(indices)
    assert (cache.k[:, 0, 100:, 0] == torch.arange(3.0)[:, None]).all()  # what nobody will read stays where it is
    out = cache.attend(*(x[:, :, 100:101] for x in (q, k, v)))
    past = [torch.cat([x[indices, :, :100], x[:, :, 100:101]], 2) for x in (q, k, v)]
    expected = truth(*past)
    last = oracle.Truth(*(x[:, :, -1:] for x in (expected.exact, expected.rival, expected.magnitude)), expected.dtype)
    oracle.check({"out": out}, {"out": last})


def test_a_cache_is_used_again_after_reset():
    q, k, v = whole()
    cache = make()
    first = in_steps(cache, q, k, v, [100, 1])
    cache.reset()
    assert torch.equal(in_steps(cache, q, k, v, [100, 1]), first)


class Reads(TorchDispatchMode):
    """Counts how often values are looked at, for which a GPU would be waited for."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op._opname == "_local_scalar_dense"
        return op(*args, **(kwargs or {}))


def test_the_capacity_is_checked_without_looking_at_lengths():
    _, k, v = whole(length=16)
    cache = make(capacity=16)
    with Reads() as reads:
        cache.append(k[:, :, :10], v[:, :, :10])
        for n, stay in ((6, 4), (12, 0), (16, None), (16, 16)):
            cache.append(k[:, :, :n], v[:, :, :n])
            cache.reset() if stay is None else cache.truncate(stay)
        assert reads.count == 0
        with pytest.raises(ValueError, match="sequences of up to 16"):
            cache.append(k[:, :, :1], v[:, :, :1])
        assert reads.count == 1


def test_capacity():
    _, k, v = whole(length=20)
    cache = make(capacity=16)
    cache.append(k[:, :, :10], v[:, :, :10])
    with pytest.raises(
        ValueError, match="7 positions were appended to sequences of up to 10; accepted: up to the capacity, 16"
    ):
        cache.append(k[:, :, :7], v[:, :, :7])
    assert cache.lengths.tolist() == [10] * B
    cache.append(k[:, :, :6], v[:, :, :6], counts=torch.tensor([1, 0, 3]))
    cache.append(k[:, :, :3], v[:, :, :3])  # there is room, though not for 6 more
    assert cache.lengths.tolist() == [14, 13, 16]
    cache.truncate(torch.tensor([16, 16, 15]))
    cache.append(k[:, :, :1], v[:, :, :1])


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda c, q, k, v: c.append(k[:2], v), r"k, v have shapes \[2,2,5,24\], \[3,2,5,17\]; this cache accepts"),
        (lambda c, q, k, v: c.append(k.double(), v), "k, v are float64, float32 and the cache is float32"),
        (lambda c, q, k, v: c.append(k, v, torch.tensor([1])), r"counts is a int64 tensor of shape \[1\]; accepted: an integer tensor \[B\] = \[3\]"),
        (lambda c, q, k, v: c.attend(q.requires_grad_(), k, v), "while gradients are recorded; accepted: under torch.no_grad"),
        (lambda c, q, k, v: c.attend(q, k, v, bias=biases.ALiBi(torch.ones(H, requires_grad=True))), "while gradients are recorded"),
        (lambda c, q, k, v: c.reorder(torch.tensor([0, 1, 3])), r"indices are \[0, 1, 3\]; accepted: numbers of sequences, 0 to 2"),
        (lambda c, q, k, v: nn.KVCache(1, 4, 2, 8, window=4), "window is 4 and capacity 4; KVCache accepts a window from 0"),
        (lambda c, q, k, v: nn.KVCache(1, 0, 2, 8), "capacity is 0; KVCache accepts a positive int"),
        (lambda c, q, k, v: make(window=3, capacity=6).append(k, v), "5 positions were appended at once; a ring of capacity 6"),
        (lambda c, q, k, v: make(window=3).attend(q, k, v, window=4), "window is 4; this cache keeps 3 positions"),
        (lambda c, q, k, v: nn.SelfAttention(8, 2)(torch.zeros(3, 1, 8), cache=c), "a cache was given with causal=False"),
        (lambda c, q, k, v: nn.SelfAttention(8, 2)(torch.zeros(3, 1, 8), counts=q), "counts was given without a cache"),
    ],
)  # fmt: skip
def test_refusals(call, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call(make(), *whole(length=5))


def test_an_extra_mask_and_bias_cover_the_slots():
    """Left padding: the first positions of a prompt are no text."""
    q, k, v = whole()
    starts = torch.tensor([0, 7, 100])
    bias = cases.randn(cases.generator(8), 1, H, 1, LENGTH)
    cache = make()
    more = {"mask": mha_ext.masks.LeftPadding(starts), "bias": bias}
    outs = [cache.attend(*(x[:, :, a:b] for x in (q, k, v)), **more) for a, b in ((0, 160), (160, LENGTH))]
    expected = mha_ext.attention(q, k, v, mask=mha_ext.masks.Causal() & more["mask"], bias=bias)
    torch.testing.assert_close(torch.cat(outs, 2), expected)


MODULES = [
    {"rope": True},
    {"rope": True, "num_kv_heads": 2, "qk_norm": True, "softcap": 4.0},
    {"rope": True, "num_kv_heads": 1, "window": 9, "packed": False},
]


@pytest.mark.parametrize("options", MODULES, ids=str)
@torch.no_grad()
def test_self_attention_step_by_step(options):
    module = nn.SelfAttention(32, 4, causal=True, dtype=torch.float64, **options).eval()
    x = torch.randn(B, 200, 32, dtype=torch.float64)
    cache = poison(module.make_cache(B, 200))
    assert (cache.window == 9) == ("window" in options)
    outs = [module(x[:, a:b], cache=cache) for a, b in ((0, 120), (120, 121), (121, 122), (122, 130), (130, 200))]
    torch.testing.assert_close(torch.cat(outs, 1), module(x))


@torch.no_grad()
def test_ragged_prompts_of_self_attention():
    module = nn.SelfAttention(32, 4, causal=True, rope=True, dtype=torch.float64).eval()
    x, counts = torch.randn(B, 50, 32, dtype=torch.float64), torch.tensor([50, 3, 20])
    cache = poison(module.make_cache(B, 60))
    prompt = module(x, cache=cache, counts=counts)
    step = module(x[:, :1], cache=cache)
    for b, n in enumerate(counts.tolist()):
        expected = module(torch.cat([x[b : b + 1, :n], x[b : b + 1, :1]], 1))
        torch.testing.assert_close(torch.cat([prompt[b : b + 1, :n], step[b : b + 1]], 1), expected)


def test_gradients_are_refused_in_modules():
    module = nn.SelfAttention(8, 2, causal=True)
    with pytest.raises(ValueError, match="while gradients are recorded"):
        module(torch.zeros(1, 1, 8), cache=module.make_cache(1, 4))
    with torch.no_grad(), pytest.raises(ValueError, match="accepted: causal attention without dropout"):
        nn.SelfAttention(8, 2, causal=True, dropout=0.1)(torch.zeros(1, 1, 8), cache=module.make_cache(1, 4))
    with torch.inference_mode():
        module(torch.zeros(1, 1, 8), cache=module.make_cache(1, 4))


@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_compiled_steps_share_a_graph(window, fresh_compiler):
    from torch._dynamo.testing import CompileCounterWithBackend

    module = nn.SelfAttention(32, 4, causal=True, rope=True, window=window).eval()
    x = torch.randn(B, 150, 32)
    expected = module(x)
    cache = module.make_cache(B, 150)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x, cache: module(x, cache=cache), backend=counter, fullgraph=True)
    outs = [module(x[:, :100], cache=cache)]
    outs += [step(x[:, i : i + 1], cache) for i in range(100, 103)]
    graphs = counter.frame_count
    outs += [step(x[:, i : i + 1], cache) for i in range(103, 150)]
    assert counter.frame_count == graphs <= 2
    torch.testing.assert_close(torch.cat(outs, 1), expected)


def test_module_with_sinks_decodes_what_it_computes_at_once():
    torch.manual_seed(0)
    module = mha_ext.nn.SelfAttention(32, 4, num_kv_heads=2, causal=True, sinks=True).eval()
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        without = module(x)
        module.sinks.copy_(torch.tensor([3.0, -1.0, 0.5, 10.0]))
        heads = module.qkv_proj(x).unflatten(-1, (-1, 8)).transpose(1, 2).split((4, 2, 2), 1)
        out = mha_ext.reference.attention(*heads, mask=mha_ext.masks.Causal(), sinks=module.sinks)
        expected = module.out_proj(out.transpose(1, 2).flatten(2))
        cache = module.make_cache(2, 16)
        steps = torch.cat([module(x[:, i : i + 1], cache=cache) for i in range(9)], 1)
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(steps, expected)
    assert (expected - without).abs().max() > 0.01
    module(x).sum().backward()
    assert module.sinks.grad.abs().min() > 0
