"""PAPERS: what was published, against what the plans and the simulation here say of it. Never imports torch."""
