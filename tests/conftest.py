"""Test workers share the cores, so each framework gets one thread."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
