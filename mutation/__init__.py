"""Deliberate breakages of the package, and whether the tests notice: `python -m mutation --help`."""
