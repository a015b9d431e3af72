"""Which ops a program runs."""

from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    def ours(self) -> int:
        return self.names.count("mha_ext::attention_fwd")

    def torchs(self) -> list[str]:
        return [
            name for name in self.names if "transformer_encoder" in name or "multi_head" in name or "scaled_dot" in name
        ]
