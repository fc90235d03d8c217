"""What a lock costs, and what it is worth: this library and its peers, side by side in one run.

`python -m benchmarks --help` says how to start it, docs/performance.md what came out.
"""
