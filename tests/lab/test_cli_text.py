"""`kbeta study char-lm --text`, called as a user calls it."""

from __future__ import annotations

import socket
import sys

import pytest

from kourkoutas import cli
from kourkoutas.lab.testbeds.char_lm import enwik8


@pytest.fixture
def kbeta(tmp_path, monkeypatch, capfd):
    """The command in this process: (exit code, what it said on standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path / "cache"))

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["kbeta", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, " ".join(capfd.readouterr().err.split())

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
    code, said = kbeta("study", "char-lm", "--text", "text.txt", "--seeds", "0", "--out", "out")
    assert code == 2
    assert says in said
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_study_is_not_continued_on_a_text_that_was_changed(kbeta, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    sizes = ["--set", "steps=10", "--set", "width=8", "--set", "layers=1", "--set", "eval_windows=2"]
    arms = ["--seeds", "0", "--optimizers", "kbeta", "--engine", "mlx", "--no-report"]
    call = ["study", "char-lm", "--text", "text.txt", *arms, *sizes]
    code, said = kbeta(*call, "--out", "out")
    assert code == 0, said
    text.write_text("the quick brown fox jumps over the lazy cat\n" * 400)
    code, said = kbeta(*call, "--out", "out")
    assert code == 2
    assert "text_sha256" in said


def test_enwik8_without_a_network_says_what_to_do_and_leaves_nothing(kbeta, tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(enwik8, "URLS", (f"http://127.0.0.1:{port}/enwik8.zip",))
    code, said = kbeta("study", "char-lm", "--text", "enwik8", "--seeds", "0", "--out", "out")
    assert code == 2
    assert "Check the network" in said
    assert "--text enwik8.txt" in said
    assert list(tmp_path.iterdir()) == []


def test_enwik8_that_is_in_the_cache_is_not_fetched(kbeta, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / enwik8.SLICE).write_text("a few words")
    monkeypatch.setattr(enwik8, "URLS", ("http://no-such-host.invalid/enwik8.zip",))
    code, said = kbeta("study", "char-lm", "--text", "enwik8", "--seeds", "0", "--out", "out")
    assert code == 2
    assert "shorter than one window" in said
