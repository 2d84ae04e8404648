"""Proof: reads a plan's programs and says what is wrong with them. Knows steps and masks; knows no planner.

Reading order: evidence (a plan taken apart), rendezvous (who waits for whom), rules (one function each), check.
"""
