"""A generated text: an almanac of invented places, so that a character model has something to learn without a download.

Words are made of syllables and drawn with Zipf frequencies; sentences come from a small grammar with agreement of
number, brackets, quotation marks and sums that come out right. A model can thus learn letters, then words, then rules.

NOTE: the text depends on nothing but the generator here and `random.Random.random`, which Python keeps the same across
versions. A change of the grammar is a change of the corpus.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

CHARACTERS = 1_000_000
NAME = "generated"

_ONSETS = ("b", "br", "c", "d", "dr", "f", "g", "gl", "h", "k", "l", "m", "n", "p", "pr", "r", "s", "st", "t", "v")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_CODAS = ("", "", "", "l", "m", "n", "r", "s", "t", "nd", "rk")
_MONTHS = ("January", "March", "April", "June", "August", "October", "December")


class _Almanac:
    def __init__(self) -> None:
        self._chance = random.Random(20_250_101).random
        self._nouns = self._words(240, 2)
        self._verbs = self._words(90, 2)
        self._adjectives = self._words(120, 2)
        self._places = [word.capitalize() for word in self._words(50, 3)]
        self._people = [word.capitalize() for word in self._words(70, 2)]

    def _below(self, n: int) -> int:
        return int(self._chance() * n)

    def _any(self, words: Sequence[str]) -> str:
        return words[self._below(len(words))]

    def _often(self, words: Sequence[str]) -> str:
        """Word k with probability about 1/k: n^u is log-uniform on [1, n)."""
        return words[int(len(words) ** self._chance()) - 1]

    def _words(self, count: int, syllables: int) -> list[str]:
        words: dict[str, None] = {}
        while len(words) < count:
            parts = 1 + self._below(syllables)
            word = "".join(self._any(_ONSETS) + self._any(_VOWELS) for _ in range(parts)) + self._any(_CODAS)
            if len(word) > 2:
                words[word] = None
        return list(words)

    def _noun_phrase(self, plural: bool) -> str:
        adjective = self._often(self._adjectives) + " " if self._chance() < 0.5 else ""
        noun = self._often(self._nouns)
        return f"the {adjective}{noun}s" if plural else f"the {adjective}{noun}"

    def _clause(self, depth: int = 0) -> str:
        """Subject, verb that agrees with it, object; maybe with a clause in brackets or after a relative pronoun."""
        plural = self._chance() < 0.4
        subject = self._noun_phrase(plural) if self._chance() < 0.8 or plural else self._often(self._people)
        if depth < 2 and self._chance() < 0.15:
            subject += f" ({self._clause(depth + 1)})"
        elif depth < 2 and self._chance() < 0.15:
            subject += f", which {self._verb(plural)} {self._noun_phrase(self._chance() < 0.4)},"
        return f"{subject} {self._verb(plural)} {self._noun_phrase(self._chance() < 0.4)}"

    def _verb(self, plural: bool) -> str:
        return self._often(self._verbs) + ("" if plural else "es")

    def _sentence(self) -> str:
        kind = self._chance()
        if kind < 0.55:
            text = self._clause()
        elif kind < 0.70:
            text = f"in {self._often(self._places)}, {self._clause()}"
        elif kind < 0.80:
            text = f'{self._often(self._people)} said: "{self._clause()}"'
        elif kind < 0.90:
            a, b = self._below(50), self._below(50)
            text = f"{a} {self._often(self._nouns)}s and {b} more make {a + b}"
        else:
            text = f"on {1 + self._below(28)} {self._any(_MONTHS)} {1700 + self._below(300)} {self._clause()}"
        return text[0].upper() + text[1:] + "."

    def article(self) -> str:
        place = self._often(self._places)
        paragraphs = (" ".join(self._sentence() for _ in range(2 + self._below(5))) for _ in range(1 + self._below(3)))
        return f"== {place} ==\n" + "\n".join(paragraphs) + "\n\n"


def generate(characters: int = CHARACTERS) -> str:
    """The first `characters` characters of the almanac.

    >>> generate(2_000) == generate(3_000)[:2_000]
    True
    """
    if characters < 1:
        raise ValueError(f"`characters` must be >= 1, for example {CHARACTERS}; got {characters!r}")
    almanac, articles, length = _Almanac(), [], 0
    while length < characters:
        articles.append(almanac.article())
        length += len(articles[-1])
    return "".join(articles)[:characters]
