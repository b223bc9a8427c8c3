"""`generate.responses: reference`: the dataset's own answers in place of the verifier's. Nobody is asked.

They show why asking matters: a draft that learnt from them predicts people and not the verifier.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.params import GenerateParams
from eagle3.serving.answers import pack_reference, response_row
from eagle3.serving.generation import read_prompts
from eagle3.tables import Account, Row
from eagle3.verifier import VerifierIdentity

ENGINE = "reference"


@dataclass
class References:
    """The answers that come with the prompts in `folder`."""

    folder: Path  # with train.parquet and validation.parquet
    params: GenerateParams
    identity: VerifierIdentity
    counts: Counter[str] = field(default_factory=Counter)

    def rows(self, account: Account) -> Iterator[Row]:
        """Rows of schemas.RESPONSES without ids; prompts without an answer go to the account."""
        for prompt in read_prompts(self.folder):
            account.rows_in += 1
            if not prompt["reference"]:
                account.reject(prompt["prompt_id"], "no reference answer", "see prompts.sources[].reference_column")
                continue
            unit, kwargs = pack_reference(prompt["reference"]), self.params.chat_template_kwargs
            account.rows_out += 1
            self.counts.update({"references": 1, "characters": len(prompt["reference"])})
            yield response_row(prompt, 0, unit, kwargs, self.identity.digest, ENGINE)

    def metrics(self) -> Row:
        """Sums over the rows."""
        return {"references": self.counts["references"], "reference_characters": self.counts["characters"]}
