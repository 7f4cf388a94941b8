"""Files that are whole or not there, and what kills leave behind."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kourkoutas import atomic

# Writes half of a file, says so, and waits for a line before it writes the rest.
SLOW_WRITER = """
import sys
from pathlib import Path
from kourkoutas import atomic

def write(stream):
    stream.write(b"slow ")
    stream.flush()
    print("half", flush=True)
    sys.stdin.readline()
    stream.write(b"writer")

atomic.replace(Path(sys.argv[1]), write)
"""
# Replaces one file again and again.
BUSY_WRITER = """
import sys
from pathlib import Path
from kourkoutas import atomic

for _ in range(100):
    atomic.replace(Path(sys.argv[1]), lambda stream: stream.write(sys.argv[2].encode() * 1000))
"""


@pytest.fixture
def start():
    started = []

    def start(source: str, *arguments: object) -> subprocess.Popen[str]:
        call = [sys.executable, "-c", source, *map(str, arguments)]
        started.append(subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
def test_the_next_writer_removes_what_a_killed_one_left_behind(start, tmp_path):
    file = tmp_path / "state.safetensors"
    file.write_bytes(b"old")
    writer = start(SLOW_WRITER, file)
    assert writer.stdout.readline() == "half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert file.read_bytes() == b"old"
    assert len(names(tmp_path)) == 2
    atomic.replace(file, lambda stream: stream.write(b"new"))
    assert names(tmp_path) == ["state.safetensors"]
    assert file.read_bytes() == b"new"


def test_a_writer_leaves_alone_what_another_is_still_writing(start, tmp_path):
    file = tmp_path / "state.safetensors"
    writer = start(SLOW_WRITER, file)
    assert writer.stdout.readline() == "half\n"
    atomic.replace(file, lambda stream: stream.write(b"new"))
    assert file.read_bytes() == b"new"
    writer.communicate("go on\n")
    assert writer.returncode == 0
    assert file.read_bytes() == b"slow writer"
    assert names(tmp_path) == ["state.safetensors"]


def test_processes_that_replace_one_file_at_once_all_succeed_and_leave_a_whole_file(start, tmp_path):
    file = tmp_path / "state.safetensors"
    writers = [start(BUSY_WRITER, file, letter) for letter in "abc"]
    assert [writer.wait(timeout=100) for writer in writers] == [0, 0, 0]
    assert names(tmp_path) == ["state.safetensors"]
    assert file.read_text() in {letter * 1000 for letter in "abc"}


def test_threads_that_replace_one_file_at_once_all_succeed(tmp_path):
    file = tmp_path / "state.safetensors"
    errors = []

    def write_often(letter: bytes) -> None:
        try:
            for _ in range(50):
                atomic.replace(file, lambda stream: stream.write(letter * 1000))
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write_often, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert names(tmp_path) == ["state.safetensors"]
    assert file.read_bytes() in {b"a" * 1000, b"b" * 1000}


def test_files_that_only_look_like_leftovers_stay(tmp_path):
    others = [".state.tmp", ".state.mine.tmp", ".other.0123456789abcdef.tmp", "state.0123456789abcdef.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    atomic.replace(tmp_path / "state", lambda stream: stream.write(b"new"))
    assert names(tmp_path) == sorted([*others, "state"])


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "state"
    file.write_bytes(b"old")

    def fail(stream):
        stream.write(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        atomic.replace(file, fail)
    assert file.read_bytes() == b"old"
    assert names(tmp_path) == ["state"]
