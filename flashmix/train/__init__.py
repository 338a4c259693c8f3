"""The training command: text to tokens (`data`), the run folder (`run_folder`), checkpoints, the loop and the command line."""
