"""The masks that `flashmix.hf.attention` takes, made of what transformers' mask functions say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashmix.hf.rows import Kept

# Functions around others. Positions that are told anew (transformers 5.23) are those of tokens in their own packed sequence, where
# they go up by one: distances are as before.
AROUND = {"and_masks": "mask_functions", "remap_positions_for_packed_sequence": "mask_function"}


@dataclass(eq=False, slots=True)
class Said:
    """What a mask function says; kept on the mask that was made of it, since not every model tells its attention as much.

    Attributes:
        causal: whether a query sees no later keys.
        window: how many keys to the left and to the right of itself a query sees, each an int or None, or None.
        sequences: `[B, T]`, the number of the packed sequence of each token, or None.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    sequences: Tensor | None = None

    @classmethod
    def by(cls, mask_function: Any) -> Said:
        """Reads transformers' mask function.

        Raises ValueError: it is more than causal, windowed and packed (chunks, blocks, a function of the user).
        """
        said = cls(causal=mask_function is None)
        for part, made_of in _parts(mask_function):
            if part == "causal_mask_function":
                said.causal = True
            elif part == "sliding_window_overlay":
                said.narrow(made_of["sliding_window"] - 1, None)
            elif part == "sliding_window_bidirectional_overlay":
                said.narrow(made_of["sliding_window"], made_of["sliding_window"])
            elif part == "packed_sequence_mask_function":
                said.sequences = made_of["packed_sequence_mask"]
            elif part != "bidirectional_mask_function":
                raise ValueError(f"the mask must be causal, windowed or full for flashmix's attention, got {part}")
        if said.causal and said.window is not None:
            said.window = (said.window[0], 0)
        return said

    def narrow(self, left: int, right: int | None) -> None:
        """Leaves of the window the part that is in another one too."""
        if self.window is not None:
            known_left, known_right = self.window
            left = left if known_left is None else min(left, known_left)
            right = min((n for n in (right, known_right) if n is not None), default=None)
        self.window = (left, right)


def window_of_layer(sliding_window: int | None, causal: bool) -> tuple[int | None, int | None] | None:
    """The window by what an attention layer says: it counts the query itself, and has two equal sides where it is not causal."""
    if sliding_window is None:
        return None
    return sliding_window - 1, 0 if causal else sliding_window - 1


def said_of(mask: Tensor | None) -> Said | None:
    """What the function of a mask said; None where the mask is None or not made here."""
    return getattr(mask, "said", None)


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **told: Any,
) -> Tensor | None:
    """The mask that `attention` takes: None, or `[B, 1, 1, S]` with a note of what its function said (`said_of`).

    It has four axes because models index masks so, and since transformers takes such a mask for one that is ready. Keys past S
    are the unused ones of a static cache. None where all keys are used and seen, causally or not as the layer says.

    Raises:
        ValueError: the mask is more than causal, windowed, packed and padded (chunks, blocks, a function of the user).
    """
    said = Said.by(mask_function)
    mask = None if attention_mask is None else attention_mask[:, None, None, -kv_length:]
    used = kv_length  # all keys of a cross attention, whose queries are no later tokens
    if mask is not None:
        used = mask.shape[3]
    elif said.causal:
        used = min(int(q_offset) + q_length - int(kv_offset), kv_length)
    if mask is None or (used == kv_length and bool(mask.all())):
        if used == kv_length and said.window is None and said.sequences is None:
            return None
        mask = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, 1, 1, used)
    mask.said = said  # type: ignore[attr-defined]
    return mask


def _parts(function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions that transformers made a mask function of: the name of each one's maker, and what that was given."""
    if function is None:
        return
    maker = function.__qualname__.split(".", 1)[0]
    made_of = {}
    if function.__closure__ is not None:
        made_of = {
            name: cell.cell_contents
            for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
        }
    if maker not in AROUND:
        yield maker, made_of
        return
    inner = made_of[AROUND[maker]]
    for part in inner if isinstance(inner, tuple) else (inner,):
        yield from _parts(part)


class RealKeys:
    """Where the real keys of each row of a mask `[B, S]` start and end, `[B]` each.

    Attributes:
        gaps: whether some row has padding between real keys, which no range says.
        ends: whether some row ends with padding.
    """

    def __init__(self, mask: Tensor) -> None:
        width, places = mask.shape[1], torch.arange(mask.shape[1], device=mask.device)
        self.starts = torch.where(mask, places, width).amin(1)
        self.lengths = torch.where(mask, places + 1, 0).amax(1)
        gaps = (mask.sum(1) < self.lengths - self.starts).any()
        self.gaps, self.ends = torch.stack([gaps, (self.lengths < width).any()]).tolist()


RANGES = Kept(4)  # one for each kind of layer


def ranges_of(mask: Tensor) -> RealKeys | None:
    """None where no token is padding; a mask that is one expanded True (a static cache's length, notes) is not read."""
    if not any(mask.stride()):
        return None
    return RANGES.of((mask,), None, _ranges)


def _ranges(masks: tuple[Tensor, ...], _: None) -> RealKeys | None:
    return None if bool(masks[0].all()) else RealKeys(masks[0].flatten(1).bool())
