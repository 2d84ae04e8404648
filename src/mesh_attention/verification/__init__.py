"""Proof: checks the programs of a plan against rules. It knows steps and masks, but no planner.

Reading order: evidence (a plan taken apart), forms (single steps), rendezvous (who waits for whom), rules, check.
"""
