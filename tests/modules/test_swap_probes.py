"""swap_attention: modules that look like those it replaces, and differ somewhere, stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from test_swap import Attention, E, N, S, nonzero, state
from torch import nn

import mha_ext


class WhileTraining(Attention):
    def forward(self, x):
        return self.attend(x) * (1.1 if self.training else 1)


class FromEightTokensOn(Attention):
    def forward(self, x):
        return self.attend(x if x.shape[1] < 8 else x.flip(1))


class OfOneSequence(Attention):
    def forward(self, x):
        return self.attend(x if x.shape[0] > 1 else 2 * x)


class StopsGradients(Attention):
    def forward(self, x):
        return self.attend(x.detach())


class UnderNoGrad(Attention):
    def forward(self, x):
        return self.attend(x if torch.is_grad_enabled() else 2 * x)


class InSingle(Attention):
    def forward(self, x):
        return self.attend(x if x.dtype == torch.float64 else x.relu())


class UnderAutocast(Attention):
    def forward(self, x):
        return self.attend(x.relu() if torch.is_autocast_enabled("cpu") else x)


class WithFloatMasks(Attention):
    def forward(self, x, attn_mask=None):
        return self.attend(x, attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else 2 * attn_mask)


class DropsOutputs(Attention):
    """attn_drop is applied to what timm's does not apply it to."""

    def weights(self, q, k, attn_mask, is_causal):
        return (q * self.scale @ k.transpose(-1, -2)).softmax(-1)

    def forward(self, x):
        return self.attn_drop(self.attend(x))


class Noisy(Attention):
    def forward(self, x):
        return self.attend(x + torch.randn_like(x) if self.training else x)


class Counts(Attention):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.attend(x)


class KeepsWeights(Attention):
    def weights(self, *args):
        self.last = super().weights(*args)
        return self.last


DIFFERENT = {
    WhileTraining: "on 2 sequences of 5 tokens while training", FromEightTokensOn: "on 2 sequences of 9 tokens",
    OfOneSequence: "on 1 sequences of 1 tokens", StopsGradients: "on 2 sequences of 5 tokens", UnderNoGrad: "on 2 sequences of 5 tokens",
    InSingle: "in float32", UnderAutocast: "under autocast", WithFloatMasks: "with attn_mask",
    DropsOutputs: "on 2 sequences of 5 tokens while training", Noisy: "on 2 sequences of 5 tokens while training", Counts: "in what it keeps as calls", KeepsWeights: "in what it keeps as last",
}  # fmt: skip


@pytest.mark.parametrize("kind", DIFFERENT, ids=lambda kind: kind.__name__)
def test_what_differs_somewhere_is_kept(kind):
    module = nonzero(kind(dropout=0.1))
    before, kept = state(module), dict(vars(module))
    torch.manual_seed(7)
    report = mha_ext.swap_attention(module)
    drawn = torch.rand(3)
    assert report.replaced == {} and type(module) is kind
    assert f"{kind.__name__} computes something else than timm's Attention {DIFFERENT[kind]}" in report.kept[""]
    assert state(module) == before and dict(vars(module)) == kept
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))  # trying draws no random numbers of the user's


class Norm(nn.BatchNorm1d):
    """Statistics of a batch, over the features of [B,N,C]."""

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


def test_statistics_are_kept_as_before():
    """A norm that counts its batches is the same module before and after; trying leaves it alone."""
    model = nonzero(Attention())
    model.norm = Norm(E)
    other = copy.deepcopy(model)
    assert mha_ext.swap_attention(model).replaced
    x = torch.randn(N, S, E)
    for module in (model, other):
        assert module.norm.num_batches_tracked == 0
        module.train()(x)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


def test_hooks_that_would_not_run():
    model = Attention(dropout=0.1)
    model.attn_drop.register_forward_hook(lambda *_: None)
    assert "has hooks on attn_drop, which would not run" in mha_ext.swap_attention(model).kept[""]


def test_each_of_many_is_tried():
    """Modules that look alike are tried in every way once, and all of them in one."""

    class Odd(Attention):
        def forward(self, x):
            return self.attend(x if self.proj.bias[0] > 0 else 2 * x)

    model = nn.Sequential(*(nonzero(Attention()) for _ in range(3)), Odd(), Odd())
    with torch.no_grad():
        model[3].proj.bias.fill_(1)
        model[4].proj.bias.fill_(-1)
    report = mha_ext.swap_attention(model)
    assert list(report.replaced) == ["0", "1", "2", "3"] and "something else" in report.kept["4"]
