"""Notes on rows of docs/benchmark.md, written by hand; numbers stay in docs/bench_results.json.

What a bench changes in a method's settings stands in its results: it needs no note.
"""

GRADIENT = "follows the gradient of a differentiable reward, so that it never sees the strict one that is measured"

# Text by preset, shown for every row that has the preset, on every model.
NOTES = {
    "refl": GRADIENT, "draft": GRADIENT, "alignprop": GRADIENT,
    "flow_dppo": "its mask acts from the second update per batch on; with one update the runs are those of the base "
                 "method",
    "expo": "leaves the denoiser unchanged; a critic chooses among candidates and their edits, so that a measured "
            "sample costs several rollouts. There is no KL of an unchanged model",
    "texforce": "trains the text encoder and leaves the denoiser as it is",
}
