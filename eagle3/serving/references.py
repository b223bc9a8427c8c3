"""`generate.reference_share`: the dataset's own answers in place of the verifier's. With 1, nobody is asked.

They show why asking matters: a draft that learnt from them predicts people and not the verifier.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.digests import digest, fraction
from eagle3.params import GenerateParams
from eagle3.schemas import PROMPTS
from eagle3.serving.answers import pack_reference, response_row
from eagle3.tables import Account, Row, read_table
from eagle3.verifier import VerifierIdentity

ENGINE = "reference"
SPLITS = ("train", "validation")


def read_prompts(folder: Path) -> Iterator[Row]:
    """The prompts that are to be answered, in order."""
    for split in SPLITS:
        yield from read_table(folder / f"{split}.parquet", PROMPTS)


def takes_reference(prompt: Row, params: GenerateParams) -> bool:
    """Whether a prompt is among those that take their reference answer: a function of its text alone."""
    share = params.reference_share
    return bool(share and prompt["reference"]) and fraction(digest(["reference", prompt["prompt_id"]])) < share


def reference_row(prompt: Row, params: GenerateParams, identity: VerifierIdentity) -> Row:
    """The row of schemas.RESPONSES, without ids, that holds a prompt's reference answer."""
    unit = pack_reference(prompt["reference"])
    return response_row(prompt, 0, unit, params.chat_template_kwargs, identity.digest, ENGINE)


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
            account.rows_out += 1
            self.counts.update({"references": 1, "characters": len(prompt["reference"])})
            yield reference_row(prompt, self.params, self.identity)

    def metrics(self) -> Row:
        """Sums over the rows."""
        return {"references": self.counts["references"], "reference_characters": self.counts["characters"]}
