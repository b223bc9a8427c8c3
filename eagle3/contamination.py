"""Do training prompts repeat what a draft is evaluated on: runs of words that both have.

Text is compared as lower-case words, without punctuation and spacing. A training prompt is listed when it holds at
least a given share of the runs of n words of an evaluation prompt; one of fewer than n words must be there whole.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from eagle3.tables import Row

WORD = re.compile(r"\w+")
EXCERPT = 200  # characters of each prompt in the list


def runs_of_words(text: str, words: int) -> set[int]:
    """Hashes of every run of so many words; of the whole text where it has fewer, none where it has none."""
    found = WORD.findall(text.lower())
    if not found:
        return set()
    return {hash(tuple(found[i : i + words])) for i in range(max(1, len(found) - words + 1))}


def asked(row: Row) -> str:
    """What the user says in a row of schemas.PROMPTS."""
    return "\n".join(message["content"] for message in row["messages"] if message["role"] == "user")


@dataclass
class Contamination:
    """Looks for evaluation prompts in others. Memory: the runs of the evaluation prompts.

    words: of a run. share: from which share of an evaluation prompt's runs on a prompt is listed.
    """

    words: int
    share: float
    _runs: list[int] = field(default_factory=list)  # how many each evaluation prompt has
    _rows: list[tuple[str, str]] = field(default_factory=list)  # its id, and the beginning of its text
    _holders: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # run -> evaluation prompts

    def learn(self, evaluation: Iterable[Row]) -> None:
        """Take in the evaluation prompts, rows of schemas.PROMPTS."""
        for row in evaluation:
            runs = runs_of_words(asked(row), self.words)
            for run in runs:
                self._holders[run].append(len(self._rows))
            self._runs.append(len(runs))
            self._rows.append((row["prompt_id"], asked(row)[:EXCERPT]))

    def overlaps(self, rows: Iterable[Row]) -> Iterator[Row]:
        """One row of schemas.CONTAMINATION for every prompt that holds enough of an evaluation prompt."""
        for row in rows if self._holders else ():
            text = asked(row)
            shared: Counter[int] = Counter()
            for run in runs_of_words(text, self.words):
                shared.update(self._holders.get(run, ()))
            for number, count in sorted(shared.items()):
                share = count / self._runs[number]
                if share >= self.share:
                    name, beginning = self._rows[number]
                    yield {
                        "prompt_id": row["prompt_id"],
                        "split": row["split"],
                        "source": row["source"],
                        "evaluation_prompt_id": name,
                        "share": share,
                        "text": text[:EXCERPT],
                        "evaluation_text": beginning,
                    }
