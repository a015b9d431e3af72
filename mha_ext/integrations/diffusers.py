"""mha_ext as an attention backend of Hugging Face diffusers.

    from mha_ext.integrations.diffusers import register
    register()
    pipeline.transformer.set_attention_backend("mha_ext")
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from .._checks import text
from ..sdpa import scaled_dot_product_attention

OLDEST = "0.36"
NAME = "mha_ext"


def register() -> str:
    """Registers "mha_ext" with diffusers' attention dispatcher, for ``model.set_attention_backend("mha_ext")``.

    Every model whose attention goes through the dispatcher can then use it, in training too. Its default, "native", is torch's
    scaled_dot_product_attention, which mha_ext.use_for_sdpa serves without any registration.

    Returns:
        The name.

    Raises:
        ImportError: diffusers is absent, or has no dispatcher that this can register with.
    """
    names, registry = _dispatcher()
    if NAME not in names._value2member_map_:
        # set_attention_backend takes what the enumeration knows; it has no door for others.
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_map_[member._name_] = names._value2member_map_[NAME] = member
        names._member_names_.append(member._name_)
    registry.register(names(NAME))(attention_backend)
    return NAME


def _dispatcher() -> Any:
    """AttentionBackendName and the registry of the diffusers that is installed, if it has all that we use."""
    try:
        import diffusers
    except ImportError as error:
        raise ImportError(
            f"diffusers is not installed; accepted: {OLDEST} or later: pip install 'diffusers>={OLDEST}'."
        ) from error
    try:
        from diffusers.models import attention_dispatch as dispatch

        names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
        complete = issubclass(names, str) and hasattr(names, "_value2member_map_")
        complete = complete and {"query", "key", "value", "attn_mask", "is_causal", "scale", "enable_gqa"} <= set(
            inspect.signature(dispatch.dispatch_attention_fn).parameters
        )
    except (ImportError, AttributeError):
        complete = False
    if not complete:
        raise ImportError(
            f"diffusers is {diffusers.__version__}; accepted: {OLDEST} or later, whose attention goes through a dispatcher: "
            "pip install -U diffusers mha_ext, or use mha_ext.use_for_sdpa()."
        )
    return names, registry


def attention_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The function that the dispatcher calls.

    Args:
        query, key, value: [B,Sq,H,D], [B,Sk,Hk,D], [B,Sk,Hk,Dv].
        attn_mask: bool (True = attend) or floating-point (added to the scores), [B,Sk] or broadcastable to [B,H,Sq,Sk].

    Returns:
        [B,Sq,H,Dv].
    """
    if return_lse or _parallel_config is not None:
        asked = "return_lse=True" if return_lse else "context parallelism"
        raise ValueError(
            f"{asked} was asked of the attention backend mha_ext for a query of shape {text(query.shape)}; accepted: whole "
            'sequences without: use set_attention_backend("native").'
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)
