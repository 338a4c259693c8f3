"""The norms on a GPU: rows that fit in one tile, and wide ones."""
