"""The functions of `fla.ops` and the modules of `fla.modules` (flash-linear-attention 0.6) under their names.

Layouts are those of the original: tokens before heads, `g` (log decay) before `beta`, states `[N, HV, K, V]` float32 or, with
`state_v_first=True`, `[N, HV, V, K]`. Chunked, recurrent and parallel forms are one implementation here, with gradients in each.

Example:
    >>> import torch
    >>> from flashmix.compat.fla import chunk_gated_delta_rule
    >>> q, k, v = torch.randn(3, 1, 10, 2, 16)
    >>> g, beta = -torch.rand(1, 10, 2), torch.rand(1, 10, 2)
    >>> o, state = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    >>> o.shape, state
    (torch.Size([1, 10, 2, 16]), None)
"""

from flashmix.compat.fla import attention, delta, linear, losses, modules, several_states
from flashmix.compat.fla.common import FLA

FAMILIES = (attention, delta, linear, losses, modules, several_states)
globals().update(FLA.names)
__getattr__ = FLA.lookup
__all__ = sorted(FLA.names)
