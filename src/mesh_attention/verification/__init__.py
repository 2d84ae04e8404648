"""Proof: checks the programs of a plan against rules. It knows steps and masks, but no planner.

Reading order: evidence (a plan taken apart, and who waits for whom), forms (single steps), rules and `verify`.
"""
