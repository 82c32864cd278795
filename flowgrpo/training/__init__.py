"""Components of the training loop: credit, optimizer, state, metrics, run folder."""
