"""The contract of every op: its call, its choice of an implementation, its checks, its packing."""
