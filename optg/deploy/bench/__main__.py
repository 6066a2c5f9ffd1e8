"""The process that `measure_in_own_process` starts: python -m optg.deploy.bench REQUEST ANSWER"""

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from optg.deploy.bench.measure import MeasureRequest, measure
from optg.deploy.bench.subject import Subject


def main(request: str, answer: str) -> None:
    """Measure as the JSON request says and write the timings and notes as JSON to the answer's path."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then ends this process
    data = json.loads(request)
    timings, notes = measure(MeasureRequest(**{**data, "subject": Subject(**data["subject"])}))
    Path(answer).write_text(json.dumps([[asdict(timing) for timing in timings], notes]))


if __name__ == "__main__":
    main(*sys.argv[1:])
