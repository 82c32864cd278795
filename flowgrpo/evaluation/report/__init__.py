"""Report of a run, as a file and live."""
