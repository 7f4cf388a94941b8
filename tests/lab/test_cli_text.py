"""`kbeta study char-lm --text` and `kbeta data`, called as a user calls them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def kbeta(tmp_path):
    def call(*arguments: str) -> subprocess.CompletedProcess:
        paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
        env = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "140", "KBETA_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-P", "-m", "kourkoutas", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=env)

    return call


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "text.txt is empty"),
        (b"\x7fELF\x00\x00" * 5_000, "text.txt is a binary file"),
        (b"a few words", "shorter than one window"),
        (b"hello world " * 3_000 + "καλημέρα ".encode() * 200, "that the training part never shows: 'έ' (U+03AD)"),
    ],
    ids=["empty", "binary", "short", "unseen"],
)
def test_a_text_that_cannot_be_used_is_one_line_and_nothing_is_written(kbeta, tmp_path, content, says):
    (tmp_path / "text.txt").write_bytes(content)
    done = kbeta("study", "char-lm", "--text", "text.txt", "--seeds", "0", "--out", "out")
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_study_is_not_continued_on_a_text_that_was_changed(kbeta, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    sizes = ["--set", "steps=10", "--set", "width=8", "--set", "layers=1", "--set", "eval_windows=2"]
    arms = ["--seeds", "0", "--optimizers", "kbeta", "--engine", "mlx", "--no-report"]
    call = ["study", "char-lm", "--text", "text.txt", *arms, *sizes]
    first = kbeta(*call, "--out", "out")
    assert first.returncode == 0, first.stderr
    text.write_text("the quick brown fox jumps over the lazy cat\n" * 400)
    second = kbeta(*call, "--out", "out")
    assert second.returncode == 2
    assert "text_sha256" in second.stderr


def test_data_without_a_network_says_what_to_do_and_leaves_nothing(kbeta, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = kbeta("data", "enwik8", "--to", "here", "--url", f"http://127.0.0.1:{port}/enwik8.zip")
    assert done.returncode == 2
    assert "Check the network" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []
