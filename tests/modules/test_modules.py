"""nn.MultiheadAttention against torch's, over the matrix of its arguments."""

from __future__ import annotations

import copy
import io
import itertools
import warnings

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F

import mha_ext
from mha_ext import nn

E, H, L, S, N = 12, 3, 5, 7, 2


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*mismatched.*mask")  # torch's own advice about mixing mask types
        warnings.filterwarnings("ignore", message=".*nested tensor.*")
        yield


def randn(*shape, dtype=torch.float64, seed=0, grad=False):
    return cases.randn(cases.generator(seed), *shape, dtype=dtype).requires_grad_(grad)


def pair(dtype=torch.float64, seed=0, **options):
    """torch's module and ours with the same parameters, none of them 0."""
    theirs = torch.nn.MultiheadAttention(E, H, dtype=dtype, **options)
    ours = nn.MultiheadAttention(E, H, dtype=dtype, **options)
    gen = cases.generator(seed)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(cases.randn(gen, *p.shape, dtype=dtype) * 0.5)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def some_masks(kind: str, L: int, S: int, N: int, dtype=torch.float64) -> dict:
    """Arguments of forward(); every query sees at least one key."""
    gen = cases.generator(kind)
    hide2 = torch.rand(L, S, generator=gen) < 0.4
    hide3 = torch.rand(N * H, L, S, generator=gen) < 0.4
    pad = torch.arange(S) >= torch.tensor([S, S - 3][:N]).view(-1, 1)
    for hide in (hide2, hide3):
        hide[..., 0] = False

    def as_float(hide):
        return randn(*hide.shape, dtype=dtype, seed=9).masked_fill(hide, -torch.inf)

    found = {
        "none": {},
        "bool 2d": {"attn_mask": hide2},
        "bool 3d": {"attn_mask": hide3},
        "float 2d": {"attn_mask": as_float(hide2)},
        "float 3d": {"attn_mask": as_float(hide3)},
        "padding": {"key_padding_mask": pad},
        "float padding": {"key_padding_mask": as_float(pad)},
        "both bool": {"attn_mask": hide2, "key_padding_mask": pad},
        "both float": {"attn_mask": as_float(hide3), "key_padding_mask": as_float(pad)},
        "mixed": {"attn_mask": as_float(hide2), "key_padding_mask": pad},
    }[kind]
    return found


MASKS = [
    "none",
    "bool 2d",
    "bool 3d",
    "float 2d",
    "float 3d",
    "padding",
    "float padding",
    "both bool",
    "both float",
    "mixed",
]
MODULES = [
    {}, {"batch_first": True}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 10, "vdim": 8},
    {"kdim": 10, "batch_first": True}, {"vdim": 8, "bias": False}, {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    {"kdim": 10, "vdim": 8, "add_bias_kv": True, "add_zero_attn": True},
]  # fmt: skip


def compare(theirs, ours, q, k, v, only_ours=None, **call):
    """Outputs, weights, and the gradients of inputs and parameters, in fp64."""
    results = []
    for module in (theirs, ours):
        if module is ours:
            call |= only_ours or {}
        inputs = {id(t): t.detach().requires_grad_() for t in (q, k, v)}  # the same tensor stays the same
        a, b, c = (inputs[id(t)] for t in (q, k, v))
        out, weights = module(a, b, c, **call)
        loss = (out * randn(*out.shape, seed=20)).sum()
        if weights is not None:
            loss = loss + (weights * randn(*weights.shape, seed=21)).sum()
        names = [name for name, _ in module.named_parameters()]
        leaves = [*inputs.values(), *module.parameters()]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        results.append((out, weights, dict(zip([f"input {n}" for n in range(len(inputs))] + names, grads))))
    (out, weights, grads), (our_out, our_weights, our_grads) = results
    torch.testing.assert_close(our_out, out)
    assert (weights is None) == (our_weights is None)
    if weights is not None:
        torch.testing.assert_close(our_weights, weights)
    assert list(grads) == list(our_grads)
    for name, g in grads.items():
        torch.testing.assert_close(our_grads[name], g, msg=lambda m, name=name: f"gradient of {name}: {m}")


CALLS = list(itertools.product([True, False], [True, False]))  # need_weights, average_attn_weights


@pytest.mark.parametrize("options", MODULES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_equal_to_torch_over_the_argument_matrix(options, kind):
    theirs, ours = pair(**options)
    q, k, v = randn(L, N, E), randn(S, N, options.get("kdim", E), seed=1), randn(S, N, options.get("vdim", E), seed=2)
    if options.get("batch_first"):
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    for need_weights, average in CALLS:
        compare(
            theirs, ours, q, k, v, need_weights=need_weights, average_attn_weights=average, **some_masks(kind, L, S, N)
        )


@pytest.mark.parametrize("options", MODULES, ids=str)
@pytest.mark.parametrize("kind", ["none", "bool 2d", "float 2d", "padding", "both bool", "bool 3d"])
def test_unbatched(options, kind):
    theirs, ours = pair(**options)
    q, k, v = randn(L, E), randn(S, options.get("kdim", E), seed=1), randn(S, options.get("vdim", E), seed=2)
    arguments = some_masks(kind, L, S, 1)
    if "key_padding_mask" in arguments:
        arguments["key_padding_mask"] = torch.arange(S) >= S - 2
    for need_weights, average in CALLS:
        compare(theirs, ours, q, k, v, need_weights=need_weights, average_attn_weights=average, **arguments)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool 2d", "float padding"])
def test_self_attention_and_shared_key_and_value(batch_first, kind):
    """One tensor for all three, or for key and value: the packed projection takes other paths then."""
    theirs, ours = pair(batch_first=batch_first)
    x, y = randn(N, S, E), randn(N, S, E, seed=1)
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    for q, k, v in ((x, x, x), (x, y, y), (x, x, y), (y, x, y)):
        compare(theirs, ours, q, k, v, **some_masks(kind, S, S, N))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("mask_type", [torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"add_zero_attn": True}, {"add_bias_kv": True}], ids=str
)
def test_is_causal(options, mask_type, padding, need_weights):
    theirs, ours = pair(**options)
    x = randn(S, N, E) if not options.get("batch_first") else randn(N, S, E)
    hide = torch.ones(S, S, dtype=torch.bool).triu(1)
    mask = hide if mask_type == torch.bool else torch.zeros(S, S, dtype=mask_type).masked_fill(hide, -torch.inf)
    call = {"key_padding_mask": torch.arange(S) >= torch.tensor([[S], [S - 3]])} if padding else {}
    if options.get("add_zero_attn") or options.get("add_bias_kv"):  # torch: visible only if padding or weights are asked for
        compare(theirs, ours, x, x, x, {"is_causal": True}, attn_mask=mask, need_weights=need_weights, **call)
    else:
        compare(theirs, ours, x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights, **call)
    square = torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    compare(theirs, ours, x, x, x, attn_mask=square, **call)


def test_is_causal_without_a_mask_is_refused_as_by_torch():
    theirs, ours = pair()
    x = randn(S, N, E)
    for module in (theirs, ours):
        with pytest.raises(RuntimeError, match="attn_mask"):
            module(x, x, x, is_causal=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_first": True}, {"batch_first": True, "kdim": 10, "vdim": 8}, {"bias": False, "batch_first": True}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["none", "bool 2d", "padding", "both bool", "float 2d"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_eval_under_no_grad_where_torch_has_a_fast_path(options, kind, need_weights):
    theirs, ours = pair(**options)
    theirs.eval()
    ours.eval()
    q = randn(N, S, E) if options.get("batch_first") else randn(S, N, E)
    k = q if "kdim" not in options else randn(N, S, 10, seed=1)
    v = q if "vdim" not in options else randn(N, S, 8, seed=2)
    with torch.no_grad():
        expected = theirs(q, k, v, need_weights=need_weights, **some_masks(kind, S, S, N))
        actual = ours(q, k, v, need_weights=need_weights, **some_masks(kind, S, S, N))
    torch.testing.assert_close(actual[0], expected[0])
    assert (actual[1] is None) == (expected[1] is None)
    if need_weights:
        torch.testing.assert_close(actual[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["none", "both bool", "float 3d"])
def test_single_and_half_precision_by_the_rule(dtype, kind):
    exact_module, _ = pair(batch_first=True)
    exact_module.to(dtype).double()  # parameters that `dtype` holds exactly
    x = randn(N, S, E).to(dtype)

    def run(module, dtype):
        leaf = x.detach().to(dtype).requires_grad_()
        arguments = {
            n: t.to(dtype) if t.is_floating_point() else t for n, t in some_masks(kind, S, S, N, torch.float32).items()
        }
        arguments = {n: t.to(x.dtype).to(dtype) if t.is_floating_point() else t for n, t in arguments.items()}
        out, weights = module(leaf, leaf, leaf, average_attn_weights=False, **arguments)
        grads = torch.autograd.grad(out, [leaf, *module.parameters()], randn(*out.shape, seed=3).to(x.dtype).to(dtype))
        return [out, weights, *grads]

    exact = run(exact_module, torch.float64)
    rival = run(copy.deepcopy(exact_module).to(dtype), dtype)
    ours = nn.MultiheadAttention(E, H, batch_first=True, dtype=dtype)
    ours.load_state_dict(exact_module.state_dict())
    for n, (a, e, r) in enumerate(zip(run(ours, dtype), exact, rival)):
        assert a.dtype == dtype
        largest = (4 * e.detach().abs().amax()).expand_as(
            e
        )  # four products after one another, each rounding in `dtype`
        oracle.compare(str(n), a, e, r, oracle.FORWARD if n < 2 else oracle.GRADIENT, largest)


# The module as an object ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MODULES, ids=str)
def test_state_dict_interchange(options):
    theirs, ours = pair(**options)
    a, b = theirs.state_dict(), ours.state_dict()
    assert list(a) == list(b) and [t.shape for t in a.values()] == [t.shape for t in b.values()]
    fresh = torch.nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    fresh.load_state_dict(ours.state_dict())
    for t in (theirs, fresh):
        assert all(torch.equal(x, y) for x, y in zip(t.state_dict().values(), b.values()))
    names = ["embed_dim", "kdim", "vdim", "num_heads", "dropout", "batch_first", "head_dim", "add_zero_attn"]
    assert [getattr(theirs, n) for n in names] == [getattr(ours, n) for n in names]


@pytest.mark.parametrize("options", MODULES, ids=str)
def test_same_seed_same_initial_parameters(options):
    torch.manual_seed(4)
    theirs = torch.nn.MultiheadAttention(E, H, **options)
    torch.manual_seed(4)
    ours = nn.MultiheadAttention(E, H, **options)
    for (name, a), (other, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b), name


@pytest.mark.parametrize("options", [{}, {"kdim": 10, "vdim": 8, "add_bias_kv": True}], ids=str)
def test_saved_copied_moved(options):
    _, ours = pair(**options)
    q, k, v = randn(L, N, E), randn(S, N, options.get("kdim", E), seed=1), randn(S, N, options.get("vdim", E), seed=2)
    expected = ours(q, k, v)[0]
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(ours),
        torch.load(buffer, weights_only=False),
        ours.to(torch.float32).to(torch.float64),
    ):
        torch.testing.assert_close(other(q, k, v)[0], expected, check_dtype=True, rtol=1e-5, atol=1e-5)
    assert ours.half()(q.half(), k.half(), v.half())[0].dtype == torch.float16


def test_positional_arguments_are_in_the_order_of_torch():
    theirs, ours = pair()
    x = randn(S, N, E)
    call = (
        torch.arange(S) >= torch.tensor([[S], [S - 3]]),
        False,
        torch.ones(S, S, dtype=torch.bool).triu(1),
        True,
        False,
    )
    torch.testing.assert_close(ours(x, x, x, *call)[0], theirs(x, x, x, *call)[0])
    positional = (E, H, 0.0, True, True, True, 10, 8, True)
    a, b = torch.nn.MultiheadAttention(*positional), nn.MultiheadAttention(*positional)
    assert [(n, p.shape) for n, p in a.named_parameters()] == [(n, p.shape) for n, p in b.named_parameters()]


def test_dropout_in_training_only():
    module = nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True)
    x = torch.randn(N, S, E)
    torch.manual_seed(1)
    a = module(x, x, x)[0]
    torch.manual_seed(1)
    assert torch.equal(a, module(x, x, x)[0]) and not torch.equal(a, module(x, x, x)[0])
    module.eval()
    plain = nn.MultiheadAttention(E, H, batch_first=True)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(x, x, x)[0], plain(x, x, x)[0])


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_fully_padded_sample_is_finite_and_others_are_as_without_it(kind, need_weights):
    theirs, ours = pair(batch_first=True)
    x = randn(3, S, E)
    pad = torch.arange(S) >= torch.tensor([[S], [0], [4]])
    given = pad if kind == "bool" else torch.zeros(3, S, dtype=torch.float64).masked_fill(pad, -torch.inf)
    out, weights = ours(x, x, x, key_padding_mask=given, need_weights=need_weights)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[1], ours.out_proj.bias.expand(S, E))
    expected, expected_weights = theirs(
        x[[0, 2]], x[[0, 2]], x[[0, 2]], key_padding_mask=given[[0, 2]], need_weights=need_weights
    )
    torch.testing.assert_close(out[[0, 2]], expected)
    if need_weights:
        torch.testing.assert_close(weights[[0, 2]], expected_weights)
        assert not weights[1].any()


# Inside torch's own models --------------------------------------------------------------------------------------------


def swapped(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model with our modules."""
    model = copy.deepcopy(model)
    assert mha_ext.swap_attention(model).replaced
    return model


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("arguments", ["none", "padding", "causal", "both"])
def test_inside_torch_encoder_layers(batch_first, norm_first, training, arguments):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        E, H, 16, dropout=0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    theirs = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    ours = swapped(theirs).train(training)
    x = randn(N, S, E) if batch_first else randn(S, N, E)
    call = {}
    if arguments in ("padding", "both"):
        call["src_key_padding_mask"] = torch.arange(S) >= torch.tensor([[S], [S - 3]])
    if arguments in ("causal", "both"):
        call["mask"] = torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    torch.testing.assert_close(ours(x, **call), theirs(x, **call))
    with torch.no_grad():
        torch.testing.assert_close(ours(x, **call), theirs(x, **call))


def test_inside_a_torch_encoder_that_uses_nested_tensors():
    """In evaluation torch's encoder turns padded batches into nested tensors on its own."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(E, H - 1, 16, dropout=0.0, batch_first=True)
    theirs = torch.nn.TransformerEncoder(layer, 2).eval()
    ours = swapped(theirs).eval()
    x, pad = torch.randn(N, S, E), torch.arange(S) >= torch.tensor([[S], [S - 3]])
    with torch.no_grad():
        expected, actual = theirs(x, src_key_padding_mask=pad), ours(x, src_key_padding_mask=pad)
    torch.testing.assert_close(actual.masked_fill(pad[..., None], 0), expected.masked_fill(pad[..., None], 0))


def test_inside_the_whole_torch_transformer():
    torch.manual_seed(0)
    theirs = torch.nn.Transformer(E, H, 1, 1, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours = swapped(theirs)
    source, target = randn(N, S, E), randn(N, L, E, seed=1)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    pad = torch.arange(S) >= torch.tensor([[S], [S - 3]])
    call = {"tgt_mask": causal, "src_key_padding_mask": pad, "memory_key_padding_mask": pad, "tgt_is_causal": True}
    results = []
    for model in (theirs, ours):
        out = model(source, target, **call)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for a, b in zip(*results):
        torch.testing.assert_close(b, a)


def test_training_a_few_steps_gives_the_same_losses():
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours = swapped(theirs)
    x, y = randn(4, S, E), randn(4, S, E, seed=1)
    losses = []
    for model in (theirs, ours):
        optimiser, found = torch.optim.AdamW(model.parameters(), 1e-2), []
        for _ in range(10):
            optimiser.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimiser.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]))


@pytest.mark.parametrize("bias_kv", [False, True])
def test_zero_attention_is_added_to_no_keys_too(bias_kv):
    theirs = torch.nn.MultiheadAttention(4, 2, add_zero_attn=True, add_bias_kv=bias_kv)
    ours = nn.MultiheadAttention(4, 2, add_zero_attn=True, add_bias_kv=bias_kv)
    ours.load_state_dict(theirs.state_dict())
    query, empty = torch.randn(3, 1, 4), torch.randn(0, 1, 4)
    torch.testing.assert_close(ours(query, empty, empty), theirs(query, empty, empty))
