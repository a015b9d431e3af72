"""NaN and infinity in what is visible, in every input: they show in all that depends on them and in nothing else, forward and backward.

Each problem is run twice, with ordinary numbers in their places, too: whole rows that stay finite keep every bit.
"""

from __future__ import annotations

import random

import cases
import oracle
import pairs
import pytest
import torch

import mha_ext
from mha_ext import masks

LENGTHS = [1, 2, 5, 8, 9, 16, 31, 33, 64, 65, 70]
BIASES = ["none", "Sq,Sk", "1,H,1,Sk", "B,1,1,Sk", "B,H,Sq,Sk", "B,1,Sq,1"]
MASKS = [m for m in cases.MASKS if "strided" not in m and "dilated" not in m]
NAN, INF = float("nan"), float("inf")


class Problem:
    """Random inputs of one call, by name, and the same with some elements of some of them not finite."""

    def __init__(self, seed: int, kind: str):
        self.rng, self.gen = random.Random(seed), cases.generator(seed)
        draw = self.rng.choice
        self.dtype, self.accumulate = draw(cases.DTYPES), None
        B, Hk, group = draw([1, 2]), draw([1, 2]), draw([1, 2])
        H = Hk * group
        Sq, D, Dv = draw(LENGTHS), draw([1, 3, 8, 16, 19]), draw([1, 4, 8, 17])
        Sk = draw([Sq, Sq, *LENGTHS])
        mask = draw(MASKS)
        if kind == "decoding":  # few rows, whose keys are visited in parts
            kind = "attention"
            Sq, Sk, mask = draw([1, 3, 8, 9]), draw([40, 300, 600, 1100]), draw([m for m in MASKS if "documents" not in m])
        Sk = Sq if "documents" in mask else Sk
        c = cases.Case(B, H, Hk, Sq, Sk, D, Dv, self.dtype, mask)
        self.kind = kind
        self.mask, seen = cases.build_mask(mask, c, self.gen)
        self.seen = torch.ones(B, H, Sq, Sk, dtype=torch.bool) if seen is None else seen
        self.accumulate = oracle.accumulate_dtype(self.dtype)
        if kind == "softmax":
            self.inputs = {"scores": self.randn(B, H, Sq, Sk)}
        else:
            self.inputs = {"q": self.randn(B, H, Sq, D), "k": self.randn(B, Hk, Sk, D), "v": self.randn(B, Hk, Sk, Dv)}
        sizes = {"B": B, "H": H, "Sq": Sq, "Sk": Sk, "1": 1}
        bias = draw(BIASES)
        if bias != "none":
            self.inputs["bias"] = self.randn(*(sizes[name] for name in bias.split(",")))
        self.options = {}
        if kind != "softmax":
            self.options = {"softcap": draw([0.0, 0.0, 3.0]), "scale": draw([None, None, 0.7, -0.5])}
            if draw([False, True]):
                self.inputs["sinks"] = self.randn(H, dtype=self.accumulate)
        if kind == "mixed":
            which = draw([("pre_mix",), ("post_mix",), ("pre_mix", "post_mix")])
            self.inputs |= {name: self.randn(H, H, dtype=self.accumulate) for name in which}
        outputs = {"softmax": ["weights"], "attention": ["out", "lse"], "mixed": ["out", "lse"]}[kind]
        self.outputs = outputs + (["weights"] if kind != "softmax" and draw([False, False, True]) else [])
        shapes = {"out": (B, H, Sq, Dv), "lse": (B, H, Sq), "weights": (B, H, Sq, Sk)}
        for name in self.outputs:
            self.inputs["d" + name] = self.randn(*shapes[name], dtype=self.accumulate if name == "lse" else self.dtype)

    def randn(self, *shape, dtype=None):
        return cases.randn(self.gen, *shape, dtype=dtype or self.dtype)

    def poison(self) -> dict[str, torch.Tensor]:
        """The inputs, with up to 3 elements of NaN or infinity, or whole rows of them."""
        found = {name: t.clone() for name, t in self.inputs.items()}
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            t = found[self.rng.choice(sorted(found))]
            if t.numel() == 0:
                continue
            at = tuple(self.rng.randrange(n) for n in t.shape)
            t[at if self.rng.random() < 0.7 else at[:-1]] = self.rng.choice([NAN, NAN, INF, -INF])
        return found

    def run(self, given: dict[str, torch.Tensor], truth: bool) -> dict[str, torch.Tensor]:
        """Outputs, and gradients by the name of the input; truth: pair by pair, in the type of sums."""
        cotangents = ["d" + name for name in self.outputs]
        leaves = {name: t for name, t in given.items() if name not in cotangents}
        if truth:
            leaves = {name: t.to(self.accumulate) for name, t in leaves.items()}
        leaves = {name: (t if truth else cases.surrounded(t)).clone().requires_grad_() for name, t in leaves.items()}
        found = self.truth(leaves) if truth else self.call(leaves)
        weighting = [given[name].to(found[name[1:]].dtype) for name in cotangents]
        if truth:  # of a row that sees nothing, the logsumexp is no function of anything, and neither is its output
            weighting = [self.where_seen(name, t, found) for name, t in zip(cotangents, weighting)]
        values = [found[name] for name in self.outputs]
        grads = torch.autograd.grad(values, list(leaves.values()), weighting, allow_unused=True)
        found |= {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(leaves, grads)}
        return {name: t.detach() for name, t in found.items()}

    def where_seen(self, name, t, found):
        if name == "dlse":
            return torch.where(found["lse"] == -INF, 0, t)
        return t

    def call(self, x):
        if self.kind == "softmax":
            return {"weights": mha_ext.masked_softmax(x["scores"], self.mask, bias=x.get("bias"), scale=0.8)}
        more = {name: x[name] for name in ("bias", "sinks", "pre_mix", "post_mix") if name in x}
        want = {"return_lse": True, "return_weights": "weights" in self.outputs}
        found = mha_ext.attention(x["q"], x["k"], x["v"], mask=self.mask, **more, **self.options, **want)
        return dict(zip(("out", "lse", "weights"), found))

    def truth(self, x):
        if self.kind == "softmax":
            scores = torch.where(self.seen, x["scores"], 0) * 0.8
            if "bias" in x:
                scores = scores + torch.where(self.seen, x["bias"], 0)
            dead = (torch.where(self.seen, scores, -INF) == -INF).all(-1, keepdim=True)
            return {"weights": pairs.softmax(scores, self.seen & ~dead)[0]}
        more = {name: x[name] for name in ("bias", "sinks", "pre_mix", "post_mix") if name in x}
        return dict(zip(("out", "lse", "weights"), pairs.attention(x["q"], x["k"], x["v"], seen=self.seen, **more, **self.options)))


def check(problem: Problem) -> dict[str, torch.Tensor]:
    """Returns the inputs that were not finite."""
    given = problem.poison()
    ours, clean, truth = problem.run(given, False), problem.run(problem.inputs, False), problem.run(given, True)
    infinite = any(t.isinf().any() for t in given.values())
    for name, t in ours.items():
        expected, text = truth[name].isfinite(), f"{name} of {problem.dtype}"
        if name == "lse":
            assert torch.equal(t == -INF, truth[name] == -INF), f"{text}: rows that see nothing differ"
        if infinite and (name == "sinks" or problem.kind == "mixed"):  # a row of -inf has output 0, whatever its dout holds
            expected = expected | t.isfinite()
        wrong = t.isfinite() != expected
        assert not wrong.any(), f"{text}: {int((wrong & expected).sum())} not finite that should be, {int((wrong & ~expected).sum())} the other way"
        if infinite or t.dim() == 0:  # finite results may depend on a score of -inf
            continue
        rows = expected if name in ("lse", "sinks") else expected.all(-1)
        assert torch.equal(t[rows], clean[name][rows]), f"{text}: other rows keep not every bit"
    return given


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit; NaN equals NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0, INF, -INF), b.nan_to_num(7.0, INF, -INF))


@pytest.mark.random(seconds=4)
def test_attention(seeds):
    for seed in seeds:
        check(Problem(seed, "attention"))


@pytest.mark.random(seconds=2)
def test_masked_softmax(seeds):
    for seed in seeds:
        check(Problem(seed, "softmax"))
@pytest.mark.random(seconds=3)
def test_decoding(seeds):
    for seed in seeds:
        problem = Problem(seed, "decoding")
        x = {name: t.detach() for name, t in check(problem).items()}
        more = {name: x.get(name) for name in ("bias", "sinks")} | problem.options | {"mask": problem.mask, "return_lse": True}
        calls = (fn(x["q"], x["k"], x["v"], **more) for fn in (mha_ext.attention, mha_ext.attention_cached))
        assert all(equal(a, b) for a, b in zip(*calls))


@pytest.mark.random(seconds=2)
def test_packed_sequences(seeds):
    """Each gives what it gives alone, whatever the others hold."""
    for seed in seeds:
        problem = Problem(seed, "attention")
        x = problem.poison()
        B, mask = len(x["q"]), problem.rng.choice([None, masks.Causal(), masks.Window(5, 3)])
        lengths = {n: [problem.rng.randint(0, x[n].shape[2]) for _ in range(B)] for n in "qk"}
        starts = {n: torch.tensor([0, *lengths[n]]).cumsum(0) for n in "qk"}
        of = {"q": "q", "k": "k", "v": "k", "dout": "q", "dlse": "q"}
        rows = {n: [x[n][b, :, : lengths[of[n]][b]].transpose(0, 1) for b in range(B)] for n in of}
        sinks = x.get("sinks")
        leaves = [torch.cat(rows[n]).requires_grad_() for n in "qkv"] + ([sinks.requires_grad_()] if sinks is not None else [])
        more = {"mask": mask, "sinks": sinks, **problem.options, "return_lse": True}
        found = mha_ext.attention_varlen(*leaves[:3], starts["q"], starts["k"], **more)
        alone = []
        for b in range(B):
            parts = (t[starts[of[n]][b] : starts[of[n]][b + 1]].transpose(0, 1)[None] for n, t in zip("qkv", leaves))
            out, lse = mha_ext.attention(*parts, **more)
            alone.append((out[0].transpose(0, 1), lse[0]))
        expected = torch.cat([out for out, _ in alone]), torch.cat([lse for _, lse in alone], 1)
        weighting = torch.cat(rows["dout"]), torch.cat([t.transpose(0, 1) for t in rows["dlse"]], 1)
        grads = [torch.autograd.grad(t, leaves[:3], weighting) for t in (found, expected)]
        for name, a, b in zip(("out", "lse", "q", "k", "v"), (*found, *grads[0]), (*expected, *grads[1])):
            assert equal(a, b), f"{name} of {problem.dtype}"


@pytest.mark.random(seconds=3)
def test_talking_heads(seeds):
    for seed in seeds:
        check(Problem(seed, "mixed"))


