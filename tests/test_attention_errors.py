"""Wrong arguments of softmax_attention: the type and the text of the error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashmix import Packing
from flashmix.ops.attention import softmax_attention

Q, K, V = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 6)
ONE, ONE_K = Q[:1], K[:1]

ERRORS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("not a tensor", {"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    ("too few axes", {"q": Q[0]}, ValueError, "q must have shape [B, Tq, HQ, K], got [5, 4, 8]"),
    ("other batch", {"k": K[:1]}, ValueError, "k must have shape [2, 7, 2, 8], got [1, 7, 2, 8]"),
    ("other dim of k", {"k": K[..., :4]}, ValueError, "k must have shape [2, 7, 2, 8], got [2, 7, 2, 4]"),
    ("other length of v", {"v": V[:, :3]}, ValueError, "v must have shape [2, 7, 2, 6], got [2, 3, 2, 6]"),
    ("other heads of v", {"v": V[:, :, :1]}, ValueError, "v must have shape [2, 7, 2, 6], got [2, 7, 1, 6]"),
    ("heads that do not divide", {"q": Q[:, :, :3]}, ValueError,
     "the number of heads of q must be a positive multiple of that of k = 2, got 3"),
    ("head dim past 512", {"q": torch.zeros(2, 5, 4, 513), "k": torch.zeros(2, 7, 2, 513)}, ValueError,
     "the head dim of q must be between 1 and 512, got 513"),
    ("head dim past 256 with a gradient", {"q": torch.zeros(2, 5, 4, 257, requires_grad=True), "k": torch.zeros(2, 7, 2, 257)},
     ValueError, "the head dim of q must be between 1 and 256, got 257"),
    ("head dim 0", {"v": V[..., :0]}, ValueError, "the head dim of v must be between 1 and 512, got 0"),
    ("integers", {"q": Q.long()}, TypeError, "q must have dtype float16 or bfloat16 or float32 or float64, got int64"),
    ("mixed dtypes", {"k": K.bfloat16()}, TypeError, "k must have dtype float32 like q, got bfloat16"),
    ("other device", {"v": V.to("meta")}, ValueError, "v must be on cpu like q, got meta"),
    ("negative window", {"window": (-1, 0)}, ValueError,
     "window left must be a non-negative int or None (unbounded), got -1"),
    ("negative right window", {"window": (1, -1)}, ValueError,
     "window right must be a non-negative int or None (unbounded), got -1"),
    ("one number as window", {"window": 4}, ValueError, "window must be (left, right), got 4"),
    ("softcap 0", {"softcap": 0.0}, ValueError, "softcap must be positive, got 0.0"),
    ("dropout 1", {"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and below 1, got 1.0"),
    ("sink per key head", {"sink": torch.zeros(2)}, ValueError, "sink must have shape [4], got [2]"),
    ("integer sink", {"sink": torch.zeros(4).long()}, TypeError, "sink must have a floating dtype, got int64"),
    ("slopes", {"alibi_slopes": torch.zeros(1, 4)}, ValueError, "alibi_slopes must have shape [4], got [1, 4]"),
    ("decay per query", {"log_decay": torch.zeros(2, 5, 4), "causal": True}, ValueError,
     "log_decay must have shape [2, 7, 4], got [2, 5, 4]"),
    ("decay both ways", {"log_decay": torch.zeros(2, 7, 4)}, ValueError,
     "log_decay must come with causal=True (the decay from a key in the future is not defined), got causal=False"),
    ("packed batch", {"cu_seqlens": torch.tensor([0, 5])}, ValueError,
     "cu_seqlens must come with inputs of batch size 1 (sequences end to end), got 2"),
    ("packed keys alone", {"cu_seqlens_k": torch.tensor([0, 7])}, ValueError,
     "cu_seqlens_k must come with cu_seqlens, the boundaries of the queries, got None"),
    ("unsorted", {"q": ONE, "k": ONE_K, "v": ONE_K, "cu_seqlens": torch.tensor([0, 4, 2, 5])}, ValueError,
     "cu_seqlens must not decrease, got 4 followed by 2"),
    ("too short for the keys", {"q": ONE, "k": ONE_K, "v": ONE_K, "cu_seqlens": torch.tensor([0, 5])}, ValueError,
     "cu_seqlens must end at the token count 7, got 5"),
    ("other count", {"q": ONE, "k": ONE_K, "v": ONE_K, "cu_seqlens": torch.tensor([0, 5]),
                     "cu_seqlens_k": Packing.from_lengths([3, 4])}, ValueError,
     "cu_seqlens_k must have shape [2], got [3]"),
    ("a tuple of keys", {"q": ONE, "k": ONE_K, "v": ONE_K, "cu_seqlens": torch.tensor([0, 5]), "cu_seqlens_k": (0, 7)}, TypeError,
     "cu_seqlens_k must be a torch.Tensor, got tuple"),
    ("float boundaries", {"q": ONE, "k": ONE_K, "v": ONE_K, "cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError,
     "cu_seqlens must have dtype int32 or int64, got float32"),
    ("starts of other rows", {"key_starts": torch.zeros(3, dtype=torch.int64)}, ValueError, "key_starts must have shape [2], got [3]"),
    ("float lengths", {"key_lengths": torch.zeros(2)}, TypeError, "key_lengths must have dtype int32 or int64, got float32"),
    ("lengths of packed keys", {"q": ONE, "k": ONE_K, "v": ONE_K, "cu_seqlens": torch.tensor([0, 5]), "cu_seqlens_k": torch.tensor([0, 7]),
                                "key_lengths": torch.tensor([3])}, ValueError,
     "key_lengths must not come with cu_seqlens, which says where keys begin and end"),
    ("no GPU", {"impl": "triton"}, ValueError,
     "impl='triton' cannot run this: it needs tensors on a CUDA device, got cpu"),
    ("unknown impl", {"impl": "flash"}, ValueError, "impl must be one of 'auto', 'gluon', 'triton', 'sdpa', 'portable', got 'flash'"),
    ("impl that cannot", {"impl": "sdpa", "v": K, "window": (2, 0)}, ValueError,
     "impl='sdpa' cannot run this: torch's scaled_dot_product_attention does not take a window of several queries"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, error, text", [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_error(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        softmax_attention(**({"q": Q, "k": K, "v": V} | arguments))
    assert str(raised.value) == text


def test_a_misspelt_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        softmax_attention(Q, K, V, casual=True)
