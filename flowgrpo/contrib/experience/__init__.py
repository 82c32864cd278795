"""`flowgrpo contrib lessons`: advice that a judge draws from samples."""
