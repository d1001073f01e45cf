"""Reading rows here and there from the shards of a log: the files stay open between reads."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from koffline.data.disk.log import naming
from koffline.data.row_block import RowBlock

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions

# Opening a file takes milliseconds, a read from an open one a fraction of that.
_MOST_OPEN = 32


class ShardReader:
    """``read_rows`` of a log, from at most ``most_open`` open files; for one thread at a time."""

    def __init__(self, log: LazyTransitions, most_open: int = _MOST_OPEN) -> None:
        self._log, self._most_open = log, most_open
        self._open: OrderedDict[int, tuple[Any, contextlib.ExitStack]] = OrderedDict()

    def read_rows(self, shard: int, start: int, stop: int) -> RowBlock:
        """Rows start … stop − 1 of one shard. Raises DataError naming the shard."""
        opened = self._opened(shard)
        with naming(self._log.shards[shard].name):
            return self._log.block_of(opened, shard, start, stop)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            _, (_, stack) = self._open.popitem()
            stack.close()

    def _opened(self, shard: int) -> Any:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard][0]
        if len(self._open) >= self._most_open:
            _, (_, oldest) = self._open.popitem(last=False)
            oldest.close()
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(self._log.open_shard(shard))
            self._open[shard] = opened, stack.pop_all()
        return opened
