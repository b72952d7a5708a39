"""Optimistic concurrency for people: a change is made to the version that its author has seen, or not at all.

The comparison happens under the row lock of the changed entity, where the version can't move any more.
"""

import re
from dataclasses import dataclass
from typing import Final, Self

_TAGS: Final = re.compile(r'\s*(W/)?"([\x21\x23-\x7e]*)"\s*(?:,|$)')


class PreconditionFailed(Exception):
    """The entity is not at the version that the caller has seen."""


class PreconditionUnreadable(ValueError):
    """If-Match is neither `*` nor a list of entity tags."""


def entity_tag(version: int) -> str:
    """Return the ETag of an entity's version."""
    return f'"{version}"'


@dataclass(frozen=True, slots=True)
class Precondition:
    """What a caller asks of an entity before changing it.

    Attributes:
        tags: strong entity tags, one of which must be the entity's; None: any version will do.
    """

    tags: frozenset[str] | None = None

    @classmethod
    def parse(cls, header: str | None) -> Self:
        """Read the header If-Match (None: it wasn't sent). Weak tags never match (RFC 9110, 13.1.1).

        Raises:
            PreconditionUnreadable: it is malformed.
        """
        if header is None or header.strip() == "*":
            return cls()
        tags, position = set(), 0
        while position < len(header) or not header:
            found = _TAGS.match(header, position)
            if found is None:
                raise PreconditionUnreadable('If-Match is * or a list of quoted entity tags, such as "7"')
            if not found[1]:
                tags.add(f'"{found[2]}"')
            position = found.end()
        return cls(frozenset(tags))

    def check(self, version: int) -> None:
        """Compare with the version of the locked entity.

        Raises:
            PreconditionFailed: it is another one.
        """
        if self.tags is not None and entity_tag(version) not in self.tags:
            raise PreconditionFailed(f"the entity is at version {version}; read it again and decide anew")


ANY_VERSION: Final = Precondition()
"""No precondition."""
