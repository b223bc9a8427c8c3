"""Stage: prompt sources of any shape to one table per split. Run: python -m stages.prompts OUT METRICS PARAMS"""

from collections.abc import Iterator
from pathlib import Path

from eagle3.console import Progress, say
from eagle3.params import load_params
from eagle3.prompts import Collector, count_metrics, write_splits
from eagle3.schemas import REJECTED
from eagle3.stage import run_stage
from eagle3.tables import Account, Row, write_metrics, write_table


def prompts(prompts: Path, metrics: Path, params_path: Path) -> None:
    """The sources of params.yaml -> `prompts`/{train,validation,evaluation,rejected}.parquet, counts in `metrics`.

    Other files in the folder `prompts` stay as they are. Raises ValueError when a source is unusable or too many of
    its rows are.
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
    write_metrics(metrics, account.settle() | counted)


if __name__ == "__main__":
    run_stage(prompts)
