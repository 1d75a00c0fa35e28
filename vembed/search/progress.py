"""How far an encoding has come, a line every few seconds."""

from __future__ import annotations

import logging
import time

_log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Say every few seconds how far the encoding has come."""

    def __init__(self, num_documents: int) -> None:
        self._num_documents = num_documents
        self._started = self._last_line = time.perf_counter()
        self.done = self._skipped = 0

    def skip(self, num_documents: int) -> None:
        """Count documents that an earlier start encoded."""
        self.done += num_documents
        self._skipped += num_documents

    def add(self, num_documents: int) -> None:
        """Count the next documents."""
        self.done += num_documents
        now = time.perf_counter()
        if now - self._last_line > SECONDS_BETWEEN_LINES:
            rate = (self.done - self._skipped) / (now - self._started)
            done, of = (f"{number:,}" for number in (self.done, self._num_documents))
            _log.info("encoded %s of %s documents, %.0f a second", done, of, rate)
            self._last_line = now
