"""The training command: text to tokens, the run folder, checkpoints, the loop and the command line."""
