"""The solution of all tokens of a chunk, and what the memory holds under it; backward the adjoint solution.

With the states `R`, `S` before the chunk and its decays `G`,

    (R_i + diag(ridge)) p_i = e^{G_i} R p_i + sum_{j <= i} beta_j e^{G_i - G_j} (p_i . k_j) k_j + ridge p_i
    o_i = scale (e^{G_i} S^T x_i + sum_{j <= i} beta_j e^{G_i - G_j} (x_i . k_j) v_j)
    dx_i = scale (e^{G_i} S do_i + sum_{j <= i} beta_j e^{G_i - G_j} (do_i . v_j) k_j)

so that a step of conjugate gradients needs no other chunk. A float32 operand of a product is the sum of two halves of 8 digits, for a
system of condition 1000 would lose what one of them rounds. Two warpgroups have half of the channels each; all operands lie in shared
memory. A step writes the halves of `p`, and beside `p R` those of the weighted pairs `p k^T`, which are then multiplied by k.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    ex2,
    fence_async_shared,
    gl,
    gluon,
    plus,
    products_done,
    shared_rows,
    thread_barrier,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.mesa.triton_gpu.structs import MesaFactors, MesaPlace, MesaTiles

LOG2E = gl.constexpr(1.4426950408889634)
TOKENS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
PAIRS = gl.constexpr(shared_rows(64))
C = gl.constexpr(64)  # tokens of a chunk


@gluon.constexpr_function
def by_rows(columns):
    """The layout of float32 rows as they lie in memory, 16 bytes a thread."""
    return gl.BlockedLayout([1, 4], [32 * 4 // columns, columns // 4], [8, 1], [1, 0])


@gluon.jit
def chunk_place(where, n, S: gl.constexpr):
    """The place of the program's chunk."""
    chunk = gl.program_id(0) // S.HV
    if S.PACKED:
        first = gl.load(where.spans + chunk.to(gl.int64) * 2)
        count = gl.load(where.spans + chunk.to(gl.int64) * 2 + 1).to(gl.int32)
    else:
        start = (chunk % n.chunks) * C
        first = (chunk // n.chunks).to(gl.int64) * n.tokens + start
        count = gl.minimum(n.tokens - start, C)
    return MesaPlace(chunk, gl.program_id(0) % S.HV, first, count)


@gluon.jit
def rows_of(at, HEADS: gl.constexpr, D: gl.constexpr, d0, S: gl.constexpr):
    """Offsets of channels `d0 + [BK]` of the chunk's tokens in `[tokens, HEADS, D]`, and which there are."""
    SUMS: gl.constexpr = shared_rows(S.BK)
    t = gl.arange(0, C, gl.SliceLayout(1, SUMS))
    d = d0 + gl.arange(0, S.BK, gl.SliceLayout(0, SUMS))
    offset = (at.first + t)[:, None] * (HEADS * D) + (at.head // (S.HV // HEADS)) * D + d[None, :]
    return offset, (t < at.count)[:, None] & (d < D)[None, :]


@gluon.jit
def load_numbers(x, at, S: gl.constexpr):
    """One number per token of `[tokens, HV]`, float32: [C]; outside the chunk 0."""
    t = gl.arange(0, C, TOKENS)
    return gl.load(x + (at.first + t) * S.HV + at.head, mask=t < at.count, other=0.0).to(gl.float32)


@gluon.jit
def halves_of(x):
    """A float32 tile as a sum of two of 8 digits each."""
    high = x.to(gl.bfloat16)
    return high, (x - high.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def write_halves(x, tiles):
    """The halves of a tile."""
    high, low = halves_of(x)
    tiles.index(0).store(high)
    tiles.index(1).store(low)


@gluon.jit
def written():
    """All threads' stores to shared memory, for the products of all."""
    fence_async_shared()
    thread_barrier()


@gluon.jit
def write_state(states, at, row, WIDTH: gl.constexpr, tiles, S: gl.constexpr):
    """The halves of BK rows from `row` on of the state before the chunk, 0 from row `WIDTH` on; 64 rows at a time."""
    LAYOUT: gl.constexpr = by_rows(S.BK)
    base = (at.chunk.to(gl.int64) * S.HV + at.head) * ((S.K + S.V) * S.K)
    d = gl.arange(0, S.BK, gl.SliceLayout(0, LAYOUT))
    for part in gl.static_range(S.BK // 64):
        r = row + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        mask = (r < WIDTH)[:, None] & (d < S.K)[None, :]
        x = gl.load(states + base + r[:, None] * S.K + d[None, :], mask=mask, other=0.0)  # [64, BK]
        high, low = halves_of(x)
        tiles.index(0).slice(part * 64, 64, dim=0).store(high)
        tiles.index(1).slice(part * 64, 64, dim=0).store(low)


@gluon.jit
def by_halves(x, high, low, acc):
    """`x (high + low)` of halves x `[2, ...]`, begun: three products."""
    acc = warpgroup_mma(x.index(1), high, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma(x.index(0), low, acc, is_async=True)
    return warpgroup_mma(x.index(0), high, acc, is_async=True)


@gluon.jit
def by_tile(x, y, acc, ADD: gl.constexpr):
    """The same with a tile y of 16 bits: two products."""
    acc = warpgroup_mma(x.index(1), y, acc, use_acc=ADD, is_async=True)
    return warpgroup_mma(x.index(0), y, acc, is_async=True)


@gluon.jit
def quotient(a, b):
    """a / b, 0 where nothing is left to be solved: [C]."""
    return gl.where(b > 0, a / gl.where(b > 0, b, 1.0), 0.0)


@gluon.jit
def factors_of(x, at, S: gl.constexpr):
    """The weights of pairs, the decays of rows and the ridge."""
    SUMS: gl.constexpr = shared_rows(S.BK)
    G = gl.associative_scan(gl.maximum(load_numbers(x.decay, at, S) * LOG2E, -160.0), 0, plus)  # [C]
    row = gl.convert_layout(G, gl.SliceLayout(1, PAIRS))[:, None]
    column = gl.convert_layout(G, gl.SliceLayout(0, PAIRS))[None, :]
    i = gl.arange(0, C, gl.SliceLayout(1, PAIRS))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, PAIRS))[None, :]
    weight = gl.where(i >= j, ex2(gl.minimum(row - column, 0.0)), 0.0)
    beta = gl.convert_layout(load_numbers(x.beta, at, S), gl.SliceLayout(0, PAIRS))  # [C]
    d = gl.arange(0, S.BK, gl.SliceLayout(0, SUMS))
    ridge = gl.load(x.ridge + at.head * S.K + d, mask=d < S.K, other=0.0)  # [BK]
    return MesaFactors(weight * beta[None, :], gl.convert_layout(ex2(G), gl.SliceLayout(1, SUMS)), ridge)


@gluon.jit
def begin_pairs(tiles):
    """`p k^T`, begun: two products, [C, C]."""
    return by_tile(tiles.p, tiles.k.permute((1, 0)), gl.full([C, C], 0.0, gl.float32, PAIRS), False)


@gluon.jit
def applied(p, tiles, factors, S: gl.constexpr):
    """`(R_i + diag(ridge)) p_i`, [C, BK]."""
    write_halves(p, tiles.p)
    written()
    scores = begin_pairs(tiles)
    made = gl.full([C, S.BK], 0.0, gl.float32, shared_rows(S.BK))
    made = by_halves(tiles.p, tiles.state.index(0), tiles.state.index(1), made)
    scores = products_done(3, deps=[scores])
    write_halves(scores * factors.weight, tiles.pairs)
    made = products_done(0, deps=[made])
    made = made * factors.past[:, None] + factors.ridge[None, :] * p
    written()
    return products_done(0, deps=[by_tile(tiles.pairs, tiles.k, made, True)])


@gluon.jit
def conjugate_gradients(b, tiles, factors, steps, S: gl.constexpr):
    """The solution `x` of `applied(x) = b`, from 0, [C, BK]."""
    x = gl.full([C, S.BK], 0.0, gl.float32, shared_rows(S.BK))
    r = b
    p = b
    squares = gl.sum(r * r, 1)
    for _ in range(steps):
        made = applied(p, tiles, factors, S)
        step = quotient(squares, gl.sum(p * made, 1))[:, None]
        x += step * p
        r -= step * made
        before = squares
        squares = gl.sum(r * r, 1)
        p = r + quotient(squares, before)[:, None] * p
    return x


@gluon.jit
def write_output(x, tiles, factors, at, inputs, out, n, S: gl.constexpr):
    """Writes `o`, BK channels at a time; the tiles of keys and of the state become those of `v` and `S`."""
    write_halves(x, tiles.p)
    written()
    write_halves(products_done(0, deps=[begin_pairs(tiles)]) * factors.weight, tiles.pairs)
    high, low = tiles.state.index(0).permute((1, 0)), tiles.state.index(1).permute((1, 0))
    for block in range((S.V + S.BK - 1) // S.BK):
        thread_barrier()  # no product reads what is overwritten
        write_state(out.states, at, S.K + block * S.BK, S.K + S.V, tiles.state, S)
        offset, mask = rows_of(at, S.HV, S.V, block * S.BK, S)
        v = gl.load(inputs.v + offset, mask=mask, other=0.0)  # [C, BK]
        tiles.k.store(v)
        written()
        o = by_halves(tiles.p, high, low, gl.full([C, S.BK], 0.0, gl.float32, shared_rows(S.BK)))
        o = products_done(0, deps=[o]) * factors.past[:, None]
        o = products_done(0, deps=[by_tile(tiles.pairs, tiles.k, o, True)])
        gl.store(out.o + offset, (n.scale * o).to(gl.bfloat16), mask=mask)


@gluon.jit
def gradient_of_solution(tiles, factors, at, inputs, out, n, S: gl.constexpr):
    """`dx`, [C, BK]; `do` and `v` lie where `p` will, `S` where `R` will."""
    scores = gl.full([C, C], 0.0, gl.float32, PAIRS)
    dx = gl.full([C, S.BK], 0.0, gl.float32, shared_rows(S.BK))
    do, v = tiles.p.index(0), tiles.p.index(1)
    for block in range((S.V + S.BK - 1) // S.BK):
        thread_barrier()  # no product reads what is overwritten
        write_state(out.states, at, S.K + block * S.BK, S.K + S.V, tiles.state, S)
        offset, mask = rows_of(at, S.HV, S.V, block * S.BK, S)
        flow = gl.load(inputs.do + offset, mask=mask, other=0.0)  # [C, BK]
        do.store(flow)
        value = gl.load(inputs.v + offset, mask=mask, other=0.0)  # [C, BK]
        v.store(value)
        written()
        scores = warpgroup_mma(do, v.permute((1, 0)), scores, is_async=True)
        dx = warpgroup_mma(do, tiles.state.index(1), dx, is_async=True)
        dx = warpgroup_mma(do, tiles.state.index(0), dx, is_async=True)
        scores, dx = products_done(0, deps=[scores, dx])
    write_halves(scores * factors.weight, tiles.pairs)
    written()
    dx = products_done(0, deps=[by_tile(tiles.pairs, tiles.k, dx * factors.past[:, None], True)])
    thread_barrier()  # no product reads what is overwritten
    return n.scale * dx


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def mesa_solve_hopper_kernel(x, out, where, n, S: gl.constexpr):
    """One program per (chunk, value head): the solution and the output, or with `do` the adjoint solution and the ridge's gradient."""
    at = chunk_place(where, n, S)
    if at.count > 0:
        SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        tiles = MesaTiles(
            gl.allocate_shared_memory(gl.bfloat16, [C, S.BK], SHARED),
            gl.allocate_shared_memory(gl.bfloat16, [2, S.BK, S.BK], SHARED),
            gl.allocate_shared_memory(gl.bfloat16, [2, C, S.BK], SHARED),
            gl.allocate_shared_memory(gl.bfloat16, [2, C, C], SHARED),
        )
        factors = factors_of(x, at, S)
        offset, mask = rows_of(at, S.H, S.K, 0, S)
        k = gl.load(x.k + offset, mask=mask, other=0.0)  # [C, BK]
        tiles.k.store(k)
        if x.do is None:
            b = gl.load(x.q + offset, mask=mask, other=0.0).to(gl.float32)  # [C, BK]
        else:
            b = gradient_of_solution(tiles, factors, at, x, out, n, S)
        write_state(out.states, at, 0, S.K, tiles.state, S)
        found = conjugate_gradients(b, tiles, factors, n.steps, S)
        offset, mask = rows_of(at, S.HV, S.K, 0, S)
        if x.do is None:
            gl.store(out.x + offset, found.to(gl.bfloat16), mask=mask)
            write_output(found, tiles, factors, at, x, out, n, S)
        else:
            gl.store(out.adjoint + offset, found.to(gl.bfloat16), mask=mask)
            solution = gl.load(out.x + offset, mask=mask, other=0.0).to(gl.float32)  # [C, BK]
            d = gl.arange(0, S.BK, gl.SliceLayout(0, shared_rows(S.BK)))
            to = out.ridge + (at.chunk.to(gl.int64) * S.HV + at.head) * S.K + d
            gl.store(to, -gl.sum(found * solution, 0), mask=d < S.K)
