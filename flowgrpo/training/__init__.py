"""What the training loop uses: credit, optimizer, state, metrics, run folder."""
