"""The ops as the package calls them: with fake kernels, autograd formulas, vmap rules and what torch counts for them.

This package and, for torch's own ops, _aten.py are the only users of torch.library.
"""

from . import fakes as _fakes  # noqa: F401
from . import flops as _flops  # noqa: F401
from .arguments import NOT_PACKED as NOT_PACKED
from .arguments import Call as Call
from .arguments import lengths_of as lengths_of
from .arguments import mask_of as mask_of
from .arguments import packed_slices as packed_slices
from .attention import attention_bwd as attention_bwd
from .attention import attention_fwd as attention_fwd
from .autograd import forward_mode_refusal as forward_mode_refusal
from .autograd import transforms_active as transforms_active
from .calls import attention_gradients as attention_gradients
from .calls import attention_kernels as attention_kernels
from .calls import attention_out as attention_out
from .calls import attention_results as attention_results
from .calls import cached_results as cached_results
from .calls import packed_results as packed_results
from .heads import merge_heads as merge_heads
from .heads import split_heads as split_heads
from .library import attention_plan as attention_plan
from .library import available_isas as available_isas
from .library import build_info as build_info
from .library import built_isas as built_isas
from .library import cpu_isa as cpu_isa
from .library import without_cuda as without_cuda
from .mixed import attention_mixed_fwd as attention_mixed_fwd
from .rng import draw_rng_state as draw_rng_state
from .rng import dropout_mask as dropout_mask
from .rng import dropout_part as dropout_part
from .rng import part_of_state as part_of_state
from .softmax import masked_softmax_fwd as masked_softmax_fwd
