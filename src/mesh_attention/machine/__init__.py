"""What the ranks of a group know about the machine they are on, and plans by its prices.

Reading order: facts (what a rank says about itself), shape (from facts to a cluster, without torch), files (calibrated
and measured clusters on disk), probe (a short measurement by all ranks), choosing (a choice by price, as a value), and
planner (rank 0 chooses, all read).
"""
