"""One token at a time for many users: their states lie in a pool, and each step names the slots of those who are in the batch.

    python examples/state_pool.py --slots 64 --users 200 --device cuda

Users come and go; a slot is cleared and given to the next one. At the end every user's outputs are compared with the whole
sequence in one call.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import flashmix


@dataclass
class User:
    """The inputs of one user's tokens, as a model's projections would make them, and what came out so far."""

    q: torch.Tensor  # [T, H, K]
    k: torch.Tensor  # [T, H, K]
    v: torch.Tensor  # [T, H, V]
    beta: torch.Tensor  # [T, H]
    log_decay: torch.Tensor  # [T, H]
    outputs: list[torch.Tensor] = field(default_factory=list)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.beta, self.log_decay


def arrive(heads: int, size: int, device: str) -> User:
    tokens = int(torch.randint(3, 20, ()))
    q, k, v = torch.randn(3, tokens, heads, size, device=device)
    beta, log_decay = torch.rand(tokens, heads, device=device), -torch.rand(tokens, heads, device=device)
    return User(flashmix.l2_norm(q), flashmix.l2_norm(k), v, beta, log_decay)


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="Serves users from a pool of states.")
    parser.add_argument("--slots", type=int, default=4, help="states in the pool, and most users in a step")
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--size", type=int, default=16, help="channels of a head")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    users = [arrive(options.heads, options.size, options.device) for _ in range(options.users)]
    pool = torch.zeros(options.slots, options.heads, options.size, options.size, device=options.device)
    waiting, active, steps = list(users), {}, 0
    while waiting or active:
        for slot in range(options.slots):
            if slot not in active and waiting:
                active[slot] = waiting.pop(0)
                pool[slot].zero_()  # of the one before
        slots = torch.tensor(list(active), device=options.device)
        now = [[x[len(user.outputs)] for x in user.inputs()] for user in active.values()]
        q, k, v, beta, log_decay = (torch.stack(parts)[:, None] for parts in zip(*now, strict=True))  # [B, 1, ...]
        out = flashmix.delta_rule_step(q, k, v, beta, pool, log_decay, state_indices=slots)  # writes the pool in place
        for row, (slot, user) in enumerate(list(active.items())):
            user.outputs.append(out[row, 0])
            if len(user.outputs) == len(user.q):
                del active[slot]
        steps += 1

    tokens = sum(len(user.q) for user in users)
    print(f"{len(users)} users, {tokens} tokens in {steps} steps, {options.slots} slots")
    errors = []
    for user in users:
        whole, _ = flashmix.delta_rule(*(x[None] for x in user.inputs()))
        errors.append(float((torch.stack(user.outputs) - whole[0]).abs().max()))
    print(f"largest difference from whole sequences: {max(errors):.1e}")
    return max(errors)


if __name__ == "__main__":
    main()
