"""Several processes: ranks, collectives, lockstep calls, signals."""
