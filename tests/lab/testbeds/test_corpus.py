"""Texts as memory-mapped ids, and enwik8 fetched from a server on this machine."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import re
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kourkoutas import cli
from kourkoutas.lab.testbeds.char_lm import corpus, enwik8
from kourkoutas.lab.testbeds.char_lm.corpus import CorpusError
from kourkoutas.lab.testbeds.char_lm.enwik8 import Expected, FetchError, fetch_enwik8
from kourkoutas.lab.testbeds.char_lm.generated import generate

TEXT = "Ένα κουρκούτι, two pancakes; drei Eier.\n" * 20


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("KBETA_CACHE", str(folder))
    return folder


def spelled(found):
    return "".join(found.characters[i] for i in found.ids)


# Files


def test_the_ids_spell_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    found = corpus.load(str(path))
    assert spelled(found) == TEXT
    assert found.characters == "".join(sorted(set(TEXT)))
    assert found.ids.dtype == np.uint8
    assert found.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()


def test_ids_are_mapped_from_the_cache_and_shared_by_every_file_with_that_text(tmp_path, cache):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "bom.txt").write_text(TEXT, encoding="utf-8-sig")
    loaded = corpus.load(str(tmp_path / "a.txt"))
    assert not cache.exists()
    corpus.keep(loaded)
    texts = [corpus.load(str(tmp_path / name)) for name in ("a.txt", "a.txt.gz", "bom.txt")]
    assert all(isinstance(text.ids, np.memmap) for text in texts)
    assert all(spelled(text) == TEXT for text in texts)
    assert [p.name for p in (cache / "corpus").iterdir()] == [texts[0].sha256]


def test_a_text_with_many_characters_takes_two_bytes_each(tmp_path):
    path = tmp_path / "a.txt"
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))
    path.write_text(text, encoding="utf-8")
    found = corpus.load(str(path))
    assert found.ids.dtype == np.uint16
    assert spelled(found) == text


def test_line_ends_are_characters_like_others(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\n")
    assert spelled(corpus.load(str(path))) == "one\r\ntwo\n"


def test_a_character_cut_at_the_end_of_a_slice_is_left_out(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("abc€".encode()[:-1])
    assert spelled(corpus.load(str(path))) == "abc"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", r"binary file \(byte 0 at offset 8\)"),
        ("caffè latte".encode("latin1"), r"not UTF-8 \(byte 0xe8 at offset 4\)"),
        ("word".encode("utf-16"), "not UTF-8|binary"),
        (b"ab\xe2\x82 cd", "not UTF-8"),
    ],
    ids=["empty", "blank", "png", "latin1", "utf16", "broken"],
)
def test_a_file_that_is_no_text_is_an_error_that_names_it_and_writes_nothing(tmp_path, cache, content, says):
    path = tmp_path / "odd.txt"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=says) as error:
        corpus.load(str(path))
    assert "odd.txt" in str(error.value)
    assert not cache.exists()


def test_a_missing_file_a_folder_and_a_truncated_gzip_file_are_errors(tmp_path, cache):
    whole = gzip.compress(TEXT.encode())
    (tmp_path / "cut.txt.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "plain.txt.gz").write_text(TEXT, encoding="utf-8")
    for name, says in (
        ("none.txt", "does not exist"),
        (".", "cannot be read"),
        ("cut.txt.gz", "not a whole gzip file"),
        ("plain.txt.gz", "not a whole gzip file"),
    ):
        with pytest.raises(CorpusError, match=says):
            corpus.load(str(tmp_path / name))
    assert not cache.exists()


def test_a_damaged_cache_is_made_again(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    corpus.keep(corpus.load(str(path)))
    (ids,) = cache.rglob("ids.npy")
    ids.write_bytes(b"")
    found = corpus.keep(corpus.load(str(path)))
    assert spelled(found) == TEXT
    assert isinstance(found.ids, np.memmap)
    assert len(list(cache.rglob("ids.npy"))) == 1
    assert not list((cache / "corpus").glob(".part-*"))


def test_where_the_cache_cannot_be_written_the_ids_stay_in_memory(tmp_path, monkeypatch):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder would go")
    monkeypatch.setenv("KBETA_CACHE", str(blocked))
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    assert spelled(corpus.keep(corpus.load(str(path)))) == TEXT


def test_enwik8_before_it_was_fetched_says_how_to_get_it():
    with pytest.raises(CorpusError, match="kbeta study char-lm --text enwik8"):
        corpus.load("enwik8")


# The generated text


def test_the_generated_text_is_the_same_in_every_process():
    code = "import hashlib; from kourkoutas.lab.testbeds.char_lm.generated import generate as g; "
    code += "print(hashlib.sha256(g(50_000).encode()).hexdigest())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == hashlib.sha256(generate(50_000).encode()).hexdigest()


def test_the_generated_text_has_rules_to_learn():
    text = generate(100_000)
    sums = re.findall(r"(\d+) \w+ and (\d+) more make (\d+)\.", text)
    assert len(sums) > 50
    assert all(int(a) + int(b) == int(c) for a, b, c in sums)
    whole = text[: text.rindex("\n\n")]
    assert whole.count("(") == whole.count(")") > 50
    words = re.findall(r"[a-z]+", text)
    counts = sorted((words.count(w) for w in set(words)), reverse=True)
    assert counts[0] > 20 * counts[len(counts) // 2]


# enwik8

BODY = b"".join(b"line %06d of a stand-in for the real thing\n" % i for i in range(5_000))
EXPECTED = Expected(
    size=len(BODY),
    sha256=hashlib.sha256(BODY).hexdigest(),
    cut=60_000,
    head=(1_000, hashlib.sha256(BODY[:1_000]).hexdigest()),
)


def zipped(body, member="enwik8"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, body)
    return buffer.getvalue()


class Server(http.server.BaseHTTPRequestHandler):
    """Good files at /good and /stream; at the others what can go wrong."""

    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        good = zipped(BODY)
        bodies = {
            "/good": good,
            "/stream": good,
            "/short": good[: len(good) // 2],
            "/cut": good[: len(good) // 2],
            "/other": zipped(BODY[:-1] + b"!"),
            "/long": zipped(BODY + b"more"),
            "/page": b"<html>moved</html>",
            "/empty": zipped(BODY, "readme.txt"),
        }
        if self.path not in bodies:
            self.send_error(404)
            return
        body = bodies[self.path]
        self.send_response(200)
        if self.path != "/stream":
            self.send_header("Content-Length", str(len(good if self.path == "/short" else body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


def fetch(to, *urls, **options):
    return fetch_enwik8(to, urls, expected=EXPECTED, timeout=10, **options)


@pytest.mark.parametrize("page", ["good", "stream"])
def test_a_good_download_leaves_the_slice_and_nothing_else(tmp_path, server, page):
    seen = []
    path = fetch(tmp_path / "data" / "here", f"{server}/{page}", on_progress=lambda got, total: seen.append(got))
    assert path.read_bytes() == BODY[:60_000]
    assert [p.name for p in path.parent.iterdir()] == ["small-enwik8.txt"]
    assert seen[-1] == len(zipped(BODY))


def test_a_slice_that_is_there_is_not_fetched_again(tmp_path, server):
    fetch(tmp_path, f"{server}/good")
    Server.asked.clear()
    fetch(tmp_path, f"{server}/good")
    assert Server.asked == []


def test_a_file_in_the_way_is_not_overwritten(tmp_path, server):
    (tmp_path / "small-enwik8.txt").write_text("mine")
    with pytest.raises(FetchError, match="remove or rename it"):
        fetch(tmp_path, f"{server}/good")
    assert (tmp_path / "small-enwik8.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("short", "ended after"),
        ("cut", "not a zip file"),
        ("other", "must have sha256"),
        ("long", f"must have {len(BODY):,} bytes"),
        ("page", "not a zip file"),
        ("empty", "not a zip file that holds 'enwik8'"),
        ("nowhere", "Not Found"),
    ],
)
def test_a_download_that_is_not_enwik8_is_an_error_and_nothing_remains(tmp_path, server, page, says):
    with pytest.raises(FetchError, match=says) as error:
        fetch(tmp_path / "new" / "data", f"{server}/{page}")
    assert f"{server}/{page}" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_no_network_is_an_error_that_says_what_to_do_and_nothing_remains(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(FetchError, match=r"(?s)refused.*Check the network"):
        fetch(tmp_path / "data", f"http://127.0.0.1:{port}/enwik8.zip")
    with pytest.raises(FetchError, match=r"no-such-host\.invalid"):
        fetch(tmp_path / "data", "http://no-such-host.invalid/enwik8.zip")
    assert list(tmp_path.iterdir()) == []


def test_the_next_address_is_tried_after_one_that_fails(tmp_path, server):
    assert fetch(tmp_path, f"{server}/page", f"{server}/good").stat().st_size == 60_000


def test_an_interrupt_leaves_nothing(tmp_path, server):
    def interrupt(got, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path / "data", f"{server}/good", on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_zip_fetched_by_other_means_can_be_given_as_a_file(tmp_path):
    (tmp_path / "enwik8.zip").write_bytes(zipped(BODY))
    path = fetch(tmp_path / "data", (tmp_path / "enwik8.zip").as_uri())
    assert path.read_bytes() == BODY[:60_000]


def test_the_fetched_slice_is_the_text_named_enwik8(cache, server):
    fetch(cache, f"{server}/good")
    assert spelled(corpus.load("enwik8")).encode() == BODY[:60_000]


def test_what_is_expected_of_enwik8_is_what_the_paper_quotes():
    real = enwik8.Expected()
    assert real.size == 10**8
    assert (real.sha256[:8], real.sha256[-6:]) == ("2b49720e", "c024a8")
    assert real.cut == 30_000_000


SHARED = Path(__file__).parents[4] / "shared" / "data" / "enwik8-4mb.txt.gz"


@pytest.mark.skipif(not SHARED.is_file(), reason="the first 4 MB of enwik8 are not beside the repository")
def test_the_real_beginning_of_enwik8_has_the_expected_head():
    found = corpus.load(str(SHARED))
    length, digest = enwik8.Expected().head
    assert found.sha256 == digest
    assert len(spelled(found).encode()) == length


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
