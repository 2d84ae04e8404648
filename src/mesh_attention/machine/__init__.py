"""Facts, probe and fit of the ranks at hand, and cost-based plans for their machine.

Reading order: facts (what ranks say of themselves, and the cluster they make), files (calibrated and measured clusters
on disk), fit (from times to figures, without torch), timing (of calls, merges and messages), probe (by all ranks),
choosing (a cost-based choice, as a value), and planner (rank 0 picks and broadcasts the strategy).
"""
