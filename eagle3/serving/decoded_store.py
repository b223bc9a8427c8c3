"""What an interrupted `evaluate` has decoded, until it is finished.

A turn is kept under a key that hashes all that decides its answers and their speed: another draft, setting or machine
is another key. A finished evaluation removes its own, so that one that is asked for again measures again.
"""

import json
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3.acceptance import Answer, Decoded, Forward, Prompt, Step, Turn
from eagle3.digests import digest
from eagle3.lineage import draft_digests
from eagle3.params import Params
from eagle3.schemas import SCHEMA_VERSION
from eagle3.verifier import VerifierIdentity
from eagle3.workstore import RowStore, work_folder

#: Of the section `evaluate`, beside what a turn's own key holds.
DECIDING = {"max_new_tokens", "seed", "side_by_side"}


class DecodedStore:
    """Turns that engines of one dtype sampled at one temperature."""

    def __init__(self, rows: RowStore, dtype: str, temperature: float):
        self._rows, self._kind = rows, [dtype, temperature]

    def get(self, turn: Turn) -> list[Decoded] | None:
        """What the arms made of the turn, in its order; None where it is not there."""
        kept = self._rows.get(self._key(turn))
        if kept is None:
            return None
        return [_decoded(turn, arm, told) for arm, told in zip(turn.arms, json.loads(kept), strict=True)]

    def take(self, turn: Turn) -> list[Decoded]:
        """The same, of a turn that is there."""
        found = self.get(turn)
        assert found is not None, turn
        return found

    def put(self, turn: Turn, decoded: list[Decoded]) -> None:
        """Keep what the arms made of the turn, in its order."""
        self._rows.put(self._key(turn), json.dumps([_told(batch) for batch in decoded]).encode())

    def _key(self, turn: Turn) -> str:
        setting, prompts = asdict(turn.setting), [[prompt.prompt_id, prompt.ids] for prompt in turn.prompts]
        return digest([*self._kind, setting, turn.arms, turn.number, prompts])


@contextmanager
def evaluation_rows(identity: VerifierIdentity, draft: Path, params: Params) -> Iterator[RowStore]:
    """What is kept of one evaluation; removed at the end of the block, unless that is an error.

    One evaluation at a time, because speed is measured too; see work_folder for what another one does.
    """
    key = digest(
        [
            SCHEMA_VERSION,
            "evaluate",
            identity.digest,
            draft_digests(draft),
            params.verifier.model_dump(),
            params.engine.model_dump(),
            params.evaluate.model_dump(include=DECIDING),
            platform.node(),
        ]
    )
    with work_folder("evaluate") as stage:
        folder = stage / key[:16]
        folder.mkdir(exist_ok=True)
        with RowStore(folder / "decoded.sqlite") as rows:
            yield rows
        shutil.rmtree(folder)


def _told(decoded: Decoded) -> dict[str, Any]:
    """A batch without its prompts, as JSON has it."""
    return {
        "answers": [
            {
                "output_ids": answer.output_ids,
                "finish_reason": answer.finish_reason,
                "seconds": answer.seconds,
                "steps": [asdict(step) for step in answer.steps],
            }
            for answer in decoded.answers
        ],
        "forwards": [asdict(forward) for forward in decoded.forwards],
        "counters": decoded.counters,
    }


def _decoded(turn: Turn, arm: str, told: dict[str, Any]) -> Decoded:
    def answer(prompt: Prompt, fields: dict[str, Any]) -> Answer:
        steps = [Step(**step) for step in fields.pop("steps")]
        return Answer(prompt=prompt, setting=turn.setting, arm=arm, batch=turn.number, steps=steps, **fields)

    answers = [answer(prompt, fields) for prompt, fields in zip(turn.prompts, told["answers"], strict=True)]
    return Decoded(turn.setting, arm, answers, [Forward(**fields) for fields in told["forwards"]], told["counters"])
