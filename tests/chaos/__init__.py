"""A seeded schedule of faults over one job, whose weights must come out as if nothing had been.

`python -m chaos --seed 1 --faults 20`, or `make chaos SEED=1 FAULTS=20`. See docs/chaos.md.
"""
