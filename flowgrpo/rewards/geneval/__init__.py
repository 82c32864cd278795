"""GenEval: the published rules, detectors of objects, and names of their colours."""
