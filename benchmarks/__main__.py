"""Compare what locks cost and what they are worth, this library's and others'.

python -m benchmarks [--quick] [--rounds N] [--only NAME ...] [--write] [--json FILE]
"""

from __future__ import annotations

import os
import sys

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")

if __name__ == "__main__":
    django.setup()
    from benchmarks.program import main

    sys.exit(main(sys.argv[1:]))
