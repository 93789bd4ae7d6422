"""Which chunks an engine could load from Redis, for its background prober."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .redis_ask import Question, ask
from .redis_layout import Names
from .redis_servers import Servers
from .redis_wire import ServerError, command, raise_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .redis_url import RedisSettings


class RedisLookup:
    """Asks for the records of all ranks at once. Thread-safe; `held` blocks.

    A chunk's records lie on one node whatever their rank, so one ``EXISTS`` asks for
    all of them, and all chunks of a call go out together.

    Args:
        settings: server and manners; nothing connects before the first call.
        namespace: 16 bytes.
        n_ranks: ranks that must each have a record.
    """

    def __init__(self, settings: RedisSettings, namespace: bytes, n_ranks: int) -> None:
        self._where = settings.safe_url
        self._servers = Servers(settings)
        self._names = [Names(settings.prefix, namespace, rank) for rank in range(n_ranks)]

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which chunks every rank has a record of.

        One round trip for up to 4096 chunks (one to every node of a cluster, side by side).
        What a node that does not answer holds is not there, as long as others answer.

        Raises:
            TierUnavailable: no answer in time.
        """
        questions = []
        for key in keys:
            heads = [names.head(key) for names in self._names]
            questions.append(Question(heads[0], command(b"EXISTS", *heads)))
        answers = ask(self._servers, questions, some=True)
        for answer in answers:
            if isinstance(answer, ServerError):
                raise_error(answer, self._where)
        return [answer == len(self._names) for answer in answers]

    def close(self) -> None:
        """Close the connections; a call under way raises. Does not wait. Idempotent."""
        self._servers.close()
