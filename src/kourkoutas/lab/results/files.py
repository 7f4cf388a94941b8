"""How a file of a results folder is written, read and removed: every change to one goes through here.

| files                               | written                          | damage is seen by                       |
|-------------------------------------|----------------------------------|-----------------------------------------|
| study.json, spec.json, result.json  | whole or not at all              | `sha256`, of the rest of the JSON       |
| metrics.jsonl                       | line by line, at the end         | `crc32` of each line                    |
| checkpoints, trace.npz, params.npz  | whole or not at all              | SHA-256 of the file, behind it          |
| report.html                         | whole or not at all              | (made again from the rest)              |
| output.txt                          | as the run prints                | (for people)                            |
| .lock                               | in place                         | (for people; the kernel has the lock)   |

A file that has no checksum is read without that check.

Caches of data, scratch folders of cluster nodes and exported tables are not in a results folder, and have their writers
in `testbeds.char_lm`, `shipping`, `testbeds.darcy.data`, `testbeds.heat2d.data`, `running.node` and `results.export`.

NOTE: a kill leaves the old file, the new one, or a file under a temporary name, which is never read and which the next
writer removes. Of metrics.jsonl it may leave half a line at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from kourkoutas import atomic
from kourkoutas.lab.errors import argument
from kourkoutas.lab.locks import try_lock
from kourkoutas.lab.specs.spec import digest_of

Arrays = dict[str, NDArray[Any]]
Model = TypeVar("Model", bound=BaseModel)

NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
TEMPORARY = (".tmp", ".part")
KEPT = 2  # checkpoints: the newest, and one before it in case that is damaged
CHECK = "crc32"  # of a line, beside the metrics
SEAL = b"kourkoutas-sha256:"  # between an .npz file and its checksum


class StoreError(ValueError):
    """A results folder that cannot be read or must not be written; the message says how to go on."""


# JSON files


def write_json(file: Path, content: BaseModel) -> None:
    plain = json.loads(content.model_dump_json())
    text = json.dumps({**plain, "sha256": digest_of(plain)}, indent=1, ensure_ascii=False)
    write_text(file, text + "\n")


def read_json(file: Path, model: type[Model], remedy: str) -> Model:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{file}: cannot be read ({error}); {remedy}") from None
    try:
        plain = json.loads(text)
        told = plain.pop("sha256", None) if isinstance(plain, dict) else None
        content = model.model_validate(plain)
    except json.JSONDecodeError as error:
        cut = "is empty or cut short" if error.pos >= len(text.rstrip()) else "is not JSON"
        raise StoreError(f"{file}, line {error.lineno}: {cut} ({error.msg}); {remedy}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise StoreError(f"{file}, line {_line_of(text, first['loc'])}: `{field}`: {first['msg']}; {remedy}") from None
    except (RecursionError, OverflowError) as error:
        raise StoreError(f"{file}: is not JSON of ours ({error}); {remedy}") from None
    if told is not None and told != digest_of(plain):
        raise StoreError(f"{file}: its checksum does not fit, so it is damaged, or was edited or moved; {remedy}")
    return content


def _line_of(text: str, loc: tuple[int | str, ...]) -> int:
    """The line where the key that a validation error names stands, or 1 when it is a missing one."""
    at = 0
    for part in loc:
        if isinstance(part, str) and (next_at := text.find(f'"{part}"', at)) >= 0:
            at = next_at
    return text.count("\n", 0, at) + 1


# Arrays


def write_arrays(file: Path, arrays: Mapping[str, NDArray[Any]], *, compress: bool = False) -> None:
    """An .npz file with its SHA-256 behind it, which NumPy passes over.

    NOTE: zip has checksums of its members only: a damaged directory may hide some of them unseen.
    """
    buffer = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(buffer, **arrays)  # type: ignore[arg-type]
    atomic.replace(file, lambda stream: stream.write(sealed(buffer.getvalue())))


def read_arrays(file: Path, remedy: str, what: str = "file of arrays") -> Arrays:
    try:
        with np.load(io.BytesIO(unsealed(file.read_bytes(), always=False)), allow_pickle=False) as saved:
            return {name: saved[name] for name in saved.files}
    except Exception as error:  # zipfile, zlib and numpy raise many kinds on damage
        raise StoreError(f"{file}: not a readable {what} ({error}); {remedy}") from None


def sealed(data: bytes) -> bytes:
    return data + SEAL + hashlib.sha256(data).digest()


def unsealed(data: bytes, *, always: bool = True) -> bytes:
    """What was sealed; ValueError if it was damaged. Unless it is `always` sealed, `data` may be as it is."""
    end = len(data) - len(SEAL) - 32
    if data[end : end + len(SEAL)] != SEAL and not always:
        return data
    if end < 0 or data != sealed(data[:end]):
        raise ValueError("its checksum does not fit")
    return data[:end]


# Lines


class Lines:
    """Rows of numbers as lines of JSON, appended; NaN and Infinity as strings, as in `RunResult`."""

    def __init__(self, file: Path) -> None:
        make_folder(file.parent)
        self._file = file.open("ab")

    def write(self, row: Mapping[str, float]) -> None:
        text = json.dumps({key: x if math.isfinite(x) else NOT_FINITE[str(float(x))] for key, x in row.items()})
        self._file.write(f'{text[:-1]}, "{CHECK}": "{zlib.crc32(text.encode()):08x}"}}\n'.encode())
        self._file.flush()

    def sync(self) -> int:
        """To the disk; returns the length of the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def cut(self, length: int) -> None:
        self._file.truncate(length)
        self._file.seek(length)

    def close(self) -> None:
        self._file.close()


def row_of(line: str) -> dict[str, Any]:
    """The row of one line; ValueError if it is not one that `Lines` wrote."""
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    told = row.pop(CHECK, None)
    if told is not None and told != f"{zlib.crc32(json.dumps(row).encode()):08x}":
        raise ValueError("its checksum does not fit, so it was damaged or edited")
    for key, x in row.items():
        if isinstance(x, bool) or not (isinstance(x, int | float) or x in NOT_FINITE.values()):
            raise ValueError(f"{key!r} is not a number")
    return row


def read_lines(file: Path, *, finished: bool, remedy: str) -> list[dict[str, Any]]:
    """The rows of one metrics.jsonl, in order; absent means none were logged.

    A last line cut short by a kill is left out while the run is unfinished.
    """
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines if lines[-1] and finished else lines[:-1], start=1):
        try:
            rows.append(row_of(line))
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{file}, line {number}: {error}: {line[:60]!r}; {remedy}") from None
    return rows


class Checkpoints:
    """The checkpoints of one run: a flat dict of arrays in one file each, the `KEPT` newest of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        remove_stale(folder)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.npz"))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.npz"

    def save(self, step: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        make_folder(self.folder)
        write_arrays(self._path(step), arrays)
        for old in self.steps()[:-KEPT]:
            remove(self._path(old))

    def newest(self) -> tuple[int, Arrays] | None:
        """The newest checkpoint that can be read, or None. One damaged on the disk is passed over for an older one."""
        for step in reversed(self.steps()):
            try:
                return step, read_arrays(self._path(step), "an older checkpoint is taken")
            except StoreError:
                continue
        return None

    def clear(self) -> None:
        for step in self.steps():
            remove(self._path(step))
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            remove_folder(self.folder)


# Other files


def write_text(file: Path, text: str) -> None:
    atomic.replace(file, lambda stream: stream.write(text.encode()))


def write_bytes(file: Path, content: bytes) -> None:
    make_folder(file.parent)
    atomic.replace(file, lambda stream: stream.write(content))


def output(file: Path) -> IO[str]:
    """What a run prints goes here, as it does."""
    return file.open("a", encoding="utf-8")


# Folders, and what goes


def make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def remove(file: Path) -> None:
    file.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it."""
    shutil.rmtree(folder)


def remove_stale(folder: Path) -> None:
    """Remove what kills have left under temporary names."""
    for ending in TEMPORARY:
        for stale in folder.glob(f".*{ending}"):
            remove(stale)


@contextlib.contextmanager
def locked(folder: Path, holder: str) -> Iterator[None]:
    """Hold `folder`/.lock, in which others read who does.

    NOTE: the lock belongs to the process, not to the file's existence: the kernel lets go of it when the process ends,
    however it ends, so a lock file left by kill -9 stops nobody.
    """
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        if not try_lock(file):
            file.seek(0)
            other = file.read().strip() or "another process"
            raise StoreError(f"{folder} is being written by {other}; wait for it, or name another {argument('out')}")
        file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk is told when something that matters is written
            os.write(file.fileno(), holder.encode())
        try:
            yield
        finally:
            file.truncate(0)
