"""The greedy order's yardstick: the price of any schedule of one tile, and the shortest schedule of a small one.

Not part of the library. Reading order: clocks (the price), optimum (the search).
"""
