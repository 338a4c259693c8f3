"""The base of every token-mixing layer: its call, its caches, its padding."""
