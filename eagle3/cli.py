"""The `eagle3` command: what the pipeline made, whether it is whole, what it takes of the disk, how to serve it."""

import json
import time
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from eagle3.card import usual_tokens
from eagle3.comparison import as_lines as comparison_lines
from eagle3.comparison import compare as compare_sides
from eagle3.comparison import data_that_differ, find_side, settings_that_differ
from eagle3.console import guarded, say, visible
from eagle3.doctor import examine
from eagle3.estimate import as_json, as_lines, estimate_run
from eagle3.findings import conclusion
from eagle3.housekeeping import SHARED, freed, no_stage_running, remove, survey, table
from eagle3.lineage import DRAFT, check_draft, read_lineage
from eagle3.lineage_view import ask_lineage
from eagle3.new_project import Wanted, start_project, usable_gpus, what_was_made
from eagle3.pager import Color, print_paged, wants_color
from eagle3.params import Params, load_params
from eagle3.params_text import parse_setting
from eagle3.probe import probe_rates
from eagle3.remote_check import verify_remote
from eagle3.report.build import project_report
from eagle3.report.page import render
from eagle3.sample_view import View, Words, matching_samples, one_sample, show_sample
from eagle3.serving.serve import (
    choose_num_speculative_tokens,
    choose_port,
    printable,
    serve_words,
)
from eagle3.serving.serve import serve as serve_forever
from eagle3.serving.speculative import settings
from eagle3.sharing import Form, evaluation_of, export_shared, full_card, import_checkpoint
from eagle3.tables import count_parts
from eagle3.tracked import open_tracked
from eagle3.verification import IDENTITY, Fault, verify_places
from eagle3.verifier import load_tokenizer, locate_verifier, read_identity
from eagle3.workload import PROMPTS_OUT, Asked
from eagle3.workstore import write_file

METRICS = Path("data/metrics")
TOKENS = Path("data/tokens")

ParamsPath = Annotated[Path, typer.Option("--params", help="The settings of the run.")]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="EAGLE-3 draft models trained on what the verifier itself writes. The pipeline itself is run by `dvc repro`.",
)
work = typer.Typer(no_args_is_help=True, help="The work store (.work), where long stages keep what is finished.")
app.add_typer(work, name="work")

RateOption = Annotated[
    float | None,
    typer.Option(min=1e-9, metavar="TOKENS_PER_S", help="Of all GPUs together, in place of the last run's."),
]
OlderThan = Annotated[float, typer.Option(min=0, metavar="DAYS", help="What was written since stays.")]


@app.command()
@guarded
def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    verifier: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="A local directory, a hub id or a bundled one; without it that of the demo."
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="JSONL or Parquet; may be given several times. Without it those of the demo."
        ),
    ] = None,
    text_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where the prompt is, if no messages or conversations are there.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub id; it is pinned to the commit that it is now.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-S", metavar="KEY=VALUE", help="Any setting of params.yaml, e.g. train.epochs=3."),
    ] = None,
) -> None:
    """Start a project around a verifier and prompts: dvc.yaml, params.yaml with what the verifier says of itself, git
    and DVC. `dvc repro` then runs it."""
    given = dict(map(parse_setting, settings or []))
    made = start_project(folder, Wanted(verifier, revision, prompts or [], text_column, given), usable_gpus())
    typer.echo("\n".join(what_was_made(made)))


@app.command()
@guarded
def doctor(params_path: ParamsPath = Path("params.yaml")) -> None:
    """Look whether everything is there that a run needs: environment, settings, disks, remote, verifier. Each finding
    has a remedy; exit 1 if one would stop a run. Takes seconds and starts nothing."""
    findings = []
    for finding in examine(params_path):
        findings.append(finding)
        typer.echo("\n".join(finding.lines))
    typer.echo(conclusion(findings))
    if any(finding.level == "stops" for finding in findings):
        raise typer.Exit(1)


@app.command()
@guarded
def summary(params_path: ParamsPath = Path("params.yaml")) -> None:
    """Show what the last `dvc repro` made: rows, tokens, acceptance length, speed-up, and how to serve the draft."""
    params = load_params(params_path)
    made = {
        name: _metrics(name) for name in ("prompts", "generate", "reconstruct_tokens", "extract", "train", "evaluate")
    }
    typer.echo("\n".join(summary_lines(made, params)))
    typer.echo("\nServe the verifier with this draft (--print shows the command for vLLM):\n\n  eagle3 serve")


@app.command()
@guarded
def inspect(
    folder: Annotated[str | None, typer.Argument(help=f"{TOKENS} unless given.", show_default=False)] = None,
    row: Annotated[
        str | None, typer.Argument(help="A number from 1, a sample id or its beginning; without it all.")
    ] = None,
    first: Annotated[int | None, typer.Option(min=1, help="At most so many samples.")] = None,
    source: Annotated[str | None, typer.Option(help="Only samples of this source.")] = None,
    category: Annotated[str | None, typer.Option(help="Only samples of this category.")] = None,
    truncated: Annotated[
        Literal["thinking", "answer"] | None, typer.Option(help="Only samples that the token budget cut off there.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="A line for each token: place, id, text.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Long samples whole.")] = False,
    color: Annotated[Color, typer.Option(help="auto: on a terminal, unless NO_COLOR is set.")] = "auto",
    params_path: ParamsPath = Path("params.yaml"),
) -> None:
    """Read samples of data/tokens: what is masked, the thinking, the answer, special tokens, what ended each part."""
    tokens, row = folder_and_row(folder, row)
    asked = {"source": source, "category": category, "truncated_in": truncated}
    wanted = {name: value for name, value in asked.items() if value is not None}
    if row is not None and (wanted or first):
        raise ValueError(
            f"row {row} is one sample; leave it out to choose by --first, --source, --category, --truncated"
        )
    total = count_parts(tokens)
    samples = iter([one_sample(tokens, row)]) if row is not None else matching_samples(tokens, wanted)
    params = load_params(params_path)
    if (writer := _written_by(tokens)) not in (None, params.verifier.model):
        named = params.verifier.model
        say(f"{tokens} was written by {writer}, but {params_path} names {named}, whose tokenizer reads it here")
    view = View(Words(load_tokenizer(params.verifier)), wants_color(color), ids, whole)
    print_paged(show_sample(number, total, sample, view) for number, sample in islice(samples, first))


@app.command()
@guarded
def compare(
    sides: Annotated[
        list[str],
        typer.Argument(metavar="A B [C]...", help="Folders, revisions or experiments; . is this project."),
    ],
    as_data: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False,
) -> None:
    """Is B better than A? Acceptance on the same prompts, with 95 % intervals (paired bootstrap) and a verdict for
    each category; and which params and which data differ."""
    if len(sides) < 2:
        raise ValueError("two sides at least, such as: eagle3 compare main my-experiment")
    found = [find_side(name) for name in sides]
    differences = compare_sides(found)
    if as_data:
        told = {"differences": [difference.row() for difference in differences]}
        typer.echo(json.dumps({**told, "params": settings_that_differ(found), "data": data_that_differ(found)}))
        return
    typer.echo("\n".join(comparison_lines(found, differences)))


@app.command()
@guarded
def report(
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("report.html"),
    against: Annotated[
        list[str] | None, typer.Option(help="Compare with this folder, revision or experiment; may be repeated.")
    ] = None,
    params_path: ParamsPath = Path("params.yaml"),
) -> None:
    """Write one page without network about the last evaluation: speed, where the draft wins and loses, training, data,
    lineage, and every answer token by token. (data/evaluation/report.html is the same without training and data.)"""
    params = load_params(params_path)
    sides = [find_side(name) for name in [".", *against]] if against else []
    differences = [difference.row() for difference in compare_sides(sides)] if sides else []
    write_file(out, render(project_report(Path(), params, differences)).encode())
    typer.echo(str(out))


@app.command()
@guarded
def verify(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="Everything unless given. With --remote: a remote's name."),
    ] = None,
    remote: Annotated[
        bool, typer.Option("--remote", help="Ask a remote (DVC's default one) for all that dvc.lock records.")
    ] = False,
    repair: Annotated[bool, typer.Option("--repair", help="With --remote: upload what it lacks.")] = False,
    read: Annotated[
        bool, typer.Option("--read", help="With --remote: download every object and compare its bytes.")
    ] = False,
) -> None:
    """Read every file again and compare it with the digests in the indexes, the lineage and dvc.lock; exit 1 if one
    differs, is missing or foreign. With --remote: are the objects there, and of the right size? Downloads nothing
    unless --read asks for it."""
    if remote:
        _verify_remote([str(place) for place in places or []], repair, read)
        return
    if read:
        raise ValueError("--read goes with --remote; without it `eagle3 verify` reads every byte that is here")
    if repair:
        raise ValueError(
            "--repair goes with --remote; what is damaged here, the lines of `eagle3 verify` say how to mend"
        )
    began = time.monotonic()
    found = verify_places(places or [], open_tracked())
    for sentence in found.skipped:
        say(f"skipped: {sentence}")
    seconds = max(time.monotonic() - began, 1e-9)
    size = found.bytes / 1e9
    speed = f"{size:,.2f} GB in {seconds:.1f} s ({size / seconds:.2f} GB/s)"
    _conclude(found.faults, f"verify: {found.files:,} files, {speed}")


def _verify_remote(names: list[str], repair: bool, read: bool) -> None:
    if len(names) > 1:
        raise ValueError(f"one remote at a time: {', '.join(names)}")
    tracked = open_tracked()
    if tracked is None:
        raise ValueError("this folder lies in no DVC repository, so no remote is known")
    faults: list[Fault] = []
    told = []
    for found in verify_remote(tracked, names[0] if names else None, repair, read):
        mended = f", {found.uploaded:,} uploaded" if repair else ""
        told.append(f"remote {found.remote}: {found.objects:,} objects{mended}")
        faults += found.faults
    _conclude(faults, "; ".join(told))


def _conclude(faults: list[Fault], summary: str) -> None:
    for fault in faults:
        typer.echo(str(fault))
    typer.echo(f"{summary}; {f'{len(faults):,} faults' if faults else 'all whole'}")
    if faults:
        raise typer.Exit(1)


@app.command()
@guarded
def estimate(
    rows: Annotated[
        int | None, typer.Option(min=1, help="Answers to record, in place of those of data/prompts.")
    ] = None,
    prompt_tokens: Annotated[
        float | None, typer.Option(min=0, help="Mean of a prompt, in place of the tables'.")
    ] = None,
    answer_tokens: Annotated[float | None, typer.Option(min=0, help="Mean of an answer, thinking included.")] = None,
    hidden_size: Annotated[int | None, typer.Option(min=1, help="With --aux-layers: in place of the verifier.")] = None,
    aux_layers: Annotated[int | None, typer.Option(min=1, help="Layers recorded beside the last one.")] = None,
    storage: Annotated[Literal["lossless", "fp8"] | None, typer.Option(help="As if extract.storage were this.")] = None,
    generate_rate: RateOption = None,
    record_rate: RateOption = None,
    train_rate: RateOption = None,
    probe: Annotated[
        int | None, typer.Option(min=1, metavar="PROMPTS", help="Measure the rates: run all stages on so many prompts.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the machine that the rates are of.")] = 1,
    price_per_hour: Annotated[float | None, typer.Option(min=0, help="Of one GPU, in any currency.")] = None,
    as_data: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False,
    params_path: ParamsPath = Path("params.yaml"),
) -> None:
    """What a run will take, before you pay for it: rows, tokens, bytes on each disk, hours, cost.

    Reads params.yaml and whatever lies in data/; what no table tells yet is expected from the last run. Rates are those
    in data/metrics unless given here. With --rows, --prompt-tokens, --answer-tokens, --hidden-size and --aux-layers it
    needs neither tables nor a model. Exit 1 if a disk is too small; `extract` makes the same sum before it records.
    """
    given = {"generate": generate_rate, "extract": record_rate, "train": train_rate}
    rates = {stage: rate for stage, rate in given.items() if rate is not None}
    params = load_params(params_path)
    probed = None if probe is None else probe_rates(params_path, PROMPTS_OUT, IDENTITY, probe)
    asked = Asked(rows, prompt_tokens, answer_tokens, hidden_size, aux_layers, storage, rates, probed)
    found = estimate_run(params, asked)
    told = as_json(found, gpus, price_per_hour) if as_data else "\n".join(as_lines(found, gpus, price_per_hour))
    typer.echo(told)
    if found.shortages:
        raise ValueError(" ".join(found.shortages))


DraftFolder = Annotated[Path, typer.Argument(metavar="[DRAFT]", help="A draft's directory.")]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens", min=1, help="Tokens drafted at a time; what `evaluate` found best unless given."
    ),
]


@app.command()
@guarded
def lineage(
    place: Annotated[
        str,
        typer.Argument(metavar="[PATH|REV]", help="A draft's or a project's directory, a git revision, an experiment."),
    ] = str(DRAFT),
    check: Annotated[
        bool, typer.Option("--check", help="Read all that is here and compare; exit 1 if a link is broken.")
    ] = False,
    remote: Annotated[
        bool, typer.Option("--remote", help="Are the objects that it names on DVC's default remote?")
    ] = False,
    as_data: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False,
) -> None:
    """Where a draft comes from: the chain of digests from its weights back to the prompts, as lineage.json has it."""
    if place == str(DRAFT) and not DRAFT.exists():
        raise ValueError(
            f"{DRAFT} is not there yet; `dvc repro` makes it, `dvc pull {DRAFT}` brings one that was pushed"
        )
    told, holds = ask_lineage(place, check, remote, as_data)
    typer.echo(told)
    if not holds:
        raise typer.Exit(1)


@app.command()
@guarded
def card(
    draft: DraftFolder = DRAFT, tokens: TokensOption = None, params_path: ParamsPath = Path("params.yaml")
) -> None:
    """Print the model card of a draft with the numbers of `evaluate`, which come after its README.md is written."""
    typer.echo(full_card(draft, _tokens_for(draft, tokens, params_path)), nl=False)


@app.command()
@guarded
def export(
    draft: Annotated[Path, typer.Argument(metavar="DRAFT", help="A draft's directory, such as data/draft.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory.")],
    form: Annotated[Form, typer.Option("--format", help="plain: as vLLM and others serve it | speculators.")],
    tokens: TokensOption = None,
    params_path: ParamsPath = Path("params.yaml"),
) -> None:
    """Write a draft for others: weights, config.json, lineage and model card, in one of the two formats in use."""
    export_shared(draft, out, form, _tokens_for(draft, tokens, params_path))
    typer.echo(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


@app.command("import")
@guarded
def import_(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="An EAGLE-3 checkpoint's directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory.")],
    params_path: ParamsPath = Path("params.yaml"),
) -> None:
    """Read a checkpoint of either format and write it as `train` would: for `eagle3 serve`, `lineage` and `export`.

    One that this pipeline exported keeps its lineage. Any other is taken for a draft of this project's verifier.
    """
    found = import_checkpoint(checkpoint, out, params_path, IDENTITY)
    whose = "its own lineage" if found.imported is None else f"taken for a draft of {visible(found.verifier.name)}"
    typer.echo(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}; {whose}")


@app.command()
@guarded
def serve(
    further: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM_OPTION]...", help="More options for vLLM's server.")
    ] = None,
    draft: Annotated[Path, typer.Option(help="A draft's directory.")] = DRAFT,
    tokens: TokensOption = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of 127.0.0.1; one that is free unless given.")
    ] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Only print the command.")] = False,
    params_path: ParamsPath = Path("params.yaml"),
) -> None:
    """Serve the verifier of params.yaml with the draft, as it was evaluated, on this machine; Ctrl-C ends all of it."""
    params = load_params(params_path)
    check_draft(draft, read_identity(IDENTITY))
    folder, number = locate_verifier(params.verifier), choose_port(port)
    words = serve_words(params, folder, draft, _tokens_for(draft, tokens, params_path), number, further or [])
    if only_print:
        typer.echo(printable(words, params))
    else:
        serve_forever(params, folder, words, number)


def _tokens_for(draft: Path, asked: int | None, params_path: Path) -> int:
    """How many tokens to draft at a time. Outside a project: as many as the draft learnt to."""
    if asked is not None:
        return asked
    if not params_path.is_file():
        return usual_tokens(read_lineage(draft))
    return choose_num_speculative_tokens(load_params(params_path), evaluation_of(draft))


@work.command()
@guarded
def du(older_than: OlderThan = 7, params_path: ParamsPath = Path("params.yaml")) -> None:
    """Show what the work store holds, what of it `eagle3 work gc` would remove, and why the rest stays."""
    typer.echo("\n".join(table(survey(load_params(params_path), older_than))))


@work.command()
@guarded
def gc(
    older_than: OlderThan = 7,
    dry_run: Annotated[bool, typer.Option("--dry-run/--yes", help="Only say what would go, or remove it.")] = True,
    params_path: ParamsPath = Path("params.yaml"),
) -> None:
    """Remove what nothing needs any more from the work store: shards that neither data/hidden_states nor data/tokens
    ask for, and training runs but the newest and unfinished ones."""
    params = load_params(params_path)
    with no_stage_running():
        entries = survey(params, older_than)
        going = [entry for entry in entries if entry.kept is None]
        for entry in going:
            typer.echo(f"{entry.unit.stage} {entry.unit.kind} {entry.unit.name}: {entry.freed:,} bytes")
        if not dry_run:
            remove(going)
    shared = sum(entry.sizes.shared for entry in entries if entry.kept == SHARED)
    done = "would be freed; --yes removes them" if dry_run else "freed"
    typer.echo(f"{len(going):,} unused, {freed(entries):,} bytes {done}")
    if shared:
        typer.echo(
            f"{shared:,} more are not needed, but DVC's cache or an out has the same files: `dvc gc` comes first"
        )


def folder_and_row(folder: str | None, row: str | None) -> tuple[Path, str | None]:
    """The arguments of `eagle3 inspect`, where a row may stand alone."""
    if folder is not None and row is None and "/" not in folder and not Path(folder).is_dir():
        return TOKENS, folder
    return TOKENS if folder is None else Path(folder), row


def _written_by(tokens: Path) -> str | None:
    """Name of the verifier whose identity lies beside a token table, if one does."""
    identity = tokens.parent / IDENTITY.name
    return read_identity(identity).name if identity.is_file() else None


def summary_lines(made: dict[str, Any], params: Params) -> list[str]:
    """The summary as lines; numbers come from the metric files alone."""
    tokens, states, train, evaluate = made["reconstruct_tokens"], made["extract"], made["train"], made["evaluate"]
    first = settings(params.evaluate)[0]
    speed = f"{evaluate['tokens_per_second_draft']:.0f} against {evaluate['tokens_per_second_plain']:.0f} tokens/s"
    rows = {
        "verifier": params.verifier.model,
        "prompts": f"{made['prompts']['rows_out']:,}, of which {made['generate']['rows_out']:,} answered for training",
        "tokens": f"{tokens['tokens']:,}, of which {tokens['loss_tokens']:,} written by the verifier",
        "hidden states": f"{states['bytes'] / 2**20:,.0f} MiB, verifier-head agreement {states['head_agreement']:.4f}",
        "training": f"{train['steps']:,} steps, draft vocabulary {train['draft_vocab_size']:,}, "
        f"promised acceptance length {train['expected_acceptance_length']:.2f}",
        "acceptance length": f"{evaluate['acceptance_length']:.2f} at "
        f"{first.num_speculative_tokens} speculative tokens, on {evaluate['num_prompts']} held-out prompts",
        "speed-up": f"{evaluate['speedup']:.2f}x at batch size {first.batch_size} ({speed})",
        "draft": str(DRAFT),
    }
    return [f"{name + ':':20}{text}" for name, text in rows.items()]


def _metrics(stage: str) -> dict[str, Any]:
    path = METRICS / f"{stage}.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is not there yet; `dvc repro` makes it") from None
    return found


def main() -> None:
    """Entry point of the `eagle3` command."""
    app()


if __name__ == "__main__":
    main()
