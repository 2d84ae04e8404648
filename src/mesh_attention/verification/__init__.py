"""Proof: checks the programs of a plan against rules. It knows steps and masks, but no planner."""
