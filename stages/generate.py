"""Stage: the verifier answers every prompt. Run: python -m stages.generate PROMPTS VERIFIER RESPONSES METRICS PARAMS"""

from pathlib import Path

from eagle3.console import say
from eagle3.params import load_params
from eagle3.schemas import REJECTED, RESPONSES
from eagle3.serving.generation import Generation
from eagle3.serving.references import References
from eagle3.stage import run_stage
from eagle3.tables import Account, write_metrics, write_parts, write_table
from eagle3.verifier import read_identity
from eagle3.workstore import RowStore, work_folder


def generate(prompts: Path, verifier: Path, responses: Path, metrics: Path, params_path: Path) -> None:
    """`prompts`/{train,validation}.parquet, identity `verifier` -> `responses` (parts), counts in `metrics`.

    Finished answers survive any end of this stage in the work store; running it again asks for the missing ones only.
    With generate.reference_share: 1 the answers are those of the prompts' sources, and nobody is asked.
    Raises ValueError when the server fails or stalls, or more rows than generate.max_failed_share have no answer.
    """
    params = load_params(params_path)
    account = Account("generate", params.generate.max_failed_share, "max_failed_share")
    identity = read_identity(verifier)
    if params.generate.reference_share == 1:
        given = References(prompts, params.generate, identity)
        write_parts(responses, given.rows(account), RESPONSES, "prompt_id", account)
        write_metrics(metrics, account.settle() | given.metrics())
        return
    with work_folder("generate") as folder, RowStore(folder / "responses.sqlite") as store:
        own = params.generate
        run = Generation(prompts, params.verifier, params.engine, params.reasoning, own, identity, store)
        run.find_engine()
        run.ask_missing()
        try:
            write_parts(responses, run.rows(account), RESPONSES, "prompt_id", account)
        except ValueError:  # too many failed: there will be no out, but a list of them
            write_table(folder / "rejected.parquet", account.rejected, REJECTED)
            say(f"generate: rows without an answer are listed in {folder / 'rejected.parquet'}")
            raise
    write_metrics(metrics, account.settle() | run.metrics())


if __name__ == "__main__":
    run_stage(generate)
