"""The report of a run, as a file and live."""
