"""Conversations side by side: one live session and parked ones, swapped by reference.

Knows when a cached prefix may be reused, and which session is given up. Does not know models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from turbospark.cache.prefix import PrefixRecord
from turbospark.cache.state import LayerStates, Snapshot

MAX_SNAPSHOTS = 4


@dataclass(eq=False)
class Session:
    """All state of one conversation; parked, swapped, saved and reset as a whole."""

    states: LayerStates
    record: PrefixRecord = field(default_factory=PrefixRecord)
    snapshots: list[Snapshot] = field(default_factory=list)
    parked_at: int = 0
    loaded: bool = False
    """Whether it came from a file and has not been forgotten since."""

    def reset(self) -> None:
        """Forget the conversation; buffers stay."""
        self.states.reset()
        self.record.clear()
        self.snapshots.clear()
        self.loaded = False

    def rewind(self, to: int) -> None:
        """Forget positions >= `to`."""
        self.states.rewind(to)
        self._forget(to)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`."""
        self.states.restore(snapshot)
        self._forget(snapshot.position)

    def keep_snapshot(self) -> None:
        """Remember this point of a recurrent model; of too many the least missed is dropped."""
        if not self.states.recurrent or self.states.position == 0:
            return
        if self.snapshots and self.snapshots[-1].position == self.states.position:
            return
        self.snapshots.append(self.states.snapshot())
        if len(self.snapshots) > MAX_SNAPSHOTS:
            # The two newest are where the next prompt is likeliest to part from this one. Of the
            # others the one with the closest neighbours is missed least.
            at = [0, *(s.position for s in self.snapshots)]
            gaps = [at[i + 2] - at[i] for i in range(len(at) - 3)]
            del self.snapshots[gaps.index(min(gaps))]

    def _forget(self, to: int) -> None:
        self.record.rewind_to(to)
        self.snapshots = [s for s in self.snapshots if s.position <= to]

    @property
    def nbytes(self) -> int:
        """Buffers plus the states that snapshots keep alive."""
        pinned = sum(s.nbytes for s in self.snapshots)
        return self.states.nbytes + pinned


@dataclass(frozen=True)
class Reuse:
    """How much of a prompt a session already holds, and how to get there."""

    kept: int
    snapshot: Snapshot | None = None


NOTHING = Reuse(0)


class SessionPool:
    """`slots` sessions allocated at once; `live` is the one the model runs on."""

    def __init__(self, slots: int, allocate: Callable[[], LayerStates]) -> None:
        self.live = Session(allocate())
        self.parked = [Session(allocate()) for _ in range(slots - 1)]
        self.ticks = 0

    @property
    def sessions(self) -> list[Session]:
        return [self.live, *self.parked]

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.sessions)

    def try_reuse(self, ids: Sequence[int]) -> int:
        """Make the session that holds most of `ids` live and rewind it; tokens kept, 0 if none.

        Refusing is always safe: the prompt is then fed in full.
        """
        common = self.live.record.common_prefix(ids)
        best, reuse = self.live, self._reuse(self.live, ids)
        for session in self.parked:
            if session.record.common_prefix(ids) <= common:
                continue  # a tie keeps the live one
            offer = self._reuse(session, ids)
            if offer.kept > reuse.kept:
                best, reuse = session, offer
        if reuse.kept == 0:
            return 0
        if best is not self.live:
            self._swap(best)
        if reuse.snapshot is not None:
            best.restore(reuse.snapshot)
        elif reuse.kept < best.states.position:
            best.rewind(reuse.kept)
        return reuse.kept

    def start(self) -> bool:
        """A conversation that reuses nothing: park the live one, take over the least recently
        parked. True when that one held a conversation, which is now lost.
        """
        worthless = self.live.states.position == 0 or self.live.record.tainted
        if not self.parked or worthless:
            self.live.reset()
            return False
        oldest = min(self.parked, key=lambda s: s.parked_at)
        evicted = oldest.states.position > 0
        self._swap(oldest)
        oldest.reset()
        return evicted

    def clear(self) -> None:
        """Forget every conversation."""
        for session in self.sessions:
            session.reset()

    def _reuse(self, session: Session, ids: Sequence[int]) -> Reuse:
        keep = session.record.common_prefix(ids)
        back = session.states.position - keep
        if keep == 0 or back < 0:
            return NOTHING
        if back == 0:
            return Reuse(keep)
        point: Snapshot | None = None
        if session.states.recurrent:
            points = [s for s in session.snapshots if s.position <= keep]
            if not points or session.states.restore_refusal(points[-1]) is not None:
                return NOTHING
            point = points[-1]
            keep, back = point.position, session.states.position - point.position
        elif session.states.rewind_refusal(keep) is not None:
            return NOTHING
        # A shallow match (two chats that share only a header) must not destroy the live session.
        if self.parked and session is self.live and back > keep:
            return NOTHING
        return Reuse(keep, point)

    def _swap(self, session: Session) -> None:
        self.ticks += 1
        self.live.parked_at = self.ticks
        self.parked[self.parked.index(session)] = self.live
        self.live = session
