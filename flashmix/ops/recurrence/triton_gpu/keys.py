"""Loading the keys of a chunk: rows and columns of the rule, as they are or in float32 with sign and beta."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.tiles import append, load_numbers, load_rows


@triton.jit
def load_row_keys(rows, at, d, S: tl.constexpr, SHIFT: tl.constexpr = 0):
    """Channels `d` of the row keys as they are, [C, d] each: q and a, of a TIED rule k."""
    COUNT: tl.constexpr = len(rows)
    found = ()
    for r in tl.static_range(COUNT):
        found = append(found, load_rows(rows[r], at, S.ROW_HEADS[r], S.K, d, S, SHIFT))  # [C, d]
    return found


@triton.jit
def load_column_keys(columns, at, d, S: tl.constexpr, SHIFT: tl.constexpr = 0):
    """Channels `d` of the column keys as they are, [C, d] each: k and b, of a TIED rule k."""
    COUNT: tl.constexpr = len(columns)
    found = ()
    for c in tl.static_range(COUNT):
        found = append(found, load_rows(columns[c], at, S.COLUMN_HEADS[c], S.K, d, S, SHIFT))  # [C, d]
    return found


@triton.jit
def load_keys(x, at, d, S: tl.constexpr):
    """Rows and columns as they are; k of a TIED rule is loaded once."""
    X = load_row_keys(x.rows, at, d, S)  # [C, d] each
    if S.TIED:
        return X, (X[1],)
    else:
        return X, load_column_keys(x.columns, at, d, S)  # [C, d] each


@triton.jit
def float_rows(X, scale, S: tl.constexpr):
    """The rows in float32: scale q, and a or -k."""
    COUNT: tl.constexpr = len(X)
    found = (X[0].to(tl.float32) * scale,)
    for r in tl.static_range(1, COUNT):
        if S.TIED:
            found = append(found, -X[r].to(tl.float32))
        else:
            found = append(found, X[r].to(tl.float32))
    return found


@triton.jit
def float_columns(Y, beta, at, S: tl.constexpr, SHIFT: tl.constexpr = 0):
    """The columns in float32: k and b, or beta k."""
    COUNT: tl.constexpr = len(Y)
    found = ()
    for c in tl.static_range(COUNT):
        if S.TIED:
            found = append(found, Y[c].to(tl.float32) * load_numbers(beta, at, S, SHIFT)[:, None])  # [C, d]
        else:
            found = append(found, Y[c].to(tl.float32))
    return found


@triton.jit
def load_float_keys(x, scale, at, d, S: tl.constexpr):
    """Channels `d` of rows X and columns Y in float32, [C, d] each."""
    X, Y = load_keys(x, at, d, S)  # [C, d] each
    return float_rows(X, scale, S), float_columns(Y, x.beta, at, S)


@triton.jit
def load_input_keys(x, beta, at, d, S: tl.constexpr):
    """Channels `d` of rows X and columns Y in the dtype of the inputs, without scale, and k of a TIED rule, [C, d] each."""
    X, Y = load_keys(x, at, d, S)  # [C, d] each
    k = Y[0]
    if S.TIED:
        X = (X[0], -k)
        Y = ((k * beta[:, None]).to(k.dtype),)
    return X, Y, k
