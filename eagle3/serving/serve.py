"""`eagle3 serve`: the verifier with its draft behind an OpenAI-compatible server on loopback, until Ctrl-C."""

import shlex
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.console import Interrupted, interrupt, say
from eagle3.lineage import public_name
from eagle3.params import Params
from eagle3.serving.engine import engine_environment
from eagle3.serving.ports import HOST, free_port
from eagle3.serving.server import LocalServer, server_command
from eagle3.serving.speculative import settings
from eagle3.workstore import work_root

BEST = "best_num_speculative_tokens"
POLL_S = 0.5


def choose_num_speculative_tokens(params: Params, evaluation: dict[str, Any] | None) -> int:
    """What `evaluate` measured to be best for the draft; where it did not, what it was evaluated with.

    evaluation: metrics of `evaluate` for this draft, if there are any; they may be older than that key.
    """
    best = int((evaluation or {}).get(BEST, 0))
    return best if best > 0 else settings(params.evaluate)[0].num_speculative_tokens


def choose_port(asked: int | None) -> int:
    """Any that is free, or the one asked for. Raises ValueError when that is taken."""
    if asked is None:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, asked))
        except OSError as error:
            raise ValueError(f"--port {asked}: {error.strerror}; leave it out for one that is free") from None
    return asked


def serve_words(
    params: Params, verifier: Path, draft: Path, num_speculative_tokens: int, port: int, further: Sequence[str]
) -> list[str]:
    """The server's command line. verifier: its folder; further: arguments for vLLM as they are, which come last."""
    names = dict.fromkeys([public_name(params.verifier.model), params.verifier.model.rpartition("/")[2]])
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": num_speculative_tokens}
    own = {
        "served_model_name": list(names),
        "generation_config": "auto",  # people who ask without sampling fields get the model's own
        "speculative_config": speculative,
    }
    return [*server_command(params.verifier, params.engine, verifier, port, draft, own), *further]


def printable(words: Sequence[str], params: Params) -> str:
    """The command for a shell in this folder, with the environment that `serve` gives it."""
    here = Path.cwd()

    def near(word: str) -> str:
        return str(Path(word).relative_to(here)) if word.startswith(f"{here}/") else word

    environment = [f"{name}={value}" for name, value in engine_environment(params.engine).items()]
    return shlex.join(["env", *environment, *map(near, words)])


def serve(params: Params, verifier: Path, words: list[str], port: int) -> None:
    """Run the command until Ctrl-C or SIGTERM, which end all that it started. Raises ValueError when it ends by itself,
    naming its log."""
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us ignore it
    log = work_root() / "logs" / f"serve-{port}.log"
    try:
        with LocalServer(params.verifier, params.engine, verifier, log, port=port, command=words) as server:
            name = words[words.index("--served-model-name") + 1]
            print(f"{server.url} serves {name}; Ctrl-C ends it", flush=True)
            while (error := server.failure()) is None:
                time.sleep(POLL_S)
            raise error
    except (KeyboardInterrupt, Interrupted):
        say("the server has ended")
