"""Context parallelism: one packed row over several ranks, and what they send one another. docs/distributed.md explains it."""
