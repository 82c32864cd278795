"""`flowgrpo compare methods`: alignment methods compared on a packaged model, from the same budget of evaluations.

    models      settings that all methods share, by model, and the split of its prompts
    methods     methods as they are given: presets, FILE.py:NAME, recipes
    budget      number of epochs that a budget of evaluations buys
    plan        runs of a bench: a method, a seed, a learning rate and a clip, and their hash
    worker      process that trains runs, one after the other; probe measures a trained one
    schedule    workers in parallel: what is left to run, progress, expected time
    statistics  bootstrap over prompts and seeds, Holm's correction, the crossing of a curve
    collect     results of all runs, as results.json has them
    table, page, charts    the Markdown table, the HTML page and its figures
"""
