"""The self-test of `flashmix doctor --check`: every op's every implementation on this machine, against its definition."""
