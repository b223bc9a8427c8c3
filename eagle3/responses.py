"""Reading data/responses: ids fast, text only where it is needed."""

import heapq
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3.digests import digest
from eagle3.schemas import RESPONSES
from eagle3.tables import Row, check_part, list_parts, read_parts, read_table

TEXT = ("messages", "reasoning", "content")
UNUSED = ("reference",)
#: The columns that rows with ids need, and those that the text route needs.
WITH_IDS = pa.schema([field for field in RESPONSES if field.name not in (*TEXT, *UNUSED)])
WITH_TEXT = pa.schema([field for field in RESPONSES if field.name not in UNUSED])


def read_responses(folder: Path) -> Iterator[Row]:
    """The rows, in order, ids as arrays; with text in the parts that have a row without ids."""
    for part in list_parts(folder):
        check_part(part)
        yield from read_table(part.path, WITH_TEXT if _lacks_ids(part.path) else WITH_IDS, arrays=True)


def _lacks_ids(path: Path) -> bool:
    """Whether a row of a part may have no ids, from the counts in the file's footer."""
    with pq.ParquetFile(path) as file:
        names = [path.split(".")[0] for path in (column.path for column in file.schema)]
        places = [place for place, name in enumerate(names) if name in ("prompt_token_ids", "output_token_ids")]
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        found = [group.column(place).statistics for group in groups for place in places]
    return any(statistics is None or statistics.null_count != 0 for statistics in found)


class Picked:
    """`count` answers spread over a table: those with the smallest digests, whatever the order of the rows."""

    def __init__(self, count: int):
        self._count = count
        self._heap: list[tuple[int, str, int]] = []

    def offer(self, prompt_id: str, sample: int) -> None:
        """Take the answer if its digest is among the smallest so far."""
        if self._count:
            entry = (-int(digest([prompt_id, sample]), 16), prompt_id, sample)
            (heapq.heappush if len(self._heap) < self._count else heapq.heappushpop)(self._heap, entry)

    def read(self, folder: Path) -> Iterator[Row]:
        """The rows of the answers taken, in order, with text."""
        names = {(prompt_id, sample) for _, prompt_id, sample in self._heap}
        if names:
            prompts = {prompt_id for prompt_id, _ in names}
            for row in read_parts(folder, WITH_TEXT, arrays=True, only=("prompt_id", prompts)):
                if (row["prompt_id"], row["sample"]) in names:
                    yield row
