"""`flowgrpo check`: drive a model once and report what works."""
