"""Stage: prompt sources of any shape to one table per split. Run: python -m stages.prompts OUT METRICS PARAMS"""

from collections.abc import Iterator
from pathlib import Path

from eagle3.console import Progress, say
from eagle3.contamination import Contamination
from eagle3.params import PromptsParams, load_params
from eagle3.prompts import Collector, count_metrics, write_splits
from eagle3.schemas import CONTAMINATION, PROMPTS, REJECTED
from eagle3.stage import run_stage
from eagle3.tables import Account, Row, read_table, write_metrics, write_table


def prompts(prompts: Path, metrics: Path, params_path: Path) -> None:
    """The sources of params.yaml -> `prompts`/{train,validation,evaluation}.parquet, counts in `metrics`.

    Beside them are rejected.parquet and contamination.parquet; other files in the folder `prompts` stay as they are.
    Raises ValueError when a source is unusable or too many of its rows are.
    """
    params = load_params(params_path).prompts
    account = Account("prompts", params.max_rejected_share)
    collector = Collector(params, account)
    total = sum(Path(source.path).stat().st_size for source in params.sources if Path(source.path).is_file())

    def shown() -> Iterator[Row]:
        with Progress("prompts", total, "bytes") as progress:
            for row in collector.rows():
                progress.advance(collector.bytes_read - progress.done, f"{account.rows_out:,} prompts")
                yield row
        write_table(prompts / "rejected.parquet", account.rejected, REJECTED)  # stays when too many were rejected
        account.settle()

    counted = count_metrics(write_splits(prompts, shown()))
    for split, count in counted["splits"].items():
        if not count:
            say(f"prompts: the {split} split is empty; add prompts or raise its share in params.yaml")
    write_metrics(metrics, account.settle() | counted | contamination(prompts, params))


def contamination(prompts: Path, params: PromptsParams) -> Row:
    """List the training prompts that repeat evaluation prompts, and count them."""
    search = Contamination(params.contamination_words, params.contamination_share)
    search.learn(read_table(prompts / "evaluation.parquet", PROMPTS))
    repeats: set[str] = set()
    repeated: set[str] = set()

    def found() -> Iterator[Row]:
        for split in ("train", "validation"):
            for row in search.overlaps(read_table(prompts / f"{split}.parquet", PROMPTS)):
                repeats.add(row["prompt_id"])
                repeated.add(row["evaluation_prompt_id"])
                yield row

    listed = prompts / "contamination.parquet"
    write_table(listed, found(), CONTAMINATION)
    if repeats:
        say(
            f"prompts: {len(repeats):,} training prompts repeat {len(repeated):,} evaluation prompts, so evaluation "
            f"flatters the draft; {listed} lists them, take them out of one of the sources"
        )
    return {"contamination": {"training_prompts": len(repeats), "evaluation_prompts": len(repeated)}}


if __name__ == "__main__":
    run_stage(prompts)
