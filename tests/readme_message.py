"""The error message in README.md: `python -m tests.readme_message` copies it from a run."""

import os
import re
import tempfile
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
PROGRAM = re.compile(r"<!-- raises: GradientGuardError -->\n```python\n(.*?)^```", re.M | re.S)
SHOWN = re.compile(r"^```text\n(keras_gradguard\.errors\..*?)^```", re.M | re.S)


def real(text: str) -> str:
    """Run the program of the page in the current directory and return its error."""
    from keras_gradguard import GradientGuardError

    try:
        exec(compile(PROGRAM.search(text)[1], "train.py", "exec"), {"__name__": "__main__"})
    except GradientGuardError as error:
        kind = type(error)
        return f"{kind.__module__}.{kind.__name__}: {error}"
    raise RuntimeError("The program in README.md did not raise.")


def shown(text: str) -> str:
    """Return the message that the page shows."""
    return SHOWN.search(text)[1]


def main() -> None:
    text = README.read_text(encoding="utf-8")
    back = Path.cwd()
    with tempfile.TemporaryDirectory() as elsewhere:
        os.chdir(elsewhere)
        try:
            message = real(text)
        finally:
            os.chdir(back)
    README.write_text(
        text.replace(shown(text), "\n".join(map(str.rstrip, message.splitlines())) + "\n"),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
