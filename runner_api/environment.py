"""The environment variables that this package reads. One that begins like ours and is none is refused: a misspelt
variable would change nothing and say nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

from runner_api.errors import UnknownNameError

PREFIX = "MODELRUNNER_"
VARIABLES = {
    "MODELRUNNER_LAYOUT": "the row layout, where the configuration leaves it open (runner_api.selection)",
    "MODELRUNNER_PROCESS_TIMEOUT": "seconds for one answer of a runner in another process (runner_api.process_runner)",
}


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Raises UnknownNameError for a variable that begins with MODELRUNNER_ and is not in VARIABLES. environ:
    os.environ unless given."""
    for name in os.environ if environ is None else environ:
        if name.startswith(PREFIX) and name not in VARIABLES:
            raise UnknownNameError("environment variable", name, VARIABLES, field=name)
