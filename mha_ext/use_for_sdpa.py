"""Every call of torch's attention in a process, on these kernels."""

from __future__ import annotations

import threading
from typing import Any

from torch.nn.attention import register_flash_attention_impl

_lock = threading.Lock()
_uses = 0
# In the keys of torch's caches on disk: what was compiled for these kernels is not what was compiled without them.
_TAG = "+mha_ext"


class SdpaUse:
    """What use_for_sdpa returns: until undo(), or the end of its with block, torch's attention runs on these kernels."""

    def __init__(self) -> None:
        self._active = True

    def undo(self) -> None:
        """Ends this use; a second time does nothing. Torch's own kernels are back once every use has ended."""
        with _lock:
            if self._active:
                self._active = False
                _count(-1)

    def __getstate__(self) -> dict[str, bool]:
        return {"_active": False}  # a copy, with the model that holds it, say, is no use more, and would end one too many

    remove = undo  # what torch.nn.attention.restore_flash_attention_impl calls

    def __enter__(self) -> SdpaUse:
        """Begins it again where it has ended."""
        with _lock:
            if not self._active:
                self._active = True
                _count(+1)
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


def use_for_sdpa() -> SdpaUse:
    """Lets every call of torch's attention on CPU tensors, and on CUDA tensors where the build has CUDA, run on these kernels.

    That is torch.nn.functional.scaled_dot_product_attention, however it was imported, and what torch computes in place of it:
    torch.nn.MultiheadAttention and TransformerEncoderLayer, their fast path for inference too, torch.nn.attention.varlen
    (which torch itself has on CUDA only), exported programs and compiled ones. Results have torch's meaning: see
    scaled_dot_product_attention.

    Torch's own kernels are used as before for what these do not take (other types, nested tensors, subclasses of Tensor
    that hide their data, forward-mode differentiation), for calls so small that torch's are faster, and where
    torch.nn.attention.sdpa_kernel chose backends without FLASH_ATTENTION. MHA_EXT_LOG=1 says so, once for each reason.

    It holds for all threads. A compiled program keeps what was chosen when it was compiled, except that one that called
    torch's fused CPU kernel by then follows this choice; torch.compiler.reset() has all of them chosen anew.

    torch.nn.attention.activate_flash_attention_impl("mha_ext") does the same, restore_flash_attention_impl() ends it.

    Returns:
        An object with undo(), which is a context manager too. Uses may be nested and undone in any order.
    """
    with _lock:
        _count(+1)
    return SdpaUse()


def _count(change: int) -> None:
    from torch.compiler import config

    from . import _aten

    global _uses
    if _uses == 0:
        _aten.register()
        config.cache_key_tag += _TAG
    _uses += change
    _aten.active = _uses > 0
    if _uses == 0:
        config.cache_key_tag = config.cache_key_tag.replace(_TAG, "", 1)


# Makes the name known to torch.nn.attention.activate_flash_attention_impl; nothing else changes.
register_flash_attention_impl("mha_ext", register_fn=use_for_sdpa)
