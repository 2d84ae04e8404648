"""Proof: checks the programs of a plan against rules. It knows steps and masks, but no planner.

Reading order: evidence (a plan taken apart), rendezvous (who waits for whom), rules (one function each), check.
"""
