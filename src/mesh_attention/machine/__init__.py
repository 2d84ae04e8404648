"""The machine at hand: which cluster the ranks make, a measurement of it, and cost-based plans for it.

Reading order: cluster (what ranks say of themselves, and the cluster they make: by a preset or a file), fit (from times
to figures, without torch), timing (of calls, merges and messages, by all ranks), and tuned_strategy (rank 0 picks and
broadcasts the strategy).
"""
