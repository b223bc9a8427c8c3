"""The verifier's states for answers that were just decoded: recorded as `extract` does, in a folder that goes again."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from eagle3.acceptance import Answer, Row
from eagle3.digests import digest_tokens
from eagle3.hidden_states import ShardStore, TokenTable, missing_shards, plan_shards, require_agreement
from eagle3.recording import Recording, record
from eagle3.schemas import TOKENS
from eagle3.shards import Sample, open_shard
from eagle3.tables import Account, write_parts
from eagle3.workstore import work_root


@contextmanager
def answer_states(answers: Iterable[Answer], recording: Recording) -> Iterator[Iterator[tuple[Answer, Sample]]]:
    """Greedy answers with their samples. Raises ValueError when the states do not explain the answers."""
    listed = list(answers)
    work_root().mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="evaluate-", dir=work_root()) as folder:
        account = Account("evaluate", 0)
        rows = [_row(answer) for answer in listed]
        account.rows_in = account.rows_out = len(rows)
        write_parts(Path(folder) / "tokens", rows, TOKENS, "sample_digest", account)
        table = TokenTable(Path(folder) / "tokens", recording.verifier.max_model_len)
        shards = Path(folder) / "shards"
        shards.mkdir()
        with ShardStore(shards) as store:
            plan = plan_shards(table, recording.identity, recording.extract, Account("evaluate", 0))
            keys = {shard.key for shard in plan}
            missing = missing_shards(store, plan, keys, table, recording.identity, recording.extract)
            facts, _ = record(store, missing, sum(shard.tokens for shard in plan), recording, "estimate")
            for shard in plan:
                require_agreement(shard.name, facts[shard.key].problems, facts[shard.key].agreement, recording.extract)
            opened = (open_shard(store.path(shard.key)) for shard in plan)
            samples = (shard.sample(place) for shard in opened for place in range(len(shard)))
            yield zip(listed, samples, strict=True)


def _row(answer: Answer) -> Row:
    """One row of schemas.TOKENS, of which recording reads no more than is filled in."""
    prompt, output = answer.prompt.ids, answer.output_ids
    ids = np.asarray([*prompt, *output], np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    return dict.fromkeys(TOKENS.names) | {
        "sample_id": answer.prompt.prompt_id,
        "sample_digest": digest_tokens(ids, mask),
        "source": answer.prompt.source,
        "category": answer.prompt.category,
        "split": "evaluation",
        "input_ids": ids,
        "loss_mask": mask,
        "prompt_length": len(prompt),
        "length": len(ids),
        "greedy": True,
        "rebuilt": False,
    }
