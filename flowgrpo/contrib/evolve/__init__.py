"""`flowgrpo contrib evolve`: an adapter moved by the user's choices."""
