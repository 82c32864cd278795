"""Learning rates that a run finds: `train.lr: auto`."""
