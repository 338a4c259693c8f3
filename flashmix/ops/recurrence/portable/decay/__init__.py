"""The decays of the portable recurrence, one file each."""
