"""mha_ext as an attention implementation of Hugging Face transformers.

    from mha_ext.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mha_ext")   # or model.set_attn_implementation

transformers makes the mask once per forward pass, by the function that is registered with its AttentionMaskInterface, and
hands it through the layers to the attention function. In between it must be a tensor of four dimensions. Ours is one of:

    None                           as for "sdpa": causal if the module is and there is more than one query, else everything
    int64 [B,1,Sq,2]               (begin, end): query i of sequence b sees the keys begin <= j < end. Causal, sliding-window,
                                   chunked and packed attention and padding at either end all have this form, in O(S) memory
    int64 [B,1,max(Sq,Sk),3]       while a graph is traced and values cannot be looked at: as above, and in the third column
                                   whether key j is visible at all, since the padding might have holes
    bool [B,1,Sq,Sk]               what is none of these (True = attend)

A model that computes with the mask itself, where it is not of the last form, fails on the shapes; a mask that its model
says will be computed with is of the last form.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import masks
from .._checks import given
from ..functional import attention
from ._in_place import attend, attend_to_requests, held_by, plain

OLDEST = "5.6"
USED = (  # of transformers.masking_utils
    "bidirectional_mask_function", "causal_mask_function", "is_tracing", "prepare_padding_mask", "sliding_window_causal_mask_function",
)  # fmt: skip
ELEMENTS = 2**22  # of a mask that are looked at at a time: bounds the memory of finding intervals
NAMES: set[str] = set()  # that our attention is registered under
SMALL = 3  # Up to so many keys masks are dense, so that the last dimension tells the forms apart


def register(name: str = "mha_ext") -> str:
    """Registers the attention of mha_ext with transformers, under a name for ``attn_implementation=``.

    Every model whose attention goes through transformers' AttentionInterface can then use it, in training and generation,
    with grouped heads, soft-capped scores, position biases, padding, sliding windows, packed sequences, static caches and
    continuous batching (generate_batch()).
    Others (BLOOM, Falcon, MPT, ...) keep their own attention, with a warning that names the class.

    Returns:
        The name.

    Raises:
        ImportError: transformers is absent or too old.
        TypeError: name is no str.
    """
    interface, mask_interface = interfaces()
    if not isinstance(name, str):
        raise TypeError(f"name is {given(name)}; accepted: a str, which attn_implementation= then takes.")
    interface.register(name, attention_forward)
    mask_interface.register(name, attention_mask)
    NAMES.add(name)
    _own_attention_stays(name)
    _serve_requests()
    return name


def _own_attention_stays(name: str) -> None:
    """Lets models that cannot use the interface, and would look up the name in tables of their own or compute with our masks,
    take what they take by default, with a warning. transformers itself warns in set_attn_implementation only."""
    from transformers import PreTrainedModel

    model: Any = PreTrainedModel
    check = getattr(model, "_check_and_adjust_attn_implementation", None)
    if check is None or name in getattr(check, "names", ()):
        return

    @functools.wraps(check)
    def check_ours(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation == name and not _asks_the_interface(type(self)):
            warnings.warn(
                f"{type(self).__name__} does not go through transformers' AttentionInterface, so {name!r} has no effect on it: "
                "it keeps its own attention.",
                stacklevel=2,
            )
            attn_implementation = None
        return check(self, attn_implementation, *args, **kwargs)

    check_ours.names = {name, *getattr(check, "names", ())}  # type: ignore[attr-defined]
    model._check_and_adjust_attn_implementation = check_ours


def _serve_requests() -> None:
    """Lets continuous batching (generate_batch()) take our names, and hand over pages where each request has one query, which
    transformers does for FlashAttention on GPUs alone. A transformers that does this in another way is left as it is: it
    refuses our names."""
    try:
        from transformers.generation.continuous_batching import PagedAttentionCache, continuous_api, initialization

        manager: Any = continuous_api.ContinuousBatchingManager
        module: Any = initialization
        switch, fast_path = manager.switch_to_cb_friendly_attn, module.ensure_decode_fast_path_is_available
        allocators, groups = module.ATTN_TYPE_TO_ALLOCATOR, module.group_layers_by_attn_type
        understood = "kwargs" in inspect.signature(PagedAttentionCache.update).parameters
    except (ImportError, AttributeError):
        return
    if not understood or hasattr(switch, "mha_ext"):
        return

    @functools.wraps(switch)
    def switch_unless_ours(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation not in NAMES:
            switch(self, model, *args, **kwargs)

    @functools.wraps(fast_path)
    def fast_path_for_ours(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
        pages = all(allocators[kind].supports_block_table for kind in groups(config))
        if not pages or config._attn_implementation not in NAMES:
            fast_path(config, cb_config, *args, **kwargs)

    switch_unless_ours.mha_ext = True  # type: ignore[attr-defined]
    manager.switch_to_cb_friendly_attn = switch_unless_ours
    module.ensure_decode_fast_path_is_available = fast_path_for_ours


def _asks_the_interface(kind: type) -> bool:
    """Whether the file of a model's class, or the nearest of its bases that defines attention, mentions the interface. Files
    that cannot be read are trusted to."""
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__)
        if module is None or base.__module__ in ("transformers.modeling_utils", "torch.nn.modules.module", "builtins"):
            continue
        try:
            source = inspect.getsource(module)
        except (OSError, TypeError):
            continue
        if re.search(r"^class \w*Attention\w*\((torch\.)?nn\.Module\):", source, re.MULTILINE):
            return "ALL_ATTENTION_FUNCTIONS" in source or "AttentionInterface" in source
    return True


def interfaces() -> Any:
    """AttentionInterface and AttentionMaskInterface of the transformers that is installed, if it has all that we use."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"transformers is not installed; accepted: {OLDEST} or later: pip install 'transformers>={OLDEST}'."
        ) from error
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

        arguments = inspect.signature(masking_utils.sdpa_mask).parameters
        complete = {"q_length", "q_offset", "kv_length", "kv_offset", "use_vmap", "device"} <= set(arguments)
        complete = complete and all(hasattr(masking_utils, name) for name in USED)
    except (ImportError, AttributeError):
        complete = False
    if not complete:
        raise ImportError(
            f"transformers is {transformers.__version__}; accepted: {OLDEST} or later, where masks are made from lengths "
            "and offsets: pip install -U transformers mha_ext."
        )
    return AttentionInterface, AttentionMaskInterface


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that AttentionInterface takes.

    Args:
        query, key, value: [B,H,Sq,D], [B,Hk,Sk,D], [B,Hk,Sk,Dv].
        attention_mask: one of the forms above, or a floating-point tensor that is added to the scores.
        position_bias: added to the scores, broadcastable to [B,H,Sq,Sk].
        s_aux: attention sinks [H].
        output_attentions: also return the weights [B,H,Sq,Sk].

    Returns:
        out [B,Sq,H,Dv], and the weights or None.
    """
    for name in ("indices", "block_indices", "sinks"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks its attention for sparse keys or sinks per token ({name}=); accepted: "
                'models without: use attn_implementation="eager" for this one.'
            )
    softcap = 0.0 if softcap is None else softcap
    if "write_index" in kwargs:  # continuous batching
        options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
        return attend_to_requests(query, key, value, kwargs, kwargs.get("sliding_window"), **options), None
    held = held_by(key)
    if held is not None and (output_attentions or dropout > 0.0):
        key, value = plain(held, key.shape[2], query.dtype)
        held = None
    if query.shape[0] != key.shape[0]:  # learned queries with batch 1
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask, bias = _mask_and_bias(attention_mask, query, key.shape[2], is_causal)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if bias is not None and bias.dtype != query.dtype and bias.dtype != torch.float32:
        bias = bias.to(query.dtype)
    if held is not None:
        options = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
        return attend(query, held, key.shape[2], mask, bias, **options).transpose(1, 2), None
    found: Any = attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scaling,
        dropout_p=dropout,
        softcap=softcap,
        sinks=s_aux,
        return_weights=bool(output_attentions),
    )
    out, weights = found if output_attentions else (found, None)
    return out.transpose(1, 2), weights


def _mask_and_bias(mask: Tensor | None, query: Tensor, Sk: int, is_causal: bool) -> Any:
    if mask is None:
        # Top-left also with more keys than queries: those of a static cache that are not written yet.
        return (masks.Causal("top_left") if is_causal and query.shape[2] > 1 else None), None
    if mask.dtype == torch.int64 and mask.dim() == 4 and mask.shape[3] in (2, 3) and Sk > SMALL:
        rows = mask[:, 0, : query.shape[2]]
        seen: masks.Mask = masks.Intervals(rows[..., 0], rows[..., 1])
        if mask.shape[3] == 3:
            seen = seen & masks.Dense(mask[:, :, None, :Sk, 2] != 0)
        return seen, None
    if mask.dtype == torch.bool:
        return masks.Dense(mask), None
    if mask.dtype.is_floating_point:
        return None, mask
    raise TypeError(
        f"attention_mask is {given(mask)}; accepted: a padding mask [B,Sk], "
        "or four dimensions that broadcast to [B,H,Sq,Sk], bool (True = attend) or floating-point (added to the scores)."
    )


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The function that AttentionMaskInterface takes: the mask, in the cheapest of the forms above that says it exactly.

    Args:
        batch_size, q_length, kv_length: B, Sq, Sk.
        q_offset, kv_offset: the positions of the first query and of the first key.
        mask_function: f(batch, head, query position, key position), True = attend.
        attention_mask: padding [B, positions], True = attend. Positions beyond its end are hidden.
        allow_is_causal_skip, allow_is_bidirectional_skip: None may stand for a causal mask, for no mask.
        use_vmap: mask_function does not broadcast.
    """
    from transformers import masking_utils

    utils: Any = masking_utils

    if mask_function is None:
        mask_function = utils.causal_mask_function
    may_skip = allow_is_causal_skip or allow_is_bidirectional_skip
    tracing = utils.is_tracing(attention_mask)
    plain_function = utils.causal_mask_function if allow_is_causal_skip else utils.bidirectional_mask_function
    if (
        tracing and may_skip and mask_function is plain_function and attention_mask is None
        and isinstance(q_offset, int) and q_offset == kv_offset
    ):  # fmt: skip
        return None

    def dense(start: int, rows: int, padding: Tensor | None) -> Tensor:
        return utils.sdpa_mask(
            batch_size, rows, kv_length, q_offset + start, kv_offset, mask_function, padding,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip

    if kv_length <= SMALL or (tracing and use_vmap) or (
        not may_skip and not use_vmap and _is_computed_with(utils, mask_function, q_length, q_offset, attention_mask)
    ):  # fmt: skip
        return dense(0, q_length, attention_mask)

    first = q_offset - kv_offset  # where the first query stands among the keys
    if mask_function is utils.causal_mask_function:
        ends = torch.arange(q_length, device=device) + (first + 1)
        intervals, exact = torch.stack([torch.zeros_like(ends), ends], -1)[None], None
    elif mask_function is utils.bidirectional_mask_function:
        intervals, exact = torch.tensor([0, kv_length], device=device).expand(1, q_length, 2), None
    else:
        intervals, exact = _intervals_of_rows(dense, q_length, kv_length, tracing)
    padding: Any = None
    no_holes: Tensor | None = None
    if attention_mask is not None:
        padding = utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        padding = padding[:, kv_offset : kv_offset + kv_length]
        unpadded, no_holes = _intervals(padding)
        begin = torch.maximum(intervals[..., 0], unpadded[:, None, 0])
        intervals = torch.stack([begin, torch.minimum(intervals[..., 1], unpadded[:, None, 1])], -1)
    intervals = intervals.expand(batch_size, -1, -1)
    if tracing:
        return _traced(intervals, exact, padding)
    checks = [check for check in (exact, no_holes) if check is not None]
    if may_skip:
        checks.append(_is_plain(intervals, kv_length, allow_is_causal_skip))
    checks = torch.stack(checks).tolist() if checks else []  # waits for the device, once
    plain = checks.pop() if may_skip else False
    if not all(checks):
        return dense(0, q_length, attention_mask)
    return None if plain else intervals[:, None]


def _is_computed_with(
    utils: Any, mask_function: Any, q_length: int, q_offset: int | Tensor, attention_mask: Tensor | None
) -> bool:
    """Whether the model denied that a mask be left out because it computes with it, not for one of the usual reasons: one
    query and a static cache (whose offset is a tensor), packed sequences (no padding), blocks that see each other."""
    if q_length == 1 and isinstance(q_offset, Tensor):
        return False
    if mask_function is utils.causal_mask_function or mask_function is utils.bidirectional_mask_function:
        return True
    windowed = getattr(mask_function, "__code__", None) is utils.sliding_window_causal_mask_function(1).__code__
    return windowed and attention_mask is not None


def _intervals(visible: Tensor) -> tuple[Tensor, Tensor]:
    """bool [..., Sk] -> (begin, end) int64 [..., 2] of what is visible, and whether nothing in between is hidden."""
    Sk = visible.shape[-1]
    keys = torch.arange(Sk, device=visible.device)
    begin = torch.where(visible, keys, Sk).amin(-1)
    end = torch.where(visible, keys + 1, 0).amax(-1)
    contiguous = (visible.sum(-1) == (end - begin).clamp(min=0)).all()
    return torch.stack([begin, end], -1), contiguous


def _intervals_of_rows(dense: Any, q_length: int, kv_length: int, tracing: bool) -> tuple[Tensor, Tensor]:
    """(intervals [B or 1,Sq,2], whether they say all) of any mask, in memory for some rows of it only. While tracing the
    rows are not cut: compilers fuse the mask into the reductions."""
    rows = q_length if tracing else max(1, ELEMENTS // kv_length)
    parts = []
    for start in range(0, q_length, rows):
        visible = dense(start, min(rows, q_length - start), None)[:, 0]
        parts.append(_intervals(visible[:1] if visible.stride(0) == 0 else visible))
    intervals, exact = zip(*parts)
    return torch.cat(intervals, 1), torch.stack(exact).all()


def _traced(intervals: Tensor, exact: Tensor | None, padding: Tensor | None) -> Tensor:
    if exact is not None:
        torch._assert_async(
            exact,
            "a query of this model sees keys that are not one interval; mha_ext accepts that in compiled code as a mask of "
            "four dimensions only: pass one, or do not compile the making of the mask",
        )
    if padding is None:
        return intervals[:, None]
    rows = max(intervals.shape[1], padding.shape[1])
    columns = [*intervals.unbind(-1), padding.to(torch.int64)]
    return torch.stack([F.pad(x, (0, rows - x.shape[1])) for x in columns], -1)[:, None]


def _is_plain(intervals: Tensor, kv_length: int, causal: bool) -> Tensor:
    """Whether attention_forward takes None for these intervals."""
    end: Any = kv_length
    if causal and intervals.shape[1] > 1:
        end = torch.arange(1, intervals.shape[1] + 1, device=intervals.device).clamp(max=kv_length)
    return ((intervals[..., 0] <= 0) & (intervals[..., 1].clamp(max=kv_length) == end)).all()
