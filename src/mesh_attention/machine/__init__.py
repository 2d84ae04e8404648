"""Facts, probe and fit of the ranks at hand, and plans by the prices of their machine.

Reading order: facts (what ranks say of themselves, and the cluster they make), files (calibrated and measured clusters
on disk), fit (from times to figures, without torch), timing (of calls, merges and messages), probe (by all ranks),
choosing (a choice by price, as a value), and planner (rank 0 chooses, every rank builds the same plans).
"""
