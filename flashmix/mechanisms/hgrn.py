"""HGRN: a scan whose forget gate leaves room for what is written."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import Result, StateOptions, check_elementwise, scan_options
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.public import public
from flashmix.ops.scan.op import scan


@public
@scan_options
def hgrn(i: Tensor, log_forget: Tensor, **options: Unpack[StateOptions]) -> Result:
    """HGRN: a recurrent unit whose forget gate leaves room for what is written.

        h_t = f_t h_{t-1} + (1 - f_t) i_t,  f_t = e^{log_forget_t}

    Args:
        i: inputs `[B, T, D]` or `[B, T, H, D]`, float32, bfloat16, float16 or float64.
        log_forget: `log f`, at most 0, of the shape of `i`, any floating dtype.
        initial_state: `h` `[N, D]` or `[N, H, D]`, float32 (float64 for float64 inputs); default zeros.

    Source: Qin et al. 2023 (arXiv 2311.04823), section 3.2, without its phase.

    Example:
        >>> import torch
        >>> h, state = hgrn(torch.randn(1, 10, 32), -torch.rand(1, 10, 32), return_state=True)
        >>> h.shape, state.shape
        (torch.Size([1, 10, 32]), torch.Size([1, 32]))
    """
    options["cu_seqlens"] = check_elementwise(options, i=i, log_forget=log_forget)
    return scan(i, log_forget, coupling="complement", **options)


register(
    Mechanism(title="HGRN", paper="2311.04823", function=hgrn, call="i:BTHK log_forget:BTHK", wide=("log_forget",))
)
