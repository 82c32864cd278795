"""Guard against collapse: a run that goes back to its last good weights, `guard.window`."""
