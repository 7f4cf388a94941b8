"""The report of a study that goes on: written anew again and again, as a page that reloads itself."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from kourkoutas.lab.judging.analysis import analyse
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoreError
from kourkoutas.lab.showing import report

PATIENCE = 4.0  # a page is made again after this many times the seconds that making it took
SHORTEST, LONGEST = 2.0, 20.0  # seconds


def follow(path: Path) -> None:
    """Write report.html of the folder at `path` again and again, until the study has ended.

    Raises:
      StoreError: there is no study to begin with.
    """
    page = path / "report.html"
    start = time.monotonic()
    going = _write(path, page)
    while going:
        time.sleep(min(LONGEST, max(SHORTEST, PATIENCE * (time.monotonic() - start))))
        start = time.monotonic()
        # A file may be half there for a moment: the last good page stays, and the next look tries again.
        with contextlib.suppress(StoreError, OSError):
            going = _write(path, page)


def _write(path: Path, page: Path) -> bool:
    """Write the page; whether the study still goes on."""
    analysis = analyse(Snapshot.read(path), resamples=0)
    going = not analysis.finished
    report.write(analysis, page, live=going)
    return going
