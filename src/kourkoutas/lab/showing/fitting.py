"""Tables for a console that never break a number: one too wide for the console goes on below, its first column again.

width of a column ≥ its longest number and the longest word of its head
width of a table = Σ widths + 3·(columns - 1) + 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

BETWEEN, EDGES = 3, 2  # characters between columns, and at both ends
NAME, WORDS = 26, 14  # to which a name or words may be folded


class Fitting:
    """A table of text: names to the left, numbers to the right; columns in `words` hold sentences, to the left too."""

    def __init__(
        self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]] = (), words: Sequence[str] = ()
    ) -> None:
        self.title, self.head, self.rows = title, tuple(head), list[tuple[str, ...]]()
        self._words = {at for at, name in enumerate(head) if name in words}
        for row in rows:
            self.add_row(*row)

    def add_row(self, *cells: str) -> None:
        if len(cells) != len(self.head):
            raise ValueError(f"a row of this table has {len(self.head)} cells, {', '.join(self.head)}; got {cells}")
        self.rows.append(cells)

    def _wanted(self, at: int) -> int:
        return max(len(self.head[at]), *(len(row[at]) for row in self.rows), 1)

    def _least(self, at: int) -> int:
        word = max(map(len, self.head[at].split()), default=1)
        cell = max((len(row[at]) for row in self.rows), default=0)
        return max(word, min(cell, NAME) if at == 0 else min(cell, WORDS) if at in self._words else cell)

    def parts(self, width: int) -> Iterator[dict[int, int]]:
        """{column: its width} of each table to print, one below the other."""
        part, room = {0: self._least(0)}, width - EDGES - self._least(0)
        for at in range(1, len(self.head)):
            least = self._least(at)
            if room < least + BETWEEN and len(part) > 1:
                yield self._spread(part, room)
                part, room = {0: self._least(0)}, width - EDGES - self._least(0)
            part[at] = least
            room -= least + BETWEEN
        yield self._spread(part, room)

    def _spread(self, part: dict[int, int], room: int) -> dict[int, int]:
        """What room is left goes to heads, names and words that would wrap."""
        for at in part:
            more = max(0, min(room, self._wanted(at) - part[at]))
            part[at] += more
            room -= more
        return part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = Text(self.title) if self.title else None
        for part in self.parts(options.max_width):
            made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
            title = None
            for at, width in part.items():
                made.add_column(
                    Text(self.head[at]),
                    justify="left" if at == 0 or at in self._words else "right",
                    overflow="fold",
                    width=width,
                )
            for row in self.rows:
                made.add_row(*(Text(row[at]) for at in part))
            yield made
