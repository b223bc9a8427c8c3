"""What the records, breakdowns and the page of `evaluate` cost beside the decoding itself.

    python -m benchmarks.evaluate PROJECT [--prompts 200]

PROJECT is a folder in which `make demo` (or `dvc repro`) has run; nothing in it is changed. Its draft is evaluated on
training prompts, of which there are enough, one at a time, without the float32 check. The last line of output is one
JSON object: ratio_to_decoding = seconds of the whole stage / seconds in which the engines started and decoded.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ruamel.yaml import YAML


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    given = parser.parse_args()
    project: Path = given.project.absolute()
    yaml = YAML()
    params = yaml.load((project / "params.yaml").read_text())
    params["evaluate"] |= {
        "num_prompts": given.prompts,
        "num_speculative_tokens": 3,
        "batch_size": 1,
        "lossless_prompts": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        with (out / "params.yaml").open("w") as file:
            yaml.dump(params, file)
        inputs = [project / "data" / name for name in ("prompts/train.parquet", "verifier.json", "draft")]
        outputs = [out / "evaluation", out / "evaluate.json", out / "plots"]
        command = [sys.executable, "-m", "stages.evaluate", *map(str, [*inputs, *outputs, out / "params.yaml"])]
        started = time.monotonic()
        subprocess.run(command, cwd=project, check=True)
        whole = time.monotonic() - started
        metrics = json.loads((out / "evaluate.json").read_text())
        page = (out / "evaluation/report.html").stat().st_size
    seconds = metrics["seconds"]
    print(
        json.dumps(
            {
                "ratio_to_decoding": round(whole / seconds["decoding"], 4),
                "prompts": metrics["num_prompts"],
                "seconds": round(whole, 1),
                "seconds_decoding": round(seconds["decoding"], 1),
                "seconds_estimate": round(seconds.get("estimate", 0.0), 1),
                "report_bytes": page,
            }
        )
    )


if __name__ == "__main__":
    main()
