"""Names for tags: whatever a variable is called, its tag is printable and its own."""

from __future__ import annotations


def printable(name: str) -> str:
    r"""Return ``name`` with everything that cannot be seen written as an escape.

    Control characters, line breaks, direction marks and lone surrogates would break a tag, a
    table or the reader's eye; letters of every script stay.

    >>> printable("a\nb/é")
    'a\\nb/é'
    """
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name
    )
    return shown or "(unnamed)"


class NameRegistry:
    """Hands out one printable name per key, never the same name to two keys."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._taken: set[str] = set()

    def name(self, prefix: str, raw: str) -> str:
        """Return the name of ``raw`` under ``prefix``, the same one every time.

        Args:
            prefix: An optimizer's label, or ``""`` for none.
            raw: The variable's path, any text.

        Returns:
            ``"<prefix>/<raw>"``, printable; with ``~2``, ``~3``... where that is taken.
        """
        key = (prefix, raw)
        if key not in self._names:
            wanted = printable(f"{prefix}/{raw}" if prefix else raw)
            name, number = wanted, 1
            while name in self._taken:
                number += 1
                name = f"{wanted}~{number}"
            self._taken.add(name)
            self._names[key] = name
        return self._names[key]
