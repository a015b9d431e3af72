"""The ops as the package calls them: with fake kernels, autograd formulas, vmap rules and what torch counts for them.

This package and, for torch's own ops, _aten.py are the only users of torch.library.
"""

from . import flops as flops
from .attention import attention_bwd as attention_bwd
from .attention import attention_fwd as attention_fwd
from .attention import attention_out as attention_out
from .attention import forward_mode_refusal as forward_mode_refusal
from .attention import masked_softmax_bwd as masked_softmax_bwd
from .attention import masked_softmax_fwd as masked_softmax_fwd
from .attention import merge_heads as merge_heads
from .attention import split_heads as split_heads
from .attention import transforms_active as transforms_active
from .library import attention_cached as attention_cached
from .library import attention_kernels as attention_kernels
from .library import attention_plan as attention_plan
from .library import available_isas as available_isas
from .library import build_info as build_info
from .library import built_isas as built_isas
from .library import cpu_isa as cpu_isa
from .library import draw_rng_state as draw_rng_state
from .library import dropout_mask as dropout_mask
from .library import dropout_part as dropout_part
from .library import packed_slices as packed_slices
from .library import part_of_state as part_of_state
from .library import without_cuda as without_cuda
from .mixed import attention_mixed_bwd as attention_mixed_bwd
from .mixed import attention_mixed_fwd as attention_mixed_fwd
from .packed import attention_packed_bwd as attention_packed_bwd
from .packed import attention_packed_fwd as attention_packed_fwd
