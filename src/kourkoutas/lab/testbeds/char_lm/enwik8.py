"""enwik8: the first 10⁸ bytes of an English Wikipedia dump of 2006, fetched, checked and cut to the paper's slice.

NOTE: what is checked is the unpacked text: its size and its sha256, which the paper quotes too. Mirrors may pack it as
they like. Nothing appears under the final name before all of it has been checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

URLS = ("https://mattmahoney.net/dc/enwik8.zip", "https://data.deepai.org/enwik8.zip")
SLICE = "small-enwik8.txt"
_PIECE = 1 << 20


@dataclass(frozen=True)
class Expected:
    """What the unpacked text must be, and how much of it is kept.

    Attributes:
      member: its name in the zip file.
      size: in bytes.
      sha256: of all of it.
      cut: the first so many bytes are kept.
      head: a first part by which a slice that is already there is recognised, and its sha256.
    """

    member: str = "enwik8"
    size: int = 100_000_000
    sha256: str = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
    cut: int = 30_000_000
    head: tuple[int, str] = (4_000_000, "9f9ca3a41e2b87a0268d00380577e2c308e07959b22a94c8d7b1e8901bdefc37")


Progress = Callable[[int, int], None]


class FetchError(OSError):
    """A download that did not give the expected file; nothing of it is kept."""


def fetch_enwik8(
    to: Path,
    urls: Sequence[str] = URLS,
    *,
    expected: Expected | None = None,
    timeout: float = 60.0,
    on_progress: Progress | None = None,
) -> Path:
    """Fetch enwik8 and keep its first 30 MB as `to`/small-enwik8.txt; a slice that is there is not fetched again.

    Args:
      to: a folder, made if needed.
      urls: tried in order.
      expected: what the file must be; enwik8 unless given.
      timeout: seconds without an answer before a server is given up.
      on_progress: called as (bytes so far, bytes in all or 0).

    Returns:
      The path of the slice.
    """
    expected = Expected() if expected is None else expected
    target = to / SLICE
    if target.exists():
        _check_slice(target, expected)
        return target
    made = [folder for folder in (to, *to.parents) if not folder.exists()]
    to.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".enwik8-", dir=to) as part:
            _first_that_works(Path(part), urls, expected, timeout, on_progress)
            os.replace(Path(part) / SLICE, target)
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise
    return target


def _check_slice(target: Path, expected: Expected) -> None:
    length, digest = expected.head
    with target.open("rb") as file:
        head = file.read(length)
    if target.stat().st_size != expected.cut or hashlib.sha256(head).hexdigest() != digest:
        raise FetchError(f"{target} exists and is not the first {expected.cut:,} bytes of enwik8: remove or rename it")


def _first_that_works(
    part: Path, urls: Sequence[str], expected: Expected, timeout: float, on_progress: Progress | None
) -> None:
    problems = []
    for url in urls:
        try:
            _download(url, part / "enwik8.zip", timeout, on_progress)
            _unpack(part / "enwik8.zip", part / SLICE, expected)
            return
        except (FetchError, urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
            problems.append(f"{url}: {getattr(error, 'reason', None) or error}")
    raise FetchError(
        "enwik8 could not be fetched; nothing was kept\n  "
        + "\n  ".join(problems)
        + "\nCheck the network, or unpack enwik8.zip yourself, `head -c 30000000 enwik8 > enwik8.txt`, and use "
        + "--text enwik8.txt"
    )


def _download(url: str, path: Path, timeout: float, on_progress: Progress | None) -> None:
    with urllib.request.urlopen(url, timeout=timeout) as answer, path.open("wb") as file:
        total, got = int(answer.headers.get("Content-Length") or 0), 0
        while piece := answer.read(_PIECE):
            file.write(piece)
            got += len(piece)
            if on_progress is not None:
                on_progress(got, total)
    if total and got != total:
        raise FetchError(f"the download ended after {got:,} of {total:,} bytes")


def _unpack(archive: Path, path: Path, expected: Expected) -> None:
    """Hash all of the text, and write its first `cut` bytes to the disk."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(archive) as packed, packed.open(expected.member) as text, path.open("wb") as file:
            while (piece := text.read(_PIECE)) and size <= expected.size:
                file.write(piece[: max(0, expected.cut - size)])
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        raise FetchError(f"not a zip file that holds {expected.member!r} ({error})") from None
    if size != expected.size:
        raise FetchError(f"{expected.member} must have {expected.size:,} bytes; got {size:,}")
    if digest.hexdigest() != expected.sha256:
        raise FetchError(f"{expected.member} must have sha256 {expected.sha256}; got {digest.hexdigest()}")
