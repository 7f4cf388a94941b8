"""From what was asked for to a list of runs: arms, seeds, settings, values to tune; checked before anything is made."""
