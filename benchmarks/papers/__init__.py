"""The published figures of the papers, and how the plans and the simulation here compare. Not part of the library.

Reading order: figures (published), scaling (the Mesh-Attention paper's experiments, simulated), fit (its cluster),
reproduce (ours beside each figure).
"""
