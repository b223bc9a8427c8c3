"""A worker of extract's crew whose engine is the fake one."""

from eagle3 import recording
from eagle3.serving import recorder
from eagle3.serving.process import ParentPipe


def work(pipe: ParentPipe, number: int, job: recording.Job) -> None:
    """As recording.work."""
    recorder.ENGINE = "tests.fake_recording_engine:run_engine"
    recording.work(pipe, number, job)
