"""Backward of softmax attention on Hopper by programs that stay: one for each multiprocessor, which takes 128 keys after another.

The copying warp draws the number of the next block when all tiles of one are on their way. So the next q, k and v come while the roles
end with this one, and the barriers are made once. What is done with a block is `backward`'s.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from flashmix.gpu.hopper import allocate_barriers, fence_async_shared, gl, gluon, plain, release, sync_group
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.gluon_hopper.backward import COPIES, REGISTERS_OF_TWO, backward_rings, walk_keys
from flashmix.ops.attention.gluon_hopper.backward_sums import backward_sums, roles_of
from flashmix.ops.attention.gluon_hopper.backward_walk import BOTH_GROUPS, backward_copies, find_keys
from flashmix.ops.attention.gluon_hopper.forward_queue import Queue, tell, told


@gluon.jit
def staying_group(group: gl.constexpr, work, rings, queue, n, S: gl.constexpr):
    """Eight warps with all keys, or four with 64 of them, of one block after another."""
    numbers = n.blocks * n.batches * n.heads_q
    ROLES: gl.constexpr = roles_of(S.QK.FIRST)
    drawn, turn, base = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    number = told(queue, drawn, 8 // ROLES)
    while number < numbers:
        at, steps = find_keys(number, work, n, S)
        if at.first >= 0:
            walk_keys(group, work, at, steps, turn, base, rings, n, S)
            if ROLES == 2:  # dK and dV have left through k and v
                fence_async_shared()
                release(rings.k.empty, turn * ROLES + group)
                release(rings.v.empty, turn * ROLES + group)
            else:  # through dS, which is written anew
                sync_group(BOTH_GROUPS, 256)
            base += steps.all
            turn += 1
        drawn += 1
        number = told(queue, drawn, 8 // ROLES)


@gluon.jit
def staying_copies(work, descriptors, rings, queue, n, S: gl.constexpr):
    """The warp that copies, and draws the numbers of the program's blocks."""
    numbers = n.blocks * n.batches * n.heads_q
    drawn, turn, base = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    number = gl.atomic_add(queue.counter, 1)
    tell(queue, drawn, (number,))
    while number < numbers:
        at, steps = find_keys(number, work, n, S)
        if at.first >= 0:
            backward_copies(work, at, steps, turn, base, descriptors, rings, n, S)
            base += steps.all
            turn += 1
        number = gl.atomic_add(queue.counter, 1)
        drawn += 1
        tell(queue, drawn, (number,))


@gluon.jit
def staying_sums(warp: gl.constexpr, work, d_q_d, rings, queue, n, S: gl.constexpr):
    """`backward_sums` of one block of keys after another."""
    numbers = n.blocks * n.batches * n.heads_q
    drawn, base = gl.to_tensor(0), gl.to_tensor(0)
    number = told(queue, drawn, 1)
    while number < numbers:
        at, steps = find_keys(number, work, n, S)
        if at.first >= 0:
            backward_sums(warp, work, at, steps, base, d_q_d, rings, n, S)
            base += steps.all
        drawn += 1
        number = told(queue, drawn, 1)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["work"])
def hopper_backward_stay_kernel(work, q_t, q_r, o_t, o_r, k_t, k_r, v_t, v_r, first_d, second_d, S: gl.constexpr):
    """`hopper_backward_kernel` of one block of keys after another."""
    n = work.n
    ROLES: gl.constexpr = roles_of(S.QK.FIRST)
    descriptors = ((q_t, q_r), (o_t, o_r), (k_t, k_r), (v_t, v_r))
    pieces = (first_d, second_d)
    rings = backward_rings(descriptors, pieces, S)
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], plain())
    queue = Queue(work.counters, numbers, allocate_barriers(2, 1), allocate_barriers(2, ROLES + 2))
    if ROLES == 1:
        gl.warp_specialize(
            [
                (staying_group, (0, work, rings, queue, n, S)),
                (staying_copies, (work, descriptors, rings, queue, n, S)),
                (staying_sums, (0, work, pieces, rings, queue, n, S)),
                (staying_sums, (1, work, pieces, rings, queue, n, S)),
            ],
            [1, 1, 1],
            [COPIES, COPIES, COPIES],
        )
    else:
        gl.warp_specialize(
            [
                (staying_group, (0, work, rings, queue, n, S)),
                (staying_group, (1, work, rings, queue, n, S)),
                (staying_copies, (work, descriptors, rings, queue, n, S)),
                (staying_sums, (0, work, pieces, rings, queue, n, S)),
                (staying_sums, (1, work, pieces, rings, queue, n, S)),
            ],
            [4, 1, 1, 1],
            [REGISTERS_OF_TWO, COPIES, COPIES, COPIES],
        )
