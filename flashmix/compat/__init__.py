"""The names that people already use, as thin calls of flashmix.

`flashmix.compat.fla`, `.flash_attn`, `.flash_attn_interface` (generation 3), `.mamba_ssm` and `.causal_conv1d` have functions
and modules of these libraries under their names, with their argument orders, layouts and defaults, on every device that flashmix runs on.
Options that only tune speed are accepted and ignored. An option that would change the result and is not there raises
NotImplementedError with its name; a name that is not there raises AttributeError, an unknown argument TypeError.

`python -m flashmix.compat` prints what is there, name by name.
"""
