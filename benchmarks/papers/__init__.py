"""The published figures of the papers, next to those of our plans and simulations. Not part of the library.

Reading order: figures (published), scaling (the Mesh-Attention paper's experiments, simulated), fit (its cluster),
reproduce (our value for each figure).
"""
