"""How the person at the terminal calls this program."""

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "specbisect"


def program() -> str:
    """The word that begins a command line which works here: the name, or a path when the name would not find it."""
    own = Path(sys.executable).with_name(NAME)
    found = shutil.which(NAME)
    if not own.is_file() or (found and os.path.samefile(found, own)):
        return NAME
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))
