"""RWKV-4's averages: values weighted by their keys and their age, the own token with a bonus."""

from flashmix.ops.wkv.op import wkv

__all__ = ["wkv"]
