"""VBench's dimensions."""
