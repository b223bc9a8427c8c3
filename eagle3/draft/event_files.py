"""TensorBoard's event files; only this imports tensorboard, which is an extra."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


def open_events(folder: Path) -> SummaryWriter:
    """A writer of scalars into `folder`; a context manager."""
    return SummaryWriter(str(folder))
