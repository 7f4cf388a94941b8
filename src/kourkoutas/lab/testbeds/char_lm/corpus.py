"""Texts for character models: a UTF-8 file, the enwik8 slice, or a generated text, as memory-mapped ids.

    load("book.txt")     any UTF-8 text file, also gzipped (.gz)
    load("enwik8")       its first 30 MB, which `fetch_enwik8` has put into the cache
    load("generated")    a text made here: see `kourkoutas.lab.testbeds.char_lm.generated`

`keep` puts the ids of a text into the cache folder, under the sha256 of the text, so that many processes share one
memory-mapped copy. `load` finds them there and writes nothing, so that a text can be refused before anything is
written.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import os
import shutil
import tempfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.machine import cache_folder
from kourkoutas.lab.testbeds.char_lm import enwik8, generated

_CODE_POINTS = 0x110000
_LARGEST_VOCABULARY = 2**16


class CorpusError(ValueError):
    """A text that cannot be used; the message names it and says how to go on."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as numbers.

    Attributes:
      name: where it comes from, for messages.
      sha256: of the text in UTF-8.
      ids: one per character, uint8 or uint16: its place in `characters`.
      characters: every character of the text, in code-point order.
    """

    name: str
    sha256: str
    ids: NDArray[Any]
    characters: str


def is_fetched() -> bool:
    """Whether the slice of enwik8 is in the cache."""
    return (cache_folder() / enwik8.SLICE).is_file()


def load(text: str, *, characters: int = generated.CHARACTERS) -> Corpus:
    """The text of that name or path; `characters` is the length of a generated one."""
    if text == "generated":
        return _encoded(generated.NAME, _generated(characters))
    path = cache_folder() / enwik8.SLICE if text == "enwik8" else Path(text)
    if text == "enwik8" and not path.is_file():
        raise CorpusError(f"text 'enwik8' is not at {path}: `kbeta study char-lm --text enwik8` fetches it once")
    return _encoded(str(path), _read(path))


@functools.lru_cache(maxsize=2)
def _generated(characters: int) -> bytes:
    return generated.generate(characters).encode()


def _read(path: Path) -> bytes:
    """The UTF-8 bytes of a text file."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except FileNotFoundError:
        raise CorpusError(f"text file {path} does not exist: give the path of a UTF-8 text file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorpusError(f"text file {path} is not a whole gzip file ({error}): fetch or compress it again") from None
    except OSError as error:
        raise CorpusError(f"text file {path} cannot be read ({error.strerror}): give a UTF-8 text file") from None
    content = content.removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        raise CorpusError(f"text file {path} is empty: give a UTF-8 text file of some hundred thousand characters")
    return content


def _encoded(name: str, content: bytes) -> Corpus:
    """The corpus of a text: mapped from the cache where it is there, else in memory."""
    digest = hashlib.sha256(content).hexdigest()
    ids, codes = _cached(_folder(digest)) or _ids(name, content)
    return Corpus(name, digest, ids, "".join(map(chr, codes.tolist())))


def keep(corpus: Corpus) -> Corpus:
    """Put the ids into the cache and map them from there; where that cannot be written, leave them in memory."""
    folder = _folder(corpus.sha256)
    if isinstance(corpus.ids, np.memmap):
        return corpus
    _write(folder, corpus.ids, np.array([ord(c) for c in corpus.characters], np.uint32))
    found = _cached(folder)
    return corpus if found is None else replace(corpus, ids=found[0])


def _folder(digest: str) -> Path:
    return cache_folder() / "corpus" / digest


def _ids(name: str, content: bytes) -> tuple[NDArray[Any], NDArray[np.uint32]]:
    """Ids and the code points they stand for."""
    text = _decoded(name, content)
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    present = np.zeros(_CODE_POINTS, bool)
    present[points] = True
    codes = np.flatnonzero(present).astype(np.uint32)
    if len(codes) > _LARGEST_VOCABULARY:
        raise CorpusError(
            f"text {name} has {len(codes):,} different characters, more than {_LARGEST_VOCABULARY:,}: "
            "use a text with a smaller alphabet"
        )
    kind = np.uint8 if len(codes) <= 256 else np.uint16
    table = np.zeros(_CODE_POINTS, kind)
    table[codes] = np.arange(len(codes), dtype=kind)
    return table[points], codes


def _decoded(name: str, content: bytes) -> str:
    zero = content.find(b"\0")
    if zero >= 0:
        raise CorpusError(f"text {name} is a binary file (byte 0 at offset {zero:,}): give a UTF-8 text file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        # A slice cut by bytes may end within a character, whose first bytes are left out.
        if error.reason == "unexpected end of data" and error.end == len(content) and error.start > 0:
            return content[: error.start].decode()
        raise CorpusError(
            f"text {name} is not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start:,}): "
            "convert it first, for example with `iconv -f latin1 -t utf-8`, or give another file"
        ) from None


def _cached(folder: Path) -> tuple[NDArray[Any], NDArray[np.uint32]] | None:
    try:
        codes = np.load(folder / "characters.npy", allow_pickle=False)
        ids = np.load(folder / "ids.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return ids, codes


def _write(folder: Path, ids: NDArray[Any], codes: NDArray[np.uint32]) -> None:
    """Put a whole folder in place under its name, or nothing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
    except OSError:
        return
    try:
        for name, array in (("characters.npy", codes), ("ids.npy", ids)):
            with (part / name).open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        if folder.exists() and _cached(folder) is None:
            shutil.rmtree(folder)
        # Fails where another process was first, whose folder is as good.
        with contextlib.suppress(OSError):
            os.rename(part, folder)
    except OSError:
        return
    finally:
        shutil.rmtree(part, ignore_errors=True)
