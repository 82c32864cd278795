"""`flowgrpo learn-experience`: advice that a judge draws from samples."""
