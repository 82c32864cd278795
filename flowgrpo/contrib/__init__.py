"""Features that no image preset and no recipe names, one folder each. The core imports none of them."""
