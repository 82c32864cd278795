"""Measures of pixels that no recipe names: PIQE of an image, and the direction of a clip's motion."""
