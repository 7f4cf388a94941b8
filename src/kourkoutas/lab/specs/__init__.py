"""What a run and a study are: arms, optimizers, settings. Plain data, checked before anything is made."""
